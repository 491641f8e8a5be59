"""Triton kernels on hidden states and the cache against the reference, on random shapes.

Without a GPU these tests run in Triton's interpreter, see conftest.py.
"""

from __future__ import annotations

import pytest
import torch

from pipeline.decoder.ops.layer import PAGE
from pipeline.decoder.ops.triton.launch import INTERPRETED
from pipeline.decoder.ops.triton.ops import TritonOps
from tests.decoder.ops.compare import OPS, REFERENCE, TOLERANCE, TYPES, error, seeded
from tests.decoder.ops.conftest import slot_metadata

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


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("count", "size"), [(1, 64), (5, 100)])
def test_embed_concat(device: torch.device, dtype: torch.dtype, count: int, size: int) -> None:
    seeded(size)
    embedding, states, *norms = (
        torch.randn(shape, device=device).to(dtype)
        for shape in ((30, size), (count, 2 * size), (size,), (size,))
    )
    tokens, hidden = torch.randint(0, 30, (count,), device=device), states[:, :size]  # a view
    got = OPS.embed_concat(tokens, embedding, hidden, norms[0], norms[1], 1e-5)
    wide = norms[0].double(), norms[1].double()
    wanted = REFERENCE.embed_concat(tokens, embedding.double(), hidden.double(), *wide, 1e-5)
    assert got.dtype == dtype and got.is_contiguous()
    assert error(got, wanted) < TOLERANCE[dtype]


def test_views_are_read_as_what_they_are(device: torch.device) -> None:
    """Every second row, and columns in the middle: strides that no kernel knows."""
    seeded(0)
    x, update = torch.randn(2, 8, 96, device=device)[..., 16:80][:, ::2]
    weight = torch.randn(64, device=device)
    got = *OPS.add_rms_norm(x, update, weight, 1e-5), OPS.silu_mul(x)
    wanted = *REFERENCE.add_rms_norm(x, update, weight, 1e-5), REFERENCE.silu_mul(x)
    assert all(error(*pair) < 1e-5 for pair in zip(got, wanted, strict=True))


def test_a_kernel_refuses_a_view_whose_strides_it_does_not_know(device: torch.device) -> None:
    weight = torch.randn(128, device=device)[::2]
    with pytest.raises(AssertionError, match=r"add_rms_norm_kernel reads a view of shape \[64\]"):
        OPS.add_rms_norm(torch.randn(1, 64, device=device), None, weight, 1e-5)


def test_weights_take_the_type_of_the_activations(device: torch.device) -> None:
    """A weight stored in another type would not multiply: cuBLAS knows one type at a time."""
    for dtype in TYPES:
        ops = TritonOps(dtype)
        packed = ops.pack(torch.randn(4, 8, dtype=torch.bfloat16, device=device))
        assert ops.dtype == packed.dtype == dtype
        assert ops.linear(torch.randn(2, 8, dtype=dtype, device=device), packed).shape == (2, 4)


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
    where = slot_metadata(rotary, positions, slots)
    query = OPS.rope_write(qkv, norms, 1e-6, where, *pool[1])
    wide_norms = None if norms is None else (norms[0].double(), norms[1].double())
    wide = slot_metadata((rotary[0].double(), rotary[1].double()), positions, slots)
    wanted = REFERENCE.rope_write(qkv.double(), wide_norms, 1e-6, wide, *wanted_pool[1])
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
