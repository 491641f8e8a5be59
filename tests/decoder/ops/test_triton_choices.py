"""Triton kernels that choose tokens against the reference: logits, beams, trees; much is tied.

Without a GPU these tests run in Triton's interpreter, see conftest.py.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from pipeline.decoder.ops.tree import Tree
from tests.decoder.ops.compare import OPS, REFERENCE, TYPES, error, seeded

# Logits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(4, 1), (2, 3, 50), (5, 5000), (1, 128256)])
def test_argmax(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    seeded(shape[-1])
    logits = (torch.randn(shape, device=device) * 2).round().to(dtype)  # ties everywhere
    assert torch.equal(OPS.argmax(logits), REFERENCE.argmax(logits))
    logits.view(-1, shape[-1])[0, shape[-1] // 2] = float("nan")
    assert torch.equal(OPS.argmax(logits), REFERENCE.argmax(logits))


def test_argmax_of_signed_zeros_and_infinities(device: torch.device) -> None:
    inf = float("inf")
    logits = torch.tensor(
        [
            [-0.0, 0.0, -1.0],
            [-inf, -inf, -inf],
            [-inf, -5.0, -inf],
            [1.0, inf, inf],
            [-3.0, -2.0, -2.0],
        ],
        device=device,
    )
    assert OPS.argmax(logits).tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("rows", "size", "k"), [(1, 4, 4), (3, 100, 10), (4, 5000, 10), (2, 3000, 64), (1, 32000, 8)]
)
def test_propose(device: torch.device, dtype: torch.dtype, rows: int, size: int, k: int) -> None:
    seeded(size)
    logits = (torch.randn(rows, size, device=device) * 3).to(dtype)
    logits[0, size // 2 :] = float("-inf") if size > 4 and k < size // 2 else 0.0
    scores, index = OPS.propose(logits, k)
    wanted = logits.double().log_softmax(-1)
    assert torch.equal(index, logits.sort(dim=-1, descending=True, stable=True).indices[:, :k])
    assert error(scores, wanted.gather(1, index)) < 1e-5
    assert error(scores, REFERENCE.propose(logits, k)[0]) < 1e-5


# Trees -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "k", "size"), [(1, 1, 64), (3, 4, 100), (2, 10, 576)])
def test_select_beams(
    device: torch.device, dtype: torch.dtype, rows: int, k: int, size: int
) -> None:
    """Scores in steps of a quarter: nearly all are tied. Views of larger tensors, as drafted."""
    seeded(size)
    score = -torch.rand(rows, k, device=device).mul(8).round() / 4
    gained = -torch.rand(rows, k, 2 * k, device=device).mul(8).round()[..., :k] / 4
    gained[0, 0, 0] = float("-inf")
    proposed, beam_mask = (torch.randint(0, 2**40, (rows, n), device=device) for n in (k * k, k))
    hidden = torch.randn(rows * k, size, device=device).to(dtype)
    bits = (1 << torch.arange(k, device=device)).expand(rows, k)
    given = score, gained, proposed.view(rows, k, k), beam_mask, hidden, bits
    got, wanted = OPS.select_beams(*given), REFERENCE.select_beams(*given)
    for name in ("total", "best", "score", "token", "beam_mask", "hidden"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
    gained[0] = float("nan")
    assert len(set(OPS.select_beams(*given).best[0].tolist())) == k


def candidates(
    chance: random.Random, rows: int, count: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents and cumulative scores [B, C] of random trees.

    Many scores are equal, and the vocabulary is small.
    """
    parents = torch.tensor(
        [[chance.randint(-1, index - 1) for index in range(count)] for _ in range(rows)]
    )
    scores = torch.zeros(rows, count)
    for row in range(rows):
        for index in range(count):
            parent = int(parents[row, index])
            above = float(scores[row, parent]) if parent >= 0 else 0.0
            scores[row, index] = above - chance.choice((0.0, 0.25, 0.5, 2.0))
    return torch.randint(0, 20, (rows, count), device=device), parents.to(device), scores.to(device)


def random_tree(chance: random.Random, rows: int, nodes: int, device: torch.device) -> Tree:
    return REFERENCE.grow_tree(
        torch.randint(0, 20, (rows,), device=device),
        *candidates(chance, rows, 2 * nodes, device),
        nodes,
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("count", "nodes"), [(1, 2), (5, 1), (10, 64), (63, 64), (300, 64), (40, 17)]
)
def test_grow_tree(device: torch.device, seed: int, count: int, nodes: int) -> None:
    chance = seeded(seed)
    roots = torch.randint(0, 20, (3,), device=device)
    drafted = candidates(chance, 3, count, device)
    got, wanted = OPS.grow_tree(roots, *drafted, nodes), REFERENCE.grow_tree(roots, *drafted, nodes)
    for name in ("tokens", "parents", "tree_mask", "depth"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name


def test_grow_tree_of_a_chain(device: torch.device) -> None:
    """63 generations: the deepest tree there is, and the sign bit of its mask."""
    count = 63
    drafted = (
        torch.arange(count, device=device)[None],
        torch.arange(-1, count - 1, device=device)[None],
        -torch.arange(1.0, count + 1, device=device)[None],
    )
    got = OPS.grow_tree(torch.tensor([7], device=device), *drafted, 64)
    assert got.depth[0].tolist() == list(range(64))
    assert got.tree_mask[0].tolist() == [(1 << (n + 1)) - 1 if n < 63 else -1 for n in range(64)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("nodes", [1, 2, 17, 64])
def test_verify(device: torch.device, seed: int, nodes: int) -> None:
    chance = seeded(seed)
    tree = random_tree(chance, 4, nodes, device)
    predicted = torch.randint(-1, 20, tree.tokens.shape, device=device)
    for child in range(1, nodes):  # most nodes agree with one of their children
        if chance.random() < 0.8:
            predicted.scatter_(
                1, tree.parents[:, child : child + 1], tree.tokens[:, child : child + 1]
            )
    for depth in (1, 5, 12):
        got, wanted = OPS.verify(tree, predicted, depth), REFERENCE.verify(tree, predicted, depth)
        for name in ("path", "counts", "tokens"):
            assert torch.equal(getattr(got, name), getattr(wanted, name)), name


def test_verify_reads_a_slice_of_predictions(device: torch.device) -> None:
    """As the reference does: a slice's rows do not stand behind each other."""
    chance = seeded(1)
    tree = random_tree(chance, 4, 9, device)
    predicted = torch.randint(0, 20, (4, 14), device=device)
    for child in range(1, 9):
        predicted.scatter_(1, tree.parents[:, child : child + 1], tree.tokens[:, child : child + 1])
    got, wanted = (ops.verify(tree, predicted[:, :9], 5) for ops in (OPS, REFERENCE))
    assert wanted.counts.max() > 1
    for name in ("path", "counts", "tokens"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
    for ops in (OPS, REFERENCE):
        with pytest.raises(AssertionError):
            ops.verify(tree, predicted, 5)


def test_grow_tree_reads_slices_of_candidates(device: torch.device) -> None:
    chance = seeded(2)
    tokens, parents, scores = (part[:, 3:] for part in candidates(chance, 3, 23, device))
    drafted = tokens, (parents - 3).clamp(min=-1), scores
    roots = torch.arange(6, device=device)[::2]
    got, wanted = OPS.grow_tree(roots, *drafted, 9), REFERENCE.grow_tree(roots, *drafted, 9)
    for name in ("tokens", "parents", "tree_mask", "depth"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
