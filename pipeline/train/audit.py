"""What is about to be learnt, checked before the first step: mask, sample, vocabulary by source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from pipeline.console import notice, show_supervised
from pipeline.errors import DataError
from pipeline.heads.init import DraftVocabulary
from pipeline.learning.corpus import Corpus, Survey
from pipeline.store.samples import check_supervised

#: Of more sources than this so many are said.
_SOURCES_SAID = 6

_FIX = "look at the samples' `supervised` spans and run `eagle3 synth` and `eagle3 features` again"


def audit_mask(survey: Survey, *, where: str) -> None:
    """Refuse states without a trainable token, and such of which everything is supervised.

    Raises DataError: the mask was lost, or never made.
    """
    fix = _FIX
    if not survey.pieces:
        left_out = ", ".join(f"{reason} {count}" for reason, count in survey.rejected.items())
        count = f"{survey.supervised} of {survey.tokens} tokens are supervised (0 %)"
        if "longer_than_batch" in survey.rejected:
            fix = "raise train.batch_tokens, or set train.long_samples=split"
        problem = f"no trainable token: {count}; left out: {left_out or 'nothing'}"
        raise DataError(problem, where=where, fix=fix)
    check_supervised(survey.supervised, survey.tokens, where=where, fix=fix)


def show_sample(corpus: Corpus, survey: Survey, decode: Callable[[Sequence[int]], str]) -> None:
    """Show the first trained sample with its mask, or its counts where there is no terminal."""
    first = survey.pieces[0]
    token_ids, mask = corpus.outline(first.shard).tokens(first.sample)
    show_supervised("train", token_ids.tolist(), mask.bool().tolist(), decode)


def coverage_by_source(counts: Mapping[str, Tensor], target_ids: Tensor) -> dict[str, float]:
    """Share of each source's supervised tokens that the draft vocabulary holds.

    counts [V] for each source, target_ids [Vd].
    """
    return {
        source: int(seen[target_ids].sum()) / max(1, int(seen.sum()))
        for source, seen in sorted(counts.items())
    }


def log_survey(survey: Survey, batch_tokens: int) -> None:
    """What the states hold, and what of it is left out."""
    share = f"{survey.supervised / survey.tokens:.1%} supervised"
    notice("train", f"states: {survey.samples:,} samples, {survey.tokens:,} tokens, {share}")
    if survey.split:
        longer = f"{survey.split:,} samples are longer than train.batch_tokens={batch_tokens}"
        notice("train", f"{longer} and were split; no token is lost")
    if survey.rejected:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in survey.rejected.items())
        notice("train", f"not trained on: {reasons}")


def log_coverage(survey: Survey, vocabulary: DraftVocabulary) -> None:
    """How much of the supervised tokens the draft vocabulary holds, and of each source's.

    Of many sources the least covered are said; the manifest has all.
    """
    covered = f"{vocabulary.coverage:.2%} of {survey.supervised:,} supervised tokens"
    notice("train", f"draft vocabulary: {vocabulary.size:,} tokens cover {covered}")
    by_source = coverage_by_source(survey.counts, vocabulary.target_ids)
    if len(by_source) > 1:
        said, which = list(by_source.items()), "by source"
        if len(said) > _SOURCES_SAID:
            which = f"the least of {len(said)} sources"
            said = sorted(said, key=lambda pair: pair[1])[:_SOURCES_SAID]
        shares = ", ".join(f"{source} {share:.2%}" for source, share in said)
        notice("train", f"{which}: {shares}")
