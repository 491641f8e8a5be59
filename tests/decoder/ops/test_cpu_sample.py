"""Sampling in C++ against the definition: the kept set, the draw, the walk."""

from __future__ import annotations

import pytest
import torch

from pipeline.decoder.ops.base import TorchOps, cumulative
from pipeline.decoder.ops.cpu import ops as cpu_ops
from pipeline.decoder.ops.philox import uniform
from pipeline.decoder.tree import SamplingTensors, Tree

OPS = cpu_ops.load()
pytestmark = pytest.mark.skipif(OPS is None, reason=cpu_ops.why_not())
SETTINGS = [
    (0.0, 1.0, 0),
    (1.0, 1.0, 0),
    (0.7, 0.9, 0),
    (1.3, 1.0, 5),
    (0.9, 0.5, 40),
    (1.0, 1e-6, 0),
    (2.0, 0.99, 1),
    (1e-3, 0.9, 0),
]


def _sampling(rows: int, settings: tuple[float, float, int]) -> SamplingTensors:
    temperature, top_p, top_k = settings
    seeds = torch.randint(0, 2**62, (rows,), generator=torch.Generator().manual_seed(rows))
    return SamplingTensors(
        torch.full((rows,), temperature),
        torch.full((rows,), top_p),
        torch.full((rows,), top_k),
        seeds,
    )


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("size", [3, 500, 49152])
@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_draws_are_the_reference_s(
    settings: tuple[float, float, int], size: int, spread: float
) -> None:
    assert OPS is not None
    rows = 40
    generator = torch.Generator().manual_seed(size)
    logits = (spread * torch.randn(rows, size, generator=generator)).bfloat16()  # 8 bits: many ties
    positions = torch.randint(0, 10_000, (rows,), generator=generator)
    sampling = _sampling(rows, settings)
    drawn = OPS.draw(logits, sampling, positions)
    if settings[0] == 0:
        assert torch.equal(drawn, logits.float().argmax(-1))
        return
    total = cumulative(logits, sampling)  # [B, V]
    wanted = uniform(sampling.seeds, positions).double() * total[:, -1]
    above = total.gather(1, drawn[:, None])[:, 0]
    below = torch.nn.functional.pad(total, (1, 0)).gather(1, drawn[:, None])[:, 0]
    assert (above > below).all(), "a token outside the kept set was drawn"
    # A number at the very edge between two tokens may be rounded to either side.
    assert torch.maximum(below - wanted, wanted - above).max() < 1e-6
    assert (drawn == TorchOps().draw(logits, sampling, positions)).float().mean() >= 0.9


@pytest.mark.parametrize("value", [float("nan"), -float("nan")])
def test_nan_gives_minus_one_in_its_row_only(value: float) -> None:
    assert OPS is not None
    logits = torch.randn(3, 100).bfloat16()
    logits[1, 77] = value
    for settings in ((0.0, 1.0, 0), (1.0, 0.9, 0)):
        drawn = OPS.draw(logits, _sampling(3, settings), torch.tensor([1, 2, 3]))
        assert (drawn == -1).tolist() == [False, True, False]


def test_the_walk_goes_where_the_draws_go() -> None:
    assert OPS is not None
    generator = torch.Generator().manual_seed(0)
    rows, nodes, size = 300, 12, 6
    tokens = torch.randint(0, size, (rows, nodes), generator=generator)
    parents = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 5, 6, 6, 9]).expand(rows, -1)
    depth = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5]).expand(rows, -1)
    logits = torch.randn(rows, nodes, size, generator=generator).bfloat16()
    sampling, positions = _sampling(rows, (0.9, 0.95, 0)), depth + 5
    tree = Tree(tokens, parents, torch.zeros_like(depth), depth)
    ours, theirs = (
        ops.verify(tree, ops.sample(logits, tree, sampling, positions, 5), 5)
        for ops in (OPS, TorchOps())
    )
    same = (ours.tokens == theirs.tokens).all(1) & (ours.counts == theirs.counts)
    assert same.float().mean() > 0.99
    assert ours.counts.max() >= 3
