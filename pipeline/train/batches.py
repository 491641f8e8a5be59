"""Packed micro-batches: documents one after the other, no padding.

    documents    a0 a1 a2 a3 a4 | b0 b1 b2 b3        lengths (5, 4), N = 9
    supervised          ●  ●  ●          ●  ●        tokens that the target generated
    labels              2  3  4          7  8        their flat positions j; depth 2 3 4 2 3 in the document
    teacher           t1 t2 t3        t6 t7          final state at j-1, one a label

Labels whose depth is below 2 are never predicted (position 0 at step 0 predicts token 2) and are left out.

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

import torch
from torch import Tensor

from pipeline.store.states import StatesSample
from pipeline.train.corpus import FIRST_LABEL, Corpus, Piece, read_piece
from pipeline.train.schedule import Schedule

#: Batches that are read before they are needed.
AHEAD = 2


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the training device."""

    sample_ids: tuple[str, ...]
    lengths: tuple[int, ...]  # of the documents, adding up to N
    token_ids: Tensor  # int64 [N]
    aux_states: Tensor  # [N, 3H]
    labels: Tensor  # int64 [S], flat position j of each predicted token
    depths: Tensor  # int64 [S], position of the same token inside its document
    teacher_states: Tensor  # [S, H], the target's final state at j-1

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """The same batch on `device`, states in `dtype`."""
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            aux_states=self.aux_states.to(device, dtype),
            labels=self.labels.to(device),
            depths=self.depths.to(device),
            teacher_states=self.teacher_states.to(device, dtype),
        )


def read_batch(corpus: Corpus, pieces: Sequence[Piece]) -> Batch:
    """Read the states of `pieces` and pack them."""
    return pack_samples([read_piece(corpus, piece) for piece in pieces])


def pack_samples(documents: Sequence[tuple[StatesSample, Tensor]]) -> Batch:
    """Concatenate samples, each with the final state's row of its positions (see `read_piece`)."""
    labels, depths, teachers = [], [], []
    offset = 0
    for sample, rows in documents:
        depth = sample.loss_mask.nonzero().flatten()
        depth = depth[depth >= FIRST_LABEL]
        labels.append(depth + offset)
        depths.append(depth)
        teachers.append(sample.final_states[rows[depth - 1]])
        offset += len(sample.token_ids)
    samples = [sample for sample, _ in documents]
    return Batch(
        sample_ids=tuple(sample.sample_id for sample in samples),
        lengths=tuple(len(sample.token_ids) for sample in samples),
        token_ids=torch.cat([sample.token_ids for sample in samples]).long(),
        aux_states=torch.cat([sample.aux_states for sample in samples]),
        labels=torch.cat(labels),
        depths=torch.cat(depths),
        teacher_states=torch.cat(teachers),
    )


class ReadAhead:
    """Batches in a fixed order, read by one thread while earlier ones are trained on.

    At most AHEAD wait, so memory is bounded. Reading does not depend on training, so the batches are
    those that would be read in turn. While it is open nobody else may read from `corpus`.
    """

    def __init__(self, corpus: Corpus, schedule: Schedule, numbers: Iterable[int]) -> None:
        """`numbers` are batch numbers of the schedule, in the order in which they are taken."""
        self._corpus, self._schedule, self._numbers = corpus, schedule, iter(numbers)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._waiting: deque[Future[Batch]] = deque()
        #: Seconds that `take` has waited for data.
        self.waited = 0.0

    def __enter__(self) -> ReadAhead:
        self._fill()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def take(self) -> Batch:
        """The next batch. Raises what reading it raised."""
        started = time.perf_counter()
        future = self._waiting.popleft()
        self._fill()
        batch = future.result()
        self.waited += time.perf_counter() - started
        return batch

    def _fill(self) -> None:
        for number in islice(self._numbers, AHEAD - len(self._waiting)):
            self._waiting.append(self._pool.submit(self._read, number))

    def _read(self, number: int) -> Batch:
        return read_batch(self._corpus, self._schedule.batch(number))
