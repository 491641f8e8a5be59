"""Prompts to samples.

select.py    prompts after all filters that need no model, cut into shards
filters.py   licence gate, duplicates, decontamination
pii.py       presidio with a real spaCy pipeline; secrets.py adds credentials
screen.py    the policy: drop or redact prompts, drop responses
generate.py  the target answers, turn by turn
audit.py     which tokens are supervised
stage.py     all of it, shard by shard; plan.py says what it would do
"""

from __future__ import annotations

from pipeline.config import RunConfig
from pipeline.records import Manifest

__all__ = ["run"]


def run(config: RunConfig) -> Manifest:
    """Run the synth stage, or what is left of it."""
    from pipeline.synth.stage import run_stage

    return run_stage(config)
