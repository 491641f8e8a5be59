"""Drawing tokens in Triton against the reference: random numbers, kept sets, draws.

Without a GPU these tests run in Triton's interpreter, see conftest.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

import pipeline.decoder.ops.triton.ops as choices
from pipeline.decoder.ops import draws as philox
from pipeline.decoder.ops.draws import keep_top, perturb
from pipeline.decoder.ops.tree import SamplingTensors, root_only
from pipeline.decoder.ops.triton.launch import Pointer, Table, jit
from pipeline.decoder.ops.triton.logits import gumbel, threshold_kernel
from tests.decoder.ops.compare import OPS, REFERENCE, TYPES, seeded

CASES = [
    (1.0, 1.0, 0),
    (0.7, 0.9137, 0),
    (1.3, 1.0, 20),
    (0.9, 0.8311, 50),
    (0.0, 0.5, 3),
    (1.0, 0.0, 0),
    (2.0, 0.9871, 100000),
    (0.05, 0.31, 7),
]
#: Sums of logits and noise that are this close may be rounded to either order.
NEAR_TIE = 1e-4


@jit
def gumbel_kernel(
    seed: Table, position: Table, out: Pointer, GROUPS: tl.constexpr, FIRST: tl.constexpr
) -> None:
    group = tl.arange(0, GROUPS)
    at = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out + at, gumbel(tl.load(seed), tl.load(position), group + FIRST))


def settings(device: torch.device, rows: list[tuple[float, float, int]]) -> SamplingTensors:
    """SamplingTensors of rows (temperature, top_p, top_k), with seeds of more than 32 bits."""
    columns = (torch.tensor(column, device=device) for column in zip(*rows, strict=True))
    temperature, top_p, top_k = columns
    seeds = torch.randint(0, 2**62, (len(rows),), device=device)
    return SamplingTensors(temperature, top_p, top_k, seeds)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (2**63 - 1, 5), (12345678901234, 2**40)])
def test_noise(device: torch.device, seed: int, position: int) -> None:
    """The words of every token, by their Gumbel numbers."""
    first = 1000
    got = torch.full((4096,), float("nan"), device=device)
    where = torch.tensor([seed], device=device), torch.tensor([position], device=device)
    gumbel_kernel[(1,)](*where, got, GROUPS=1024, FIRST=first)
    wanted = philox.gumbel(*where, 4 * first + 4096)[0, 4 * first :]
    assert float((got - wanted).abs().max()) < 4e-6


def test_largest_and_smallest_noise(device: torch.device) -> None:
    """Words of zero and of all ones would be infinite without their half and their bound."""
    v = (torch.tensor([0.0, 2**32 - 1.0]) + 0.5) * 2.0**-32
    exponential = -torch.log1p(-v.clamp(max=1 - 2.0**-24).double())
    bounds = -exponential.log()
    assert bounds[0] < 22.88 and bounds[1] > -2.82


def threshold(logits: Tensor, sampling: SamplingTensors, near: float, capacity: int) -> Tensor:
    """The least scaled logit that each row of logits [B, V] keeps."""
    rows, size = logits.shape
    least = torch.full((rows,), float("nan"), device=logits.device)
    by_row = sampling.temperature, sampling.top_p, sampling.top_k
    scratch = torch.full((rows, capacity), float("nan"), dtype=logits.dtype, device=logits.device)
    sizes = {"SIZE": size, "CAPACITY": capacity, "NEAR": near, "BLOCK": 1024, "WAYS": 4}
    threshold_kernel[(rows,)](logits, *by_row, scratch, least, 1, **sizes)
    return least


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("near", "capacity"), [(16.0, 4096), (0.5, 4096), (16.0, 64)])
@pytest.mark.parametrize("ties", [False, True])
def test_kept_set(
    device: torch.device, dtype: torch.dtype, near: float, capacity: int, ties: bool
) -> None:
    """The same tokens survive top-k and top-p, ties included.

    With a small `near` the candidates do not suffice, with a small `capacity` they do not fit.
    """
    seeded(int(near) + capacity)
    cases = [case for case in CASES if case[0] > 0]
    sampling = settings(device, cases)
    logits = torch.randn(len(cases), 3000, device=device) * 3
    logits[:, 7] = float("-inf")
    logits = ((logits * 4).round() / 4 if ties else logits).to(dtype)
    least = threshold(logits, sampling, near, capacity)
    scaled = logits.float() / sampling.temperature[:, None]
    wanted = keep_top(scaled, sampling) > float("-inf")
    for row, case in enumerate(cases):
        kept = scaled[row] >= least[row]
        kept[7] = wanted[row, 7]
        assert torch.equal(kept, wanted[row]), case
    assert (least == float("-inf")).tolist() == [p >= 1 and k in (0, 100000) for _, p, k in cases]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 50, 5000])
def test_draw(device: torch.device, dtype: torch.dtype, size: int) -> None:
    seeded(size)
    sampling = settings(device, CASES)
    logits = (torch.randn(len(CASES), size, device=device) * 2).to(dtype)
    for position in range(2):
        positions = torch.arange(len(CASES), device=device) + 100 * position
        drawn = OPS.draw(logits, sampling, positions)
        noisy = perturb(logits, sampling, positions)
        behind = noisy.max(-1).values - noisy.gather(1, drawn[:, None])[:, 0]
        assert float(behind.max()) < NEAR_TIE
        assert (behind == 0).sum() >= len(CASES) - 1


@pytest.mark.parametrize("dtype", TYPES)
def test_sample(device: torch.device, dtype: torch.dtype) -> None:
    """Every node draws as its row does, at its position; a NaN is its node's only."""
    seeded(0)
    sampling = settings(device, CASES)
    rows, nodes, size = len(CASES), 3, 30
    logits = torch.randn(rows, nodes, size, device=device).to(dtype)
    logits[3, 2, 11] = float("nan")
    tree = root_only(torch.zeros(rows, dtype=torch.int64, device=device))
    positions = torch.randint(0, 1000, (rows, 2 * nodes), device=device)[:, :nodes]
    got = OPS.sample(logits, tree, sampling, positions, 4)
    assert got[3, 2] == -1 and int((got < 0).sum()) == 1
    assert (got == REFERENCE.sample(logits, tree, sampling, positions, 4)).sum() >= rows * nodes - 1
    assert torch.equal(got[:, 1], OPS.draw(logits[:, 1], sampling, positions[:, 1]))
    others = replace(sampling, seeds=sampling.seeds + 1)
    assert not torch.equal(OPS.sample(logits, tree, others, positions, 4), got)


def test_rows_without_a_finite_choice(device: torch.device) -> None:
    """The first of the infinite ones, as in the reference, top-k and top-p or not."""
    inf = float("inf")
    logits = torch.tensor([[-inf] * 5, [0.0, inf, 1.0, inf, -inf]], device=device).repeat(4, 1)
    cases = [(1.0, p, k) for p in (1.0, 0.5) for k in (0, 2) for _ in range(2)]
    sampling = settings(device, cases)
    positions = torch.arange(8, device=device)
    assert OPS.draw(logits, sampling, positions).tolist() == [0, 1] * 4


def test_few_candidates_fit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operation passes its limits on, and draws the same beyond them."""
    seeded(3)
    sampling = settings(device, CASES)
    logits, positions = torch.randn(len(CASES), 900, device=device), torch.arange(len(CASES))
    wanted = OPS.draw(logits, sampling, positions.to(device))
    monkeypatch.setattr(choices, "CAPACITY", 32)
    assert torch.equal(OPS.draw(logits, sampling, positions.to(device)), wanted)
