"""What a shard of samples adds to audit and manifest, as JSON that its entry carries.

The tallies of a stage are those of its shards, added number by number, so that no shard is read
again when the stage is finished, whoever made it:

    {"samples": 64, "licenses": {"MIT": 64}, "lengths": {"reply": {"12": 3, …}, …}, …}
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.records import Sample, canonical_json

Tallies = dict[str, Any]  # names → counts, or names → …

#: Notes of a shard that are counts by reason.
_COUNTS = ("ended", "dropped_prompts", "dropped_replies")


def tally(samples: Sequence[Sample], notes: Mapping[str, Mapping[str, Any]]) -> Tallies:
    """Of one shard with its notes."""
    by_sample: dict[str, Counter[str]] = defaultdict(Counter)
    sources: dict[str, Counter[str]] = defaultdict(Counter)
    source_licenses: dict[str, Counter[str]] = defaultdict(Counter)
    lengths: dict[str, Counter[str]] = defaultdict(Counter)
    for sample in samples:
        replies = [span.end - span.start for span in sample.supervised]
        tokens, supervised = len(sample.token_ids), sum(replies)
        sources[sample.source].update(samples=1, tokens=tokens, supervised_tokens=supervised)
        source_licenses[sample.source][sample.license] += 1
        by_sample["licenses"][sample.license] += 1
        by_sample["categories"][sample.category] += 1
        if sample.variant is not None:
            by_sample["variants"][sample.variant] += 1
        by_sample["finish_reasons"][sample.finish_reason] += 1
        by_sample["generators"][sample.generator] += 1
        by_sample["samplings"][canonical_json(sample.sampling.model_dump(mode="json"))] += 1
        lengths["prompt"][str(sample.supervised[0].start)] += 1
        lengths["conversation"][str(tokens)] += 1
        lengths["turns"][str(len(replies))] += 1
        lengths["reply"].update(map(str, replies))
    findings = {
        where: {entity: counts["values"] for entity, counts in entities.items()}
        for where, entities in notes.get("findings", {}).items()
    }
    return {
        "samples": len(samples),
        "tokens": sum(counts["tokens"] for counts in sources.values()),
        "supervised": sum(counts["supervised_tokens"] for counts in sources.values()),
        "system_prompts": sum(sample.messages[0].role == "system" for sample in samples),
        "sources": sources,
        "source_licenses": source_licenses,
        "lengths": lengths,
        "findings": findings,
        **by_sample,
        **{name: notes.get(name, {}) for name in _COUNTS},
    }


def add(total: Tallies, tallies: Mapping[str, Any]) -> None:
    """Add the numbers of `tallies` to those of `total` under the same names."""
    for name, value in tallies.items():
        if isinstance(value, Mapping):
            add(total.setdefault(name, {}), value)
        else:
            total[name] = total.get(name, 0) + value
