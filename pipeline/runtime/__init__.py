"""Where a stage runs: in this process, or in the actors of a Ray cluster.

The stages know nothing of it. Whoever runs one, every process claims shards, commits them, and
finishes the stage when it finds all committed (store/claims.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from pipeline.config import RunConfig
from pipeline.errors import memory_explained
from pipeline.records import Manifest, Stage
from pipeline.telemetry import metrics_of

#: The room behind each stage; `eval` would shadow a builtin as a package name.
ROOMS: dict[Stage, str] = {
    "synth": "synth",
    "features": "features",
    "train": "train",
    "eval": "serve_eval",
}
#: Stages of many shards that any process can make; the others are one process's or one launcher's.
SHARED: tuple[Stage, ...] = ("synth", "features")


def run(config: RunConfig, stage: Stage) -> Manifest:
    """Run `stage` as `run.runtime` says. Raises Eagle3Error for whatever the user can fix."""
    if config.run.runtime == "ray" and stage in SHARED:
        from pipeline.runtime.ray import run_on_ray

        return run_on_ray(config, stage)
    return run_here(config, stage)


def run_here(config: RunConfig, stage: Stage) -> Manifest:
    """Run `stage` in this process, with its metrics."""
    with metrics_of(config.run, stage), memory_explained(stage):
        return entry_of(stage)(config)


def entry_of(stage: Stage) -> Callable[[RunConfig], Manifest]:
    """The stage's entry function."""
    entry: Callable[[RunConfig], Manifest]
    entry = importlib.import_module(f"pipeline.{ROOMS[stage]}").run
    return entry
