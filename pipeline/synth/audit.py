"""The audit of a run: each shard's mask as it is made, and the content of audit.json.

audit.json is a function of the shards, the configuration and the target, so that a run that was
interrupted and one that was not have the same, byte for byte. No prompt, no reply and no finding is
quoted; texts of system prompts are not either, except the run's own.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pipeline.console import show_supervised
from pipeline.records import Record, Sample, TargetContract, canonical_json
from pipeline.store.samples import check_supervised

SCHEMA_VERSION = 1

#: Lower bounds of a histogram's bins.
_BOUNDS = (0, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_PII = "pii:"
#: Notes of a shard that are counts by reason.
_COUNTS = ("ended", "dropped_prompts", "dropped_replies")
_MOST_VALUES = 100  # salted hashes listed for each type of personal data


def count_tokens(samples: Sequence[Sample]) -> tuple[int, int]:
    """(supervised, all) tokens."""
    supervised = sum(span.end - span.start for sample in samples for span in sample.supervised)
    return supervised, sum(len(sample.token_ids) for sample in samples)


def audit_mask(samples: Sequence[Sample], *, where: str) -> None:
    """Raise DataError when nothing or everything in a shard's samples is supervised."""
    if not samples:
        return
    fix = "check the target's chat template and end-of-turn token, and synth.max_new_tokens"
    check_supervised(*count_tokens(samples), where=where, fix=fix)
    for sample in samples:
        bounds = [bound for span in sample.supervised for bound in (span.start, span.end)]
        assert bounds == sorted(bounds), "supervised spans overlap"
        assert bounds[-1] <= len(sample.token_ids), "a supervised span leaves the sample"


def show_sample(sample: Sample, decode: Callable[[Sequence[int]], str]) -> None:
    """Show one sample with its mask, or its counts where there is no terminal."""
    mask = [False] * len(sample.token_ids)
    for span in sample.supervised:
        mask[span.start : span.end] = [True] * (span.end - span.start)
    show_supervised("synth", sample.token_ids, mask, decode)


class StageCounts:
    """Counts over all samples, one shard after another, in any order."""

    def __init__(self) -> None:
        self.samples = self.tokens = self.supervised = 0
        self.licenses: Counter[str] = Counter()
        # source → samples, tokens, supervised_tokens
        self.sources: dict[str, Counter[str]] = defaultdict(Counter)
        self.source_licenses: dict[str, Counter[str]] = defaultdict(Counter)
        self.categories: Counter[str] = Counter()
        self.finish_reasons: Counter[str] = Counter()
        self.generators: Counter[str] = Counter()
        self.samplings: Counter[str] = Counter()  # canonical JSON
        self.system_prompts: Counter[bool] = Counter()
        self.notes: dict[str, Counter[str]] = defaultdict(Counter)  # those that are counts
        # (prompts or replies, entity) → salted hash → times
        self.findings: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.lengths: dict[str, Counter[int]] = defaultdict(Counter)

    @property
    def samples_by_source(self) -> dict[str, int]:
        return {source: counts["samples"] for source, counts in self.sources.items()}

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
            for entity, counts in entities.items():
                self.findings[where, entity].update(counts["values"])

    def _add_sample(self, sample: Sample) -> None:
        replies = [span.end - span.start for span in sample.supervised]
        tokens, supervised = len(sample.token_ids), sum(replies)
        self.samples += 1
        self.tokens += tokens
        self.supervised += supervised
        self.licenses[sample.license] += 1
        self.sources[sample.source].update(samples=1, tokens=tokens, supervised_tokens=supervised)
        self.source_licenses[sample.source][sample.license] += 1
        self.categories[sample.category] += 1
        self.finish_reasons[sample.finish_reason] += 1
        self.generators[sample.generator] += 1
        self.samplings[canonical_json(sample.sampling.model_dump(mode="json"))] += 1
        self.system_prompts[sample.messages[0].role == "system"] += 1
        self.lengths["prompt"][sample.supervised[0].start] += 1
        self.lengths["conversation"][tokens] += 1
        self.lengths["turns"][len(replies)] += 1
        self.lengths["reply"].update(replies)


class HistogramBin(Record):
    """How many lengths are at least `start` and below the next bin's."""

    start: int
    count: int


class Lengths(Record):
    """A distribution of lengths, in tokens or turns."""

    count: int
    mean: float
    median: int
    p90: int
    p99: int
    longest: int
    bars: tuple[HistogramBin, ...]


class Audit(Record):
    """audit.json."""

    schema_version: int = SCHEMA_VERSION
    prompts: dict[str, int]  # loaded, selected; samples: what they became
    rejected: dict[str, int]  # reason → prompts; with the samples they add up to those loaded
    sources: dict[str, dict[str, Any]]  # samples, tokens, supervised_tokens, licenses
    licenses: dict[str, int]  # SPDX id → samples
    categories: dict[str, int]
    personal_data: dict[str, Any]  # policy; dropped by type; findings, also those replaced
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
        fields = self.model_dump(mode="json")
        return json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def audit_record(
    counts: StageCounts,
    details: Mapping[str, Any],
    rejected: Mapping[str, int],
    contract: TargetContract,
) -> Audit:
    """The audit of a whole run; `details` and `rejected` are those of its manifest."""
    sources = {
        name: {**numbers, "licenses": _sorted(counts.source_licenses[name])}
        for name, numbers in sorted(counts.sources.items())
    }
    sampling = [
        {**json.loads(text), "samples": count} for text, count in sorted(counts.samplings.items())
    ]
    return Audit(
        prompts=details["prompts"],
        rejected=_sorted(rejected),
        sources=sources,
        licenses=_sorted(counts.licenses),
        categories=_sorted(counts.categories),
        personal_data={
            "policy": details["pii"],
            "dropped_prompts": _of_types(counts.notes["dropped_prompts"]),
            "dropped_replies": _of_types(counts.notes["dropped_replies"]),
            "findings": _findings(counts.findings),
        },
        tokens={
            "all": counts.tokens,
            "supervised": counts.supervised,
            "supervised_share": counts.supervised_share,
        },
        lengths={name: _lengths(counts.lengths[name]) for name in sorted(counts.lengths)},
        ended=_sorted(counts.notes["ended"]),
        finish_reasons=_sorted(counts.finish_reasons),
        sampling=sampling,
        generators=_sorted(counts.generators),
        template={
            **details["template"],
            "chat_template_hash": contract.chat_template_hash,
            "samples_with_system_prompt": counts.system_prompts[True],
        },
        target=contract,
        settings=details["sampling"],
    )


def _lengths(counts: Counter[int]) -> Lengths:
    values, total, longest = sorted(counts), counts.total(), max(counts)
    bins = Counter[int]()
    for value, count in counts.items():
        bins[_BOUNDS[bisect_right(_BOUNDS, value) - 1]] += count
    return Lengths(
        count=total,
        mean=round(sum(value * count for value, count in counts.items()) / total, 2),
        median=_quantile(values, counts, 0.5),
        p90=_quantile(values, counts, 0.9),
        p99=_quantile(values, counts, 0.99),
        longest=longest,
        bars=tuple(
            HistogramBin(start=start, count=bins[start]) for start in _BOUNDS if start <= longest
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


def _findings(findings: Mapping[tuple[str, str], Counter[str]]) -> dict[str, dict[str, Any]]:
    """prompts, replies → entity → findings, values, and salted hashes of the most frequent."""
    listed: dict[str, dict[str, Any]] = {}
    for (where, entity), values in sorted(findings.items()):
        frequent = dict(sorted(values.items(), key=lambda item: (-item[1], item[0]))[:_MOST_VALUES])
        listed.setdefault(where, {})[entity] = {
            "findings": values.total(),
            "values": len(values),
            "frequent": frequent,
        }
    return listed


def _of_types(counts: Mapping[str, int]) -> dict[str, int]:
    """`pii:EMAIL_ADDRESS` → EMAIL_ADDRESS; other reasons are listed with the rejected."""
    types = {
        reason.removeprefix(_PII): count
        for reason, count in counts.items()
        if reason.startswith(_PII)
    }
    return _sorted(types)


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items()))
