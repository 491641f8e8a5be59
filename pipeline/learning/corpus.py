"""What a run's states hold: samples, pieces of long ones, supervised tokens.

A survey reads ids and masks, a few bytes a token, one shard at a time; what stays in memory is one
small record a sample. States are read piece by piece when a batch needs them (`StoredCorpus`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from pipeline.errors import ConfigError, CorruptShard
from pipeline.store.states import StatesRows, StatesSample, as_bytes

#: The first two tokens of a document cannot be predicted: position 0 at step 0 predicts token 2.
FIRST_LABEL = 2


_FIX = "run `eagle3 features --force`"


class Piece(NamedTuple):
    """A sample, or the part [start, stop) of one that is longer than a batch.

        sample      0 ────────── start ────────── stop ─────── T
        read        ●●●●●●●●●●●●●●●●●●●●●●●●●●●●●●
        trained on               ●●●●●●●●●●●●●●●●●

    A part is read with its past, the tokens before it, whose keys and values its own attend to at
    their own positions. So the parts of a sample have the loss of the whole, and its gradient.
    """

    shard: int
    sample: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Tokens that are trained on."""
        return self.stop - self.start


class Outline(Protocol):
    """What is known of a shard without reading its states."""

    def __len__(self) -> int: ...
    def origin(self, index: int) -> tuple[str, str]: ...  # id, source
    def tokens(self, index: int) -> tuple[Tensor, Tensor]: ...  # ids, supervised mask
    def final_positions(self, index: int) -> Tensor: ...  # of the final states, ascending


class Corpus(Protocol):
    """Shards by number. Every method may be called from several threads at once."""

    @property
    def reading_threads(self) -> int: ...  # as many as read fastest together

    def __len__(self) -> int: ...
    def rows(self, shard: int) -> int: ...  # samples, known without opening it
    def outline(self, shard: int) -> Outline: ...
    def outlines(self, shards: Sequence[int]) -> Iterator[Outline]: ...  # in that order
    def prefetch(self, shard: int) -> None: ...  # it will be asked for soon
    def announce(self, piece: Piece) -> None: ...  # likewise; returns at once

    def new_rows(self, piece: Piece, tokens: int, finals: int) -> StatesRows:
        """Memory for the states of `tokens` tokens and final ones, in rows like `piece`'s."""
        ...

    def read(self, piece: Piece, rows: StatesRows) -> StatesSample:
        """The piece with its past (see `cut_into`), in the first of the given rows.

        Raises CorruptShard for bytes that are not those that were written.
        """
        ...


class HeldOut(NamedTuple):
    """A sample that is decoded and not trained on."""

    shard: int
    sample: int
    sample_id: str
    prompt_ids: tuple[int, ...]  # everything before the first supervised token


class Survey(NamedTuple):
    """What shards hold for training; held-out and dropped samples are in `rejected` alone."""

    pieces: tuple[Piece, ...]  # in stored order
    samples: int
    tokens: int
    supervised: int
    counts: dict[str, Tensor]  # source → [V] int64, supervised occurrences of each target token
    rejected: dict[str, int]  # samples that were left out, pieces that teach nothing
    split: int  # samples that were cut into several pieces


def hold_out(corpus: Corpus, count: int, *, seed: int, max_prompt: int) -> tuple[HeldOut, ...]:
    """2·`count` samples drawn with `seed`: with a reply, the prompt at most `max_prompt` tokens.

        drawn    7  2  9 … │ 4  1  8 … │ 3  5  …
                 count, to │ count, to │ trained on
                 select by │ report by │

    Raises ConfigError when there are too few, or none would be left to train on.
    """
    stored = [(shard, index) for shard in range(len(corpus)) for index in range(corpus.rows(shard))]
    random.Random(f"{seed}/held-out").shuffle(stored)
    chosen: list[HeldOut] = []
    for shard, index in stored:
        if len(chosen) == 2 * count:
            break
        outline = corpus.outline(shard)
        token_ids, mask = outline.tokens(index)
        prompt = int(mask.argmax()) if bool(mask.any()) else 0
        if 0 < prompt <= max_prompt:
            prompt_ids = tuple(token_ids[:prompt].tolist())
            chosen.append(HeldOut(shard, index, outline.origin(index)[0], prompt_ids))
    if len(chosen) < 2 * count or len(stored) == 2 * count:
        problem = (
            f"{count} samples cannot be held out to select a head, and as many to report on it: of "
            f"{len(stored):,} stored ones {len(chosen):,} have a prompt of 1 to {max_prompt} tokens"
        )
        fix = "lower it, or make more samples; some must be left to train on"
        raise ConfigError(problem, where="train.evaluate_prompts", fix=fix)
    return tuple(chosen)


def draw_samples(
    corpus: Corpus,
    tokens: int,
    *,
    seed: int,
    held_out: Sequence[HeldOut],
    max_length: int | None = None,
) -> set[tuple[int, int]]:
    """(shard, sample) of samples drawn with `seed` until they have `tokens` tokens.

    Less than all of a run's states; what is held out is not among them, nor what is dropped because
    it has more than `max_length` tokens.
    """
    lengths = {
        (shard, index): len(outline.tokens(index)[0])
        for shard, outline in enumerate(corpus.outlines(range(len(corpus))))
        for index in range(len(outline))
    }
    for item in held_out:
        del lengths[item.shard, item.sample]
    order = sorted(each for each in lengths if max_length is None or lengths[each] <= max_length)
    random.Random(f"{seed}/data-tokens").shuffle(order)
    before = accumulate((lengths[sample] for sample in order), initial=0)
    return {sample for sample, drawn in zip(order, before, strict=False) if drawn < tokens}


def survey(
    corpus: Corpus,
    shards: Sequence[int] | None = None,
    *,
    vocab_size: int,
    budget: int,
    long_samples: Literal["split", "drop"] = "split",
    held_out: Sequence[HeldOut] = (),
    drawn: Collection[tuple[int, int]] | None = None,
) -> Survey:
    """Read all ids and masks, or those of `shards`, once; samples longer than `budget` tokens are
    cut into equal parts, or dropped. Of (shard, sample) only the drawn ones, if not None.

    Raises CorruptShard for a token id outside the target's vocabulary.
    """
    shards = range(len(corpus)) if shards is None else shards
    excluded = {(item.shard, item.sample) for item in held_out if item.shard in shards}
    pieces: list[Piece] = []
    counts: dict[str, Tensor] = {}
    rejected: Counter[str] = Counter(held_out=len(excluded))
    samples = tokens = supervised = split = 0
    for shard, outline in zip(shards, corpus.outlines(shards), strict=True):
        for index in range(len(outline)):
            token_ids, mask = outline.tokens(index)
            _check_ids(token_ids, vocab_size, shard, index)
            if (shard, index) in excluded:
                continue
            length = len(token_ids)
            if length > budget and long_samples == "drop":
                rejected["longer_than_batch"] += 1
                continue
            if drawn is not None and (shard, index) not in drawn:
                rejected["beyond_data_tokens"] += 1
                continue
            count = max(1, -(-length // budget))
            cuts = [length * number // count for number in range(count + 1)]
            parts = [Piece(shard, index, start, stop) for start, stop in pairwise(cuts)]
            positions = outline.final_positions(index)
            useful = [part for part in parts if _teaches(part, positions)]
            if useful:
                rejected["piece_without_supervised_tokens"] += len(parts) - len(useful)
                split += len(parts) > 1
            else:
                rejected["no_supervised_tokens"] += 1
            pieces += useful
            samples, tokens = samples + 1, tokens + length
            supervised += _count(outline.origin(index)[1], token_ids, mask, vocab_size, counts)
    reasons = {reason: count for reason, count in rejected.items() if count}
    return Survey(tuple(pieces), samples, tokens, supervised, counts, reasons, split)


def join_surveys(parts: Sequence[Survey]) -> Survey:
    """Of a whole corpus, from those of its parts in order."""
    counts: dict[str, Tensor] = {}
    rejected: Counter[str] = Counter()
    for part in parts:
        rejected.update(part.rejected)
        for source, seen in part.counts.items():
            counts[source] = counts[source] + seen if source in counts else seen
    return Survey(
        pieces=tuple(piece for part in parts for piece in part.pieces),
        samples=sum(part.samples for part in parts),
        tokens=sum(part.tokens for part in parts),
        supervised=sum(part.supervised for part in parts),
        counts=counts,
        rejected=dict(rejected),
        split=sum(part.split for part in parts),
    )


def final_rows(positions: Tensor, start: int, stop: int) -> slice:
    """Of a sample's final states, those that teach a label of its tokens [start, stop):

    position      start-1  start  …  stop-2  stop-1
    its label      start  start+1 …  stop-1    –       FIRST_LABEL tokens into the sample, or later
    """
    first, last = positions.numpy().searchsorted((max(start, FIRST_LABEL) - 1, stop - 1))
    return slice(int(first), int(last))


def cut_into(whole: StatesSample, piece: Piece, rows: StatesRows) -> StatesSample:
    """A piece of `whole` with its past, its states copied to the first of the given rows.

    Of the final states only those that teach a label of the piece are kept (see `final_rows`).
    """
    tokens = slice(0, piece.stop)
    finals = final_rows(whole.final_positions, piece.start, piece.stop)
    ids, others = whole.alternative_ids, whole.alternative_states
    if others is not None and rows.alternatives is not None:
        others = _copy(others[finals], rows.alternatives)
    return replace(
        whole,
        token_ids=whole.token_ids[tokens],
        supervised_mask=whole.supervised_mask[tokens],
        aux_states=_copy(whole.aux_states[tokens], rows.aux),
        final_states=_copy(whole.final_states[finals], rows.final),
        final_positions=whole.final_positions[finals],
        alternative_ids=None if ids is None else ids[finals],
        alternative_states=others,
    )


def _copy(rows: Tensor, memory: Tensor) -> Tensor:
    """The first rows of `memory`, now equal to `rows`.

    The copy is numpy's, with one thread: torch would start a team of threads for each thread that
    reads batches, and they would take the cores from training.
    """
    copied = memory[: len(rows)]
    as_bytes(copied)[:] = as_bytes(rows)
    return copied


def _teaches(piece: Piece, positions: Tensor) -> bool:
    rows = final_rows(positions, piece.start, piece.stop)
    return int(rows.start) < int(rows.stop)


def _count(
    source: str, token_ids: Tensor, mask: Tensor, vocab_size: int, counts: dict[str, Tensor]
) -> int:
    """Add a sample's supervised tokens to those of its `source`; returns how many there are."""
    supervised = token_ids[mask.bool()].long()
    of_source = counts.setdefault(source, torch.zeros(vocab_size, dtype=torch.int64))
    of_source.index_add_(0, supervised, torch.ones_like(supervised))
    return len(supervised)


def _check_ids(token_ids: Tensor, vocab_size: int, shard: int, index: int) -> None:
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        problem = f"a token id is outside the target's {vocab_size}"
        where = f"states shard {shard}, sample {index}: token_ids"
        raise CorruptShard(problem, where=where, fix=_FIX)
