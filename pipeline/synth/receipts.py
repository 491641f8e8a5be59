"""What a run of synth is made of, counted from its shards: the content of audit.json.

Everything here is a function of the shards, the configuration and the target, so that a run that was
interrupted and one that was not have the same receipts, byte for byte. No prompt, no reply and no
finding is quoted; texts of system prompts are not either, except the run's own.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from pipeline.records import Sample, TargetContract, canonical_json

SCHEMA_VERSION = 1

#: Lower bounds of the bars that lengths are shown in.
_BOUNDS = (0, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_PII = "pii:"
#: Notes of a shard that are counts by reason.
_COUNTS = ("ended", "dropped_prompts", "dropped_responses")
_MOST_VALUES = 100  # salted hashes listed for each type of personal data


class StageCounts:
    """Counts over all samples, one shard after another, in any order."""

    def __init__(self) -> None:
        self.samples = self.tokens = self.supervised = 0
        self.licenses: Counter[str] = Counter()
        self.by_source_samples: Counter[str] = Counter()
        self.sources: dict[str, Counter[str]] = defaultdict(
            Counter
        )  # source → samples, tokens, supervised_tokens
        self.source_licenses: dict[str, Counter[str]] = defaultdict(Counter)
        self.categories: Counter[str] = Counter()
        self.finish_reasons: Counter[str] = Counter()
        self.generators: Counter[str] = Counter()
        self.samplings: Counter[str] = Counter()  # canonical JSON
        self.system_prompts: Counter[bool] = Counter()
        self.notes: dict[str, Counter[str]] = defaultdict(Counter)  # those that are counts
        self.findings: dict[tuple[str, str], Counter[str]] = defaultdict(
            Counter
        )  # (prompts or responses, entity) → salted hash → times
        self.lengths: dict[str, Counter[int]] = defaultdict(Counter)

    @property
    def supervised_share(self) -> float:
        return round(self.supervised / self.tokens, 6) if self.tokens else 0.0

    def add(self, samples: Iterable[Sample], notes: Mapping[str, Mapping[str, Any]]) -> None:
        """Count one shard."""
        for sample in samples:
            self._add_sample(sample)
        for name in _COUNTS:
            self.notes[name].update(notes.get(name, {}))
        for where, entities in notes.get("findings", {}).items():
            for entity, found in entities.items():
                self.findings[where, entity].update(found["values"])

    def _add_sample(self, sample: Sample) -> None:
        replies = [span.end - span.start for span in sample.supervised]
        self.samples += 1
        self.tokens += len(sample.token_ids)
        self.supervised += sum(replies)
        self.licenses[sample.license] += 1
        self.by_source_samples[sample.source] += 1
        self.sources[sample.source].update(
            samples=1, tokens=len(sample.token_ids), supervised_tokens=sum(replies)
        )
        self.source_licenses[sample.source][sample.license] += 1
        self.categories[sample.category] += 1
        self.finish_reasons[sample.finish_reason] += 1
        self.generators[sample.generator] += 1
        self.samplings[canonical_json(sample.sampling.model_dump(mode="json"))] += 1
        self.system_prompts[sample.messages[0].role == "system"] += 1
        self.lengths["prompt"][sample.supervised[0].start] += 1
        self.lengths["conversation"][len(sample.token_ids)] += 1
        self.lengths["turns"][len(replies)] += 1
        self.lengths["reply"].update(replies)


class HistogramBin(BaseModel):
    """How many lengths are at least `start` and below the next bar's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start: int
    count: int


class Lengths(BaseModel):
    """A distribution of lengths, in tokens or turns."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int
    mean: float
    median: int
    p90: int
    p99: int
    longest: int
    bars: tuple[HistogramBin, ...]


class Audit(BaseModel):
    """audit.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA_VERSION
    prompts: dict[str, int]  # loaded, selected; samples: what they became
    rejected: dict[str, int]  # reason → prompts; with the samples they add up to those loaded
    sources: dict[str, dict[str, Any]]  # samples, tokens, supervised_tokens, licenses
    licenses: dict[str, int]  # SPDX id → samples
    categories: dict[str, int]
    personal_data: dict[
        str, Any
    ]  # policy; prompts and responses dropped by type; findings, also those that were replaced
    tokens: dict[str, float]  # all, supervised, share
    lengths: dict[str, Lengths]
    ended: dict[str, int]  # why conversations have no further turn
    finish_reasons: dict[str, int]  # of last turns
    sampling: list[dict[str, Any]]  # each setting with its samples
    generators: dict[str, int]
    template: dict[str, Any]
    target: TargetContract
    settings: dict[str, Any]  # the run's sampling section

    def as_json(self) -> str:
        return (
            json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True, ensure_ascii=False)
            + "\n"
        )


def audit_record(
    tally: StageCounts,
    details: Mapping[str, Any],
    rejected: Mapping[str, int],
    contract: TargetContract,
) -> Audit:
    """All receipts of a run; `details` and `rejected` are those of its manifest."""
    return Audit(
        prompts=details["prompts"],
        rejected=_sorted(rejected),
        sources={
            name: {**counts, "licenses": _sorted(tally.source_licenses[name])}
            for name, counts in sorted(tally.sources.items())
        },
        licenses=_sorted(tally.licenses),
        categories=_sorted(tally.categories),
        personal_data={
            "policy": details["pii"],
            "dropped_prompts": _of_types(tally.notes["dropped_prompts"]),
            "dropped_responses": _of_types(tally.notes["dropped_responses"]),
            "findings": _findings(tally),
        },
        tokens={
            "all": tally.tokens,
            "supervised": tally.supervised,
            "supervised_share": tally.supervised_share,
        },
        lengths={name: _lengths(tally.lengths[name]) for name in sorted(tally.lengths)},
        ended=_sorted(tally.notes["ended"]),
        finish_reasons=_sorted(tally.finish_reasons),
        sampling=[
            {**json.loads(text), "samples": count}
            for text, count in sorted(tally.samplings.items())
        ],
        generators=_sorted(tally.generators),
        template={
            **details["template"],
            "chat_template_hash": contract.chat_template_hash,
            "samples_with_system_prompt": tally.system_prompts[True],
        },
        target=contract,
        settings=details["sampling"],
    )


def _lengths(counts: Counter[int]) -> Lengths:
    values = sorted(counts)
    total = counts.total()
    bars = Counter[int]()
    for value, count in counts.items():
        bars[_BOUNDS[bisect_right(_BOUNDS, value) - 1]] += count
    return Lengths(
        count=total,
        mean=round(sum(value * count for value, count in counts.items()) / total, 2),
        median=_quantile(values, counts, 0.5),
        p90=_quantile(values, counts, 0.9),
        p99=_quantile(values, counts, 0.99),
        longest=values[-1],
        bars=tuple(
            HistogramBin(start=start, count=bars[start])
            for start in _BOUNDS
            if _BOUNDS[0] <= start <= values[-1]
        ),
    )


def _quantile(values: Sequence[int], counts: Counter[int], share: float) -> int:
    """The smallest value that is not exceeded by `share` of all."""
    seen, needed = 0, share * counts.total()
    for value in values:
        seen += counts[value]
        if seen >= needed:
            return value
    raise AssertionError("a share is at most 1")


def _findings(tally: StageCounts) -> dict[str, dict[str, Any]]:
    """prompts, responses → entity → findings, different values, and the salted hashes of the most frequent ones."""
    listed: dict[str, dict[str, Any]] = {}
    for (where, entity), values in sorted(tally.findings.items()):
        frequent = dict(sorted(values.items(), key=lambda item: (-item[1], item[0]))[:_MOST_VALUES])
        listed.setdefault(where, {})[entity] = {
            "findings": values.total(),
            "values": len(values),
            "frequent": frequent,
        }
    return listed


def _of_types(counts: Mapping[str, int]) -> dict[str, int]:
    """`pii:EMAIL_ADDRESS` → EMAIL_ADDRESS; other reasons are listed with the rejected."""
    return _sorted(
        {
            reason.removeprefix(_PII): count
            for reason, count in counts.items()
            if reason.startswith(_PII)
        }
    )


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items()))
