"""τ under others' names: their definitions, by hand for two turns of a prompt and one more."""

from __future__ import annotations

import pytest

from pipeline.reports import RoundCounters, SglangNames, SpeedBenchNames, VllmNames

# Turn 1 of prompt a: rounds of 1, 3, 2 tokens, the last cut to 1. Nothing was drafted in the first.
FIRST = RoundCounters(rounds=3, tokens=5, drafted=8, accepted_lengths=(1, 1, 1), proposed=(2, 2, 1))
# Turn 2: one round of 4 tokens.
SECOND = RoundCounters(
    rounds=1, tokens=4, drafted=4, accepted_lengths=(0, 0, 0, 1), proposed=(1, 1, 1)
)
# Prompt b: two rounds of 1 token; and c, whose first token was its last.
THIRD = RoundCounters(rounds=2, tokens=2, drafted=8, accepted_lengths=(2,), proposed=(2, 2))
NOTHING = RoundCounters(rounds=0, tokens=0, drafted=0, accepted_lengths=(), proposed=())
ALL = [FIRST, SECOND, THIRD, NOTHING]


def test_vllm() -> None:
    assert VllmNames.of(ALL).model_dump() == {
        "num_drafts": 5,  # a round without a draft is none
        "num_draft_tokens": 20,
        "num_accepted_tokens": 6,
        "num_accepted_tokens_per_pos": (3, 2, 1),
        "spec_decode_acceptance_rate": pytest.approx(100 * 6 / 20),
        "spec_decode_acceptance_length": pytest.approx(1 + 6 / 5),
        "spec_decode_per_position_acceptance_rates": pytest.approx((3 / 5, 2 / 5, 1 / 5)),
    }


def test_sglang() -> None:
    assert SglangNames.of([FIRST]).spec_accept_length == 6 / 3, "prefill's token counts"
    assert SglangNames.of(ALL).model_dump() == {
        "spec_verify_ct": 6,
        "spec_accept_length": pytest.approx((6 + 5 + 3) / 6),
        "spec_accept_rate": pytest.approx(6 / 20),
        "spec_num_proposed_drafts": 20,
        "spec_num_correct_drafts": 6,
        "spec_correct_drafts_histogram": (3, 1, 1, 1),
    }


def test_speed_bench() -> None:
    names = SpeedBenchNames.of(ALL, ["a", "a", "b", "c"], ["chat", "chat", "math", "math"])
    assert names.model_dump() == {
        "Request_AL": {"a": 10 / 4, "b": 1.0},
        "Category_AL": {"chat": 2.5, "math": 1.0},
        "Average_AL": pytest.approx(3.5 / 2),
    }


def test_without_rounds() -> None:
    assert VllmNames.of([]).spec_decode_acceptance_length == 1
    assert SglangNames.of([NOTHING]).spec_accept_length == 0
    nothing = {"Request_AL": {}, "Category_AL": {}, "Average_AL": 0}
    assert SpeedBenchNames.of([], [], []).model_dump() == nothing


def test_counters_add_up() -> None:
    assert RoundCounters.total(ALL) == RoundCounters(
        rounds=6, tokens=11, drafted=20, accepted_lengths=(3, 1, 1, 1), proposed=(5, 5, 2)
    )
