"""Figures of acceptance against counts made by hand, and intervals against simple ones."""

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.reports import RoundCounters
from pipeline.serve_eval.intervals import acceptance_figures, drawn_sums, estimate


def counted(*accepted: int, proposed: int = 3, cut: int = 0) -> RoundCounters:
    """Rounds of a chain of `proposed`, by the drafted tokens that each accepted."""
    return RoundCounters(
        rounds=len(accepted),
        tokens=len(accepted) + sum(accepted) - cut,
        drafted=proposed * len(accepted),
        accepted_lengths=tuple(accepted.count(n) for n in range(proposed + 1)),
        proposed=(len(accepted),) * proposed,
    )


def test_figures_of_counts_made_by_hand() -> None:
    one, other = counted(2, 0, 3, 1, cut=1), counted(0, 0)
    figures = acceptance_figures([one, other], ["a", "b"])
    assert figures is not None
    assert (figures.requests, figures.rounds) == (2, 6)
    assert figures.acceptance_length.value == pytest.approx(11 / 6)
    assert figures.request_acceptance_length.value == pytest.approx((9 / 4 + 1) / 2)
    assert [each.value for each in figures.joint] == pytest.approx([3 / 6, 2 / 6, 1 / 6])
    assert [each.value for each in figures.conditional] == pytest.approx([3 / 6, 2 / 3, 1 / 2])
    assert figures.accept_rate == pytest.approx(6 / 18)


def test_without_rounds_there_are_no_figures() -> None:
    assert acceptance_figures([counted()], ["a"]) is None
    assert acceptance_figures([], []) is None


def test_turns_of_a_prompt_are_drawn_together() -> None:
    """The interval of n prompts with m equal turns is that of n requests, not of n · m."""
    random = np.random.default_rng(1)
    prompts = [counted(*random.integers(0, 4, size=10).tolist()) for _ in range(12)]
    names = [str(index) for index in range(12)]
    single = acceptance_figures(prompts, names)
    threefold = acceptance_figures(prompts * 3, names * 3)
    assert single is not None
    assert threefold is not None
    assert threefold.acceptance_length == single.acceptance_length


def test_the_order_in_which_replies_come_in_changes_nothing() -> None:
    """A server's requests end in any order, and are compared with the decoder's of the report."""
    random = np.random.default_rng(3)
    replies = [(counted(*random.integers(0, 4, size=9).tolist()), f"s/{n % 7}") for n in range(14)]
    first = acceptance_figures(*zip(*replies, strict=True))
    for _ in range(20):
        random.shuffle(replies)
        assert acceptance_figures(*zip(*replies, strict=True)) == first


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """95 % intervals of 200 sets of 40 prompts whose τ is 1.9 by construction."""
    random, inside = np.random.default_rng(2), 0
    for _ in range(200):
        rounds = np.full(40, 20)
        tokens = rounds + random.binomial(20, random.beta(9, 1, size=40))
        sums = drawn_sums(
            np.stack([tokens, rounds], axis=1).astype(float), [str(n) for n in range(40)]
        )
        interval = estimate(sums[:, 0] / sums[:, 1], 40)
        inside += interval.low <= 1.9 <= interval.high
    assert 178 <= inside <= 199


@pytest.mark.parametrize(
    "changes",
    [{"rounds": 3}, {"proposed": (4, 4)}, {"proposed": (4, 0, 4)}],
)
def test_counters_that_do_not_add_up_are_refused(changes: dict[str, object]) -> None:
    whole = counted(2, 0, 3, 1).model_dump()
    with pytest.raises(ValidationError):
        RoundCounters.model_validate(whole | changes)
