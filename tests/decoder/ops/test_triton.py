"""Every Triton kernel against the reference, on random shapes, what must not matter poisoned.

Without a GPU these tests run in Triton's interpreter, see conftest.py.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from pipeline.decoder.ops.base import PAGE, TorchOps, _keep_top
from pipeline.decoder.ops.philox import uniform
from pipeline.decoder.ops.triton.language import INTERPRETED, Pointer, Scalar, jit
from pipeline.decoder.ops.triton.ops import TritonOps
from pipeline.decoder.ops.triton.sampling import _largest, keep_top
from pipeline.decoder.ops.triton.sampling import uniform as uniform_in_kernel
from pipeline.decoder.ops.triton.top_k import value_of
from pipeline.decoder.tree import SamplingTensors, Tree

REFERENCE = TorchOps()
OPS = TritonOps()
TYPES = [torch.float32, torch.bfloat16]
#: Largest error against the reference in float64 on the same inputs, of values about 1 in size.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def seeded(seed: int) -> random.Random:
    torch.manual_seed(seed)
    return random.Random(seed)


def error(got: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative where values are above 1; infinite if anything is NaN."""
    difference = (got.double() - wanted.double()).abs() / wanted.double().abs().clamp(min=1)
    return float(difference.nan_to_num(nan=float("inf")).max())


# Rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("count", "size"), [(1, 64), (3, 100), (7, 576), (2, 4096)])
def test_add_rms_norm(device: torch.device, dtype: torch.dtype, count: int, size: int) -> None:
    seeded(size)
    x, update, weight = (
        torch.randn(shape, dtype=dtype, device=device)
        for shape in ((count, size), (count, size), (size,))
    )
    for added in (update, None):
        normed, total = OPS.add_rms_norm(x, added, weight, 1e-5)
        # The interpreter truncates to bfloat16, a GPU rounds: up to one step apart.
        assert error(total, x if added is None else x + added) <= (
            2**-7 if INTERPRETED and dtype == torch.bfloat16 else 0
        )
        wanted, _ = REFERENCE.add_rms_norm(total.double(), None, weight.double(), 1e-5)
        assert normed.dtype == dtype and error(normed, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("count", "size"), [(1, 64), (5, 100), (3, 1536)])
def test_silu_mul(device: torch.device, dtype: torch.dtype, count: int, size: int) -> None:
    seeded(size)
    x = torch.randn(count, 2 * size, dtype=dtype, device=device) * 4
    x[0, 0] = -200.0  # exp(200) is infinite in float32
    assert error(OPS.silu_mul(x), REFERENCE.silu_mul(x.double())) < TOLERANCE[dtype]


# Cache -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "groups", "size"), [(3, 3, 64), (6, 2, 80), (8, 2, 96), (8, 1, 128), (4, 2, 8)]
)
def test_rope_write(
    device: torch.device, dtype: torch.dtype, normed: bool, heads: int, groups: int, size: int
) -> None:
    seeded(size + heads)
    count, pages = 9, 3
    qkv = torch.randn(count, (heads + 2 * groups) * size, dtype=dtype, device=device)
    rotary = (
        torch.randn(500, size, device=device).to(dtype),
        torch.randn(500, size, device=device).to(dtype),
    )
    norms = (
        (torch.randn(size, device=device).to(dtype), torch.randn(size, device=device).to(dtype))
        if normed
        else None
    )
    positions = torch.randint(0, 500, (count,), device=device)
    slots = torch.randperm(pages * PAGE, device=device)[:count]
    # A slice of a larger pool, as the model passes it; what is not written must stay as it is.
    pool = torch.full((2, 2, pages, groups, PAGE, size), float("nan"), dtype=dtype, device=device)
    wanted_pool = pool.double()
    query = OPS.rope_write(qkv, norms, 1e-6, rotary, positions, slots, *pool[1])
    wide_norms = None if norms is None else (norms[0].double(), norms[1].double())
    wanted = REFERENCE.rope_write(
        qkv.double(),
        wide_norms,
        1e-6,
        (rotary[0].double(), rotary[1].double()),
        positions,
        slots,
        *wanted_pool[1],
    )
    tolerance = TOLERANCE[dtype] * (
        3 if normed else 1
    )  # bfloat16 rounds once more, before the rotation
    assert error(query, wanted) < tolerance
    assert torch.equal(pool.isnan(), wanted_pool.isnan())
    assert error(pool.nan_to_num(0), wanted_pool.nan_to_num(0)) < tolerance
    assert torch.equal(
        pool[1, 1].double().nan_to_num(0), wanted_pool[1, 1].nan_to_num(0)
    )  # values are copied


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("size", "moved"), [(64, 7), (80, 17), (128, 1)])
def test_compact(device: torch.device, dtype: torch.dtype, size: int, moved: int) -> None:
    chance = seeded(size)
    rows, groups, pages = 3, 2, 4
    planes = torch.randn(2, 2, rows * pages, groups, PAGE, size, device=device).to(dtype)
    block_table = torch.randperm(rows * pages, device=device).view(rows, pages)
    seq_lens = torch.tensor(
        [0, 60, 127], device=device
    )  # within a page, across its end, at its end
    path = torch.zeros(rows, moved, dtype=torch.int64)
    for row in range(rows):
        real = chance.randint(1, moved)
        path[row, :real] = torch.tensor([0, *sorted(chance.sample(range(1, 40), real - 1))])
        path[row, real:] = path[row, real - 1]
    wanted = planes.clone()
    REFERENCE.compact(wanted, block_table, seq_lens, path.to(device))
    OPS.compact(planes, block_table, seq_lens, path.to(device))
    assert torch.equal(planes, wanted)


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
    for name in ("tokens", "parents", "ancestors", "depth"):
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
    assert got.ancestors[0].tolist() == [(1 << (n + 1)) - 1 if n < 63 else -1 for n in range(64)]


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


# Sampling ----------------------------------------------------------------------------------------


@jit
def uniform_kernel(seeds: Pointer, positions: Pointer, out: Pointer, BLOCK: tl.constexpr) -> None:
    at = tl.arange(0, BLOCK)
    tl.store(out + at, uniform_in_kernel(tl.load(seeds + at), tl.load(positions + at)))


@jit
def kept_kernel(
    logits: Pointer,
    values: Pointer,
    index: Pointer,
    temperature: Pointer,
    top_p: Pointer,
    top_k: Pointer,
    kept: Pointer,
    size: Scalar,
    NEAR: tl.constexpr,
) -> None:
    """kept [B, 2]: how many candidates are listed, and the lowest image that is kept."""
    row = tl.program_id(0) * size
    temperature = tl.load(temperature + tl.program_id(0))
    top_p, top_k = tl.load(top_p + tl.program_id(0)), tl.load(top_k + tl.program_id(0))
    peak = tl.div_rn(value_of(_largest(logits + row, size, 1024)), temperature)
    count, least = keep_top(
        logits + row, values + row, index + row,
        temperature, peak, top_p, top_k, size, NEAR, 1024, 4,
    )  # fmt: skip
    tl.store(kept + tl.program_id(0) * 2, count.to(tl.int64))
    tl.store(kept + tl.program_id(0) * 2 + 1, least)


def settings(device: torch.device, rows: list[tuple[float, float, int]]) -> SamplingTensors:
    """SamplingTensors of rows (temperature, top_p, top_k), with seeds of more than 32 bits."""
    columns = (torch.tensor(column, device=device) for column in zip(*rows, strict=True))
    temperature, top_p, top_k = columns
    seeds = torch.randint(0, 2**62, (len(rows),), device=device)
    return SamplingTensors(temperature, top_p, top_k, seeds)


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


def test_uniform(device: torch.device) -> None:
    seeded(0)
    seeds, positions = torch.randint(0, 2**63 - 1, (2, 1024), device=device)
    positions[:512] %= 5000
    got = torch.full((1024,), float("nan"), device=device)
    uniform_kernel[(1,)](seeds, positions, got, BLOCK=1024)
    assert torch.equal(got, uniform(seeds, positions))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("near", [16.0, 0.5])
@pytest.mark.parametrize("ties", [False, True])
def test_kept_set(device: torch.device, seed: int, near: float, ties: bool) -> None:
    """The same tokens survive top-k and top-p, ties included.

    With a small `near` the candidates never suffice at first.
    """
    seeded(seed)
    cases = [case for case in CASES if case[0] > 0]
    sampling = settings(device, cases)
    logits = torch.randn(len(cases), 3000, device=device) * 3
    if ties:
        logits = (logits * 4).round() / 4
    values, index = (
        torch.full_like(logits, float("nan")),
        torch.full_like(logits, -1, dtype=torch.int32),
    )
    kept = torch.empty(len(cases), 2, dtype=torch.int64, device=device)
    kept_kernel[(len(cases),)](
        logits,
        values,
        index,
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        kept,
        3000,
        NEAR=near,
    )
    scaled = logits / sampling.temperature[:, None]
    wanted = _keep_top(scaled, sampling).isfinite()
    for row, (count, least) in enumerate(kept.tolist()):
        bits = values[row, :count].view(torch.int32).long()
        image = torch.where(values[row, :count] == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))
        assert (
            index[row, :count][image >= least].tolist() == wanted[row].nonzero()[:, 0].tolist()
        ), cases[row]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [5, 300, 5000])
def test_draw(device: torch.device, dtype: torch.dtype, size: int) -> None:
    seeded(size)
    sampling = settings(device, CASES)
    logits = (torch.randn(len(CASES), size, device=device) * 2).to(dtype)
    for position in range(2):
        positions = torch.arange(len(CASES), device=device) + 100 * position
        assert torch.equal(
            OPS.draw(logits, sampling, positions), REFERENCE.draw(logits, sampling, positions)
        )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("seed", range(2))
def test_sample(device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Walks that go deep: the vocabulary is the tree's, so that draws often name a child.

    One row holds a NaN.
    """
    chance = seeded(seed)
    sampling = settings(device, CASES)
    tree = random_tree(chance, len(CASES), 40, device)
    logits = torch.randn(len(CASES), 40, 20, device=device)
    for child in range(1, 40):
        logits[torch.arange(len(CASES)), tree.parents[:, child], tree.tokens[:, child]] += 4
    logits = logits.to(dtype)
    logits[3, 0, 11] = float("nan")
    positions = 7 + tree.depth
    got, wanted = (
        OPS.sample(logits, tree, sampling, positions, 6),
        REFERENCE.sample(logits, tree, sampling, positions, 6),
    )
    assert torch.equal(got, wanted)
    assert (wanted[3] == -1).all() and int(
        (wanted >= 0).sum(1).max()
    ) > 2  # some walk took more than one step
    # What a draw reads is its own row: others may hold anything.
    logits[1:] = float("nan")
    assert torch.equal(OPS.sample(logits, tree, sampling, positions, 6)[0], wanted[0])
    assert (
        OPS.sample(logits, tree, replace(sampling, seeds=sampling.seeds + 1), positions, 6)[1:]
        == -1
    ).all()
