"""Speculative sampling is lossless: whatever the drafter proposes, the tokens are the target's own.

Every emitted token is drawn from the target's distribution with a number that its seed and position
fix; the draft decides only how many of them one round emits. So the first test asks for the same
tokens as plain decoding, and the statistical ones for the right distribution: sequences of a Markov
target, of which the exact probabilities are known, and of which 200,000 are drawn a case. A case passes
at 1e-4 significance; the same test, with the same number of draws, must fail when one draw in a
hundred is not the target's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.decoder.ops.random import uniform
from pipeline.decoder.ops.reference import TorchOps
from pipeline.decoder.tree import Acceptance, Sampling, Tree
from tests.decoder.ops import markov
from tests.decoder.ops.markov import VOCABULARY, Settings, Shape

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
    """Requests of each of `settings` in one batch, and the rounds that one row of `length` tokens takes."""

    shape: Shape
    settings: tuple[Settings, ...] = (Settings(),)
    target: Tensor = TARGET
    drafter: Tensor = NOISY
    length: int = 3
    rounds: int | None = None  # None: it varies
    plant: Literal["acceptance", "draws"] = "acceptance"  # which bias to plant: "draws" where nearly every draft is impossible or accepted


TREE = Shape(steps=2, width=3, beam=3, nodes=8)
SOME = (Settings(temperature=1.3, top_k=4), Settings(temperature=1.2, top_p=0.7), Settings(temperature=0.0))
CASES = {
    "chain": Case(Shape(steps=2, width=1, beam=1, nodes=3)),
    "tree": Case(TREE),
    "full": Case(Shape(steps=1, width=6, beam=6, nodes=7), drafter=TARGET, rounds=2),
    "full-top-k": Case(Shape(steps=2, width=3, beam=9, nodes=13), (Settings(top_k=3),), drafter=TARGET, length=4, rounds=2, plant="draws"),
    "zero": Case(Shape(steps=1, width=2, beam=2, nodes=3), target=SILENT, drafter=STUBBORN, length=2, rounds=2, plant="draws"),
    "temperature": Case(TREE, (Settings(temperature=0.6),)),
    "top-p": Case(TREE, (Settings(top_p=0.8),), plant="draws"),
    "mixed": Case(TREE, SOME, plant="draws"),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other after every small operation are slower than one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class FavouriteDraws(TorchOps):
    """Biased: one draw in a hundred is the target's most likely token instead."""

    def draw(self, logits: Tensor, sampling: Sampling, positions: Tensor) -> Tensor:
        drawn = super().draw(logits, sampling, positions)
        return torch.where(uniform(sampling.seeds + 2**40, positions) < BIAS, logits.argmax(-1), drawn)


class InflatedAcceptance(TorchOps):
    """Biased: at one node in a hundred the drafter's favourite is accepted, whatever the target says."""

    def sample(self, logits: Tensor, tree: Tree, sampling: Sampling, positions: Tensor, depth: int) -> Tensor:
        children = tree.parents[:, None] == torch.arange(tree.tokens.shape[1])[:, None]  # [B, N, N]: child of node
        children[:, :, 0] = False
        favourite = tree.tokens.gather(1, children.int().argmax(-1))  # [B, N]: of the first child drafted
        lucky = children.any(-1) & (uniform(sampling.seeds[:, None] + 2**40, positions) < BIAS)
        certain = torch.full_like(logits, float("-inf")).scatter_(-1, favourite[..., None], 0.0)
        return super().sample(torch.where(lucky[..., None], certain, logits), tree, sampling, positions, depth)


BIASED = {"draws": FavouriteDraws(), "acceptance": InflatedAcceptance()}


def _emitted(ops: TorchOps, case: Case) -> tuple[Tensor, Tensor]:
    """[DRAWS, L] tokens of speculative decoding, and the rounds they took."""
    forest = markov.plant(ops, case.drafter, case.shape)
    sampling = markov.sampling_of(case.settings, DRAWS, 0)
    tokens, rounds = zip(*(markov.speculative(ops, case.target, forest, block, case.length) for block in markov.blocks(sampling)), strict=True)
    return torch.cat(tokens), torch.cat(rounds)


@cache
def _speculative(case: Case) -> tuple[Tensor, Tensor]:
    return _emitted(OPS, case)


@cache
def _direct(case: Case, first_seed: int, rows: int) -> Tensor:
    """[rows, L] tokens of plain decoding."""
    sampling = markov.sampling_of(case.settings, rows, first_seed)
    return torch.cat([markov.direct(OPS, case.target, block, case.length) for block in markov.blocks(sampling)])


def _p_against_exact(case: Case, tokens: Tensor) -> float:
    """The least p-value of the requests of each settings, times their number (Bonferroni)."""
    kinds = len(case.settings)
    counts = [markov.count_sequences(tokens[kind::kinds]) for kind in range(kinds)]
    exact = [markov.joint(case.target, each, case.length) for each in case.settings]
    return kinds * min(markov.p_value_exact(*pair) for pair in zip(counts, exact, strict=True))


def _p_against_direct(case: Case, tokens: Tensor) -> float:
    """As above, against twice as many sequences of plain decoding with other seeds."""
    kinds = len(case.settings)
    other = _direct(case, 2**33, 2 * DRAWS)
    return kinds * min(markov.p_value_same(markov.count_sequences(tokens[kind::kinds]), markov.count_sequences(other[kind::kinds])) for kind in range(kinds))


@each_case
def test_the_same_seeds_give_the_same_tokens_as_plain_decoding(case: Case) -> None:
    tokens, rounds = _speculative(case)
    assert torch.equal(tokens[: 2 * markov.ROWS], _direct(case, 0, 2 * markov.ROWS))
    if case.rounds is None:
        assert set(rounds.tolist()) == set(range(1, case.length + 1)), "a varying number of drafts is accepted"
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


def _sampling(rows: int, choice: Settings) -> Sampling:
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
        ([0.5, 0.25, 0.125, 0.125], Settings(top_k=2, top_p=0.6), {0}),  # top-k first: 2/3 and 1/3 remain
        ([0.5, 0.25, 0.125, 0.125], Settings(temperature=2.0, top_p=0.5), {0, 1}),  # temperature first: 0.37, 0.26, …
        ([0.5, 0.0, 0.5, 0.0], Settings(temperature=4.0), {0, 2}),
    ],
)
def test_draws_keep_exactly_top_k_and_then_top_p(probabilities: list[float], choice: Settings, kept: set[int]) -> None:
    logits = torch.tensor(probabilities).log().expand(4096, -1)
    assert set(OPS.draw(logits, _sampling(4096, choice), torch.zeros(4096, dtype=torch.int64)).tolist()) == kept


def test_a_top_p_of_one_keeps_the_rarest_tokens_of_a_large_vocabulary() -> None:
    """Float32 masses of 128,256 tokens sum to 1 ± 1e-5; what lies beyond 1 must not be cut off."""
    logits = torch.sort(torch.randn(128_256, generator=torch.Generator().manual_seed(0)) * 3, descending=True).values
    numbers = uniform(torch.arange(2**20), torch.zeros(2**20, dtype=torch.int64)).double()
    seeds = (numbers > 1 - 5e-6).nonzero()[:, 0]  # these fall on the rarest tokens
    sampling = Sampling(torch.ones(len(seeds)), torch.ones(len(seeds)), torch.zeros_like(seeds), seeds)
    drawn = OPS.draw(logits.expand(len(seeds), -1), sampling, torch.zeros_like(seeds))
    assert len(seeds) > 2
    torch.testing.assert_close(logits.double().softmax(0).cumsum(0)[drawn], numbers[seeds], atol=1e-6, rtol=0)


def test_the_number_zero_draws_the_first_possible_token() -> None:
    seeds, positions = torch.tensor([12_121_362]), torch.tensor([0])
    assert float(uniform(seeds, positions)) == 0.0
    logits = torch.tensor([[float("-inf"), float("-inf"), 0.0, 1.0]])
    assert OPS.draw(logits, Sampling(torch.ones(1), torch.ones(1), torch.zeros(1, dtype=torch.int64), seeds), positions).tolist() == [2]


def test_greedy_rows_take_the_lowest_of_the_largest_and_ignore_the_rest() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]]).expand(64, -1)
    drawn = OPS.draw(logits, _sampling(64, Settings(temperature=0.0, top_k=1, top_p=0.1)), torch.arange(64))
    assert (drawn == 1).all()


@pytest.mark.parametrize("choice", [Settings(0.0), Settings(), Settings(top_k=2), Settings(top_p=0.5)], ids=str)
def test_a_nan_among_the_logits_gives_minus_one_in_its_row_only(choice: Settings) -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[1, 4] = float("nan")
    drawn = OPS.draw(logits, _sampling(3, choice), torch.arange(3))
    assert drawn[1] == -1
    assert (drawn[[0, 2]] >= 0).all()


def test_a_nan_ends_the_branch_at_its_node() -> None:
    """root ─ 2 ─ 2 ─ 2, the target is certain of 2, and knows nothing at the second node."""
    tree = Tree(torch.full((1, 4), 2), torch.tensor([[0, 0, 1, 2]]), torch.tensor([[1, 3, 7, 15]]), torch.tensor([[0, 1, 2, 3]]))
    logits = torch.full((1, 4, 5), float("-inf"))
    logits[:, :, 2] = 0.0
    logits[:, 1, 0] = float("nan")
    accepted = OPS.verify(tree, OPS.sample(logits, tree, _sampling(1, Settings()), 7 + tree.depth, 3), 3)
    assert accepted.counts.tolist() == [2]
    assert accepted.tokens[0, :2].tolist() == [2, -1]


def _philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32-10 in Python integers, from section 3.1 of the paper (Salmon et al. 2011)."""
    for turn in range(10):
        low, high = ((0x9E3779B9 * turn + key[0]) & 0xFFFFFFFF, (0xBB67AE85 * turn + key[1]) & 0xFFFFFFFF)
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [second >> 32 ^ counter[1] ^ low, second & 0xFFFFFFFF, first >> 32 ^ counter[3] ^ high, first & 0xFFFFFFFF]
    return counter


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0], [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ],
)
def test_the_plain_philox_gives_the_known_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    assert _philox(counter, key) == answer


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_uniform_is_philox_keyed_by_seed_and_counting_positions(seed: int, position: int) -> None:
    word = _philox([position & 0xFFFFFFFF, position >> 32, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])[0]
    assert float(uniform(torch.tensor([seed]), torch.tensor([position]))) == (word >> 8) / 2**24


@pytest.mark.parametrize("axis", ["positions", "seeds", "high words of seeds"])
def test_numbers_are_uniform_and_neighbours_independent(axis: str) -> None:
    steps, fixed = torch.arange(2**17), torch.full((2**17,), 5)
    seeds, positions = {"positions": (fixed, steps), "seeds": (steps, fixed), "high words of seeds": (steps << 32, fixed)}[axis]
    cells = (uniform(seeds, positions) * 32).long()
    pairs = cells[:-1:2] * 32 + cells[1::2]
    for observed, bins in ((cells, 32), (pairs, 32**2)):
        assert markov.p_value_exact(observed.bincount(minlength=bins), torch.full((bins,), 1 / bins)) > SIGNIFICANCE


@dataclass(frozen=True)
class Draft:
    """Candidates of one row as `grow_tree` gets them; siblings carry different tokens."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]


@st.composite
def drafts(draw: st.DrawFn, most: int = 80) -> tuple[list[Draft], int]:
    """One to three rows of equally many candidates, and a node budget. Scores are often equal."""
    count = draw(st.integers(1, most))
    step = st.tuples(st.integers(0, count), st.sampled_from([0.0, 0.5, 1.0, 4.0, float("inf")]))
    rows = []
    for choices in draw(st.lists(st.lists(step, min_size=count, max_size=count), min_size=1, max_size=3)):
        parents = [choice % (index + 1) - 1 for index, (choice, _) in enumerate(choices)]
        scores: list[float] = []
        for parent, (_, loss) in zip(parents, choices, strict=True):
            scores.append((scores[parent] if parent >= 0 else 0.0) - loss)
        rows.append(Draft([parents[:index].count(parent) for index, parent in enumerate(parents)], parents, scores))
    return rows, draw(st.integers(1, 64))


def _grown(rows: list[Draft], nodes: int) -> Tree:
    tokens, parents, scores = (torch.tensor([getattr(row, field) for row in rows]) for field in ("tokens", "parents", "scores"))
    return OPS.grow_tree(torch.arange(len(rows)) + 90, tokens, parents, scores, nodes)


#: A chain that is longer than the bits of a mask: the last node has the sign bit.
LONG = Draft([0] * 80, list(range(-1, 79)), [-float(index) for index in range(80)])


@given(drafts())
@example(([LONG], 64))
@settings(max_examples=150, deadline=None)
def test_grow_tree_keeps_the_best_candidates_as_a_connected_tree(drafted: tuple[list[Draft], int]) -> None:
    rows, nodes = drafted
    tree = _grown(rows, nodes)
    for index, row in enumerate(rows):
        best = sorted(range(len(row.scores)), key=lambda candidate: (-row.scores[candidate], candidate))
        kept = sorted(best[: nodes - 1])
        branches: list[list[int]] = [[0]]  # nodes from the root to each node
        for candidate in kept:
            parent = row.parents[candidate]
            above = 0 if parent < 0 else kept.index(parent) + 1  # a parent that was not kept is a ValueError
            branches.append([*branches[above], len(branches)])
        assert tree.tokens[index].tolist() == [90 + index, *(row.tokens[candidate] for candidate in kept)]
        assert tree.parents[index].tolist() == [branch[-2] if len(branch) > 1 else 0 for branch in branches]
        assert tree.depth[index].tolist() == [len(branch) - 1 for branch in branches]
        assert [bits % 2**64 for bits in tree.ancestors[index].tolist()] == [sum(1 << node for node in branch) for branch in branches]


def _walk(tree: Tree, row: int, predicted: list[int], node: int = 0) -> list[int]:
    """The accepted branch by recursion: nodes from `node` down."""
    for child in range(1, len(predicted)):
        if int(tree.parents[row, child]) == node and int(tree.tokens[row, child]) == predicted[node]:
            return [node, *_walk(tree, row, predicted, child)]
    return [node]


def _check_acceptance(tree: Tree, predicted: Tensor, accepted: Acceptance, depth: int) -> None:
    for row, (choices, count) in enumerate(zip(predicted.tolist(), accepted.counts.tolist(), strict=True)):
        branch = _walk(tree, row, choices)
        assert count == len(branch)
        assert accepted.path[row].tolist() == branch + [branch[-1]] * (depth + 1 - count)
        assert accepted.tokens[row, :count].tolist() == [choices[node] for node in branch]


@given(drafts(most=20), st.data())
@settings(max_examples=100, deadline=None)
def test_verify_equals_a_recursive_walk(drafted: tuple[list[Draft], int], data: st.DataObject) -> None:
    tree = _grown(*drafted)
    count = tree.tokens.shape[1]
    choices = st.lists(st.integers(-1, 2), min_size=count, max_size=count)
    predicted = torch.tensor([data.draw(choices) for _ in tree.tokens])
    depth = int(tree.depth.max()) + data.draw(st.integers(0, 2))
    _check_acceptance(tree, predicted, OPS.verify(tree, predicted, depth), depth)


@given(drafts(most=20), st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_sample_draws_at_every_node_of_the_walked_branch(drafted: tuple[list[Draft], int], seed: int) -> None:
    """The walk is the one that draws at all nodes, reachable or not, would lead to."""
    tree = _grown(*drafted)
    rows, count = tree.tokens.shape
    logits = torch.randn(rows, count, 4, generator=torch.Generator().manual_seed(seed))
    sampling = markov.sampling_of((Settings(), Settings(0.5, 3), Settings(0.0)), rows, seed)
    depth = int(tree.depth.max())
    positions = seed + tree.depth
    everywhere = torch.stack([OPS.draw(logits[:, node], sampling, positions[:, node]) for node in range(count)], 1)
    predicted = OPS.sample(logits, tree, sampling, positions, depth)
    _check_acceptance(tree, everywhere, OPS.verify(tree, predicted, depth), depth)
