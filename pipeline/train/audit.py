"""What is about to be learnt, looked at before the first step: mask, one sample, vocabulary by source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from torch import Tensor

from pipeline.console import show_mask
from pipeline.errors import DataError
from pipeline.train.data.corpus import Corpus, Survey

#: Tokens shown of one run of prompt or reply; the middle of a longer one is left out.
_SHOWN_TOKENS = 160


def audit_mask(found: Survey, *, where: str) -> None:
    """Refuse states of which nothing, or everything, is supervised: a mask that was lost or never made.

    Raises DataError.
    """
    share = found.supervised / found.tokens if found.tokens else 0.0
    fix = (
        "look at the samples' `supervised` spans and run `eagle3 synth` and `eagle3 features` again"
    )
    if not found.pieces:
        left_out = ", ".join(f"{reason} {count}" for reason, count in found.rejected.items())
        problem = f"no trainable token: {found.supervised} of {found.tokens} tokens are supervised (0 %); left out: {left_out or 'nothing'}"
        if "longer_than_batch" in found.rejected:
            fix = "raise train.batch_tokens, or set train.long_samples=split"
        raise DataError(problem, where=where, fix=fix)
    if share == 1.0:
        raise DataError(
            f"all {found.tokens} tokens are supervised (100 %), prompts included",
            where=where,
            fix=fix,
        )


def show_sample(corpus: Corpus, found: Survey, decode: Callable[[Sequence[int]], str]) -> None:
    """Print the first trained sample: supervised tokens green, all others dim."""
    first = found.pieces[0]
    token_ids, mask = corpus.outline(first.shard).tokens(first.sample)
    parts = []
    for supervised, run in groupby(
        zip(mask.tolist(), token_ids.tolist(), strict=True), key=lambda pair: bool(pair[0])
    ):
        parts.append((_shortened([token for _, token in run], decode), supervised))
    show_mask(parts, supervised=int(mask.sum()), total=len(mask))


def coverage_by_source(counts: Mapping[str, Tensor], target_ids: Tensor) -> dict[str, float]:
    """Share of each source's supervised tokens that the draft vocabulary holds. counts [V] a source, target_ids [Vd]."""
    return {
        source: int(seen[target_ids].sum()) / max(1, int(seen.sum()))
        for source, seen in sorted(counts.items())
    }


def _shortened(ids: list[int], decode: Callable[[Sequence[int]], str]) -> str:
    if len(ids) <= _SHOWN_TOKENS:
        return decode(ids)
    half = _SHOWN_TOKENS // 2
    return f"{decode(ids[:half])} … {len(ids) - 2 * half} tokens … {decode(ids[-half:])}"
