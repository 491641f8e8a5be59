"""What a finished stage says of itself: audit, datasheet and manifest.

All of it comes from the entries of the shards, so that interruptions leave no trace.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pipeline.config import RunConfig
from pipeline.console import notice
from pipeline.errors import DataError
from pipeline.records import Manifest, TargetContract
from pipeline.store.samples import Selection
from pipeline.store.stage_run import StageRun
from pipeline.synth.audit import audit_record
from pipeline.synth.datasheet import write_datasheet
from pipeline.synth.forecast import forecast
from pipeline.synth.generate.rejections import RejectionLimit
from pipeline.synth.screen import pii_policy
from pipeline.synth.selection.select import synth_section
from pipeline.synth.tallies import Tallies, add
from pipeline.target.template import ChatTemplate

AUDIT, DATASHEET = "audit.json", "datasheet.md"

#: What the manifest and the audit repeat of the section.
_SAMPLING = {
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
    "max_turns",
    "on_length",
    "system_prompt",
    "mix",
}


def finish(
    config: RunConfig,
    stage_run: StageRun,
    selection: Selection,
    template: ChatTemplate,
    contract: TargetContract,
) -> Manifest:
    """Commit the stage. Raises StageIncomplete while shards are missing, DataError without samples,
    EndpointError where servers cost too many prompts.
    """
    tallies: Tallies = {"samples": 0, "tokens": 0, "supervised": 0, "system_prompts": 0}
    rejected = Counter(selection.rejected)
    shards = []
    for entry in stage_run.collect(selection.names):
        shards.append(entry.shard)
        add(tallies, entry.tallies)
        rejected.update(entry.shard.rejected)
    assert selection.loaded == tallies["samples"] + rejected.total(), "a prompt was lost"
    RejectionLimit(synth_section(config)).add(rejected, prompts=selection.prompts)
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(rejected.items()))
    if not tallies["samples"]:
        problem = f"none of {selection.loaded:,} prompts became a sample ({reasons})"
        fix = "widen synth's filters or raise its limits, then run again with --force"
        raise DataError(problem, where=stage_run.location.uri, fix=fix)
    details = _details(config, selection, template, tallies)
    if stage_run.clock:
        details["template"]["clock"] = stage_run.clock.isoformat()
    details["forecast"] = forecast(
        contract, stage_run.location, shards, supervised=tallies["supervised"]
    )
    audit = audit_record(tallies, details, rejected, contract)
    for name, text in ((AUDIT, audit.as_json()), (DATASHEET, write_datasheet(audit))):
        stage_run.write_once(name, text.encode())
        details[f"{name}_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    manifest = stage_run.finish(
        contract=contract,
        licenses=tallies["licenses"],
        sources={name: counts["samples"] for name, counts in tallies["sources"].items()},
        details=details,
        rejected_extra=selection.rejected,
    )
    made = f"{manifest.rows:,} samples, {manifest.tokens:,} tokens"
    supervised = f"{details['supervised_share']:.0%} supervised"
    notice("synth", f"{made}, {supervised}; rejected: {reasons or 'none'}")
    notice("synth", f"datasheet: {stage_run.location.where(DATASHEET)}")
    return manifest


def _details(
    config: RunConfig,
    selection: Selection,
    template: ChatTemplate,
    tallies: Mapping[str, Any],
) -> dict[str, Any]:
    """What the manifest says of this stage alone."""
    section = synth_section(config)
    return {
        "prompts": {
            "loaded": selection.loaded,
            "selected": selection.prompts,
            "samples": tallies["samples"],
        },
        "supervised_tokens": tallies["supervised"],
        "supervised_share": round(tallies["supervised"] / tallies["tokens"], 6),
        "sampling": section.model_dump(mode="json", include=_SAMPLING),
        "template": {
            "kwargs": config.target.chat_template_kwargs,
            "stop_ids": list(template.stop_ids),
            "end_of_turn": template.end_of_turn,
        },
        "pii": pii_policy(section),
    }
