"""What a states encoding costs in τ: heads trained alike on states that differ in it alone.

    synth ──► features bf16 ──► train ──► τ        the samples, the order and the held-out prompts
          ├─► features int8 ──► train ──► τ        are the same in every branch
          └─► features fp8  ──► train ──► τ

The run is that of configs/demo.yaml; τ is decoded after the last step on prompts that were not
trained on.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.report import ROOT

CONFIG = ROOT / "configs/demo.yaml"
#: After the last step only, on as many prompts as make the two values comparable.
EVALUATION = ("train.evaluate_every=1000000", "train.evaluate_prompts=48")


def tau_cost(encodings: Sequence[str], default: str, threads: int) -> dict[str, float]:
    """τ by encoding, and how much lower it is with `default` than with bf16."""
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        samples = Path(folder) / "samples"
        _stage("synth", samples, threads)
        tau = {}
        for encoding in encodings:
            run = Path(folder) / encoding
            shutil.copytree(samples, run)
            for stage in ("features", "train"):
                _stage(stage, run, threads, f"features.encoding={encoding}", *EVALUATION)
            tau[encoding] = _last_tau(run / "train" / "metrics.jsonl")
    by_encoding = {f"tau_{encoding}": value for encoding, value in tau.items()}
    return by_encoding | {"tau_cost": tau["bf16"] - tau[default]}


def _stage(name: str, run: Path, threads: int, *settings: str) -> None:
    command = [sys.executable, "-m", "pipeline.cli", name, "-c", str(CONFIG)]
    settings = (f"run.uri={run}", f"run.threads={threads}", *settings)
    subprocess.run([*command, *settings], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def _last_tau(metrics: Path) -> float:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return float(next(line["tau"] for line in reversed(lines) if "tau" in line))
