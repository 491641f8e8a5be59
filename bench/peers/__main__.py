"""Optimiser steps of this trainer beside SpecForge's and speculators': `make bench-peers`.

    python -m bench.peers --python PYTHON [--runs N] [--threads N] [--only ours,specforge]

PYTHON is an interpreter with what requirements.txt here names; nothing else of this package needs
it. Each trainer is a process, in bf16 and in fp32; all have the same head, batch and unroll
(turns.py), and perform one step each in turn, so that what else the machine does befalls all alike.
A trainer counts with the type that is faster here. What differs: ours goes through DeepSpeed, with
fp32 weights and sums whatever the type; theirs are torch's AdamW on weights of the type.

`floor` is what the products alone would take that no exact step can leave out, those with weights
at the positions that a label needs, at the rate of a large product; `floor_vs_peers` is what a
trainer of nothing else would win over these peers here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.peers.turns import DOCUMENTS, LENGTH, supervised_mask
from bench.report import ROOT, publish, rounded
from bench.train import CPU, operations, random_model
from pipeline.tuning.cost import matmul_rate

TRAINERS = {"ours": "ours", "specforge": "specforge_step", "speculators": "speculators_step"}
TYPES = ("bfloat16", "float32")


class _Turns:
    """A trainer's process."""

    def __init__(self, trainer: str, dtype: str, python: str, threads: int) -> None:
        command = [python, "-m", f"bench.peers.{TRAINERS[trainer]}", dtype, str(threads)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.trainer, self.dtype = trainer, dtype
        self.steps: list[dict[str, float]] = []
        self._answer()

    def step(self) -> None:
        assert self._process.stdin
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        self.steps.append(self._answer())

    def end(self) -> float:
        """→ gigabytes that the process reached."""
        answer, _ = self._process.communicate("end\n")
        return float(json.loads(answer)["peak_gb"])

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._process.communicate()
            status = self._process.returncode
            raise SystemExit(f"{self.trainer} in {self.dtype} ended with {status}")
        answer: dict[str, float] = json.loads(line)
        return answer


def main() -> None:
    """Print each figure, and publish them with the ratios to the faster peer."""
    options = _options()
    pythons = {name: options.python for name in options.only} | {"ours": sys.executable}
    running = [
        _Turns(trainer, dtype, pythons[trainer], options.threads)
        for trainer in options.only
        for dtype in TYPES
    ]
    for _ in range(options.runs):
        for each in running:
            each.step()
    figures: dict[str, Any] = {}
    for each in running:
        rates = {
            "tokens_per_second": _rate(each.steps, "seconds"),
            "tokens_per_cpu_second": _rate(each.steps, "cpu_seconds"),
            "peak_gb": each.end(),
        }
        figures |= {f"{each.trainer}.{each.dtype}.{name}": rate for name, rate in rates.items()}
    figures |= _floors(options.threads)
    figures |= _ratios(figures, options.only)
    for name, value in rounded(figures).items():
        print(f"{name:44s} {value}")
    publish("peers", rounded(figures), device=CPU, folder=options.out)


def _rate(steps: list[dict[str, float]], clock: str) -> float:
    return DOCUMENTS * LENGTH / median(step[clock] for step in steps)


def _floors(threads: int) -> dict[str, float]:
    """Tokens a CPU-second of the products alone, by type."""
    torch.set_num_threads(threads)
    tokens, labels = DOCUMENTS * LENGTH, int(supervised_mask().sum())
    needed = operations(random_model(LENGTH, "float32").head, tokens, labels) / tokens
    rates = {name: matmul_rate(CPU, size=2048, dtype=getattr(torch, name)) for name in TYPES}
    return {
        f"floor.{name}.tokens_per_cpu_second": rate / threads / needed
        for name, rate in rates.items()
    }


def _ratios(figures: dict[str, Any], trainers: list[str]) -> dict[str, float]:
    """Of our better type to the better type of the best peer; memory of those types."""
    best = {
        trainer: max(TYPES, key=lambda dtype: figures[f"{trainer}.{dtype}.tokens_per_cpu_second"])
        for trainer in trainers
    }
    peers = [trainer for trainer in trainers if trainer != "ours"]
    if "ours" not in trainers or not peers:
        return {}

    def of(trainer: str, name: str) -> float:
        return float(figures[f"{trainer}.{best[trainer]}.{name}"])

    ratios = {
        f"{name}_vs_peers": of("ours", name) / max(of(peer, name) for peer in peers)
        for name in ("tokens_per_second", "tokens_per_cpu_second")
    }
    least = min(of(peer, "peak_gb") for peer in peers)
    floor = max(figures[f"floor.{dtype}.tokens_per_cpu_second"] for dtype in TYPES)
    fastest = max(of(peer, "tokens_per_cpu_second") for peer in peers)
    return {
        **ratios,
        "peak_gb_vs_peers": of("ours", "peak_gb") / least,
        "floor_share": of("ours", "tokens_per_cpu_second") / floor,
        "floor_vs_peers": floor / fastest,
    }


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="peers", description=__doc__, formatter_class=raw)
    option = parser.add_argument
    option("--python", required=True, help="interpreter that has the other trainers")
    option("--runs", type=int, default=7, help="steps of which the median counts")
    option("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads")
    option("--only", default=",".join(TRAINERS), help=f"of {', '.join(TRAINERS)}")
    option("--out", type=Path, help="folder of the JSON file, default runs/bench")
    options = parser.parse_args()
    options.only = [name for name in options.only.split(",") if name]
    if unknown := set(options.only) - set(TRAINERS):
        parser.error(f"--only {', '.join(unknown)}: it takes {', '.join(TRAINERS)}")
    return options


if __name__ == "__main__":
    main()
