"""Micro-batches: which pieces make up batch n, packed without padding, and read ahead.

The order is a pure function of (pieces, budget, seed), so resuming is a look-up:

    batch number n ──► (epoch, index in the epoch) ──► pieces

Each epoch shuffles the shards, then the pieces of a few neighbouring shards together, so that few
shards are open at one time; the stream is packed with a small set of open batches.

Documents of a batch stand one after the other:

    documents    a0 a1 a2 a3 a4 | b0 b1 b2 b3        lengths (5, 4), N = 9
    supervised          ●  ●  ●          ●  ●        tokens that the target generated
    labels              2  3  4          7  8        their flat positions j, at depths 2 3 4 2 3
    teacher           t1 t2 t3        t6 t7          final state at j-1, one a label

A label's depth is its position in its document. Labels whose depth is below 2 are never predicted
(position 0 at step 0 predicts token 2) and are left out.

A document that is a part of a longer sample follows its past, whose tokens carry no label
(`Piece`); only the others are counted as trained on.

States stay as they are stored until the batch is on the training device, which decodes them there.

Shapes: N tokens of a batch, S labels, H hidden size.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.learning.corpus import Corpus, Piece
from pipeline.store.states import Codec, StatesSample

#: Batches that are read, or wait, before they are needed.
AHEAD = 4


#: Batches whose shards are fetched before they are read.
LOOK_AHEAD = 32


#: Shards that are fetched at one time.
FETCHES = 4


#: Shards whose pieces are shuffled together, at most; also bounds how many are read at one time.
SHUFFLED_SHARDS = 64


#: Bytes of them, at most: less than `run.cache_bytes` by default, and the same on every machine, as
#: the order of training depends on it.
SHUFFLED_BYTES = 16_000_000_000


#: Batches that wait for a piece that fits. More fill better and mix more.
OPEN_BATCHES = 24


#: Products of a step have so many rows, or a multiple: oneDNN compiles a kernel for each number of
#: rows that it does not have at hand, which takes milliseconds.
ROW_MULTIPLE = 32


def fill_up(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [R], the last of them again up to a multiple of ROW_MULTIPLE, and bool [R]: which are no
    such repetition. None at all stay none."""
    missing = -len(rows) % ROW_MULTIPLE if len(rows) else 0
    filled = torch.cat((rows, rows[-1:].expand(missing)))
    return filled, torch.arange(len(filled), device=rows.device) < len(rows)


def shards_together(sizes: Sequence[int]) -> int:
    """How many shards of a run are shuffled together, by the bytes of each: the largest must fit.

    At H = 8,192 a shard of 16,384 tokens has 0.5 GB: 32 of them.
    """
    return max(2, min(SHUFFLED_SHARDS, SHUFFLED_BYTES // max(sizes, default=1)))


class Schedule:
    """Batches of all epochs, packed to at most `budget` tokens.

    The pieces of `together` shards are shuffled with each other. With a `window`, all epochs pass
    over so many shards before the next ones; without, over all:

        window 2, epochs 2    shards  a b │ b a │ d c │ c d │ e │ e
                              pass     0     1     2     3    4   5
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        *,
        budget: int,
        seed: int,
        epochs: int,
        together: int = SHUFFLED_SHARDS,
        window: int | None = None,
    ) -> None:
        assert all(piece.length <= budget for piece in pieces), "pieces were cut for another budget"
        self._together, self._epochs = together, epochs
        self._budget, self._seed = budget, seed
        by_window: dict[int, list[Piece]] = {0: []}
        for piece in pieces:
            by_window.setdefault(piece.shard // window if window else 0, []).append(piece)
        self._pieces = [by_window.get(number, []) for number in range(max(by_window) + 1)]
        self._tokens = sum(piece.length for piece in pieces)
        self._cached: tuple[int, list[list[Piece]]] | None = None
        sizes = [len(self._pass(number)) for number in range(epochs * len(self._pieces))]
        self._ends = list(accumulate(sizes))

    def __len__(self) -> int:
        """Batches of all epochs."""
        return self._ends[-1]

    @property
    def fill(self) -> float:
        """Share of the batches' token budget that holds tokens."""
        return self._tokens * self._epochs / (len(self) * self._budget)

    @property
    def windows(self) -> int:
        """How many there are; shards after the last piece's are in none."""
        return len(self._pieces)

    def locate(self, number: int) -> tuple[int, int]:
        """TrainBatch number → (pass, index in it); a pass is an epoch, of a window if there are."""
        done = bisect_right(self._ends, number)
        return done, number - (self._ends[done - 1] if done else 0)

    def window(self, number: int) -> int:
        """That of batch `number`; of one after the last batch `windows`."""
        return self.locate(number)[0] // self._epochs

    def window_end(self, window: int) -> int:
        """Number of the first batch after `window`."""
        return self._ends[(window + 1) * self._epochs - 1]

    def batch(self, number: int) -> list[Piece]:
        """Pieces of batch `number`, counted over all epochs."""
        passes, index = self.locate(number)
        return self._pass(passes)[index]

    def _pass(self, number: int) -> list[list[Piece]]:
        if self._cached is None or self._cached[0] != number:
            draw = random.Random(f"{self._seed}/{number}")
            pieces = self._pieces[number // self._epochs]
            order = shuffle(pieces, draw, together=self._together)
            self._cached = (number, list(pack(order, self._budget)))
        return self._cached[1]


def shuffle(
    pieces: Sequence[Piece], draw: random.Random, *, together: int = SHUFFLED_SHARDS
) -> list[Piece]:
    """Shards in random order, pieces in random order within each group of `together` shards."""
    by_shard: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_shard.setdefault(piece.shard, []).append(piece)
    shards = sorted(by_shard)
    draw.shuffle(shards)
    order: list[Piece] = []
    for first in range(0, len(shards), together):
        group = [piece for shard in shards[first : first + together] for piece in by_shard[shard]]
        draw.shuffle(group)
        order += group
    return order


def pack(order: Iterable[Piece], budget: int) -> Iterator[list[Piece]]:
    """Each piece goes into the fullest open batch that it fits into, else into a new one.

    A batch is emitted when it is full, or when there are too many open ones and it is the fullest.
    A piece with a past has more to read than a whole batch, and goes alone.
    """
    batches: list[tuple[int, list[Piece]]] = []  # open ones: (tokens, pieces)
    for piece in order:
        if piece.start:
            yield [piece]
            continue
        tokens, pieces = _pop_fullest(batches, budget - piece.length)
        if not pieces and len(batches) == OPEN_BATCHES:
            yield _pop_fullest(batches, budget)[1]
        tokens, pieces = tokens + piece.length, [*pieces, piece]
        if tokens == budget:
            yield pieces
        else:
            batches.append((tokens, pieces))
    yield from (pieces for _, pieces in batches)


def _pop_fullest(batches: list[tuple[int, list[Piece]]], limit: int) -> tuple[int, list[Piece]]:
    """The fullest open batch of at most `limit` tokens, the oldest of equals; else an empty one."""
    fitting = [number for number, (tokens, _) in enumerate(batches) if tokens <= limit]
    if not fitting:
        return 0, []
    return batches.pop(max(fitting, key=lambda number: batches[number][0]))


class CodecSpan(NamedTuple):
    """Consecutive documents of a batch whose states are encoded alike."""

    codec: Codec
    tokens: int
    labels: int


@dataclass(frozen=True)
class TrainBatch:
    """One micro-batch on the training device. States are rows as stored while there are codecs."""

    sample_ids: tuple[str, ...]
    lengths: tuple[int, ...]  # of the documents with their pasts, adding up to N
    token_ids: Tensor  # int64 [N]
    aux_states: Tensor  # [N, L · H]
    labels: Tensor  # int64 [S], flat position j of each predicted token
    depths: Tensor  # int64 [S], position of the same token inside its document
    teacher_states: Tensor  # [S, H], the target's final state at j-1
    alternative_ids: Tensor | None = None  # int64 [S, K], other tokens at j-1
    alternative_states: Tensor | None = None  # [S, K · H], the target's final state of each
    codecs: tuple[CodecSpan, ...] = ()  # empty: states are plain numbers
    pasts: tuple[int, ...] = ()  # tokens of each document before those trained on; empty: none
    number: int = 0  # in the schedule, over all epochs: what is drawn for the batch is drawn by it

    @property
    def tokens(self) -> int:
        """N."""
        return len(self.token_ids)

    @property
    def trained_tokens(self) -> int:
        """Those that are not a document's past."""
        return self.tokens - sum(self.pasts)

    def trained(self, rows: Tensor) -> Tensor:
        """Of rows [N, ..] those of the tokens that are trained on."""
        if not any(self.pasts):
            return rows
        documents = zip(rows.split_with_sizes(list(self.lengths)), self.pasts, strict=True)
        return torch.cat([document[past:] for document, past in documents])

    @property
    def where(self) -> str:
        """For errors."""
        more = " …" if len(self.sample_ids) > 8 else ""
        return f"batch of samples {', '.join(self.sample_ids[:8])}{more}"

    def pinned(self) -> TrainBatch:
        """The same batch in memory that a GPU copies from by itself, while both go on working."""
        return self._mapped(Tensor.pin_memory)

    def to(self, device: torch.device, dtype: torch.dtype) -> TrainBatch:
        """The same batch on `device`, states decoded there, in `dtype`."""
        there = self._mapped(lambda tensor: tensor.to(device, non_blocking=True))
        aux, teachers, others = there.aux_states, there.teacher_states, there.alternative_states
        if self.codecs:
            aux, teachers, others = there._decode()
        return replace(
            there,
            aux_states=aux.to(dtype),
            teacher_states=teachers.to(dtype),
            alternative_states=None if others is None else others.to(dtype),
            codecs=(),
        )

    def padded(self) -> TrainBatch:
        """The same batch, states decoded, up to a multiple of ROW_MULTIPLE tokens: behind them is a
        document that is all past.

            documents    a0 a1 a2 a3 a4 | b0 b1 b2 b3 | b3 b3 …        N = 32
        """
        missing = -self.tokens % ROW_MULTIPLE
        if not missing:
            return self
        at = torch.arange(self.tokens + missing, device=self.token_ids.device)
        at = at.clamp(max=self.tokens - 1)
        return replace(
            self,
            lengths=(*self.lengths, missing),
            token_ids=self.token_ids[at],
            aux_states=self.aux_states[at],
            pasts=(*(self.pasts or (0,) * len(self.lengths)), missing),
        )

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> TrainBatch:
        """The same batch with every tensor changed."""
        tensors: dict[str, Any] = {
            name: change(value) for name, value in vars(self).items() if torch.is_tensor(value)
        }
        return replace(self, **tensors)

    def _decode(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """States of rows as stored, each span with its codec: aux, the teacher's, alternatives."""
        codecs, tokens, labels = zip(*self.codecs, strict=True)
        aux = map(Codec.decode_aux, codecs, self.aux_states.split_with_sizes(tokens))
        teachers = map(Codec.decode_final, codecs, self.teacher_states.split_with_sizes(labels))
        others, ids = self.alternative_states, self.alternative_ids
        if others is not None and ids is not None:
            decode = partial(Codec.decode_final, count=ids.shape[1])
            others = _joined(list(map(decode, codecs, others.split_with_sizes(labels))))
        return _joined(list(aux)), _joined(list(teachers)), others


def read_batch(corpus: Corpus, pieces: Sequence[Piece]) -> TrainBatch:
    """Read the states of `pieces` straight into the batch: stacks of rows, each allocated once.

    aux    ▓▓▓▓▓▓▓▓▓▓░░░░░········  N rows       ▓ read    ░ being read, into the rows it is given
    final  ▓▓▓▓▓▓░░░··············  S of N rows, and likewise alternatives
    """
    sizes = sum(piece.stop for piece in pieces), sum(piece.length for piece in pieces)
    rows = corpus.new_rows(pieces[0], *sizes)
    parts: list[StatesSample] = []
    labels, depths = list[Tensor](), list[Tensor]()
    tokens = finals = 0
    for piece in pieces:
        own = rows.part(slice(tokens, tokens + piece.stop), slice(finals, None))
        part = corpus.read(piece, own)
        depth = part.final_positions.long() + 1
        parts.append(part)
        labels.append(depth + tokens)
        depths.append(depth)
        tokens, finals = tokens + piece.stop, finals + len(part.final_states)
    everything = rows.part(slice(None), slice(0, finals))
    ids = [part.alternative_ids for part in parts if part.alternative_ids is not None]
    return TrainBatch(
        sample_ids=tuple(part.sample_id for part in parts),
        lengths=tuple(piece.stop for piece in pieces),
        token_ids=torch.cat([part.token_ids for part in parts]).long(),
        aux_states=everything.aux,
        labels=torch.cat(labels),
        depths=torch.cat(depths),
        teacher_states=everything.final,
        alternative_ids=torch.cat(ids).long() if ids else None,
        alternative_states=everything.alternatives,
        codecs=_codec_spans(parts),
        pasts=tuple(piece.start for piece in pieces),
    )


def _codec_spans(parts: Sequence[StatesSample]) -> tuple[CodecSpan, ...]:
    """Neighbours that are encoded alike together; none when all states are plain numbers."""
    spans: list[CodecSpan] = []
    for part in parts:
        span = CodecSpan(part.codec or Codec("bf16"), len(part.aux_states), len(part.final_states))
        if spans and spans[-1].codec.is_like(span.codec):
            before = spans.pop()
            tokens, labels = before.tokens + span.tokens, before.labels + span.labels
            span = CodecSpan(before.codec, tokens, labels)
        spans.append(span)
    plain = all(span.codec.encoding == "bf16" for span in spans)
    return () if plain else tuple(spans)


def _joined(spans: list[Tensor]) -> Tensor:
    return torch.cat(spans) if len(spans) > 1 else spans[0]


class ReadAhead:
    """Batches in a fixed order, read by a few threads while earlier ones are trained on.

        plan    batches n … n+31   which pieces they hold, and so which shards; the operating system
                                   reads local ones ahead from now on
        fetch   their shards       into the cache of remote ones, four at a time
        read    batches n … n+3    wait, read or being read: memory is bounded
        take    batch n

    Reading does not depend on training, so the batches are those that would be read in turn.
    """

    def __init__(self, corpus: Corpus, schedule: Schedule, numbers: Iterable[int]) -> None:
        """`numbers` are batch numbers of the schedule, in the order in which they are taken."""
        self._corpus, self._schedule, self._numbers = corpus, schedule, iter(numbers)
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="plan")
        self._fetchers = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch")
        self._readers = ThreadPoolExecutor(
            min(corpus.reading_threads, AHEAD), thread_name_prefix="read-ahead"
        )
        self._planned: deque[tuple[int, Future[list[Piece]]]] = deque()
        self._waiting: deque[Future[TrainBatch]] = deque()
        #: Shards of the batches planned last.
        self._recent: deque[set[int]] = deque(maxlen=LOOK_AHEAD)
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
        pools = (self._planner, self._fetchers, self._readers)
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in pools:
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
            self._planned.append((number, self._planner.submit(self._plan, number)))
        while self._planned and len(self._waiting) < AHEAD:
            self._waiting.append(self._readers.submit(self._read, *self._planned.popleft()))

    def _plan(self, number: int) -> list[Piece]:
        """The pieces of a batch; those of its shards that no recent batch has are prefetched."""
        pieces = self._schedule.batch(number)
        shards = dict.fromkeys(piece.shard for piece in pieces)  # in their order
        for shard in shards:
            if not any(shard in recent for recent in self._recent):
                self._fetchers.submit(self._corpus.prefetch, shard)
        self._recent.append(set(shards))
        for piece in pieces:
            self._corpus.announce(piece)
        return pieces

    def _read(self, number: int, planned: Future[list[Piece]]) -> TrainBatch:
        batch = replace(read_batch(self._corpus, planned.result()), number=number)
        return batch.pinned() if torch.cuda.is_available() else batch
