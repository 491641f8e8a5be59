"""The states before the first step: verified, held out, surveyed, scheduled.

Of several processes each verifies and surveys its part of the shards, and all get the whole; what
is decided from few of them, the first process decides.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeline.config import RunConfig, rank
from pipeline.console import long_step, notice
from pipeline.heads.base import DraftingHead, DraftShape
from pipeline.heads.dflash.init import start_blocks_by_least_squares
from pipeline.heads.dflash.shape import DflashHead
from pipeline.heads.eagle3.init import start_by_least_squares
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.init import SCALE_BATCHES, fc_scale
from pipeline.heads.mtp.init import solve_chain
from pipeline.heads.mtp.shape import ChainedHead
from pipeline.learning.corpus import HeldOut, Survey, draw_samples, hold_out, join_surveys, survey
from pipeline.learning.least_squares import FirstBatches, rows_wanted
from pipeline.learning.schedule import Schedule
from pipeline.records import Manifest
from pipeline.store.manifest import stage_location
from pipeline.target.open import Target
from pipeline.train.audit import audit_mask, log_survey, show_sample
from pipeline.train.group import first_decides, own_part, take_from_first, together
from pipeline.train.stored import StoredCorpus, open_corpus


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
    together(lambda: corpus.verify(own))
    held_out: tuple[HeldOut, ...] = ()
    if section.evaluate_every:
        count, longest = section.evaluate_prompts, shape.max_position_embeddings
        longest -= section.evaluate_tokens
        held_out = first_decides(lambda: hold_out(corpus, count, seed=seed, longest=longest))
    drawn = None
    if (tokens := section.data_tokens) is not None:
        most = section.batch_tokens if section.long_samples == "drop" else None
        drawn = first_decides(
            lambda: draw_samples(corpus, tokens, seed=seed, held_out=held_out, longest=most)
        )
    parts = together(
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


def solve(config: RunConfig, head: DraftingHead, target: Target, data: Data) -> None:
    """Start `head` by least squares on the first process; all get it. It stays on the CPU."""
    with long_step("train", "solving the head by least squares"):
        if isinstance(head, DflashHead):
            first_decides(lambda: _solve_blocks(config, head, target, data))
        elif isinstance(head, ChainedHead):
            first_decides(lambda: _solve_chain(config, head, target, data))
        else:
            assert isinstance(head, Eagle3Head)
            first_decides(lambda: _solve(config, head, target, data))
    for parameter in head.parameters():
        take_from_first(parameter, target.device)


def measure_scale(config: RunConfig, head: DraftingHead, data: Data) -> float:
    """Factor of the learning rate of `fc`, measured on the first process."""
    tokens = config.train.batch_tokens * SCALE_BATCHES
    batches = FirstBatches(data.corpus, data.schedule, tokens=tokens)
    return first_decides(lambda: fc_scale(head, batches))


def _solve_blocks(config: RunConfig, head: DflashHead, target: Target, data: Data) -> None:
    device, section, wanted = (
        target.device,
        config.train.dflash,
        rows_wanted(head.shape.hidden_size),
    )
    batches = FirstBatches(data.corpus, data.schedule, labels=wanted)
    solved = start_blocks_by_least_squares(
        head.to(device),
        target.weights.embedding().to(device),
        batches,
        anchors=section.anchors,
        decay=section.position_decay,
        seed=config.run.seed,
    )
    head.cpu()
    held_out = f"on {solved.held_out:,} of them held out" if solved.held_out else "on the same"
    notice("train", f"block drafter solved by least squares on {solved.rows:,} labels")
    first = f"{solved.explained:.0%} of the target's states explained at position 1"
    every = f"{solved.explained_by_attention:.0%} at all by attention"
    notice("train", f"{held_out}: {first}, {every}")


def _solve_chain(config: RunConfig, head: ChainedHead, target: Target, data: Data) -> None:
    device, wanted = target.device, rows_wanted(head.shape.hidden_size)
    tokens = config.train.head_config.init_tokens
    many, few = (
        FirstBatches(data.corpus, data.schedule, tokens=tokens, labels=labels)
        for labels in (wanted, wanted // 2)  # input_proj has half of fc's regressors
    )
    weights = target.weights
    given = weights.embedding().to(device), weights.final_norm().to(device)
    fits = solve_chain(head.to(device), *given, many, few)
    head.cpu()
    explained = ", ".join(f"{fit.explained:.0%}" for fit in fits)
    notice("train", f"heads solved by least squares on {fits[0].rows:,} labels")
    notice("train", f"of the target's states they explain {explained}, head by head")


def _solve(config: RunConfig, head: Eagle3Head, target: Target, data: Data) -> None:
    device, wanted = target.device, rows_wanted(head.shape.hidden_size)
    tokens = config.train.head_config.init_tokens
    batches = FirstBatches(data.corpus, data.schedule, tokens=tokens, labels=wanted)
    embedding = target.weights.embedding().to(device)
    solved = start_by_least_squares(head.to(device), embedding, batches)
    head.cpu()
    linear = f"{solved.explained:.0%} of the target's states explained linearly"
    rest = f"{solved.explained_by_mlp:.0%} of the rest by the MLP"
    held_out = f"on {solved.held_out:,} of them held out" if solved.held_out else "on the same"
    few = "" if solved.rows >= wanted else f", fewer than the {wanted:,} that it should have"
    notice("train", f"head solved by least squares on {solved.rows:,} labels{few}")
    notice("train", f"{held_out}: {linear}, {rest}; ridge {solved.strength:g}")
