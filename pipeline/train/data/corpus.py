"""What a run's states hold: samples, pieces of long ones, supervised tokens.

A survey reads ids and masks, a few bytes a token, one shard at a time; what stays in memory is one
small record a sample. States are read piece by piece when a batch needs them (stored.py).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from pipeline.errors import ConfigError, CorruptShard
from pipeline.store.states import Room, StatesSample

#: The first two tokens of a document cannot be predicted: position 0 at step 0 predicts token 2.
FIRST_LABEL = 2

_FIX = "run `eagle3 features --force`"


class Outline(Protocol):
    """What is known of a shard without reading its states."""

    def __len__(self) -> int: ...
    def origin(self, index: int) -> tuple[str, str]: ...  # id, source
    def tokens(self, index: int) -> tuple[Tensor, Tensor]: ...


class Corpus(Protocol):
    """Shards by number. Every method may be called from several threads at once."""

    @property
    def readers(self) -> int: ...  # threads that read samples fastest together

    def __len__(self) -> int: ...
    def rows(self, shard: int) -> int: ...  # samples, known without opening it
    def outline(self, shard: int) -> Outline: ...
    def outlines(self) -> Iterator[Outline]: ...  # of all shards in order
    def sample(
        self, shard: int, index: int, room: Room | None = None
    ) -> StatesSample: ...  # checked; states possibly as stored
    def prefetch(self, shard: int) -> None: ...  # it will be asked for soon
    def announce(self, piece: Piece) -> None: ...  # likewise; returns at once


class Piece(NamedTuple):
    """A sample, or the part [start, stop) of one that is longer than a batch."""

    shard: int
    sample: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class HeldOut(NamedTuple):
    """A sample that is decoded and not trained on."""

    shard: int
    sample: int
    sample_id: str
    prompt_ids: tuple[int, ...]  # everything before the first supervised token


class Survey(NamedTuple):
    """What the corpus holds for training: held-out and dropped samples count in `rejected` alone."""

    pieces: tuple[Piece, ...]  # in stored order
    samples: int
    tokens: int
    supervised: int
    counts: dict[str, Tensor]  # source → [V] int64, supervised occurrences of each target token
    rejected: dict[str, int]  # samples that were left out, and pieces of samples that teach nothing
    split: int  # samples that were cut into several pieces


def hold_out(corpus: Corpus, count: int, *, seed: int, longest: int) -> tuple[HeldOut, ...]:
    """`count` samples drawn with `seed`. Passed over: those without a reply, or with a prompt above `longest` tokens.

    Raises ConfigError when there are too few, or none would be left to train on.
    """
    order = [
        (shard, sample) for shard in range(len(corpus)) for sample in range(corpus.rows(shard))
    ]
    random.Random(f"{seed}/held-out").shuffle(order)
    chosen: list[HeldOut] = []
    for shard, sample in order:
        if len(chosen) == count:
            break
        outline = corpus.outline(shard)
        token_ids, mask = outline.tokens(sample)
        prompt = int(mask.argmax()) if bool(mask.any()) else 0
        if 0 < prompt <= longest:
            chosen.append(
                HeldOut(
                    shard, sample, outline.origin(sample)[0], tuple(token_ids[:prompt].tolist())
                )
            )
    if len(chosen) < count or len(order) == count:
        problem = f"{count} samples cannot be held out: of {len(order):,} stored ones {len(chosen):,} have a prompt of 1 to {longest} tokens"
        raise ConfigError(
            problem,
            where="train.evaluate_prompts",
            fix="lower it, or make more samples; some must be left to train on",
        )
    return tuple(chosen)


def survey(
    corpus: Corpus,
    *,
    vocab_size: int,
    budget: int,
    long_samples: Literal["split", "drop"] = "split",
    held_out: Sequence[HeldOut] = (),
) -> Survey:
    """Read all ids and masks once; samples longer than `budget` tokens are cut, or dropped and counted.

    A cut sample loses no token, and its states were computed with all of their context. Only
    predictions that would look across a cut are lost: the first two tokens of a later piece at
    step 0, one more at each further step.

    Raises CorruptShard for a token id outside the target's vocabulary.
    """
    excluded = {(item.shard, item.sample) for item in held_out}
    pieces: list[Piece] = []
    counts: dict[str, Tensor] = {}
    rejected: Counter[str] = Counter(held_out=len(excluded))
    samples = tokens = supervised = split = 0
    for shard, outline in enumerate(corpus.outlines()):
        for index in range(len(outline)):
            token_ids, mask = outline.tokens(index)
            _check_ids(token_ids, vocab_size, shard, index)
            if (shard, index) in excluded:
                continue
            if len(token_ids) > budget and long_samples == "drop":
                rejected["longer_than_batch"] += 1
                continue
            cut = [
                Piece(shard, index, start, min(start + budget, len(token_ids)))
                for start in range(0, len(token_ids), budget)
            ]
            useful = [
                piece for piece in cut if bool(mask[piece.start + FIRST_LABEL : piece.stop].any())
            ]
            if useful:
                rejected["piece_without_supervised_tokens"] += len(cut) - len(useful)
            else:
                rejected["no_supervised_tokens"] += 1
            pieces += useful
            split += bool(useful) and len(cut) > 1
            labels = token_ids[mask.bool()].long()
            seen = counts.setdefault(
                outline.origin(index)[1], torch.zeros(vocab_size, dtype=torch.int64)
            )
            seen.index_add_(0, labels, torch.ones_like(labels))
            samples, tokens, supervised = (
                samples + 1,
                tokens + len(token_ids),
                supervised + len(labels),
            )
    return Survey(
        tuple(pieces),
        samples,
        tokens,
        supervised,
        counts,
        {reason: count for reason, count in rejected.items() if count},
        split,
    )


def read_piece(corpus: Corpus, piece: Piece, room: Room | None = None) -> StatesSample:
    """The piece as a sample of its own (see `cut`), states as the corpus hands them out, in the `room` for them.

    Raises CorruptShard for bytes that are not those that were written.
    """
    return cut(corpus.sample(piece.shard, piece.sample, room), piece.start, piece.stop)


def cut(whole: StatesSample, start: int, stop: int) -> StatesSample:
    """Tokens [start, stop) as a sample of their own, with the final states that teach a label among them:

    position      start  start+1  …  stop-2  stop-1
    its label       –    start+2  …  stop-1    –       FIRST_LABEL tokens into the document, or later
    """
    first, last = whole.final_positions.numpy().searchsorted((start + FIRST_LABEL - 1, stop - 1))
    return replace(
        whole,
        token_ids=whole.token_ids[start:stop],
        supervised_mask=whole.supervised_mask[start:stop],
        aux_states=whole.aux_states[start:stop],
        final_states=whole.final_states[first:last],
        final_positions=whole.final_positions[first:last] - start,
    )


def _check_ids(token_ids: Tensor, vocab_size: int, shard: int, index: int) -> None:
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise CorruptShard(
            f"a token id is outside the target's {vocab_size}",
            where=f"states shard {shard}, sample {index}: token_ids",
            fix=_FIX,
        )
