"""Speculative sampling is lossless: whatever the drafter proposes, the tokens are the target's own.

Every emitted token is drawn from the target's distribution with numbers that its seed and
position fix; the draft decides only how many of them one round emits. So the first test asks for
the same tokens as plain decoding, and the statistical ones for the right distribution: sequences
of a Markov target, of which the exact probabilities are known, and of which 200,000 or more are
drawn a case. A case passes at 1e-4 significance; the same test, with the same number of draws,
must fail when one draw in a hundred is not the target's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import pytest
import torch
from torch import Tensor

from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.draws import by_node
from pipeline.decoder.ops.tree import SamplingTensors, Tree
from tests.decoder.ops import markov
from tests.decoder.ops.biased import lucky, towards_drafts
from tests.decoder.ops.markov import Settings, Shape

DRAWS = 200_000
SIGNIFICANCE = 1e-4
BIAS = 0.01
OPS = TorchOps()

TARGET = markov.random_logits(1)
#: Agrees with the target about half of the time.
NOISY = TARGET + markov.random_logits(2)
#: A target that never says the last two tokens, and a drafter that proposes nothing else.
SILENT, STUBBORN = TARGET.clone(), TARGET.clone()
SILENT[:, -2:] = float("-inf")
STUBBORN[:, -2:] += 50


@dataclass(frozen=True, eq=False)
class Case:
    """Requests of each of `settings` in a batch; the rounds that a row of `length` tokens takes."""

    shape: Shape
    settings: tuple[Settings, ...] = (Settings(),)
    target: Tensor = TARGET
    drafter: Tensor = NOISY
    length: int = 3
    draws: int = DRAWS
    rounds: int | None = None  # None: it varies
    # Which bias to plant: "draws" where nearly every draft is impossible or accepted.
    plant: Literal["acceptance", "draws"] = "acceptance"


TREE = Shape(steps=2, width=3, beam=3, nodes=8)
SOME = (
    Settings(temperature=1.3, top_k=4),
    Settings(temperature=1.2, top_p=0.7),
    Settings(temperature=0.0),
)
CASES = {
    "chain": Case(Shape(steps=2, width=1, beam=1, nodes=3)),
    "tree": Case(TREE),
    "full": Case(
        # Only every other draw can be biased here.
        Shape(steps=1, width=6, beam=6, nodes=7),
        drafter=TARGET,
        rounds=2,
        draws=2 * DRAWS,
    ),
    "full-top-k": Case(
        Shape(steps=2, width=3, beam=9, nodes=13),
        (Settings(top_k=3),),
        drafter=TARGET,
        length=4,
        rounds=2,
        plant="draws",
    ),
    "zero": Case(
        Shape(steps=1, width=2, beam=2, nodes=3),
        target=SILENT,
        drafter=STUBBORN,
        length=2,
        rounds=2,
        plant="draws",
    ),
    "temperature": Case(TREE, (Settings(temperature=0.6),)),
    "top-p": Case(TREE, (Settings(top_p=0.8),), plant="draws"),
    "mixed": Case(TREE, SOME, length=2, plant="draws", draws=len(SOME) * DRAWS),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


class FavouriteDraws(TorchOps):
    """Biased: one draw in a hundred is the target's most likely token instead."""

    def draw(self, logits: Tensor, sampling: SamplingTensors, positions: Tensor) -> Tensor:
        drawn = super().draw(logits, sampling, positions)
        planted = lucky(sampling.seeds, positions, BIAS)
        return torch.where(planted, logits.argmax(-1), drawn)

    def sample(
        self, logits: Tensor, tree: Tree, sampling: SamplingTensors, positions: Tensor, depth: int
    ) -> Tensor:
        count = logits.shape[1]
        drawn = self.draw(logits.flatten(0, 1), by_node(sampling, count), positions.flatten())
        return drawn.view(-1, count)


class InflatedAcceptance(TorchOps):
    """Biased: at one node in a hundred a draft is accepted regardless."""

    def sample(
        self, logits: Tensor, tree: Tree, sampling: SamplingTensors, positions: Tensor, depth: int
    ) -> Tensor:
        favoured = towards_drafts(logits, tree, sampling, positions, BIAS)
        return super().sample(favoured, tree, sampling, positions, depth)


BIASED = {"draws": FavouriteDraws(), "acceptance": InflatedAcceptance()}


def _emitted(ops: TorchOps, case: Case) -> tuple[Tensor, Tensor]:
    """[draws, L] tokens of speculative decoding, and the rounds they took."""
    forest = markov.plant(ops, case.drafter, case.shape)
    sampling = markov.sampling_of(case.settings, case.draws, 0)
    tokens, rounds = zip(
        *(
            markov.speculative(ops, case.target, forest, block, case.length)
            for block in markov.blocks(sampling)
        ),
        strict=True,
    )
    return torch.cat(tokens), torch.cat(rounds)


@cache
def _speculative(case: Case) -> tuple[Tensor, Tensor]:
    return _emitted(OPS, case)


@cache
def _direct(case: Case, first_seed: int, rows: int) -> Tensor:
    """[rows, L] tokens of plain decoding."""
    sampling = markov.sampling_of(case.settings, rows, first_seed)
    return torch.cat(
        [markov.direct(OPS, case.target, block, case.length) for block in markov.blocks(sampling)]
    )


def _p_against_exact(case: Case, tokens: Tensor) -> float:
    """The least p-value of the requests of each settings, times their number (Bonferroni)."""
    kinds = len(case.settings)
    counts = [markov.count_sequences(tokens[kind::kinds]) for kind in range(kinds)]
    exact = [markov.joint(case.target, each, case.length) for each in case.settings]
    return kinds * min(markov.p_value_exact(*pair) for pair in zip(counts, exact, strict=True))


def _p_against_direct(case: Case, tokens: Tensor) -> float:
    """As above, against twice as many sequences of plain decoding with other seeds."""
    kinds = len(case.settings)
    other = _direct(case, 2**33, 2 * case.draws)
    return kinds * min(
        markov.p_value_same(
            markov.count_sequences(tokens[kind::kinds]), markov.count_sequences(other[kind::kinds])
        )
        for kind in range(kinds)
    )


@each_case
def test_the_same_seeds_give_the_same_tokens_as_plain_decoding(case: Case) -> None:
    tokens, rounds = _speculative(case)
    assert torch.equal(tokens[: 2 * markov.ROWS], _direct(case, 0, 2 * markov.ROWS))
    if case.rounds is None:
        assert set(rounds.tolist()) == set(range(1, case.length + 1)), (
            "a varying number of drafts is accepted"
        )
    else:
        assert (rounds == case.rounds).all()


@each_case
def test_speculative_samples_follow_the_exact_distribution(case: Case) -> None:
    assert _p_against_exact(case, _speculative(case)[0]) > SIGNIFICANCE


@each_case
def test_speculative_samples_are_distributed_like_direct_samples(case: Case) -> None:
    assert _p_against_direct(case, _speculative(case)[0]) > SIGNIFICANCE


@each_case
def test_a_planted_bias_of_one_percent_is_caught(case: Case) -> None:
    tokens, _ = _emitted(BIASED[case.plant], case)
    assert _p_against_exact(case, tokens) < SIGNIFICANCE
    assert _p_against_direct(case, tokens) < SIGNIFICANCE
