"""What is supervised: checked on every shard, and shown once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.console import show_mask
from pipeline.errors import DataError
from pipeline.records import Sample


def count_tokens(samples: Sequence[Sample]) -> tuple[int, int]:
    """(supervised, all) tokens."""
    supervised = sum(span.end - span.start for sample in samples for span in sample.supervised)
    return supervised, sum(len(sample.token_ids) for sample in samples)


def audit_mask(samples: Sequence[Sample], *, where: str) -> None:
    """Raise DataError when nothing or everything is supervised; either would train a useless head."""
    supervised, total = count_tokens(samples)
    if samples and not 0 < supervised < total:
        share = "none" if supervised == 0 else "all"
        fix = "check the target's chat template and end-of-turn token, and synth.max_new_tokens"
        raise DataError(f"{share} of the {total} tokens are supervised", where=where, fix=fix)
    for sample in samples:
        borders = [border for span in sample.supervised for border in (span.start, span.end)]
        assert borders == sorted(borders) and borders[-1] <= len(sample.token_ids), (
            "supervised spans overlap or leave the sample"
        )


def show_sample(sample: Sample, decode: Callable[[Sequence[int]], str]) -> None:
    """Print one sample: supervised tokens green, all others dim."""
    parts = []
    position = 0
    for span in sample.supervised:
        parts.append((decode(sample.token_ids[position : span.start]), False))
        parts.append((decode(sample.token_ids[span.start : span.end]), True))
        position = span.end
    parts.append((decode(sample.token_ids[position:]), False))
    supervised, total = count_tokens([sample])
    show_mask(parts, supervised=supervised, total=total)
