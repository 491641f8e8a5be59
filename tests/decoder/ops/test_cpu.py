"""The C++ kernels against the reference in float32, and against themselves in other batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.cpu.ops import CpuOps
from pipeline.decoder.ops.layer import PAGE
from pipeline.decoder.ops.tree import Tree
from tests.decoder.ops.conftest import slot_metadata
from tests.decoder.ops.kernels import KERNELS, assert_rounded, load_kernels, name_of, numbers

REFERENCE = TorchOps()


@pytest.fixture(scope="module", params=KERNELS, ids=name_of)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return load_kernels(*request.param)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


#: Shapes [rows, inputs, outputs] at which the product takes another way.
CORNERS = {
    "one number": (1, 1, 1),
    "a half panel, one row": (1, 33, 17),
    "whole panels, one row": (1, 64, 64),
    "both halves of a panel": (2, 2, 31),
    "most rows of a pass in AVX2, and one more": (7, 127, 65),
    "most rows of a pass in AVX-512": (12, 64, 96),
    "two passes": (13, 576, 96),
    "a tile and a rest": (40, 33, 48),
    "rows in chunks": (300, 1536, 48),
}


def check_linear(ops: CpuOps, rows: int, inputs: int, outputs: int, stored: torch.dtype) -> None:
    x, weight = numbers(ops, rows, inputs), torch.randn(outputs, inputs).to(stored)
    bias = numbers(ops, outputs) if (rows + outputs) % 2 else None
    if ops.dtype is torch.bfloat16:  # rounds weights that are stored in more
        weight = weight.bfloat16()
    wanted = REFERENCE.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_rounded(ops.linear(x, ops.pack(weight), bias), wanted, slack=1e-5 * math.sqrt(inputs))


@pytest.mark.parametrize("shape", CORNERS.values(), ids=CORNERS)
def test_linear(ops: CpuOps, shape: tuple[int, int, int]) -> None:
    for stored in (torch.bfloat16, torch.float32):
        check_linear(ops, *shape, stored)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 90),
    inputs=st.integers(1, 400),
    outputs=st.integers(1, 140),
    stored=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_linear_of_any_shape(
    ops: CpuOps, rows: int, inputs: int, outputs: int, stored: torch.dtype
) -> None:
    check_linear(ops, rows, inputs, outputs, stored)


def test_a_weight_in_float32_gives_the_bits_of_one_in_bfloat16(ops: CpuOps) -> None:
    weight, x = torch.randn(70, 90).bfloat16(), numbers(ops, 9, 90)
    y = ops.linear(x, ops.pack(weight))
    assert torch.equal(ops.linear(x, ops.pack(weight.float())), y)
    assert torch.equal(
        ops.linear(x, ops.pack(weight.half())), ops.linear(x, ops.pack(weight.half().float()))
    )


@pytest.mark.skipif(len(KERNELS) < 4, reason="one level only")
def test_float32_has_the_same_bits_on_every_level() -> None:
    both = [load_kernels(level, dtype) for level, dtype in KERNELS if dtype is torch.float32]
    assert len(both) == 2
    one, other = both
    x, weight, gate_up = torch.randn(21, 91), torch.randn(50, 91), torch.randn(21, 66) * 9
    for stored in (weight, weight.bfloat16()):
        assert torch.equal(*(ops.linear(x, ops.pack(stored)) for ops in both))
    normed, total = zip(*(ops.add_rms_norm(x, x, x[0], 1e-5) for ops in both), strict=True)
    assert torch.equal(*normed) and torch.equal(*total)
    assert torch.equal(one.silu_mul(gate_up), other.silu_mul(gate_up))
    assert torch.equal(*(ops.propose(x, 5)[0] for ops in both))


def test_linear_takes_views(ops: CpuOps) -> None:
    x, weight = numbers(ops, 3, 5, 48)[:, 2], numbers(ops, 48, 40).t()
    assert_rounded(ops.linear(x, ops.pack(weight)), x.double() @ weight.double().t(), slack=1e-4)


def test_a_row_of_linear_does_not_depend_on_the_others(ops: CpuOps) -> None:
    # 20,000 inputs split even 40 rows into several cached chunks.
    for inputs, outputs in [(576, 200), (20_000, 70), (131, 33)]:
        x, weight, bias = (
            numbers(ops, 77, inputs),
            ops.pack(numbers(ops, outputs, inputs)),
            numbers(ops, outputs),
        )
        together = ops.linear(x, weight, bias)
        for rows in (1, 2, 5, 16, 31):
            pieces = [ops.linear(part, weight, bias) for part in torch.split(x, rows)]
            assert torch.equal(torch.cat(pieces), together)
        with threads(3):
            assert torch.equal(ops.linear(x, weight, bias), together)


def test_nan_stays_in_its_row(ops: CpuOps) -> None:
    x, weight = numbers(ops, 20, 63), numbers(ops, 40, 63)
    x[7, 62] = float("nan")
    y = ops.linear(x, ops.pack(weight))
    assert y[7].isnan().all() and y.isnan().any(1).sum() == 1


@pytest.mark.parametrize(("rows", "size"), [(1, 576), (5, 33), (16, 2048), (200, 576), (1, 7)])
@pytest.mark.parametrize("updated", [False, True])
def test_add_rms_norm(ops: CpuOps, rows: int, size: int, updated: bool) -> None:
    x, update, weight = (
        numbers(ops, rows, size, scale=3),
        numbers(ops, rows, size) if updated else None,
        numbers(ops, size),
    )
    normed, total = ops.add_rms_norm(x, update, weight, 1e-5)
    assert torch.equal(total, x if update is None else x + update)
    wanted, _ = REFERENCE.add_rms_norm(total.float(), None, weight.float(), 1e-5)
    assert_rounded(normed, wanted)
    alone, _ = ops.add_rms_norm(x[-1:], None if update is None else update[-1:], weight, 1e-5)
    assert torch.equal(alone, normed[-1:])


@pytest.mark.parametrize(("rows", "size"), [(1, 1536), (3, 17), (64, 1536)])
def test_silu_mul(ops: CpuOps, rows: int, size: int) -> None:
    gate_up = numbers(ops, rows, 2 * size, scale=6)
    gate_up[0, :5] = torch.tensor([0.0, 200.0, -200.0, 3e38, -3e38])
    mixed = ops.silu_mul(gate_up)
    assert_rounded(mixed, REFERENCE.silu_mul(gate_up.float()), slack=1e-30)
    assert torch.equal(ops.silu_mul(gate_up[-1:]), mixed[-1:])


@pytest.mark.parametrize(
    ("heads", "groups", "size", "tokens"),
    [(9, 3, 64, 21), (4, 4, 80, 1), (8, 1, 96, 21), (8, 2, 128, 150), (3, 1, 6, 21)],
)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write(
    ops: CpuOps, heads: int, groups: int, size: int, tokens: int, normed: bool
) -> None:
    qkv, rotary = (
        numbers(ops, tokens, (heads + 2 * groups) * size),
        (numbers(ops, 400, size), numbers(ops, 400, size)),
    )
    norms = (numbers(ops, size), numbers(ops, size)) if normed else None
    positions, slots = torch.randint(400, (tokens,)), torch.randperm(4 * PAGE)[:tokens]
    planes = torch.full((2, 4, groups, PAGE, size), float("nan"), dtype=ops.dtype)
    where = slot_metadata(rotary, positions, slots)
    query = ops.rope_write(qkv, norms, 1e-6, where, planes[0], planes[1])

    wanted_planes = torch.full_like(planes, float("nan"), dtype=torch.float32)
    wide_norms = None if norms is None else (norms[0].float(), norms[1].float())
    wide_rotary = rotary[0].float(), rotary[1].float()
    wanted = REFERENCE.rope_write(
        qkv.float(),
        wide_norms,
        1e-6,
        slot_metadata(wide_rotary, positions, slots),
        wanted_planes[0],
        wanted_planes[1],
    )
    assert_rounded(query, wanted)
    assert torch.equal(planes.isnan(), wanted_planes.isnan())  # nothing else was written
    assert_rounded(planes.nan_to_num(), wanted_planes.nan_to_num())
    assert torch.equal(
        planes[1].nan_to_num().float(), wanted_planes[1].nan_to_num()
    )  # values are copied as they are


@pytest.mark.parametrize("size", [576, 33])
def test_embed_concat(ops: CpuOps, size: int) -> None:
    tokens, embedding, hidden = (
        torch.tensor([4, 0, 9]),
        numbers(ops, 10, size),
        numbers(ops, 3, size),
    )
    norms = numbers(ops, size), numbers(ops, size)
    both = ops.embed_concat(tokens, embedding, hidden, *norms, 1e-5)
    wide = embedding.float(), hidden.float(), norms[0].float(), norms[1].float()
    assert_rounded(both, REFERENCE.embed_concat(tokens, *wide, 1e-5))


@pytest.mark.parametrize("token", [10, 1 << 40, -1])
def test_embed_concat_refuses_a_token_without_an_embedding(ops: CpuOps, token: int) -> None:
    tensors = numbers(ops, 10, 33), numbers(ops, 3, 33), numbers(ops, 33), numbers(ops, 33)
    with pytest.raises(IndexError, match=f"token {token} is outside the embedding of 10 tokens"):
        ops.embed_concat(torch.tensor([4, token, 9]), *tensors, 1e-5)


@pytest.mark.parametrize(("rows", "k"), [(1, 1), (1, 4), (5, 8)])
def test_select_beams(ops: CpuOps, rows: int, k: int) -> None:
    score, gained = -torch.rand(rows, k), -torch.randint(1, 9, (rows, k, k)) / 4
    proposed, beam_mask = torch.randint(999, (rows, k, k)), torch.randint(1 << 40, (rows, k))
    hidden, bits = numbers(ops, rows * k, 24), torch.randint(1 << 40, (rows, k))
    arguments = score, gained, proposed, beam_mask, hidden, bits
    kept, wanted = (backend.select_beams(*arguments) for backend in (ops, REFERENCE))
    for name in ("total", "best", "score", "token", "beam_mask", "hidden"):
        assert torch.equal(getattr(kept, name), getattr(wanted, name)), name


@pytest.mark.parametrize("size", [1, 15, 16, 1000, 49_152])
def test_argmax(ops: CpuOps, size: int) -> None:
    # A hundred different values, so that equals are common.
    logits = torch.randint(-50, 50, (3, 4, size)).to(ops.dtype)
    logits[0, 0] = float("-inf")
    logits[0, 1, size // 2] = float("nan")
    logits[0, 2] = -0.0
    logits[0, 2, -1] = 0.0  # equal to -0
    logits[0, 3] = float("inf")
    index = ops.argmax(logits)
    assert torch.equal(index[0], torch.tensor([0, -1, 0, 0]))
    assert torch.equal(
        index[1:], (logits[1:] == logits[1:].amax(-1, keepdim=True)).int().argmax(-1)
    )


@pytest.mark.parametrize(
    ("size", "k"), [(10, 10), (17, 3), (1000, 8), (8192, 10), (300, 64), (300, 65)]
)
def test_propose(ops: CpuOps, size: int, k: int) -> None:
    logits = numbers(ops, 9, size, scale=4)
    scores, index = ops.propose(logits, k)
    wanted, _ = REFERENCE.propose(logits.double(), k)
    torch.testing.assert_close(scores, wanted, rtol=0, atol=2e-5)
    assert torch.equal(
        logits.gather(1, index), logits.sort(descending=True, stable=True).values[:, :k]
    )
    if k <= 64:  # beyond, torch is free to order equals as it likes
        assert torch.equal(index, logits.sort(descending=True, stable=True).indices[:, :k])
        assert torch.equal(ops.propose(logits[3:4], k)[0], scores[3:4])


def test_propose_shows_nan(ops: CpuOps) -> None:
    logits = numbers(ops, 3, 200)
    logits[1, 150] = float("nan")
    scores, index = ops.propose(logits, 4)
    assert (
        torch.equal(scores.isnan().all(1), torch.tensor([False, True, False]))
        and not scores[0].isnan().any()
    )
    assert index.min() >= 0 and index.max() < 200


def random_candidates(rows: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents, cumulative scores [rows, count] as drafted, with many equal scores."""
    parents = torch.stack(
        [
            torch.randint(-1, index, (rows,)) if index else torch.full((rows,), -1)
            for index in range(count)
        ],
        1,
    )
    scores = torch.zeros(rows, count)
    for index in range(count):
        above = torch.where(
            parents[:, index] < 0,
            0.0,
            scores.gather(1, parents[:, index : index + 1].clamp(min=0))[:, 0],
        )
        scores[:, index] = above - torch.randint(0, 4, (rows,)) / 2
    return torch.randint(6, (rows, count)), parents, scores


@pytest.mark.parametrize(
    ("rows", "count", "nodes"), [(1, 5, 3), (3, 40, 16), (2, 200, 64), (4, 6, 20), (2, 5, 1)]
)
def test_grow_tree_and_verify(ops: CpuOps, rows: int, count: int, nodes: int) -> None:
    for _ in range(5):
        tokens, parents, scores = random_candidates(rows, count)
        roots = torch.randint(6, (rows,))
        tree, wanted = (
            backend.grow_tree(roots, tokens, parents, scores, nodes) for backend in (ops, REFERENCE)
        )
        for name in ("tokens", "parents", "tree_mask", "depth"):
            assert torch.equal(getattr(tree, name), getattr(wanted, name)), name
        depth = int(tree.depth.max())
        predicted = torch.randint(-1, 6, tree.tokens.shape)
        accepted, expected = (
            backend.verify(tree, predicted, depth) for backend in (ops, REFERENCE)
        )
        for name in ("path", "counts", "tokens"):
            assert torch.equal(getattr(accepted, name), getattr(expected, name)), name


def test_grow_tree_survives_nan(ops: CpuOps) -> None:
    tokens, parents, scores = random_candidates(2, 30)
    scores[0, 3:] = float("nan")
    tree, wanted = (
        backend.grow_tree(torch.zeros(2, dtype=torch.int64), tokens, parents, scores, 12)
        for backend in (ops, REFERENCE)
    )
    assert torch.equal(tree.parents, wanted.parents) and torch.equal(tree.tokens, wanted.tokens)


def test_verify_accepts_a_whole_branch(ops: CpuOps) -> None:
    chain = torch.arange(5)[None]
    tree = Tree(chain, (chain - 1).clamp(min=0), 2 ** (chain + 1) - 1, chain)
    accepted = ops.verify(tree, chain + 1, 4)
    assert (
        accepted.counts.tolist() == [5]
        and accepted.path.tolist() == [[0, 1, 2, 3, 4]]
        and accepted.tokens.tolist() == [[1, 2, 3, 4, 5]]
    )


@pytest.mark.parametrize("layers", [1, 9])
def test_compact(ops: CpuOps, layers: int) -> None:
    planes = numbers(ops, layers, 2, 6, 3, PAGE, 64)
    block_table = torch.tensor([[3, 1], [5, 2], [4, 0]])
    seq_lens = torch.tensor([PAGE - 2, 0, 17])  # the first branch crosses a page
    path = torch.tensor([[0, 2, 5, 9, 9], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]])
    wanted = planes.clone()
    REFERENCE.compact(wanted, block_table, seq_lens, path)
    before = planes.clone()
    ops.compact(planes, block_table, seq_lens, path)
    for row, counts in enumerate([4, 5, 1]):
        for entry in range(int(seq_lens[row]) + counts):
            page, offset = int(block_table[row, entry // PAGE]), entry % PAGE
            assert torch.equal(planes[:, :, page, :, offset], wanted[:, :, page, :, offset])
    still = [0, 2, 4, 5]  # rows 1 and 2 move nothing
    assert torch.equal(planes[:, :, still], before[:, :, still])
