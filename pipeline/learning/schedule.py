"""Which pieces make up batch n, for every n: a pure function of (pieces, budget, seed).

Nothing is drawn while training runs, so resuming is a look-up:

    batch number n ──► (epoch, index in the epoch) ──► pieces

Each epoch shuffles the shards, then the pieces of a few neighbouring shards together, so that the
shards that are open at one time are few; the stream is packed with a small set of open batches.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from pipeline.learning.corpus import Piece

#: Shards whose pieces are shuffled together, at most; also bounds how many are read at one time.
SHUFFLED_SHARDS = 64


#: Bytes of them, at most: less than `run.cache_bytes` by default, and the same on every machine, as
#: the order of training depends on it.
SHUFFLED_BYTES = 16_000_000_000


#: Batches that wait for a piece that fits. More fill better and mix more.
OPEN_BATCHES = 24


def shards_together(sizes: Sequence[int]) -> int:
    """How many shards of a run are shuffled together, by the bytes of each: the largest must fit.

    At H = 8,192 a shard of 16,384 tokens has 0.5 GB: 32 of them.
    """
    return max(2, min(SHUFFLED_SHARDS, SHUFFLED_BYTES // max(sizes, default=1)))


class Schedule:
    """Batches of all epochs, packed to at most `budget` tokens.

    The pieces of `together` shards are shuffled with each other.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        *,
        budget: int,
        seed: int,
        epochs: int,
        together: int = SHUFFLED_SHARDS,
    ) -> None:
        assert all(piece.length <= budget for piece in pieces), "pieces were cut for another budget"
        self._together = together
        self._pieces, self._budget, self._seed = pieces, budget, seed
        self._tokens = sum(piece.length for piece in pieces)
        self._cached: tuple[int, list[list[Piece]]] | None = None
        sizes = [len(self._epoch(epoch)) for epoch in range(epochs)]
        self._ends = list(accumulate(sizes))

    def __len__(self) -> int:
        """Batches of all epochs."""
        return self._ends[-1]

    @property
    def fill(self) -> float:
        """Share of the batches' token budget that holds tokens."""
        return self._tokens * len(self._ends) / (len(self) * self._budget)

    def locate(self, number: int) -> tuple[int, int]:
        """TrainBatch number → (epoch, index in it)."""
        epoch = bisect_right(self._ends, number)
        return epoch, number - (self._ends[epoch - 1] if epoch else 0)

    def batch(self, number: int) -> list[Piece]:
        """Pieces of batch `number`, counted over all epochs."""
        epoch, index = self.locate(number)
        return self._epoch(epoch)[index]

    def _epoch(self, epoch: int) -> list[list[Piece]]:
        if self._cached is None or self._cached[0] != epoch:
            draw = random.Random(f"{self._seed}/{epoch}")
            order = shuffle(self._pieces, draw, together=self._together)
            self._cached = (epoch, list(pack(order, self._budget)))
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
