"""Which samples share a shard of states: depends on their order and lengths alone.

    synth's shards  [▢▢▢ ▢▢ ▢▢▢▢ ▢ ▢▢▢▢▢ ▢▢][…   one is cut into as many parts as its tokens, which
    shards          [▢▢▢ ▢▢ ▢▢▢▢][▢ ▢▢▢▢▢ ▢▢][…  its manifest counts, are features.shard_tokens

What is cut where needs no sample but those of one synth shard, so that a shard can be made without
reading others, and is known before it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from pipeline.records import Shard


class Part(NamedTuple):
    """One shard of the features: part `number` of the `parts` of a synth shard."""

    source: Shard
    number: int
    parts: int

    @property
    def tokens(self) -> float:
        """About so many, before its samples are known."""
        return self.source.tokens / self.parts


def parts_of(shards: Sequence[Shard], shard_tokens: int) -> dict[str, Part]:
    """Name → part, of all shards of the features, by name; those of synth without rows have none.

    A synth shard has one part for each `shard_tokens` of its tokens, a last one for the rest, and
    no more than samples.
    """
    parts = {}
    for index, shard in enumerate(shards):
        count = min(shard.rows, -(-shard.tokens // shard_tokens))
        for number in range(count):
            parts[f"{index:06d}-{number:03d}.safetensors"] = Part(shard, number, count)
    return dict(sorted(parts.items()))


def cut(lengths: Sequence[int], count: int) -> list[range]:
    """`count` runs of consecutive samples, none empty, as equal in tokens as their lengths allow.

    A sample goes to the run in which its middle lies:

        lengths   5  3    4  4  |  8         count 2, 24 tokens: the middle is at 12
    """
    total, ends = sum(lengths), list(accumulate(lengths))
    bounds = [0]
    for part in range(1, count):
        limit = total * part / count
        first = next(
            (
                i
                for i, (end, n) in enumerate(zip(ends, lengths, strict=True))
                if end - n / 2 >= limit
            ),
            len(lengths),
        )
        # One sample at least for this run, and for each that follows.
        bounds.append(min(max(first, bounds[-1] + 1), len(lengths) - (count - part)))
    return [range(*pair) for pair in zip(bounds, [*bounds[1:], len(lengths)], strict=True)]


def window_of(keep: int, shards: int) -> int:
    """Shards of a window: all, or half of those that may lie in the run."""
    return max(1, shards if keep >= shards else keep // 2)
