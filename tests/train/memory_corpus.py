"""A corpus that was never written, and batches of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from pipeline.learning.batches import TrainBatch, read_batch
from pipeline.learning.corpus import Piece, cut_into
from pipeline.store.states import StatesRows, StatesSample


class MemoryOutline:
    """A shard's samples."""

    def __init__(self, samples: Sequence[StatesSample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def origin(self, index: int) -> tuple[str, str]:
        return self.samples[index].sample_id, self.samples[index].source

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        return self.samples[index].token_ids, self.samples[index].supervised_mask

    def final_positions(self, index: int) -> Tensor:
        return self.samples[index].final_positions


class MemoryCorpus:
    """The corpus' interface over samples in memory."""

    reading_threads = 2

    def __init__(self, *shards: Sequence[StatesSample]) -> None:
        self._shards = [MemoryOutline(samples) for samples in shards]

    def __len__(self) -> int:
        return len(self._shards)

    def rows(self, shard: int) -> int:
        return len(self._shards[shard])

    def outline(self, shard: int) -> MemoryOutline:
        return self._shards[shard]

    def outlines(self, shards: Sequence[int]) -> Iterator[MemoryOutline]:
        return map(self.outline, shards)

    def new_rows(self, piece: Piece, tokens: int, finals: int) -> StatesRows:
        sample = self._shards[piece.shard].samples[piece.sample]
        aux, final, others = sample.aux_states, sample.final_states, sample.alternative_states
        return StatesRows(
            aux.new_empty(tokens, aux.shape[1]),
            final.new_empty(finals, final.shape[1]),
            None if others is None else others.new_empty(finals, others.shape[1]),
        )

    def read(self, piece: Piece, rows: StatesRows) -> StatesSample:
        return cut_into(self._shards[piece.shard].samples[piece.sample], piece, rows)

    def prefetch(self, shard: int) -> None:
        pass

    def announce(self, piece: Piece) -> None:
        pass


def pack_samples(samples: Sequence[StatesSample]) -> TrainBatch:
    """One batch of whole samples."""
    lengths = [len(sample.token_ids) for sample in samples]
    pieces = [Piece(0, number, 0, length) for number, length in enumerate(lengths)]
    return read_batch(MemoryCorpus(samples), pieces)
