"""Which samples share a shard and a forward."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.features.capture import into_forwards
from pipeline.records import Shard
from pipeline.store.parts import cut, parts_of


def shard(tokens: int, rows: int, name: str = "a.parquet") -> Shard:
    return Shard(name=name, rows=rows, tokens=tokens, bytes=1, sha256="0")


def test_a_synth_shard_has_a_part_for_each_so_many_tokens_and_no_more_than_samples() -> None:
    shards = [shard(25, 9), shard(0, 0), shard(30, 2), shard(10, 5)]
    parts = parts_of(shards, 10)
    assert [(part.number, part.parts) for part in parts.values()] == [
        *((0, 3), (1, 3), (2, 3)),
        *((0, 2), (1, 2)),
        (0, 1),
    ]
    assert list(parts)[3] == "000002-000.safetensors", "the number is the synth shard's"
    assert list(parts) == sorted(parts)


def test_a_sample_goes_where_its_middle_lies() -> None:
    assert cut([5, 3, 4, 4, 8], 2) == [range(0, 3), range(3, 5)]
    assert cut([30, 1, 1], 3) == [range(0, 1), range(1, 2), range(2, 3)]
    assert cut([1, 1, 30], 3) == [range(0, 1), range(1, 2), range(2, 3)]


def test_a_forward_takes_samples_of_like_length_the_longest_first() -> None:
    assert list(into_forwards([4, 5, 3, 9, 30, 1, 2], 10)) == [[4], [3], [1, 0], [2, 6, 5]]
    assert list(into_forwards([7, 7, 7], 14)) == [[0, 1], [2]], "equal lengths stay in their order"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 60))
def test_nothing_is_lost_or_empty(sizes: list[int], budget: int) -> None:
    count = len(parts_of([shard(sum(sizes), len(sizes))], budget))
    parts, forwards = cut(sizes, count), list(into_forwards(sizes, budget))
    assert [number for part in parts for number in part] == list(range(len(sizes)))
    assert len(parts) == count and all(parts)
    assert sorted(number for forward in forwards for number in forward) == list(range(len(sizes)))
    assert all(
        sum(sizes[number] for number in forward) <= budget or len(forward) == 1
        for forward in forwards
    )
