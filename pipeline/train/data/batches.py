"""Packed micro-batches: documents one after the other, no padding.

    documents    a0 a1 a2 a3 a4 | b0 b1 b2 b3        lengths (5, 4), N = 9
    supervised          ●  ●  ●          ●  ●        tokens that the target generated
    labels              2  3  4          7  8        their flat positions j; depth 2 3 4 2 3 in the document
    teacher           t1 t2 t3        t6 t7          final state at j-1, one a label

Labels whose depth is below 2 are never predicted (position 0 at step 0 predicts token 2) and are left out.

States stay as they are stored until the batch is on the training device, which decodes them there.

Shapes: N tokens of a batch, S labels, H hidden size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.store.states import Codec, StatesSample
from pipeline.train.data.corpus import FIRST_LABEL, Corpus, Piece, cut, read_piece
from pipeline.train.data.row_stack import RowStack
from pipeline.train.data.schedule import Schedule

#: Batches that are read, or wait, before they are needed.
AHEAD = 4
#: Batches whose shards are fetched before they are read.
LOOK_AHEAD = 32
#: Shards that are fetched at one time.
FETCHES = 4


class Coded(NamedTuple):
    """Consecutive documents of a batch whose states are encoded alike."""

    codec: Codec
    tokens: int
    labels: int


@dataclass(frozen=True)
class TrainBatch:
    """One micro-batch on the training device."""

    sample_ids: tuple[str, ...]
    lengths: tuple[int, ...]  # of the documents, adding up to N
    token_ids: Tensor  # int64 [N]
    aux_states: Tensor  # [N, 3H]; rows as stored while there are codecs
    labels: Tensor  # int64 [S], flat position j of each predicted token
    depths: Tensor  # int64 [S], position of the same token inside its document
    teacher_states: (
        Tensor  # [S, H], the target's final state at j-1; rows as stored while there are codecs
    )
    coded: tuple[Coded, ...] = ()  # empty: states are plain numbers

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    def to(self, device: torch.device, dtype: torch.dtype) -> TrainBatch:
        """The same batch on `device`, states decoded there, in `dtype`."""
        aux, teachers = self._decoded(device)
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            aux_states=aux.to(dtype),
            labels=self.labels.to(device),
            depths=self.depths.to(device),
            teacher_states=teachers.to(dtype),
            coded=(),
        )

    def _decoded(self, device: torch.device) -> tuple[Tensor, Tensor]:
        aux, teachers = self.aux_states.to(device), self.teacher_states.to(device)
        if not self.coded:
            return aux, teachers
        aux_runs = aux.split_with_sizes([run.tokens for run in self.coded])
        teacher_runs = teachers.split_with_sizes([run.labels for run in self.coded])
        decoded_aux = [
            run.codec.decode_aux(rows) for run, rows in zip(self.coded, aux_runs, strict=True)
        ]
        decoded_teachers = [
            run.codec.decode_final(rows) for run, rows in zip(self.coded, teacher_runs, strict=True)
        ]
        return _joined(decoded_aux), _joined(decoded_teachers)


def read_batch(corpus: Corpus, pieces: Sequence[Piece]) -> TrainBatch:
    """Read the states of `pieces` straight into the batch."""
    states = _States(sum(piece.length for piece in pieces))
    parts = []
    for piece in pieces:
        part = read_piece(corpus, piece, states.room)
        states.keep(part)
        parts.append(part)
    return _batch(parts, states)


def pack_samples(samples: Sequence[StatesSample]) -> TrainBatch:
    """Concatenate samples."""
    states = _States(sum(len(sample.token_ids) for sample in samples))
    parts = [cut(sample, 0, len(sample.token_ids)) for sample in samples]
    for part in parts:
        states.keep(part)
    return _batch(parts, states)


class _States:
    """States of a batch of at most `tokens` tokens: two stacks of rows."""

    def __init__(self, tokens: int) -> None:
        self.stacks = {"aux_states": RowStack(tokens), "final_states": RowStack(tokens)}

    def room(self, name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return self.stacks[name].room(rows, width, dtype)

    def keep(self, part: StatesSample) -> None:
        self.stacks["aux_states"].keep(part.aux_states)
        self.stacks["final_states"].keep(part.final_states)


def _batch(parts: Sequence[StatesSample], states: _States) -> TrainBatch:
    """Cut samples (see `cut`) and their states."""
    labels, depths = [], []
    offset = 0
    for part in parts:
        depth = part.supervised_mask.nonzero().flatten()
        depth = depth[depth >= FIRST_LABEL]
        labels.append(depth + offset)
        depths.append(depth)
        offset += len(part.token_ids)
    return TrainBatch(
        sample_ids=tuple(part.sample_id for part in parts),
        lengths=tuple(len(part.token_ids) for part in parts),
        token_ids=torch.cat([part.token_ids for part in parts]).long(),
        aux_states=states.stacks["aux_states"].rows(),
        labels=torch.cat(labels),
        depths=torch.cat(depths),
        teacher_states=states.stacks["final_states"].rows(),
        coded=_runs(parts, [len(depth) for depth in depths]),
    )


def _runs(samples: Sequence[StatesSample], labels: Sequence[int]) -> tuple[Coded, ...]:
    """Neighbours of one codec together; nothing when all states are plain numbers."""
    if all(sample.codec is None or sample.codec.encoding == "bf16" for sample in samples):
        return ()
    runs: list[Coded] = []
    for sample, count in zip(samples, labels, strict=True):
        codec = sample.codec or Codec("bf16")
        last = runs[-1] if runs else None
        if last and last.codec.encoding == codec.encoding and last.codec.channels is codec.channels:
            runs[-1] = Coded(codec, last.tokens + len(sample.token_ids), last.labels + count)
        else:
            runs.append(Coded(codec, len(sample.token_ids), count))
    return tuple(runs)


def _joined(runs: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(runs)) if len(runs) > 1 else runs[0]


class ReadAhead:
    """Batches in a fixed order, read by a few threads while earlier ones are trained on.

        plan      batches n … n+31   which pieces they hold, and so which shards; local ones are on their way from now on
        fetch     their shards       into the cache of remote ones, four at a time
        read      batches n … n+3    wait, read or being read: memory is bounded
        take      batch n

    Reading does not depend on training, so the batches are those that would be read in turn.
    """

    def __init__(self, corpus: Corpus, schedule: Schedule, numbers: Iterable[int]) -> None:
        """`numbers` are batch numbers of the schedule, in the order in which they are taken."""
        self._corpus, self._schedule, self._numbers = corpus, schedule, iter(numbers)
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="plan")
        self._fetchers = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch")
        self._readers = ThreadPoolExecutor(
            min(corpus.readers, AHEAD), thread_name_prefix="read-ahead"
        )
        self._planned: deque[Future[list[Piece]]] = deque()
        self._waiting: deque[Future[TrainBatch]] = deque()
        self._announced: deque[set[int]] = deque(
            maxlen=LOOK_AHEAD
        )  # shards of the batches planned last
        #: Seconds that `take` has waited for data.
        self.waited = 0.0

    def __enter__(self) -> ReadAhead:
        self._fill()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pool in (self._planner, self._fetchers, self._readers):
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in (self._planner, self._fetchers, self._readers):
            pool.shutdown(wait=True)

    def take(self) -> TrainBatch:
        """The next batch. Raises what reading it raised."""
        started = time.perf_counter()
        future = self._waiting.popleft()
        self._fill()
        batch = future.result()
        self.waited += time.perf_counter() - started
        return batch

    def _fill(self) -> None:
        for number in islice(self._numbers, LOOK_AHEAD - len(self._planned)):
            self._planned.append(self._planner.submit(self._plan, number))
        while self._planned and len(self._waiting) < AHEAD:
            self._waiting.append(self._readers.submit(self._read, self._planned.popleft()))

    def _plan(self, number: int) -> list[Piece]:
        """The pieces of a batch; those of its shards that no batch shortly before it needs are fetched from now on."""
        pieces = self._schedule.batch(number)
        shards = list(dict.fromkeys(piece.shard for piece in pieces))
        for shard in shards:
            if not any(shard in recent for recent in self._announced):
                self._fetchers.submit(self._corpus.prefetch, shard)
        self._announced.append(set(shards))
        for piece in pieces:
            self._corpus.announce(piece)
        return pieces

    def _read(self, planned: Future[list[Piece]]) -> TrainBatch:
        return read_batch(self._corpus, planned.result())
