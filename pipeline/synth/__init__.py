"""Prompts to samples.

select.py    prompts after all filters that need no model, cut into shards
filters.py   licence gate, duplicates, decontamination; quality.py length, language, repetition, refusals
pii.py       what finds personal data: engine.py (presidio with spaCy), numbers.py, addresses.py, names.py,
             secrets.py (credentials) and dlp.py (Cloud DLP); finding.py is what they all report
screen.py    the policy: drop or change prompts, drop responses; replace.py placeholders and pseudonyms,
             ledger.py what the audit keeps; score.py measures it all
generate.py  the target answers, turn by turn: through the bundled decoder (local.py) or servers
             (remote.py; fleet.py endpoints, servers.py their APIs, exact.py what may be believed)
audit.py     which tokens are supervised
receipts.py  audit.json, from the shards; datasheet.py makes datasheet.md of it
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
