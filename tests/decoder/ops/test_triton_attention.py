"""Attention in Triton against the reference in float64.

Whatever a query must not see is NaN, or no page at all.

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
    block_table: Tensor  # [B, P]
    seq_lens: Tensor  # [B]
    mask: Tensor | None  # [B, N]

    def run(self) -> Tensor:
        return OPS.tree_attention(
            self.query, self.keys, self.values, self.block_table, self.seq_lens, self.mask
        )

    def reference(self) -> Tensor:
        """In float64 on the same numbers; pages that do not exist are page 0 to it."""
        block_table = torch.where(self.block_table < len(self.keys), self.block_table, 0)
        wide = self.query.double(), self.keys.double(), self.values.double()
        return REFERENCE.tree_attention(*wide, block_table, self.seq_lens, self.mask)

    def error(self) -> float:
        """Largest difference; infinite if anything is NaN."""
        difference = self.run().double() - self.reference()
        return float(difference.abs().nan_to_num(nan=float("inf")).max())


def problem(
    seed: int,
    seq_lens: list[int],
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
    """Random queries of `heads` (query, key/value) over prefixes `seq_lens`.

    Block tables are `spare` pages wider than needed. A query sees itself and a random half of the
    `window` entries behind the prefix (default: as many as queries).
    """
    chance = random.Random(seed)
    torch.manual_seed(seed)
    rows, reach = len(seq_lens), count if causal else window or count
    # What nobody may see is NaN later.
    shared = sum(1 << offset for offset in range(reach) if chance.random() < 0.7)

    def bits_of(node: int) -> int:
        return _signed((chance.getrandbits(reach) & shared) | 1 << node)

    mask = None
    if not causal:
        mask = torch.tensor([[bits_of(node) for node in range(count)] for _ in seq_lens])
    needed = -(-(max(seq_lens) + reach) // PAGE)
    pages = rows * needed
    block_table = torch.full((rows, needed + spare), 10**9)  # no such page
    block_table[:, :needed] = torch.randperm(pages).view(rows, needed)
    planes = torch.full((2, pages, heads[1], PAGE, size), float("nan"), dtype=dtype)
    for row, seq_len in enumerate(seq_lens):
        bits = (1 << count) - 1 if mask is None else _union(mask[row])
        behind = [seq_len + m for m in range(count if causal else WINDOW) if bits >> m & 1]
        seen = torch.tensor([*range(seq_len), *behind])
        content = torch.randn(len(seen), 2, heads[1], size).to(dtype)
        planes[:, block_table[row, seen // PAGE], :, seen % PAGE] = content
    query = torch.randn(rows, count, heads[0], size).to(dtype)
    return Problem(
        query=query.to(device),
        keys=planes[0].to(device),
        values=planes[1].to(device),
        block_table=block_table.to(device),
        seq_lens=torch.tensor(seq_lens, device=device),
        mask=None if mask is None else mask.to(device),
    )


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _union(masks: Tensor) -> int:
    bits = 0
    for each in masks.tolist():
        bits |= each & (1 << 64) - 1
    return bits


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [64, 80, 96, 128])
@pytest.mark.parametrize("ratio", [1, 3, 4, 8])
def test_shapes(device: torch.device, dtype: torch.dtype, size: int, ratio: int) -> None:
    """Every ratio of heads with every size of them, ragged prefixes, in random trees or chunks."""
    seed = size + ratio + TYPES.index(dtype)
    chance = random.Random(seed)
    seq_lens = [chance.choice((0, 1, 63, 64, 65, 127, 128)), chance.randint(0, 200)]
    groups, count = 1 if ratio > 1 else 2, chance.randint(1, 9)
    heads, causal, spare = (groups * ratio, groups), bool(seed & 1), chance.randint(0, 3)
    posed = problem(
        seed, seq_lens, count, device,
        dtype=dtype, heads=heads, size=size, causal=causal, spare=spare,
    )  # fmt: skip
    assert posed.run().dtype == dtype
    assert posed.error() < TOLERANCE[dtype]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count", [1, 64])
def test_page_boundaries(device: torch.device, causal: bool, count: int) -> None:
    """Prefixes and windows ending before, at and behind a page's end; 64 nodes use a sign bit."""
    seq_lens = [0, 1, 62, 63, 64, 65, 127, 128]
    posed = problem(count, seq_lens, count, device, heads=(1, 1), causal=causal, spare=0)
    assert posed.error() < 1e-5


@pytest.mark.parametrize("spare", [0, 3])
def test_window_beyond_the_tree(device: torch.device, spare: int) -> None:
    """A draft step's few queries see any of 64 entries behind the prefix.

    The block table may end where they do.
    """
    posed = problem(5, [0, 63, 100], 3, device, heads=(2, 1), window=WINDOW, spare=spare)
    assert posed.error() < 1e-5


@pytest.mark.parametrize(
    ("dtype", "causal", "start"), [(torch.float32, False, 8192), (torch.bfloat16, True, 2500)]
)
def test_long_prefixes(device: torch.device, dtype: torch.dtype, causal: bool, start: int) -> None:
    """Beside a short one, most of whose splits have no work."""
    posed = problem(9, [start, 70], 8, device, dtype=dtype, heads=(2, 1), causal=causal)
    assert split_count(2, posed.block_table.shape[1]) > 16
    assert posed.error() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TYPES)
def test_chunked_prefill(device: torch.device, dtype: torch.dtype) -> None:
    """More queries than a tile holds, behind an earlier chunk: later tiles read more pages."""
    posed = problem(4, [0, 70], 90, device, dtype=dtype, heads=(3, 1), causal=True)
    assert posed.error() < TOLERANCE[dtype]


def test_large_batches_are_not_split(device: torch.device) -> None:
    posed = problem(6, [200] + [3] * 63, 2, device, heads=(4, 4), spare=10)
    pages = posed.block_table.shape[1]
    assert split_count(64 * 4, pages) == 1 < split_count(63 * 2, pages)
    assert posed.error() < 1e-5


@pytest.mark.parametrize("spare", [0, 40])
def test_queries_that_see_nothing(device: torch.device, spare: int) -> None:
    """An empty slot of a batch yields zeros and disturbs nobody."""
    posed = problem(7, [0, 5], 3, device, spare=spare)
    assert posed.mask is not None
    posed.mask[0] = 0
    out = posed.run()
    assert (out[0] == 0).all()
    assert not out[1].isnan().any()


@pytest.mark.parametrize("causal", [False, True])
def test_rows_do_not_depend_on_other_rows(device: torch.device, causal: bool) -> None:
    """Bit for bit, whatever the others hold and however long they are."""
    posed = problem(8, [150, 300, 40], 5, device, causal=causal)
    other = replace(posed, query=posed.query.clone(), seq_lens=posed.seq_lens.clone())
    other.query[1:] *= -7
    other.seq_lens[1:] = torch.tensor([7, 120])
    assert torch.equal(other.run()[0], posed.run()[0])


@pytest.mark.parametrize("causal", [False, True])
def test_comparison_catches_planted_errors(device: torch.device, causal: bool) -> None:
    """One key too few, the window off by one, two pages swapped, two heads swapped.

    Each is a hundred tolerances off.
    """
    posed = problem(3, [100, 67], 6, device, causal=causal)
    wanted = posed.reference()
    dropped = replace(posed, seq_lens=posed.seq_lens.clone())
    dropped.seq_lens[1] -= 1
    swapped = posed.block_table[:, [1, 0, *range(2, posed.block_table.shape[1])]].contiguous()
    planted = [
        dropped,
        replace(posed, block_table=swapped),
        replace(posed, query=posed.query.flip(2)),
    ]
    if posed.mask is not None:
        itself = 1 << torch.arange(6, device=device)
        planted.append(replace(posed, mask=posed.mask & ~itself))
    for wrong in planted:
        error = (wrong.run().double() - wanted).abs().nan_to_num(nan=1.0).max()
        assert float(error) > 100 * TOLERANCE[torch.float32]
