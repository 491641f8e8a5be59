"""`make bench-decode`: the decoder's speed on this machine, as one JSON line.

CPU   python -m bench.decode [--levels avx2,amx] [--only single,pieces,many,cost] [--quick]
GPU   python -m bench.decode [--part NAME or 2/4] [--list] [--vllm PYTHON] [--sglang PYTHON]
both  [--head DIR] [--threads N] [--runs N] [--device cpu|cuda] [--out FOLDER]

On a CPU every level of vector instructions that it has is measured in a process of its own, with
torch and its libraries limited to the same level: the rival is what a machine of that level has.
Figures are named after it, `avx2.plain_vs_hf_b1`. On a GPU parts end within ten minutes each. What
is not measured by a call stays as an earlier call at the same commit has left it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.levels import TORCH, bench_levels, measure_at
from bench.report import publish, rounded

GROUPS = ("single", "pieces", "many", "cost")
#: Packages that a GPU is shared with in turns, where they are installed.
RIVALS = ("vllm", "sglang")


def _options() -> argparse.Namespace:
    here = "cuda" if torch.cuda.is_available() else "cpu"
    cores = len(os.sched_getaffinity(0))
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    option = parser.add_argument
    option("--head", type=Path, help="directory of a trained head; else acceptance is imposed")
    option("--threads", type=int, default=cores, help="CPU threads")
    option("--runs", type=int, default=7, help="interleaved runs of which the median counts")
    option("--device", default=here, choices=("cpu", "cuda"))
    option("--levels", type=_names, help=f"of {', '.join(bench_levels())}; default all (CPU)")
    option("--only", type=_names, default=GROUPS, help=f"of {', '.join(GROUPS)} (CPU)")
    option("--quick", action="store_true", help="three runs (CPU)")
    option("--part", help="a part, all of a first word, or some as 2/4; default all (GPU)")
    for package in RIVALS:
        python = "the interpreter that has it, if not this one (GPU)"
        option(f"--{package}", metavar="PYTHON", default=sys.executable, help=python)
    option("--list", action="store_true", help="print the parts and end (GPU)")
    option("--out", type=Path, help="folder of the JSON file, default runs/bench")
    option("--here", type=Path, help=argparse.SUPPRESS)  # the child's side of `measure_at`
    options = parser.parse_args()
    if unknown := set(options.only) - set(GROUPS):
        parser.error(f"--only {', '.join(unknown)}: it takes {', '.join(GROUPS)}")
    if unknown := set(options.levels or ()) - set(bench_levels()):
        parser.error(f"--levels {', '.join(unknown)}: here are {', '.join(bench_levels())}")
    for package in RIVALS:
        if shutil.which(python := getattr(options, package)) is None:
            parser.error(f"--{package} {python}: no such program")
    if options.quick:
        options.runs = min(options.runs, 3)
    return options


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    if options.here:
        from bench import decode_cpu

        groups = decode_cpu.measure(options.head, options.only, runs=options.runs)
        options.here.write_text(json.dumps(_shown(groups)), encoding="utf-8")
    elif options.device == "cpu":
        _every_level(options)
    else:
        _gpu(options)


def _every_level(options: argparse.Namespace) -> None:
    """A table a level; the exit status is 1 when one of them failed."""
    device, failed = torch.device("cpu"), []
    save = partial(publish, "decode", device=device, folder=options.out, merge=True)
    for level in options.levels or bench_levels():
        print(f"\n{level}", flush=True)
        only = [name for name in options.only if level != TORCH or name in ("single", "many")]
        arguments = ["--threads", str(options.threads), "--runs", str(options.runs)]
        arguments += ["--only", ",".join(only)]
        arguments += ["--head", str(options.head.absolute())] if options.head else []
        if not only:
            continue
        try:
            figures = measure_at(level, "bench.decode", arguments)
        except subprocess.CalledProcessError as error:
            print(f"{level} failed with exit status {error.returncode}", flush=True)
            failed.append(level)
            continue
        save({f"{level}.{name}": value for name, value in figures.items()})
    if failed:
        raise SystemExit(1)


def _gpu(options: argparse.Namespace) -> None:
    from bench import decode_gpu

    if options.list:
        print("\n".join(decode_gpu.PARTS))
        return
    device = torch.device("cuda")
    save = partial(publish, "decode_gpu", device=device, folder=options.out, merge=True)
    interpreters = {package: getattr(options, package) for package in RIVALS}
    for part in decode_gpu.chosen(options.part):
        print(f"\n{part}", flush=True)
        save(_shown(decode_gpu.measure(part, runs=options.runs, interpreters=interpreters)))


def _shown(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """All figures of some groups, printed as they are ready."""
    figures: dict[str, Any] = {}
    for group in groups:
        for name, value in group.items():
            print(f"  {name:44s} {_text(value)}", flush=True)
        figures |= group
    return rounded(figures)


def _text(value: Any, indent: int = 4) -> str:
    if isinstance(value, dict):
        margin = "\n" + " " * indent
        lines = (f"{margin}{name:40s} {_text(item, indent + 2)}" for name, item in value.items())
        return "".join(lines) or "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _names(text: str) -> Sequence[str]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


if __name__ == "__main__":
    main()
