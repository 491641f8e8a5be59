"""Random numbers and single draws: which tokens a draw may take, and what becomes of NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.philox import uniform
from pipeline.decoder.tree import SamplingTensors, Tree
from tests.decoder.ops import markov
from tests.decoder.ops.markov import VOCABULARY, Settings

SIGNIFICANCE = 1e-4
OPS = TorchOps()


def _sampling(rows: int, choice: Settings) -> SamplingTensors:
    return markov.sampling_of((choice,), rows, 0)


@pytest.mark.parametrize(
    ("probabilities", "choice", "kept"),
    [
        ([0.5, 0.25, 0.125, 0.125], Settings(), {0, 1, 2, 3}),
        ([0.125, 0.5, 0.25, 0.125], Settings(top_k=2), {1, 2}),
        ([0.125, 0.5, 0.25, 0.125], Settings(top_k=3), {0, 1, 2, 3}),  # the two last are equals
        ([0.5, 0.25, 0.125, 0.125], Settings(top_k=9), {0, 1, 2, 3}),
        ([0.25, 0.125, 0.125, 0.5], Settings(top_p=0.7), {0, 3}),
        ([0.25, 0.125, 0.125, 0.5], Settings(top_p=0.8), {0, 1, 2, 3}),
        ([0.25, 0.125, 0.125, 0.5], Settings(top_p=1e-3), {3}),
        (
            [0.5, 0.25, 0.125, 0.125],
            Settings(top_k=2, top_p=0.6),
            {0},
        ),  # top-k first: 2/3 and 1/3 remain
        (
            [0.5, 0.25, 0.125, 0.125],
            Settings(temperature=2.0, top_p=0.5),
            {0, 1},
        ),  # temperature first: 0.37, 0.26, …
        ([0.5, 0.0, 0.5, 0.0], Settings(temperature=4.0), {0, 2}),
    ],
)
def test_draws_keep_exactly_top_k_and_then_top_p(
    probabilities: list[float], choice: Settings, kept: set[int]
) -> None:
    logits = torch.tensor(probabilities).log().expand(4096, -1)
    assert (
        set(
            OPS.draw(logits, _sampling(4096, choice), torch.zeros(4096, dtype=torch.int64)).tolist()
        )
        == kept
    )


def test_a_top_p_of_one_keeps_the_rarest_tokens_of_a_large_vocabulary() -> None:
    """Float32 masses of 128,256 tokens sum to 1 ± 1e-5; what lies beyond 1 must not be cut off."""
    logits = torch.sort(
        torch.randn(128_256, generator=torch.Generator().manual_seed(0)) * 3, descending=True
    ).values
    numbers = uniform(torch.arange(2**20), torch.zeros(2**20, dtype=torch.int64)).double()
    seeds = (numbers > 1 - 5e-6).nonzero()[:, 0]  # these fall on the rarest tokens
    sampling = SamplingTensors(
        torch.ones(len(seeds)), torch.ones(len(seeds)), torch.zeros_like(seeds), seeds
    )
    drawn = OPS.draw(logits.expand(len(seeds), -1), sampling, torch.zeros_like(seeds))
    assert len(seeds) > 2
    torch.testing.assert_close(
        logits.double().softmax(0).cumsum(0)[drawn], numbers[seeds], atol=1e-6, rtol=0
    )


def test_the_number_zero_draws_the_first_possible_token() -> None:
    seeds, positions = torch.tensor([12_121_362]), torch.tensor([0])
    assert float(uniform(seeds, positions)) == 0.0
    logits = torch.tensor([[float("-inf"), float("-inf"), 0.0, 1.0]])
    assert OPS.draw(
        logits,
        SamplingTensors(torch.ones(1), torch.ones(1), torch.zeros(1, dtype=torch.int64), seeds),
        positions,
    ).tolist() == [2]


def test_greedy_rows_take_the_lowest_of_the_largest_and_ignore_the_rest() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]]).expand(64, -1)
    drawn = OPS.draw(
        logits, _sampling(64, Settings(temperature=0.0, top_k=1, top_p=0.1)), torch.arange(64)
    )
    assert (drawn == 1).all()


@pytest.mark.parametrize(
    "choice", [Settings(0.0), Settings(), Settings(top_k=2), Settings(top_p=0.5)], ids=str
)
def test_a_nan_among_the_logits_gives_minus_one_in_its_row_only(choice: Settings) -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[1, 4] = float("nan")
    drawn = OPS.draw(logits, _sampling(3, choice), torch.arange(3))
    assert drawn[1] == -1
    assert (drawn[[0, 2]] >= 0).all()


def test_a_nan_ends_the_branch_at_its_node() -> None:
    """root ─ 2 ─ 2 ─ 2, the target is certain of 2, and knows nothing at the second node."""
    tree = Tree(
        torch.full((1, 4), 2),
        torch.tensor([[0, 0, 1, 2]]),
        torch.tensor([[1, 3, 7, 15]]),
        torch.tensor([[0, 1, 2, 3]]),
    )
    logits = torch.full((1, 4, 5), float("-inf"))
    logits[:, :, 2] = 0.0
    logits[:, 1, 0] = float("nan")
    accepted = OPS.verify(
        tree, OPS.sample(logits, tree, _sampling(1, Settings()), 7 + tree.depth, 3), 3
    )
    assert accepted.counts.tolist() == [2]
    assert accepted.tokens[0, :2].tolist() == [2, -1]


def _philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32-10 in Python integers, from section 3.1 of the paper (Salmon et al. 2011)."""
    for turn in range(10):
        low, high = (
            (0x9E3779B9 * turn + key[0]) & 0xFFFFFFFF,
            (0xBB67AE85 * turn + key[1]) & 0xFFFFFFFF,
        )
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            second >> 32 ^ counter[1] ^ low,
            second & 0xFFFFFFFF,
            first >> 32 ^ counter[3] ^ high,
            first & 0xFFFFFFFF,
        ]
    return counter


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_the_plain_philox_gives_the_known_answers(
    counter: list[int], key: list[int], answer: list[int]
) -> None:
    assert _philox(counter, key) == answer


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_uniform_is_philox_keyed_by_seed_and_counting_positions(seed: int, position: int) -> None:
    word = _philox([position & 0xFFFFFFFF, position >> 32, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])[
        0
    ]
    assert float(uniform(torch.tensor([seed]), torch.tensor([position]))) == (word >> 8) / 2**24


@pytest.mark.parametrize("axis", ["positions", "seeds", "high words of seeds"])
def test_numbers_are_uniform_and_neighbours_independent(axis: str) -> None:
    steps, fixed = torch.arange(2**17), torch.full((2**17,), 5)
    seeds, positions = {
        "positions": (fixed, steps),
        "seeds": (steps, fixed),
        "high words of seeds": (steps << 32, fixed),
    }[axis]
    cells = (uniform(seeds, positions) * 32).long()
    pairs = cells[:-1:2] * 32 + cells[1::2]
    for observed, bins in ((cells, 32), (pairs, 32**2)):
        assert (
            markov.p_value_exact(observed.bincount(minlength=bins), torch.full((bins,), 1 / bins))
            > SIGNIFICANCE
        )
