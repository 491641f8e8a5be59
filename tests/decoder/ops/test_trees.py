"""Growing a tree and walking it, against plain recursive definitions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.tree import Tree, VerifyOutput
from tests.decoder.ops import markov
from tests.decoder.ops.markov import Settings

OPS = TorchOps()


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
    for choices in draw(
        st.lists(st.lists(step, min_size=count, max_size=count), min_size=1, max_size=3)
    ):
        parents = [choice % (index + 1) - 1 for index, (choice, _) in enumerate(choices)]
        scores: list[float] = []
        for parent, (_, loss) in zip(parents, choices, strict=True):
            scores.append((scores[parent] if parent >= 0 else 0.0) - loss)
        rows.append(
            Draft(
                [parents[:index].count(parent) for index, parent in enumerate(parents)],
                parents,
                scores,
            )
        )
    return rows, draw(st.integers(1, 64))


def _grown(rows: list[Draft], nodes: int) -> Tree:
    tokens, parents, scores = (
        torch.tensor([getattr(row, field) for row in rows])
        for field in ("tokens", "parents", "scores")
    )
    return OPS.grow_tree(torch.arange(len(rows)) + 90, tokens, parents, scores, nodes)


#: A chain that is longer than the bits of a mask: the last node has the sign bit.
LONG = Draft([0] * 80, list(range(-1, 79)), [-float(index) for index in range(80)])


@given(drafts())
@example(([LONG], 64))
@settings(max_examples=150, deadline=None)
def test_grow_tree_keeps_the_best_candidates_as_a_connected_tree(
    drafted: tuple[list[Draft], int],
) -> None:
    rows, nodes = drafted
    tree = _grown(rows, nodes)
    for index, row in enumerate(rows):
        best = sorted(
            range(len(row.scores)), key=lambda candidate: (-row.scores[candidate], candidate)
        )
        kept = sorted(best[: nodes - 1])
        branches: list[list[int]] = [[0]]  # nodes from the root to each node
        for candidate in kept:
            parent = row.parents[candidate]
            above = (
                0 if parent < 0 else kept.index(parent) + 1
            )  # a parent that was not kept is a ValueError
            branches.append([*branches[above], len(branches)])
        assert tree.tokens[index].tolist() == [
            90 + index,
            *(row.tokens[candidate] for candidate in kept),
        ]
        assert tree.parents[index].tolist() == [
            branch[-2] if len(branch) > 1 else 0 for branch in branches
        ]
        assert tree.depth[index].tolist() == [len(branch) - 1 for branch in branches]
        assert [bits % 2**64 for bits in tree.tree_mask[index].tolist()] == [
            sum(1 << node for node in branch) for branch in branches
        ]


def _walk(tree: Tree, row: int, predicted: list[int], node: int = 0) -> list[int]:
    """The accepted branch by recursion: nodes from `node` down."""
    for child in range(1, len(predicted)):
        if (
            int(tree.parents[row, child]) == node
            and int(tree.tokens[row, child]) == predicted[node]
        ):
            return [node, *_walk(tree, row, predicted, child)]
    return [node]


def _check_acceptance(tree: Tree, predicted: Tensor, accepted: VerifyOutput, depth: int) -> None:
    for row, (choices, count) in enumerate(
        zip(predicted.tolist(), accepted.counts.tolist(), strict=True)
    ):
        branch = _walk(tree, row, choices)
        assert count == len(branch)
        assert accepted.path[row].tolist() == branch + [branch[-1]] * (depth + 1 - count)
        assert accepted.tokens[row, :count].tolist() == [choices[node] for node in branch]


@given(drafts(most=20), st.data())
@settings(max_examples=100, deadline=None)
def test_verify_equals_a_recursive_walk(
    drafted: tuple[list[Draft], int], data: st.DataObject
) -> None:
    tree = _grown(*drafted)
    count = tree.tokens.shape[1]
    choices = st.lists(st.integers(-1, 2), min_size=count, max_size=count)
    predicted = torch.tensor([data.draw(choices) for _ in tree.tokens])
    depth = int(tree.depth.max()) + data.draw(st.integers(0, 2))
    _check_acceptance(tree, predicted, OPS.verify(tree, predicted, depth), depth)


@given(drafts(most=20), st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_sample_draws_at_every_node_of_the_walked_branch(
    drafted: tuple[list[Draft], int], seed: int
) -> None:
    """The walk is the one that draws at all nodes, reachable or not, would lead to."""
    tree = _grown(*drafted)
    rows, count = tree.tokens.shape
    logits = torch.randn(rows, count, 4, generator=torch.Generator().manual_seed(seed))
    sampling = markov.sampling_of((Settings(), Settings(0.5, 3), Settings(0.0)), rows, seed)
    depth = int(tree.depth.max())
    positions = seed + tree.depth
    everywhere = torch.stack(
        [OPS.draw(logits[:, node], sampling, positions[:, node]) for node in range(count)], 1
    )
    predicted = OPS.sample(logits, tree, sampling, positions, depth)
    _check_acceptance(tree, everywhere, OPS.verify(tree, predicted, depth), depth)
