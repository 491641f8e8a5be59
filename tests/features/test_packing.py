"""Which samples share a shard and a forward."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.features.packing import into_forwards, into_shards
from pipeline.records import Message, Sample, SamplingParams, Span

_BASE = Sample(
    sample_id="p",
    source="s",
    license="MIT",
    category="c",
    messages=(Message(role="user", content=""),),
    token_ids=(),
    supervised=(Span(start=0, end=1),),
    finish_reason="stop",
    sampling=SamplingParams(temperature=0, top_p=1, top_k=0, max_new_tokens=1),
    seed=0,
    generator="g",
)


def of(lengths: list[int]) -> list[Sample]:
    return [
        _BASE.model_copy(update={"sample_id": str(index), "token_ids": (0,) * length})
        for index, length in enumerate(lengths)
    ]


def lengths(packed: list[list[Sample]]) -> list[list[int]]:
    return [[len(sample.token_ids) for sample in part] for part in packed]


def test_a_shard_is_closed_by_the_sample_that_fills_it() -> None:
    assert lengths(list(into_shards(of([4, 5, 3, 9, 30, 1, 2]), 10))) == [
        [4, 5, 3],
        [9, 30],
        [1, 2],
    ]


def test_a_forward_takes_samples_of_like_length_the_longest_first() -> None:
    assert list(into_forwards([4, 5, 3, 9, 30, 1, 2], 10)) == [[4], [3], [1, 0], [2, 6, 5]]
    assert list(into_forwards([7, 7, 7], 14)) == [[0, 1], [2]], "equal lengths stay in their order"


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 60))
def test_nothing_is_lost_or_empty(sizes: list[int], budget: int) -> None:
    samples = of(sizes)
    shards, forwards = list(into_shards(samples, budget)), list(into_forwards(sizes, budget))
    assert [sample for shard in shards for sample in shard] == samples
    assert sorted(number for forward in forwards for number in forward) == list(range(len(sizes)))
    assert all(shards) and all(forwards)
    assert all(
        sum(sizes[number] for number in forward) <= budget or len(forward) == 1
        for forward in forwards
    )
    assert all(sum(shard) >= budget for shard in lengths(shards)[:-1])
