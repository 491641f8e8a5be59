"""Samples in, target states out. Torch loads only when there is something to compute."""

from __future__ import annotations

from pipeline.config import RunConfig
from pipeline.records import Manifest

__all__ = ["run"]


def run(config: RunConfig) -> Manifest:
    """Compute and store the states of the run's samples; returns at once when they are complete."""

    from pipeline.features import stage

    return stage.run(config)
