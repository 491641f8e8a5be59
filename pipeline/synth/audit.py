"""The audit of a run: each shard's mask as it is made, and the content of audit.json.

A shard's entry carries its tallies as JSON. Those of a stage are the sums over its shards, number
by number, so that no shard is read again when the stage is finished:

    {"samples": 64, "licenses": {"MIT": 64}, "lengths": {"reply": {"12": 3, …}, …}, …}

audit.json is a function of the shards, the configuration and the target: an interrupted run and one
that was not have the same, byte for byte. No prompt, reply or finding is quoted; of system prompts
only the run's own is.

Its forecast says what training will meet: tokens, bytes of states, and how much a draft vocabulary
covers, measured on replies that had no part in choosing it:

    samples of up to 16 shards    0  1  2  3  4  5 …
    choose the V most frequent    ·     ·     ·        of the generated tokens
    cover                            ·     ·     ·     share of theirs that is among them

And how much of the replies runs in loops, from which a head learns little:

    generated     a b c d e f g h i j   a b c d e f g h i j   a b …
    repeated                                            · ·   · ·     end nine that stood before
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from pipeline.console import show_supervised
from pipeline.records import (
    Record,
    Sample,
    SamplingParams,
    Shard,
    TargetContract,
    canonical_json,
)
from pipeline.store.encodings import Encoding, row_width
from pipeline.store.location import Location
from pipeline.store.samples import check_supervised, read_samples
from pipeline.synth.filters import repeated_rows

AUDIT = "audit.json"
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
    forecast: dict[str, Any]  # tokens, bytes of states, coverage of draft vocabularies, loops

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
            "messages_that_spell_control_tokens": counts("spelt_control_tokens"),
        },
        target=contract,
        settings=details["sampling"],
        forecast=details["forecast"],
    )


def _lengths(counts: Mapping[int, int]) -> Lengths:
    values, total, maximum = sorted(counts), sum(counts.values()), max(counts)
    bins = Counter[int]()
    for value, count in counts.items():
        bins[_BOUNDS[bisect_right(_BOUNDS, value) - 1]] += count
    return Lengths(
        count=total,
        mean=round(sum(value * count for value, count in counts.items()) / total, 2),
        median=_quantile(values, counts, 0.5),
        p90=_quantile(values, counts, 0.9),
        p99=_quantile(values, counts, 0.99),
        longest=maximum,
        bars=tuple(
            HistogramBin(start=start, count=bins[start]) for start in _BOUNDS if start <= maximum
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


def _findings(findings: Mapping[str, Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, Any]]:
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


_SIZES = (4096, 8192, 16384, 32768, 65536)
_ENCODINGS: tuple[Encoding, ...] = ("int8", "bf16")
#: Shards that are read, evenly spaced: the datasheet of 100,000 may not take hours.
_SHARDS = 16
#: Tokens in a row that a sample says twice; fewer are style.
_ROW = 9
#: With more of the generated tokens repeated, a head of SmolLM2 accepted less (docs/log.md).
MUCH_REPEATED = 0.15


def forecast(
    contract: TargetContract, location: Location, shards: Sequence[Shard], *, supervised: int
) -> dict[str, Any]:
    """From the stage at `location` with these committed `shards` of `supervised` tokens in all."""
    filled = [shard for shard in shards if shard.rows]
    read = filled[:: -(-len(filled) // _SHARDS)]
    samples = chain.from_iterable(read_samples(location, shard) for shard in read)
    replies = _read_replies(samples)
    chosen_from, covered = replies.chosen_from, replies.covered
    tokens = sum(shard.tokens for shard in filled)
    return {
        "tokens": tokens,
        "supervised_tokens": supervised,
        "states_bytes": {
            encoding: _states_bytes(contract, encoding, tokens, supervised)
            for encoding in _ENCODINGS
        },
        "shards_read": len(read),
        "distinct_tokens": len({*chosen_from, *covered}),
        "coverage": _coverage(chosen_from, covered, contract.vocab_size),
        "repeated_share": round(replies.repeated / (chosen_from.total() + covered.total()), 6),
    }


class _Replies(NamedTuple):
    """How often each generated token occurs, in every other sample and in the others."""

    chosen_from: Counter[int]
    covered: Counter[int]
    repeated: int  # generated tokens that end a row which has stood in their sample before


def _read_replies(samples: Iterable[Sample]) -> _Replies:
    halves, repeated = (Counter[int](), Counter[int]()), 0
    for number, sample in enumerate(samples):
        repeated += _count_repeated(sample)
        for span in sample.supervised:
            halves[number % 2].update(sample.token_ids[span.start : span.end])
    return _Replies(*halves, repeated)


def _count_repeated(sample: Sample) -> int:
    ids, generated = sample.token_ids, set[int]()
    for span in sample.supervised:
        generated.update(range(span.start, span.end))
    return sum(start + _ROW - 1 in generated for start in repeated_rows(ids, _ROW))


def _coverage(
    chosen_from: Counter[int], covered: Mapping[int, int], vocabulary: int
) -> dict[str, float]:
    """Draft vocabulary size → share of tokens; nothing where there is one sample alone.

    The last size is the first that holds every token of the half that chooses.
    """
    ranked = [
        token for token, _ in sorted(chosen_from.items(), key=lambda item: (-item[1], item[0]))
    ]
    total = sum(covered.values())
    if not total:
        return {}
    sizes = [size for size in _SIZES if size < vocabulary]
    enough = sum(size < len(ranked) for size in sizes) + 1
    return {
        str(size): round(sum(covered.get(token, 0) for token in ranked[:size]) / total, 6)
        for size in sizes[:enough]
    }


def _states_bytes(
    contract: TargetContract, encoding: Encoding, tokens: int, supervised: int
) -> int:
    """Of the aux states of each token and the final state of each supervised one."""
    layers = len(contract.capture_layers)
    aux, final = (row_width(encoding, contract.hidden_size, count) for count in (layers, 1))
    return (tokens * aux + supervised * final) * (2 if encoding == "bf16" else 1)


Tallies = dict[str, Any]  # names → counts, or names → …
#: Notes of a shard that are counts by reason.
_COUNTS = ("ended", "dropped_prompts", "dropped_replies", "spelt_control_tokens")


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


#: Those of a shard that are numbers; the others are numbers by name.
_NUMBERS = frozenset({"samples", "tokens", "supervised", "system_prompts"})


def check_tallies(tallies: Mapping[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError for what `tally` does not write."""
    for name in (*_NUMBERS, "sources", "source_licenses", "lengths", *tallies):
        if type(tallies[name]) is not (int if name in _NUMBERS else dict):
            raise TypeError(f"{name} is a {type(tallies[name]).__name__}")
    for text in tallies.get("samplings", ()):
        SamplingParams.model_validate_json(text)


def add(total: Tallies, tallies: Mapping[str, Any]) -> None:
    """Add the numbers of `tallies` to those of `total` under the same names."""
    for name, value in tallies.items():
        if isinstance(value, Mapping):
            add(total.setdefault(name, {}), value)
        else:
            total[name] = total.get(name, 0) + value
