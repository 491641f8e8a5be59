"""SHA-256 of what a run holds, times left out: a refactor shows the same before and after.

    python -m bench.fingerprint RUN               of a finished run's directory
    python -m bench.fingerprint --tiny [--out D]  of the four stages over a tiny random target

Prints one line a file: synth and states shards, the head's weights, metrics, report. Compare two
commits on one machine with one number of threads: another kind of core sums in another order.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet  # type: ignore[import-untyped]
import yaml

from tests.conftest import QUESTIONS, build_tiny_target

#: Keys of metrics and reports that a second run of the same commit gives other values, and those
#: that say where and with what version it ran.
VARIABLE = ("second", "time", "speed", "wall", "memory", "wait", "floor", "bandwidth")
PLACES = ("uri", "source", "generator", "manifests", "software", "machine", "version", "config")


def main() -> None:
    options = _options()
    if options.run:
        lines = list(fingerprint(Path(options.run)))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            where = Path(options.out or scratch)
            where.mkdir(parents=True, exist_ok=True)
            run_tiny(where)
            lines = list(fingerprint(where / "run"))
    print("\n".join(lines))


def fingerprint(run: Path) -> Iterator[str]:
    """One line a file."""
    for file in sorted(run.glob("synth/shards/*.parquet")):
        rows = pyarrow.parquet.read_table(file).drop_columns("generator").to_pylist()
        yield _line(_rows(rows), f"synth/{file.name.partition('-')[0]}")
    for file in sorted(run.glob("features/shards/*.safetensors")):
        yield _line(file.read_bytes(), f"features/{file.name.partition('.')[0]}")
    yield _line((run / "train/head/model.safetensors").read_bytes(), "train/head")
    metrics = (run / "train/metrics.jsonl").read_text().splitlines()
    yield _line(_rows([json.loads(line) for line in metrics]), "train/metrics")
    report = json.loads((run / "eval/report.json").read_text())
    yield _line(_rows(report["golden"]["prompts"]), "eval/decoded ids and rounds")
    yield _line(_rows([report]), "eval/report")


def _rows(rows: list[Any]) -> bytes:
    return json.dumps(_constant(rows), sort_keys=True, default=str).encode()


def _line(data: bytes, name: str) -> str:
    return f"{hashlib.sha256(data).hexdigest()[:16]}  {name}"


def _constant(value: Any) -> Any:
    """A JSON value without the keys that hold times or places."""
    if isinstance(value, dict):
        return {
            key: _constant(item)
            for key, item in value.items()
            if not any(word in key for word in (*VARIABLE, *PLACES))
        }
    return [_constant(item) for item in value] if isinstance(value, list) else value


def run_tiny(where: Path) -> None:
    """The four stages over a random target of 8 layers, in float32 with one thread."""
    target = build_tiny_target(where / "target")
    config = where / "run.yaml"
    config.write_text(yaml.safe_dump(_config(where, target)))
    command = [sys.executable, "-m", "pipeline.cli", "run", "-c", str(config)]
    subprocess.run(
        command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=sys.stderr
    )


def _config(where: Path, target: Path) -> dict[str, Any]:
    for name, questions in (("prompts", QUESTIONS), ("held-out", QUESTIONS[:6])):
        records = [
            {
                "id": f"{name}{n}",
                "source": "ours",
                "license": "MIT",
                "category": "math",
                "turns": [q],
            }
            for n, q in enumerate(questions)
        ]
        (where / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    head = {"draft_vocab_size": 200, "intermediate_size": 32, "max_share_of_target": 5.0}
    return {
        "run": {"uri": str(where / "run"), "threads": 1},
        "target": {"source": str(target), "dtype": "float32", "device": "cpu"},
        "synth": {
            "sources": [{"source": str(where / "prompts.jsonl")}],
            "max_new_tokens": 24,
            "batch_size": 8,
            "shard_prompts": 4,
            "max_turns": 1,
            "max_prompt_tokens": 200,
        },
        "features": {"batch_tokens": 256, "shard_tokens": 300},
        "train": {
            "head_config": head,
            "ttt_steps": 3,
            "epochs": 4,
            "batch_tokens": 128,
            "log_every": 1,
            "dtype": "float32",
            "wandb": "disabled",
        },
        "eval": {
            "sources": [{"source": str(where / "held-out.jsonl")}],
            "max_new_tokens": 16,
            "hf_prompts": 2,
            "tree": {"top_k": 2, "steps": 3, "nodes": 6},
        },
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", nargs="?", help="directory of a finished run")
    parser.add_argument("--tiny", action="store_true", help="make a run over a tiny random target")
    parser.add_argument("--out", help="directory for the tiny run; a temporary one otherwise")
    options = parser.parse_args()
    if bool(options.run) == options.tiny:
        parser.error("name a run's directory, or --tiny")
    return options


if __name__ == "__main__":
    main()
