"""A benchmark at each level of vector instructions, every level in a process of its own.

A process at a level computes with that level's instructions in all it does: our kernels by
EAGLE3_ISA, and torch's libraries by variables of theirs, so that a rival is as fast as it would be
on a machine that has no more. What remains of the better machine is its memory and its clock.

Level `torch` is this machine without a compiler: its highest instructions, torch's own operations.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import ROOT
from pipeline.config.isa import VARIABLE, machine_levels

#: Without our kernels.
TORCH = "torch"

#: Level → what ATen, oneDNN and MKL may use. MKL has no name for what lies above AVX-512.
_LIBRARIES = {
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512"),
    "amx": ("avx512", "AVX512_CORE_AMX", "AVX512"),
}
_VARIABLES = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"


def bench_levels() -> tuple[str, ...]:
    """The levels of this machine, lowest first, and `torch`."""
    return (*machine_levels(), TORCH)


def environment(level: str) -> dict[str, str]:
    """This process's environment, limited to a level."""
    limits = (
        {"EAGLE3_CPU_KERNELS": "0"}
        if level == TORCH
        else {VARIABLE: level, **dict(zip(_VARIABLES, _LIBRARIES[level], strict=True))}
    )
    return {**os.environ, **limits}


def measure_at(level: str, module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Figures of `python -m MODULE … --here FILE` at a level: a process that writes them to FILE.

    What it prints passes through. Raises CalledProcessError when it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, "-m", module, *arguments, "--here", str(file)]
        subprocess.run(command, cwd=ROOT, env=environment(level), check=True)
        figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return figures
