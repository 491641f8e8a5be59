"""Random numbers and single draws: which tokens a draw may take, and what becomes of NaN."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.decoder.ops import draws as philox
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.draws import keep_top, random_words
from pipeline.decoder.ops.tree import SamplingTensors, Tree
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
    logits = torch.randn(1, 128_256, generator=torch.Generator().manual_seed(0)) * 3
    one, zero = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    # Beside a row that is cut, so that nothing is skipped.
    sampling = SamplingTensors(one.repeat(2), torch.tensor([1.0, 0.5]), *zero.repeat(2, 2))
    kept = (keep_top(logits.expand(2, -1), sampling) > float("-inf")).sum(-1)
    assert kept[0] == 128_256 > kept[1]


@pytest.mark.parametrize("token", [0, 3, 4, 9])
def test_a_single_kept_token_is_drawn_whatever_its_noise(token: int) -> None:
    """Noise is bounded: the largest word would give minus infinity, a tie with what is dropped."""
    logits = torch.zeros(4096, 10)
    logits[:, token] = 1.0
    seeds = torch.arange(4096)
    sampling = SamplingTensors(
        torch.ones(4096), torch.ones(4096), torch.ones(4096, dtype=torch.int64), seeds
    )
    assert (OPS.draw(logits, sampling, seeds) == token).all()
    words = torch.tensor([0, 2**32 - 1])
    with patch.object(philox, "random_words", lambda *_: words[None]):
        high, low = philox.gumbel(seeds, seeds, 2)[0].tolist()
    assert -2.82 < low < -2.81 and 22.87 < high < 22.88


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


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**20))
def test_words_are_philox_s_keyed_by_seed_counting_positions_and_tokens(
    seed: int, position: int, token: int
) -> None:
    key, counter = [seed & 0xFFFFFFFF, seed >> 32], [position & 0xFFFFFFFF, position >> 32]
    words = random_words(torch.tensor([seed]), torch.tensor([position]), token % 4096 + 1)
    token %= 4096
    assert int(words[0, token]) == _philox([*counter, token // 4, 0], key)[token % 4]


def _uniform(axis: str) -> Tensor:
    """2^17 numbers in [0, 1) along one axis."""
    steps, fixed = torch.arange(2**17), torch.full((2**17,), 5)
    if axis == "tokens":
        return random_words(fixed[:1], fixed[:1], 2**17)[0] / 2**32
    seeds, positions = {
        "positions": (fixed, steps),
        "seeds": (steps, fixed),
        "high words of seeds": (steps << 32, fixed),
    }[axis]
    return random_words(seeds, positions, 3)[:, 2] / 2**32


@pytest.mark.parametrize("axis", ["positions", "seeds", "high words of seeds", "tokens"])
def test_numbers_are_uniform_and_neighbours_independent(axis: str) -> None:
    cells = (_uniform(axis) * 32).long()
    pairs = cells[:-1:2] * 32 + cells[1::2]
    for observed, bins in ((cells, 32), (pairs, 32**2)):
        assert (
            markov.p_value_exact(observed.bincount(minlength=bins), torch.full((bins,), 1 / bins))
            > SIGNIFICANCE
        )


def test_draws_of_a_large_vocabulary_follow_its_distribution() -> None:
    """20,000 draws from 1,000 tokens, most of them rare: what bounded noise must not lose."""
    rows, size = 20_000, 1000
    logits = torch.randn(size, generator=torch.Generator().manual_seed(1)) * 2
    counts = torch.zeros(size, dtype=torch.int64)
    for first in range(0, rows, 1000):
        sampling = markov.sampling_of((Settings(),), 1000, first)
        drawn = OPS.draw(logits.expand(1000, -1), sampling, torch.full((1000,), 7))
        counts += drawn.bincount(minlength=size)
    assert markov.p_value_exact(counts, logits.double().softmax(0)) > SIGNIFICANCE
