"""All states of a run: lengths and supervised tokens known at once, states read when a batch needs them.

A survey reads ids and masks, a few bytes a token, one shard at a time; what stays in memory is one
small record a sample. States are then read sample by sample, with a bounded number of open shards.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pipeline.errors import CorruptShard, DataError
from pipeline.records import Shard
from pipeline.store.location import Location
from pipeline.store.shards import verify_shard
from pipeline.store.states import StatesReader, StatesSample, teacher_positions

#: The first two tokens of a document cannot be predicted: position 0 at step 0 predicts token 2.
FIRST_LABEL = 2

_FIX = "run `eagle3 features --force`"


class Reader(Protocol):
    """The samples of one shard; `StatesReader` is one."""

    def __len__(self) -> int: ...
    def tokens(self, index: int) -> tuple[Tensor, Tensor]: ...
    def sample(self, index: int) -> StatesSample: ...


class Corpus(Protocol):
    """Shards that can be opened by number, again and again."""

    def __len__(self) -> int: ...
    def reader(self, shard: int) -> Reader: ...


class StoredCorpus:
    """The committed shards of the features stage at `location`; at most `keep_open` stay open."""

    def __init__(self, location: Location, shards: Sequence[Shard], *, keep_open: int = 64) -> None:
        self._location, self._shards, self._keep_open = location, list(shards), keep_open
        self._open: OrderedDict[int, StatesReader] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shards)

    def verify(self) -> None:
        """Check every shard's checksum. Raises CorruptShard."""
        for shard in self._shards:
            verify_shard(self._location, shard)

    def reader(self, shard: int) -> StatesReader:
        """The reader of shard number `shard`; the one unused for longest is closed for it."""
        if shard in self._open:
            self._open.move_to_end(shard)
        else:
            self._open[shard] = StatesReader(self._location, self._shards[shard])
            if len(self._open) > self._keep_open:
                self._open.popitem(last=False)
        return self._open[shard]


class Piece(NamedTuple):
    """A sample, or the part [start, stop) of one that is longer than a batch."""

    shard: int
    sample: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class Survey(NamedTuple):
    """What the corpus holds."""

    pieces: tuple[Piece, ...]  # in stored order
    samples: int
    tokens: int
    supervised: int
    counts: Tensor  # [V] int64, supervised occurrences of each target token
    rejected: dict[str, int]  # samples, and pieces of samples, that teach nothing
    split: int  # samples that were cut into several pieces


def survey(corpus: Corpus, *, vocab_size: int, budget: int) -> Survey:
    """Read all ids and masks once and cut samples longer than `budget` tokens.

    A cut sample loses no token. Only predictions that would look across a cut are lost: the first
    two tokens of a later piece at step 0, one more at each further step.

    Raises CorruptShard for a token id outside the target's vocabulary.
    """
    pieces: list[Piece] = []
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    samples = tokens = split = 0
    rejected = {"no_supervised_tokens": 0, "piece_without_supervised_tokens": 0}
    for shard in range(len(corpus)):
        reader = corpus.reader(shard)
        for index in range(len(reader)):
            token_ids, mask = reader.tokens(index)
            _check_ids(token_ids, vocab_size, shard, index)
            supervised = mask.bool()
            counts += torch.bincount(token_ids[supervised].long(), minlength=vocab_size)
            samples, tokens = samples + 1, tokens + len(token_ids)
            cut = [Piece(shard, index, start, min(start + budget, len(token_ids))) for start in range(0, len(token_ids), budget)]
            useful = [piece for piece in cut if bool(supervised[piece.start + FIRST_LABEL : piece.stop].any())]
            pieces += useful
            if not useful:
                rejected["no_supervised_tokens"] += 1
            else:
                split += len(cut) > 1
                rejected["piece_without_supervised_tokens"] += len(cut) - len(useful)
    return Survey(tuple(pieces), samples, tokens, int(counts.sum()), counts, {reason: count for reason, count in rejected.items() if count}, split)


def audit_mask(found: Survey, *, where: str) -> None:
    """Refuse states of which nothing, or everything, is supervised: a mask that was lost or never made.

    Raises DataError.
    """
    share = found.supervised / found.tokens if found.tokens else 0.0
    fix = "look at the samples' `supervised` spans and run `eagle3 synth` and `eagle3 features` again"
    if not found.pieces:
        raise DataError(f"no trainable token: {found.supervised} of {found.tokens} tokens are supervised (0 %)", where=where, fix=fix)
    if share == 1.0:
        raise DataError(f"all {found.tokens} tokens are supervised (100 %), prompts included", where=where, fix=fix)


def read_piece(corpus: Corpus, piece: Piece) -> tuple[StatesSample, Tensor]:
    """The piece as a sample of its own, and the final state's row of each position or -1 [T].

    Raises CorruptShard when a supervised token has no final state.
    """
    whole = corpus.reader(piece.shard).sample(piece.sample)
    expected = teacher_positions(whole.loss_mask)
    if not torch.equal(expected, whole.final_positions):
        problem = "final states are not at the positions before the supervised tokens"
        raise CorruptShard(problem, where=f"states of sample {whole.sample_id}: final_positions", fix=_FIX)
    own = slice(piece.start, piece.stop)
    inside = (whole.final_positions >= piece.start) & (whole.final_positions < piece.stop)
    part = StatesSample(
        sample_id=whole.sample_id,
        source=whole.source,
        token_ids=whole.token_ids[own],
        loss_mask=whole.loss_mask[own],
        aux_states=whole.aux_states[own],
        final_states=whole.final_states[inside],
        final_positions=whole.final_positions[inside] - piece.start,
    )
    rows = torch.full((piece.length,), -1, dtype=torch.int64)
    rows[part.final_positions.long()] = torch.arange(len(part.final_positions))
    return part, rows


def _check_ids(token_ids: Tensor, vocab_size: int, shard: int, index: int) -> None:
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise CorruptShard(f"a token id is outside the target's {vocab_size}", where=f"states shard {shard}, sample {index}: token_ids", fix=_FIX)
