"""Rounds of a server against the decoder's, draft by draft."""

from __future__ import annotations

import random
from itertools import product
from math import inf

import pytest

from pipeline.config import TreeSection
from pipeline.reports import GoldenPrompt, RoundCounters
from pipeline.serve_eval.servers.findings import ComparedRounds
from pipeline.serve_eval.servers.kinds import ServerRounds, rounds_of

CHAIN = TreeSection.chain(2)


def _prompt(accepted_at: list[int], margins: list[list[float]]) -> GoldenPrompt:
    rounds = RoundCounters(rounds=1, tokens=1, drafted=2, accepted_lengths=(1,), proposed=(1, 1))
    return GoldenPrompt(
        id="p",
        prompt_ids=(1,),
        reply_ids=tuple(range(len(accepted_at) + 1)),
        counters=rounds,
        shapes={CHAIN.label: rounds},
        accepted_at={CHAIN.label: tuple(accepted_at)},
        chain_margins=tuple(map(tuple, margins)),
    )


def _compared(prompt: GoldenPrompt, taken: list[int], tokens: int | None = None) -> ComparedRounds:
    counted = ServerRounds(len(taken), len(taken) + sum(taken), 0, sum(taken))
    return ComparedRounds(prompt, counted, prompt.counters, tokens)


def _in_order(each: ComparedRounds, taken: list[int]) -> ComparedRounds:
    rounds = ServerRounds(0, 0, in_order=tuple((CHAIN.steps, each) for each in taken))
    return each._replace(theirs=rounds)


def _walk(prompt: GoldenPrompt, draws: list[int]) -> tuple[list[int], float]:
    """Rounds that accept as drawn, and by how much the drafts lead that the decoder has instead."""
    position, taken, lead = 0, list[int](), 0.0
    accepted_at, margins = prompt.accepted_at[CHAIN.label], prompt.chain_margins
    while position < len(accepted_at):
        ours, theirs = accepted_at[position], draws[position]
        if theirs != ours:
            lead += margins[position][min(ours, theirs)]
        taken.append(theirs)
        position += theirs + 1
    return taken, lead


def _random(seed: int, length: int = 6) -> GoldenPrompt:
    rng = random.Random(seed)
    accepted_at = [rng.randint(0, 2) for _ in range(length)]
    margins = [[rng.choice([0.01, 0.2, 1.0]) for _ in range(2)] for _ in range(length)]
    return _prompt(accepted_at, margins)


@pytest.mark.parametrize("seed", range(20))
def test_counters_are_explained_by_the_likeliest_other_drafts(seed: int) -> None:
    """Against every way in which drafts of six tokens can go."""
    prompt = _random(seed)
    least: dict[tuple[int, int], float] = {}
    for draws in product(range(3), repeat=6):
        taken, lead = _walk(prompt, list(draws))
        counters = len(taken), sum(taken)
        least[counters] = min(least.get(counters, inf), lead)
    for (rounds, accepted), lead in least.items():
        taken = [0] * (rounds - 1) + [accepted]  # their order is not known
        found = [each for each, _ in _compared(prompt, taken).other_drafts(CHAIN)]
        assert sum(found) == pytest.approx(lead)
    impossible = _compared(prompt, [0] * 7)
    assert [each for each, _ in impossible.other_drafts(CHAIN)] == [inf]


@pytest.mark.parametrize("seed", range(20))
def test_rounds_in_order_name_each_draft_that_is_another(seed: int) -> None:
    prompt, rng = _random(seed, 40), random.Random(-seed)
    draws = [rng.randint(0, 2) for _ in range(40)]
    taken, lead = _walk(prompt, draws)
    each = _in_order(_compared(prompt, taken), taken)
    found = list(each.other_drafts(CHAIN))
    assert sum(lead for lead, _ in found) == pytest.approx(lead)
    own, nothing = _walk(prompt, list(prompt.accepted_at[CHAIN.label]))
    assert nothing == 0
    assert not list(_in_order(each, own).other_drafts(CHAIN))


def test_after_the_texts_part_nothing_is_compared() -> None:
    """decoder   a b c d e f        the server's token 4 is another: its first round may be
    server    a b c x y z            compared, the second reaches beyond
    """
    prompt = _prompt([0, 2, 0, 0, 0], [[1.0, 1.0]] * 5)
    taken = [1, 0, 0]
    assert list(_in_order(_compared(prompt, taken, 4), taken).other_drafts(CHAIN))
    taken = [0, 0, 0]
    assert not list(_in_order(_compared(prompt, taken, 4), taken).other_drafts(CHAIN))
    # Asked for four tokens, it may accept whatever it says beyond them, but in as many rounds.
    assert not list(_compared(prompt, [0, 1], 4).other_drafts(CHAIN))
    assert list(_compared(prompt, [0, 0, 0], 4).other_drafts(CHAIN))


#: Of vLLM 0.32.0 with --per-request-spec-decode-metrics detailed.
VLLM = {
    "mean_acceptance_length": 1.1176470588235294,
    "draft_acceptance_rate": 0.0392156862745098,
    "acceptance_histogram": [15, 2, 0, 0],
    "num_spec_steps": 17,
    "num_accepted_draft_tokens": 2,
    "num_draft_tokens": 51,
    "num_spec_tokens": 3,
    "per_step_accepted": [0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
    "per_step_drafted": [3] * 17,
}


def test_what_vllm_reports_of_a_request() -> None:
    rounds = rounds_of(VLLM, 20, None)
    assert rounds is not None and (rounds.rounds, rounds.tokens, rounds.drafted) == (17, 19, 51)
    assert rounds.in_order == tuple((3, each) for each in VLLM["per_step_accepted"])  # type: ignore[attr-defined]
    assert rounds.counters is not None
    assert rounds.counters.accepted_lengths == (15, 2)
    assert rounds.counters.proposed == (17, 17, 17)
    summary = {key: each for key, each in VLLM.items() if not key.startswith("per_step")}
    brief = rounds_of(summary, 20, None)
    assert brief is not None and brief.counters == rounds.counters and not brief.in_order


@pytest.mark.parametrize(
    "change",
    [
        {"acceptance_histogram": None},
        {"acceptance_histogram": [0, 0]},
        {"acceptance_histogram": [18, -1]},
        {"acceptance_histogram": [1] * 9},
        {"num_draft_tokens": "many"},
        {"per_step_accepted": [[]]},
        {"per_step_accepted": [1]},
    ],
)
def test_metrics_that_make_no_sense_are_not_taken(change: dict[str, object]) -> None:
    assert rounds_of(VLLM | change, 20, None) is None
