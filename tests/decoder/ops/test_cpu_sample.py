"""Sampling in C++ against the definition: the kept set, the draw, the walk."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.cpu.ops import CpuOps
from pipeline.decoder.ops.draws import perturb
from pipeline.decoder.ops.tree import SamplingTensors, Tree
from tests.decoder.ops.kernels import KERNELS, load_kernels, name_of

SETTINGS = [
    (0.0, 1.0, 0),
    (1.0, 1.0, 0),
    (0.7, 0.9, 0),
    (1.3, 1.0, 5),
    (0.9, 0.5, 40),
    (1.0, 1e-6, 0),
    (2.0, 0.99, 1),
    (1.5, 0.999, 70000),
    (1e-3, 0.9, 0),
    (1e-8, 1.0, 0),
]
#: Sums of logits and noise that are this close, as a part of them, may be rounded to either order.
NEAR_TIE = 2.0**-20


@pytest.fixture(scope="module", params=KERNELS, ids=name_of)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return load_kernels(*request.param)


def _sampling(rows: int, settings: tuple[float, float, int]) -> SamplingTensors:
    temperature, top_p, top_k = settings
    seeds = torch.randint(0, 2**62, (rows,), generator=torch.Generator().manual_seed(rows))
    return SamplingTensors(
        torch.full((rows,), temperature),
        torch.full((rows,), top_p),
        torch.full((rows,), top_k),
        seeds,
    )


def _logits(ops: CpuOps, spread: float, *shape: int) -> Tensor:
    """In bf16 many are tied."""
    generator = torch.Generator().manual_seed(shape[-1])
    return (spread * torch.randn(shape, generator=generator)).to(ops.dtype)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    ("rows", "size", "spread"), [(40, 3, 0.3), (40, 500, 4.0), (40, 5003, 0.01), (4, 49152, 3.0)]
)
def test_draws_are_the_reference_s(
    ops: CpuOps, settings: tuple[float, float, int], rows: int, size: int, spread: float
) -> None:
    logits = _logits(ops, spread, rows, size)
    positions = torch.arange(rows) * 2**33
    sampling = _sampling(rows, settings)
    drawn = ops.draw(logits, sampling, positions)
    noisy = perturb(logits, sampling, positions)  # minus infinity outside the kept set
    best, chosen = noisy.max(-1).values, noisy.gather(1, drawn[:, None])[:, 0]
    assert ((best - chosen) <= NEAR_TIE * best.abs().clamp(min=1)).all()
    assert (drawn == TorchOps().draw(logits, sampling, positions)).sum() >= rows - 1


def test_tokens_without_a_finite_choice(ops: CpuOps) -> None:
    inf = float("inf")
    logits = torch.tensor([[-inf, -inf, -inf], [0.0, inf, inf], [-inf, 1.0, -inf]]).to(ops.dtype)
    for settings in SETTINGS:
        drawn = ops.draw(logits, _sampling(3, settings), torch.tensor([1, 2, 3]))
        assert drawn.tolist() == [0, 1, 1]


@pytest.mark.parametrize("value", [float("nan"), -float("nan")])
def test_nan_gives_minus_one_in_its_row_only(ops: CpuOps, value: float) -> None:
    logits = _logits(ops, 1.0, 3, 100)
    logits[1, 77] = value
    for settings in ((0.0, 1.0, 0), (1.0, 0.9, 0)):
        drawn = ops.draw(logits, _sampling(3, settings), torch.tensor([1, 2, 3]))
        assert (drawn == -1).tolist() == [False, True, False]


def test_the_walk_goes_where_the_draws_go(ops: CpuOps) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, nodes, size = 300, 12, 6
    tokens = torch.randint(0, size, (rows, nodes), generator=generator)
    parents = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 5, 6, 6, 9]).expand(rows, -1)
    depth = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5]).expand(rows, -1)
    logits = _logits(ops, 1.0, rows, nodes, size)
    sampling, positions = _sampling(rows, (0.9, 0.95, 0)), depth + 5
    tree = Tree(tokens, parents, torch.zeros_like(depth), depth)
    ours, theirs = (
        each.verify(tree, each.sample(logits, tree, sampling, positions, 5), 5)
        for each in (ops, TorchOps())
    )
    same = (ours.tokens == theirs.tokens).all(1) & (ours.counts == theirs.counts)
    assert same.float().mean() > 0.99
    assert ours.counts.max() >= 3
