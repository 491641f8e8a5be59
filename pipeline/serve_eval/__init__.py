"""Head + decoder → acceptance, speed, losslessness, and the report people read."""

from __future__ import annotations

from pipeline.config import RunConfig
from pipeline.records import Manifest


def run(config: RunConfig) -> Manifest:
    """Evaluate a head; see stage.py."""
    from pipeline.serve_eval.stage import run as run_stage

    return run_stage(config)
