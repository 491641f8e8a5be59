"""Which samples share a shard, and which share a forward. Depends on nothing but their order and lengths.

samples   ▢▢▢ ▢▢ ▢▢▢▢ ▢ ▢▢▢▢▢ ▢▢
shards   [▢▢▢ ▢▢ ▢▢▢▢][▢ ▢▢▢▢▢ ▢▢]     closed by the sample that reaches shard_tokens
forwards [▢▢▢ ▢▢][▢▢▢▢] [▢ ▢▢▢▢▢][▢▢]  never above batch_tokens, except for one longer sample alone
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipeline.records import Sample


def into_shards(samples: Iterable[Sample], shard_tokens: int) -> Iterator[list[Sample]]:
    """Consecutive samples; a list is closed once it holds `shard_tokens`. The last may hold fewer."""
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


def into_forwards(samples: Iterable[Sample], batch_tokens: int) -> Iterator[list[Sample]]:
    """Consecutive samples of at most `batch_tokens` together; a longer one goes alone."""
    batch: list[Sample] = []
    held = 0
    for sample in samples:
        length = len(sample.token_ids)
        if batch and held + length > batch_tokens:
            yield batch
            batch, held = [], 0
        batch.append(sample)
        held += length
    if batch:
        yield batch
