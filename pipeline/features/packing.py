"""Which samples share a shard, and which share a forward: depends on their order and lengths alone.

samples   ▢▢▢ ▢▢ ▢▢▢▢ ▢ ▢▢▢▢▢ ▢▢
shards   [▢▢▢ ▢▢ ▢▢▢▢][▢ ▢▢▢▢▢ ▢▢]     closed by the sample that reaches shard_tokens
forwards [▢▢▢▢][▢▢▢ ▢▢] [▢▢▢▢▢][▢▢ ▢]  the longest first; at most batch_tokens, or one longer sample

Inside a shard samples of like length are computed together and put back into their order. The most
memory is needed by the first forward of a shard, not by some later one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pipeline.records import Sample


def into_shards(samples: Iterable[Sample], shard_tokens: int) -> Iterator[list[Sample]]:
    """Consecutive samples; a list is closed once it holds `shard_tokens`, the last with fewer."""
    shard: list[Sample] = []
    held = 0
    for sample in samples:
        shard.append(sample)
        held += len(sample.token_ids)
        if held >= shard_tokens:
            yield shard
            shard, held = [], 0
    if shard:
        yield shard


def into_forwards(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Numbers of samples of like length, `batch_tokens` together; a longer one goes alone."""
    batch: list[int] = []
    held = 0
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        if batch and held + lengths[number] > batch_tokens:
            yield batch
            batch, held = [], 0
        batch.append(number)
        held += lengths[number]
    if batch:
        yield batch
