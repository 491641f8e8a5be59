"""Trainings of these tests: what fixtures build, what a run leaves on disk, one that is killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import yaml

from pipeline.config import RunConfig
from pipeline.records import Manifest
from pipeline.store.location import Location
from pipeline.train.metrics import METRICS, VOLATILE
from tests.forked import Command, kill_once

#: The fixtures `tiny_config` and `store_states`.
Configure = Callable[..., RunConfig]
Store = Callable[..., Manifest]


def lines_of(config: RunConfig) -> list[dict[str, float]]:
    """All whole lines of metrics; a last one that a kill cut short is left out."""
    stage = Location(config.run.uri).child("train")
    lines = stage.read(METRICS).splitlines(keepends=True) if stage.exists(METRICS) else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def without_speed(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    """What two runs of the same training have in common."""
    return [{name: value for name, value in line.items() if name not in VOLATILE} for line in lines]


def head_of(config: RunConfig) -> Path:
    return Path(config.run.uri) / "train" / "head"


def written(config: RunConfig) -> Path:
    """The configuration as a file beside the run, or in its cache where that is remote."""
    folder, name = str(config.run.cache_dir or Path(config.run.uri).parent), config.run.uri
    file = Path(folder) / f"{name.rpartition('/')[2]}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    tree = config.model_dump(mode="json", exclude_none=True)
    file.write_text(yaml.safe_dump({**tree, "synth": None}))
    return file


def begin(config: RunConfig) -> tuple[Command, Path]:
    """Training in a process of its own, and the file of what it prints."""
    file = written(config)
    printed = file.with_suffix(".printed")
    return Command(["train", "-c", str(file)], printed), printed


def kill_after(config: RunConfig, steps: int) -> None:
    """Start training and kill it once it has logged `steps` steps."""
    kill_once(lambda: len(lines_of(config)) >= steps, *begin(config))


def stop_at(config: RunConfig, steps: int) -> None:
    """Make a finished run look like one that was killed after the checkpoint of step `steps`."""
    directory = Path(config.run.uri) / "train"
    for name in ("manifest.json", "shards", "head"):
        path = directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for marker in (directory / "checkpoints").glob("step-*.json"):
        if int(marker.stem.removeprefix("step-")) > steps:
            marker.unlink()
