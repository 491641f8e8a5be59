"""All before the first step: states verified, held out, surveyed and scheduled; the initial head.

Of several processes each verifies and surveys its part of the shards, and all get the whole; rank 0
draws the held-out samples, solves the least squares and broadcasts both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.config import RunConfig, TrainSection, rank
from pipeline.console import long_step, notice, show_supervised
from pipeline.errors import ConfigError, DataError
from pipeline.heads.base import DraftingHead, DraftShape
from pipeline.heads.checkpoint import WEIGHTS
from pipeline.heads.init import (
    SCALE_BATCHES,
    DraftVocabulary,
    choose_vocabulary,
    fc_scale,
    lend_rows,
)
from pipeline.heads.registry import (
    algorithm,
    algorithm_of,
    check_algorithm,
    empty_head,
    open_head,
)
from pipeline.learning.batches import Schedule
from pipeline.learning.corpus import (
    Corpus,
    HeldOut,
    Survey,
    draw_samples,
    hold_out,
    join_surveys,
    survey,
)
from pipeline.learning.least_squares import FirstBatches
from pipeline.records import Manifest, TargetContract
from pipeline.store.location import Location
from pipeline.store.manifest import stage_location
from pipeline.store.samples import check_supervised
from pipeline.target.open import Target
from pipeline.train.group import (
    all_gather_or_raise,
    broadcast_from_rank0,
    broadcast_tensor,
    own_part,
)
from pipeline.train.stored import StoredCorpus, open_corpus

#: Sources whose coverage is printed, at most.
_PRINTED_SOURCES = 6


class Data(NamedTuple):
    """The states, and what is trained and decoded of them."""

    corpus: StoredCorpus
    survey: Survey
    schedule: Schedule
    held_out: tuple[HeldOut, ...]  # selecting half, reporting half; none without evaluate_every


def open_data(config: RunConfig, parent: Manifest, target: Target, shape: DraftShape) -> Data:
    """Verify the states, hold some out, survey, audit and schedule the rest."""
    section, seed = config.train, config.run.seed
    corpus = open_corpus(config, parent)
    own = own_part(len(corpus))
    all_gather_or_raise(lambda: corpus.verify(own))
    held_out: tuple[HeldOut, ...] = ()
    if section.evaluate_every:
        count = section.evaluate_prompts
        limit = shape.max_position_embeddings - section.evaluate_tokens
        held_out = broadcast_from_rank0(
            lambda: hold_out(corpus, count, seed=seed, max_prompt=limit)
        )
    drawn = None
    if (tokens := section.data_tokens) is not None:
        budget = section.batch_tokens if section.long_samples == "drop" else None
        drawn = broadcast_from_rank0(
            lambda: draw_samples(corpus, tokens, seed=seed, held_out=held_out, max_length=budget)
        )
    parts = all_gather_or_raise(
        lambda: survey(
            corpus,
            own,
            vocab_size=target.contract.vocab_size,
            budget=section.batch_tokens,
            long_samples=section.long_samples,
            held_out=held_out,
            drawn=drawn,
        )
    )
    surveyed = join_surveys(parts)
    audit_mask(surveyed, where=stage_location(config.run.uri, "features").uri)
    template = target.template()
    if rank() == 0:
        show_sample(corpus, surveyed, lambda ids: template.text(tuple(ids), special=True))
    log_survey(surveyed, section.batch_tokens)
    schedule = Schedule(
        surveyed.pieces,
        budget=section.batch_tokens,
        seed=seed,
        epochs=section.epochs,
        together=corpus.together,
    )
    return Data(corpus, surveyed, schedule, held_out)


def solve_least_squares(config: RunConfig, head: DraftingHead, target: Target, data: Data) -> None:
    """Solve what is linear in `head` on rank 0, and broadcast it. It stays on the CPU."""

    def batches(labels: int) -> FirstBatches:
        return FirstBatches(data.corpus, data.schedule, labels=labels)

    def solve() -> None:
        lines = algorithm_of(head).init.init_least_squares(
            config.train, head.to(target.device), target, batches, config.run.seed
        )
        head.cpu()
        for line in lines:
            notice("train", line)

    with long_step("train", "solving the head by least squares"):
        broadcast_from_rank0(solve)
    for parameter in head.parameters():
        broadcast_tensor(parameter, target.device)


def measure_scale(config: RunConfig, head: DraftingHead, data: Data) -> float:
    """Factor of the learning rate of `fc`, measured on rank 0."""
    tokens = config.train.batch_tokens * SCALE_BATCHES
    batches = FirstBatches(data.corpus, data.schedule, tokens=tokens)
    return broadcast_from_rank0(lambda: fc_scale(head, batches))


def audit_mask(survey: Survey, *, where: str) -> None:
    """Refuse states without a trainable token, and such of which everything is supervised.

    Raises DataError: the mask was lost, or never made.
    """
    fix = (
        "look at the samples' `supervised` spans and run `eagle3 synth` and `eagle3 features` again"
    )
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
    """Print what the states hold, and what of it is left out."""
    share = f"{survey.supervised / survey.tokens:.1%} supervised"
    notice("train", f"states: {survey.samples:,} samples, {survey.tokens:,} tokens, {share}")
    if survey.split:
        longer = f"{survey.split:,} samples are longer than train.batch_tokens={batch_tokens}"
        notice("train", f"{longer} and were split; no token is lost")
    if survey.rejected:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in survey.rejected.items())
        notice("train", f"not trained on: {reasons}")


def log_coverage(survey: Survey, vocabulary: DraftVocabulary) -> None:
    """Print which share of the supervised tokens the draft vocabulary holds, and of each source's.

    Of many sources the least covered are printed; the manifest has all.
    """
    covered = f"{vocabulary.coverage:.2%} of {survey.supervised:,} supervised tokens"
    notice("train", f"draft vocabulary: {vocabulary.size:,} tokens cover {covered}")
    by_source = coverage_by_source(survey.counts, vocabulary.target_ids)
    if len(by_source) > 1:
        printed, which = list(by_source.items()), "by source"
        if len(printed) > _PRINTED_SOURCES:
            which = f"the least of {len(printed)} sources"
            printed = sorted(printed, key=lambda pair: pair[1])[:_PRINTED_SOURCES]
        shares = ", ".join(f"{source} {share:.2%}" for source, share in printed)
        notice("train", f"{which}: {shares}")


@dataclass(frozen=True)
class HeadInit:
    """What is known of the head before any data is read."""

    shape: DraftShape
    parameters: int
    share: float  # of the target's parameters
    earlier: DraftingHead | None = None  # train.start_from, in float32
    origin: Mapping[str, Any] | None = None  # where `earlier` comes from, for the card


def choose_init(
    section: TrainSection, target_directory: Path, contract: TargetContract
) -> HeadInit:
    """Shape of a new head, or the head of `train.start_from`.

    Raises ConfigError for a shape that cannot be, is too large, or is not that of the earlier head;
    HeadError or ContractMismatch for an earlier head that cannot be read or belongs to another
    target.
    """
    if section.start_from:
        earlier, card = open_head(section.start_from, expected=contract)
        origin = {
            "head": section.start_from,
            "weights_sha256": Location(section.start_from).sha256(WEIGHTS),
            "provenance": card.provenance,
        }
        check_algorithm(section, earlier, where=section.start_from)
        chosen = algorithm_of(earlier)
        shape = chosen.init.continue_shape(section, earlier, section.start_from)
        earlier.shape = shape
    else:
        earlier, origin, chosen = None, None, algorithm(section)
        shape = chosen.init.choose_shape(section, target_directory, contract)
    settings = chosen.settings(section)
    parameters, share = check_share(shape, contract.parameters, settings.max_share, settings.key)
    of_target = f"{share:.2%} of the target's {contract.parameters:,}"
    notice("train", f"head: {parameters:,} parameters, {of_target}")
    return HeadInit(shape, parameters, share, earlier, origin)


def draft_vocabulary(init: HeadInit, counts: Mapping[str, Tensor]) -> DraftVocabulary:
    """The most frequent supervised tokens, or the earlier head's own. counts: source → [V]."""
    total = torch.stack(list(counts.values())).sum(0)
    if init.earlier is None:
        return choose_vocabulary(total, init.shape.draft_vocab_size)
    ids = init.earlier.target_ids()
    return DraftVocabulary(ids, float(total[ids].sum()) / max(1, int(total.sum())))


def initial_head(
    init: HeadInit, section: TrainSection, vocabulary: DraftVocabulary, target: Target, *, seed: int
) -> DraftingHead:
    """The head that training begins with: the earlier one, or a new one."""
    if init.earlier and init.origin:
        head, same = init.earlier, "its draft vocabulary and shape are kept"
        notice("train", f"head starts from {init.origin['head']}, {same}")
    else:
        layers, weights = target.contract.num_layers, target.weights
        head = algorithm(section).init.new_head(
            section, init.shape, vocabulary, weights, num_layers=layers, seed=seed
        )
    lend_rows(head, target.weights.lm_head())
    return head


def check_share(
    shape: DraftShape, target_parameters: int, limit: float, section: str = "train.head_config"
) -> tuple[int, float]:
    """(parameters, share of the target's) of a head that `section` describes.

    Raises ConfigError for one above `limit`.
    """
    with torch.device("meta"):
        parameters = empty_head(shape).count_parameters()
    share = parameters / target_parameters
    if share > limit:
        above = f"{share:.1%} of the target's {target_parameters:,}, above the limit of {limit:.1%}"
        vocabulary = f"{section}.draft_vocab_size (now {shape.draft_vocab_size})"
        mlp = f"intermediate_size (now {shape.intermediate_size})"
        raise ConfigError(
            f"the head has {parameters:,} parameters, {above}",
            where=f"{section}.max_share_of_target",
            fix=f"lower {vocabulary} or {mlp}, or raise the limit",
        )
    return parameters, share
