"""The audit of a run: each shard's mask as it is made, and the content of audit.json.

audit.json is a function of the shards, the configuration and the target, so that a run that was
interrupted and one that was not have the same, byte for byte. No prompt, no reply and no finding is
quoted; texts of system prompts are not either, except the run's own.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.console import show_supervised
from pipeline.records import Record, Sample, TargetContract
from pipeline.store.samples import check_supervised
from pipeline.synth.tallies import Tallies

SCHEMA_VERSION = 2

#: Lower bounds of a histogram's bins.
_BOUNDS = (0, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_PII = "pii:"
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
    variants: dict[str, int]  # of `synth.mix` → samples
    generators: dict[str, int]
    template: dict[str, Any]
    target: TargetContract
    settings: dict[str, Any]  # the run's sampling section
    forecast: dict[str, Any]  # tokens, bytes of states, coverage of draft vocabularies

    def as_json(self) -> str:
        fields = self.model_dump(mode="json")
        return json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def audit_record(
    tallies: Tallies,
    details: Mapping[str, Any],
    rejected: Mapping[str, int],
    contract: TargetContract,
) -> Audit:
    """The audit of a whole run from its tallies; `details` and `rejected` are its manifest's."""

    def counts(name: str) -> dict[str, int]:
        return _sorted(tallies.get(name, {}))

    sources = {
        name: {**numbers, "licenses": _sorted(tallies["source_licenses"][name])}
        for name, numbers in sorted(tallies.get("sources", {}).items())
    }
    sampling = [
        {**json.loads(text), "samples": count} for text, count in counts("samplings").items()
    ]
    return Audit(
        prompts=details["prompts"],
        rejected=_sorted(rejected),
        sources=sources,
        licenses=counts("licenses"),
        categories=counts("categories"),
        personal_data={
            "policy": details["pii"],
            "dropped_prompts": _of_types(counts("dropped_prompts")),
            "dropped_replies": _of_types(counts("dropped_replies")),
            "findings": _findings(tallies.get("findings", {})),
        },
        tokens={
            "all": tallies["tokens"],
            "supervised": tallies["supervised"],
            "supervised_share": details["supervised_share"],
        },
        lengths={
            name: _lengths({int(length): count for length, count in lengths.items()})
            for name, lengths in sorted(tallies.get("lengths", {}).items())
        },
        ended=counts("ended"),
        finish_reasons=counts("finish_reasons"),
        sampling=sampling,
        variants=counts("variants"),
        generators=counts("generators"),
        template={
            **details["template"],
            "chat_template_hash": contract.chat_template_hash,
            "samples_with_system_prompt": tallies["system_prompts"],
        },
        target=contract,
        settings=details["sampling"],
        forecast=details["forecast"],
    )


def _lengths(counts: Mapping[int, int]) -> Lengths:
    values, total, longest = sorted(counts), sum(counts.values()), max(counts)
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


def _quantile(values: Sequence[int], counts: Mapping[int, int], share: float) -> int:
    """The smallest value that is not exceeded by `share` of all."""
    seen, needed = 0, share * sum(counts.values())
    for value in values:
        seen += counts[value]
        if seen >= needed:
            return value
    raise AssertionError("a share is at most 1")


def _findings(
    findings: Mapping[str, Mapping[str, Mapping[str, int]]],
) -> dict[str, dict[str, Any]]:
    """prompts, replies, metadata → entity → findings, values, hashes of the most frequent."""
    listed: dict[str, dict[str, Any]] = {}
    for where, entities in sorted(findings.items()):
        for entity, values in sorted(entities.items()):
            ranked = sorted(values.items(), key=lambda item: (-item[1], item[0]))
            listed.setdefault(where, {})[entity] = {
                "findings": sum(values.values()),
                "values": len(values),
                "frequent": dict(ranked[:_MOST_VALUES]),
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
