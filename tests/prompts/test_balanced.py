"""Draws: even, deterministic, in order."""

from __future__ import annotations

import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import StoreError
from pipeline.prompts import balanced
from pipeline.prompts.draw import Balance, by_category, draw
from pipeline.records import Prompt


def prompts_of(categories: str) -> list[Prompt]:
    """One prompt a letter, the letter being its category."""
    return [
        Prompt(sample_id=str(index), source="s", license="MIT", category=letter, turns=("hello",))
        for index, letter in enumerate(categories)
    ]


def test_small_categories_are_taken_whole_before_large_ones_take_more() -> None:
    drawn = balanced(prompts_of("a" * 100 + "b" * 3 + "c" * 50), 23, seed=1)
    assert Counter(prompt.category for prompt in drawn) == {"a": 10, "b": 3, "c": 10}


def test_the_seed_decides_the_draw() -> None:
    prompts = prompts_of("ab" * 50)
    assert balanced(prompts, 10, seed=3) == balanced(prompts, 10, seed=3)
    assert balanced(prompts, 10, seed=3) != balanced(prompts, 10, seed=4)


def test_a_known_draw_never_changes() -> None:
    drawn = balanced(prompts_of("aabbbbcc" * 3), 6, seed=0)
    assert [prompt.sample_id for prompt in drawn] == ["0", "9", "14", "18", "20", "22"]


@given(st.text("abc", max_size=30), st.integers(1, 30), st.integers(0, 5))
def test_draws_are_even_ordered_and_nested(categories: str, limit: int, seed: int) -> None:
    prompts = prompts_of(categories)
    drawn = balanced(prompts, limit, seed)
    positions = [int(prompt.sample_id) for prompt in drawn]
    assert len(drawn) == min(limit, len(prompts)) and positions == sorted(set(positions))
    taken, there = Counter(prompt.category for prompt in drawn), Counter(categories)
    unexhausted = [taken[category] for category in there if taken[category] < there[category]]
    assert not unexhausted or max(taken.values()) - min(unexhausted) <= 1
    larger = balanced(prompts, limit + 1, seed)
    assert set(positions) <= {int(prompt.sample_id) for prompt in larger}
    assert balanced(prompts, None, seed) == prompts
    assert list(draw(iter(prompts), limit, seed)) == drawn
    assert list(draw(iter(prompts), None, seed)) == prompts


@given(
    st.text("abc", min_size=1, max_size=60),
    st.integers(1, 60),
    st.dictionaries(st.sampled_from("ab"), st.sampled_from([0.25, 1.0, 3.0])),
)
def test_shares_decide_how_much_of_a_category_is_drawn(
    categories: str, limit: int, shares: dict[str, float]
) -> None:
    """Each has what its share says, to one prompt, unless it is used up; draws are nested."""
    prompts, balance = prompts_of(categories), Balance(by_category, shares)
    drawn = list(draw(prompts, limit, 0, balance))
    assert len(drawn) == min(limit, len(prompts))
    taken, there = Counter(prompt.category for prompt in drawn), Counter(categories)
    level = {name: taken[name] / shares.get(name, 1.0) for name in there}
    for short in (name for name in there if taken[name] < there[name]):
        for other in there:
            before = (taken[other] - 1) / shares.get(other, 1.0)  # when its last one was drawn
            assert before <= level[short], "the last one was taken of the one that had too much"
    larger = {prompt.sample_id for prompt in draw(prompts, limit + 1, 0, balance)}
    assert {prompt.sample_id for prompt in drawn} <= larger


def test_a_draw_holds_few_prompts_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.prompts.draw.IN_MEMORY", 1 << 20)
    text = "x" * 4000
    prompts = (
        Prompt(sample_id=str(index), source="s", license="MIT", category="c", turns=(text,))
        for index in range(5000)
    )
    tracemalloc.start()
    drawn = sum(1 for _ in draw(prompts, 4000, seed=0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert drawn == 4000 and peak < 3 << 20, "20 MB of prompts"


def test_a_full_disk_is_one_line(
    mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(mount("size=64k")))
    monkeypatch.setattr("pipeline.prompts.draw.IN_MEMORY", 1)
    prompts = prompts_of("abc" * 1000)
    with pytest.raises(StoreError, match=r"put aside: No space left on device .*TMPDIR"):
        list(draw(prompts, 5, seed=0))
