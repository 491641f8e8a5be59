"""Every kernel compiles for three generations of GPUs, none of them here, and fits into each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.aot import SHARED_LIMIT, variants

ROOT = Path(__file__).resolve().parents[3]
KERNELS = ROOT / "pipeline/decoder/ops/triton"


def run(*arguments: str, cache: Path, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    """Python in a process whose kernels are compiled, whatever this one does with them."""
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | {"TRITON_CACHE_DIR": str(cache)}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_every_kernel_is_recorded() -> None:
    """A kernel that no operation launches, or that is not compiled ahead of time, goes untested.

    Recording also shows that shapes alone decide every grid and allocation: the tensors have no
    values.
    """
    defined = {
        name
        for file in KERNELS.glob("*.py")
        for name in re.findall(
            r"^def (\w+)_kernel\(", file.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert {variant.name for variant in variants()} == defined
    types = {
        name: {
            variant.signature[next(iter(variant.signature))]
            for variant in variants()
            if variant.name == name
        }
        for name in defined
    }
    for name in (
        "add_rms_norm",
        "silu_mul",
        "rope_write",
        "tree_attention",
        "argmax_part",
        "propose_part",
        "sample",
        "compact",
    ):
        assert types[name] == {"*bf16", "*fp32"}, name
    assert {
        (v.constants["DIM"], v.constants["CAUSAL"])
        for v in variants()
        if v.name == "tree_attention"
    } == {(d, c) for d in (64, 128) for c in (True, False)}


@pytest.mark.slow
def test_compiles_for_every_architecture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run("-m", "bench.aot", cache=tmp_path)
    with capsys.disabled():  # the table is worth a look in every run
        print(f"\n{done.stdout}")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert len(rows) == len(variants()) * len(SHARED_LIMIT)
    shared = {
        (row[0], arch): int(row[row.index(arch) + 3])
        for row in rows
        for arch in row
        if re.fullmatch(r"sm_\d+", arch)
    }
    assert set(shared) == {
        (variant.name, f"sm_{arch}") for variant in variants() for arch in SHARED_LIMIT
    }
    assert shared["tree_attention", "sm_90"] > 0


def test_fails_where_shared_memory_is_short(tmp_path: Path) -> None:
    """With a limit of 16 bytes, RMS norm's sum over eight warps no longer fits."""
    code = """
from bench import aot
if __name__ == "__main__":
    aot.SHARED_LIMIT = {90: 16}
    raise SystemExit(aot.main(["add_rms_norm"]))
"""
    script = tmp_path / "short.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}\n", encoding="utf-8")
    done = run(str(script), cache=tmp_path / "cache")
    assert done.returncode == 1, done.stderr
    assert "needs more than 16" in done.stdout
    assert "2 kernels need more shared memory" in done.stderr


def test_fails_where_a_kernel_does_not_compile(tmp_path: Path) -> None:
    code = """
from dataclasses import replace
from bench import aot
variant = aot.variants()[0]
aot.compile_variant(replace(variant, constants={**variant.constants, "BLOCK": 100}), 90)
"""
    done = run("-c", code, cache=tmp_path)
    assert done.returncode != 0
    assert "power of 2" in done.stderr


def test_refuses_to_compile_in_the_interpreter(tmp_path: Path) -> None:
    done = run("-m", "bench.aot", "verify", cache=tmp_path, interpret=True)
    assert done.returncode != 0
    assert "TRITON_INTERPRET is set" in done.stderr
