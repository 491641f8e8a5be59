"""Which samples share a shard and a forward."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.features.packing import into_forwards, into_shards
from pipeline.records import Message, Sample, Sampling, Span

_BASE = Sample(
    prompt_id="p",
    source="s",
    license="MIT",
    category="c",
    messages=(Message(role="user", content=""),),
    token_ids=(),
    supervised=(Span(start=0, end=1),),
    finish_reason="stop",
    sampling=Sampling(temperature=0, top_p=1, top_k=0, max_new_tokens=1),
    seed=0,
    generator="g",
)


def of(lengths: list[int]) -> list[Sample]:
    return [_BASE.model_copy(update={"prompt_id": str(index), "token_ids": (0,) * length}) for index, length in enumerate(lengths)]


def lengths(packed: list[list[Sample]]) -> list[list[int]]:
    return [[len(sample.token_ids) for sample in part] for part in packed]


def test_a_shard_is_closed_by_the_sample_that_fills_it() -> None:
    assert lengths(list(into_shards(of([4, 5, 3, 9, 30, 1, 2]), 10))) == [[4, 5, 3], [9, 30], [1, 2]]


def test_a_forward_stays_within_its_budget_except_for_one_long_sample() -> None:
    assert lengths(list(into_forwards(of([4, 5, 3, 9, 30, 1, 2]), 10))) == [[4, 5], [3], [9], [30], [1, 2]]


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 60))
def test_nothing_is_lost_reordered_or_empty(sizes: list[int], budget: int) -> None:
    samples = of(sizes)
    for packed in (list(into_shards(samples, budget)), list(into_forwards(samples, budget))):
        assert [sample for part in packed for sample in part] == samples
        assert all(packed_part for packed_part in packed)
    assert all(sum(part) <= budget or len(part) == 1 for part in lengths(list(into_forwards(samples, budget))))
    assert all(sum(part) >= budget for part in lengths(list(into_shards(samples, budget)))[:-1])
