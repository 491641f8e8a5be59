"""Prompts to samples.

stage.py     all of it, shard by shard; plan.py says what it would do
finish.py    audit, datasheet and manifest, from the shards' entries
selection/   prompts after all filters that need no model, cut into shards
screen.py    the policy: drop or change prompts, drop samples for their replies
metadata.py  the same for what stands beside the text
screening.py the policy in processes beside generation
privacy/     what finds personal data and secrets, and what replaces them
generate/    the target replies, turn by turn, through the bundled decoder or servers
audit.py     each shard's mask checked; audit.json, counted from the shards
tallies.py   what a shard adds to it
forecast.py  what training may expect
datasheet.py datasheet.md of it, through datasheet.md.j2
"""

from __future__ import annotations

from pipeline.config import RunConfig
from pipeline.records import Manifest

__all__ = ["run"]


def run(config: RunConfig) -> Manifest:
    """Run the synth stage, or what is left of it."""
    from pipeline.synth import stage

    return stage.run(config)
