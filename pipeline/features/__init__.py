"""Samples in, target states out. The door of the room; torch loads only when there is work to do."""

from __future__ import annotations

from pipeline.config import RunConfig
from pipeline.records import Manifest

__all__ = ["run"]


def run(config: RunConfig) -> Manifest:
    """Compute and store the states of the run's samples; returns at once when they are complete."""
    from pipeline.features.stage import run as run_stage

    return run_stage(config)
