"""Attention in Triton against the reference in float64: whatever a query must not see is NaN, or no page at all.

Without a GPU these tests run in Triton's interpreter, see conftest.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from pipeline.decoder.ops.base import PAGE, TorchOps
from pipeline.decoder.ops.triton.ops import TritonOps, split_count
from pipeline.decoder.tree import WINDOW

REFERENCE = TorchOps()
OPS = TritonOps()
TYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Problem:
    """B rows of queries over a cache in which every entry that no query of its row sees is NaN."""

    query: Tensor  # [B, N, Q, d]
    keys: Tensor  # [pages, G, PAGE, d]
    values: Tensor
    table: Tensor  # [B, P]
    starts: Tensor  # [B]
    visible: Tensor | None  # [B, N]

    def run(self) -> Tensor:
        return OPS.tree_attention(
            self.query, self.keys, self.values, self.table, self.starts, self.visible
        )

    def reference(self) -> Tensor:
        """In float64 on the same numbers; pages that do not exist are page 0 to it."""
        table = torch.where(self.table < len(self.keys), self.table, 0)
        return REFERENCE.tree_attention(
            self.query.double(),
            self.keys.double(),
            self.values.double(),
            table,
            self.starts,
            self.visible,
        )

    def error(self) -> float:
        """Largest difference; infinite if anything is NaN."""
        return float(
            (self.run().double() - self.reference()).abs().nan_to_num(nan=float("inf")).max()
        )


def problem(
    seed: int,
    starts: list[int],
    count: int,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    size: int = 64,
    causal: bool = False,
    window: int | None = None,
    spare: int = 3,
) -> Problem:
    """Random queries of `heads` (query, key/value) over prefixes `starts`; tables are `spare` pages wider than needed.

    A query sees itself and a random half of the `window` entries behind the prefix (default: as many as queries).
    """
    chance = random.Random(seed)
    torch.manual_seed(seed)
    rows, reach = len(starts), count if causal else window or count
    shared = sum(
        1 << offset for offset in range(reach) if chance.random() < 0.7
    )  # what nobody may see is NaN later
    visible = (
        torch.tensor(
            [
                [_signed((chance.getrandbits(reach) & shared) | 1 << n) for n in range(count)]
                for _ in starts
            ]
        )
        if not causal
        else None
    )
    needed = -(-(max(starts) + reach) // PAGE)
    pages = rows * needed
    table = torch.full((rows, needed + spare), 10**9)  # no such page
    table[:, :needed] = torch.randperm(pages).view(rows, needed)
    planes = torch.full((2, pages, heads[1], PAGE, size), float("nan"), dtype=dtype)
    for row, start in enumerate(starts):
        bits = (1 << count) - 1 if visible is None else _union(visible[row])
        seen = torch.tensor(
            [
                *range(start),
                *(
                    start + offset
                    for offset in range(WINDOW if not causal else count)
                    if bits >> offset & 1
                ),
            ]
        )
        planes[:, table[row, seen // PAGE], :, seen % PAGE] = torch.randn(
            len(seen), 2, heads[1], size
        ).to(dtype)
    query = torch.randn(rows, count, heads[0], size).to(dtype)
    return Problem(
        query=query.to(device),
        keys=planes[0].to(device),
        values=planes[1].to(device),
        table=table.to(device),
        starts=torch.tensor(starts, device=device),
        visible=None if visible is None else visible.to(device),
    )


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _union(masks: Tensor) -> int:
    bits = 0
    for mask in masks.tolist():
        bits |= mask & (1 << 64) - 1
    return bits


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [64, 80, 96, 128])
@pytest.mark.parametrize("ratio", [1, 3, 4, 8])
def test_shapes(device: torch.device, dtype: torch.dtype, size: int, ratio: int) -> None:
    """Every ratio of heads with every size of them, over ragged prefixes, in random trees or chunks."""
    seed = size + ratio + TYPES.index(dtype)
    chance = random.Random(seed)
    starts, groups = (
        [chance.choice((0, 1, 63, 64, 65, 127, 128)), chance.randint(0, 200)],
        1 if ratio > 1 else 2,
    )
    posed = problem(
        seed,
        starts,
        chance.randint(1, 9),
        device,
        dtype=dtype,
        heads=(groups * ratio, groups),
        size=size,
        causal=bool(seed & 1),
        spare=chance.randint(0, 3),
    )
    assert posed.run().dtype == dtype
    assert posed.error() < TOLERANCE[dtype]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count", [1, 64])
def test_page_boundaries(device: torch.device, causal: bool, count: int) -> None:
    """Prefixes and windows that end before, at and behind the end of a page; a tree of 64 uses the sign bit."""
    assert (
        problem(
            count,
            [0, 1, 62, 63, 64, 65, 127, 128],
            count,
            device,
            heads=(1, 1),
            causal=causal,
            spare=0,
        ).error()
        < 1e-5
    )


@pytest.mark.parametrize("spare", [0, 3])
def test_window_beyond_the_tree(device: torch.device, spare: int) -> None:
    """A draft step's few queries see any of 64 entries behind the prefix; the table may end where they do."""
    assert (
        problem(5, [0, 63, 100], 3, device, heads=(2, 1), window=WINDOW, spare=spare).error() < 1e-5
    )


@pytest.mark.parametrize(
    ("dtype", "causal", "start"), [(torch.float32, False, 8192), (torch.bfloat16, True, 2500)]
)
def test_long_prefixes(device: torch.device, dtype: torch.dtype, causal: bool, start: int) -> None:
    """Beside a short one, most of whose splits have no work."""
    posed = problem(9, [start, 70], 8, device, dtype=dtype, heads=(2, 1), causal=causal)
    assert split_count(2, posed.table.shape[1]) > 16
    assert posed.error() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TYPES)
def test_chunked_prefill(device: torch.device, dtype: torch.dtype) -> None:
    """More queries than a tile holds, behind an earlier chunk: later tiles read more pages."""
    assert (
        problem(4, [0, 70], 90, device, dtype=dtype, heads=(3, 1), causal=True).error()
        < TOLERANCE[dtype]
    )


def test_large_batches_are_not_split(device: torch.device) -> None:
    posed = problem(6, [200] + [3] * 63, 2, device, heads=(4, 4), spare=10)
    assert (
        split_count(64 * 4, posed.table.shape[1]) == 1 < split_count(63 * 2, posed.table.shape[1])
    )
    assert posed.error() < 1e-5


@pytest.mark.parametrize("spare", [0, 40])
def test_queries_that_see_nothing(device: torch.device, spare: int) -> None:
    """An empty slot of a batch yields zeros and disturbs nobody."""
    posed = problem(7, [0, 5], 3, device, spare=spare)
    assert posed.visible is not None
    posed.visible[0] = 0
    out = posed.run()
    assert (out[0] == 0).all()
    assert not out[1].isnan().any()


@pytest.mark.parametrize("causal", [False, True])
def test_rows_do_not_depend_on_other_rows(device: torch.device, causal: bool) -> None:
    """Bit for bit, whatever the others hold and however long they are."""
    posed = problem(8, [150, 300, 40], 5, device, causal=causal)
    other = replace(posed, query=posed.query.clone(), starts=posed.starts.clone())
    other.query[1:] *= -7
    other.starts[1:] = torch.tensor([7, 120])
    assert torch.equal(other.run()[0], posed.run()[0])


@pytest.mark.parametrize("causal", [False, True])
def test_comparison_catches_planted_errors(device: torch.device, causal: bool) -> None:
    """One key too few, the window off by one, two pages swapped, two heads swapped: each is a hundred tolerances off."""
    posed = problem(3, [100, 67], 6, device, causal=causal)
    wanted = posed.reference()
    dropped = replace(posed, starts=posed.starts.clone())
    dropped.starts[1] -= 1
    planted = [
        dropped,
        replace(posed, table=posed.table[:, [1, 0, *range(2, posed.table.shape[1])]].contiguous()),
        replace(posed, query=posed.query.flip(2)),
    ]
    if posed.visible is not None:
        planted.append(
            replace(posed, visible=posed.visible & ~(1 << torch.arange(6, device=device)))
        )  # a query misses itself
    for wrong in planted:
        assert (
            float((wrong.run().double() - wanted).abs().nan_to_num(nan=1.0).max())
            > 100 * TOLERANCE[torch.float32]
        )
