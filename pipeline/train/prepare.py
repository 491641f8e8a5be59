"""The states before the first step: verified, held out, surveyed, scheduled.

Of several processes each verifies and surveys its part of the shards, and all get the whole; what
few of them decide, rank 0 decides and broadcasts.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeline.config import RunConfig, rank
from pipeline.console import long_step, notice
from pipeline.heads.base import DraftingHead, DraftShape
from pipeline.heads.init import SCALE_BATCHES, fc_scale
from pipeline.heads.registry import algorithm_of
from pipeline.learning.corpus import HeldOut, Survey, draw_samples, hold_out, join_surveys, survey
from pipeline.learning.least_squares import FirstBatches
from pipeline.learning.schedule import Schedule
from pipeline.records import Manifest
from pipeline.store.manifest import stage_location
from pipeline.target.open import Target
from pipeline.train.audit import audit_mask, log_survey, show_sample
from pipeline.train.group import (
    all_gather_or_raise,
    broadcast_from_rank0,
    broadcast_tensor,
    own_part,
)
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
    all_gather_or_raise(lambda: corpus.verify(own))
    held_out: tuple[HeldOut, ...] = ()
    if section.evaluate_every:
        count, longest = section.evaluate_prompts, shape.max_position_embeddings
        longest -= section.evaluate_tokens
        held_out = broadcast_from_rank0(lambda: hold_out(corpus, count, seed=seed, longest=longest))
    drawn = None
    if (tokens := section.data_tokens) is not None:
        most = section.batch_tokens if section.long_samples == "drop" else None
        drawn = broadcast_from_rank0(
            lambda: draw_samples(corpus, tokens, seed=seed, held_out=held_out, longest=most)
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
    """Factor of the learning rate of `fc`, measured on the first process."""
    tokens = config.train.batch_tokens * SCALE_BATCHES
    batches = FirstBatches(data.corpus, data.schedule, tokens=tokens)
    return broadcast_from_rank0(lambda: fc_scale(head, batches))
