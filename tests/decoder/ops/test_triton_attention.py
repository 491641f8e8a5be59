"""Attention in Triton against the reference in float64.

Whatever a query must not see is NaN, or no page at all.

Without a GPU these tests run in Triton's interpreter, see conftest.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from pipeline.decoder.ops.layer import PAGE, AttentionMetadata
from pipeline.decoder.ops.tree import WINDOW
from pipeline.decoder.ops.triton.ops import MOST_SPLIT, chunks_of
from tests.decoder.ops.compare import OPS, REFERENCE, TOLERANCE, TYPES
from tests.decoder.ops.conftest import chain_metadata, tree_metadata


@dataclass(frozen=True)
class Problem:
    """Queries over a cache in which every entry that no query of its row sees is NaN."""

    query: Tensor  # [T, Q, d]
    keys: Tensor  # [pages, G, PAGE, d]
    values: Tensor
    block_table: Tensor  # [B, P]
    seq_lens: Tensor  # [B]
    counts: Sequence[int]  # tokens of each row
    mask: Tensor | None  # [B, N]

    def metadata(self, block_table: Tensor) -> AttentionMetadata:
        if self.mask is None:
            return chain_metadata(block_table, self.seq_lens, self.counts)
        return tree_metadata(block_table, self.seq_lens, self.mask)

    def run(self) -> Tensor:
        metadata = self.metadata(self.block_table)
        return OPS.tree_attention(self.query, self.keys, self.values, metadata)

    def reference(self) -> Tensor:
        """In float64 on the same numbers; pages that do not exist are page 0 to it."""
        block_table = torch.where(self.block_table < len(self.keys), self.block_table, 0)
        wide = self.query.double(), self.keys.double(), self.values.double()
        return REFERENCE.tree_attention(*wide, self.metadata(block_table))

    def error(self) -> float:
        """Largest difference; infinite if anything is NaN."""
        difference = self.run().double() - self.reference()
        return float(difference.abs().nan_to_num(nan=float("inf")).max())

    def rows_of(self, out: Tensor) -> tuple[Tensor, ...]:
        """out [T, ..] by row."""
        ends = torch.tensor(self.counts).cumsum(0).tolist()
        return tuple(out[end - count : end] for end, count in zip(ends, self.counts, strict=True))


def problem(
    seed: int,
    seq_lens: list[int],
    count: int | list[int],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    size: int = 64,
    causal: bool = False,
    window: int | None = None,
    spare: int = 3,
) -> Problem:
    """Random queries of `heads` (query, key/value) over prefixes `seq_lens`, `count` a row.

    Block tables are `spare` pages wider than needed. A query sees itself and a random half of the
    `window` entries behind the prefix (default: as many as queries). Chains may be ragged.
    """
    chance = random.Random(seed)
    torch.manual_seed(seed)
    counts = [count] * len(seq_lens) if isinstance(count, int) else count
    rows, max_query_len = len(seq_lens), max(counts)
    reach = max_query_len if causal else window or max_query_len
    # What nobody may see is NaN later.
    shared = sum(1 << offset for offset in range(reach) if chance.random() < 0.7)

    def bits_of(node: int) -> int:
        return _signed((chance.getrandbits(reach) & shared) | 1 << node)

    mask = None
    if not causal:
        mask = torch.tensor([[bits_of(node) for node in range(max_query_len)] for _ in seq_lens])
    needed = -(-(max(seq_lens) + reach) // PAGE)
    pages = rows * needed
    block_table = torch.full((rows, needed + spare), 10**9)  # no such page
    block_table[:, :needed] = torch.randperm(pages).view(rows, needed)
    planes = torch.full((2, pages, heads[1], PAGE, size), float("nan"), dtype=dtype)
    for row, (seq_len, count) in enumerate(zip(seq_lens, counts, strict=True)):
        bits = (1 << count) - 1 if mask is None else _union(mask[row])
        behind = [seq_len + m for m in range(count if causal else WINDOW) if bits >> m & 1]
        seen = torch.tensor([*range(seq_len), *behind], dtype=torch.int64)
        content = torch.randn(len(seen), 2, heads[1], size).to(dtype)
        planes[:, block_table[row, seen // PAGE], :, seen % PAGE] = content
    query = torch.randn(sum(counts), heads[0], size).to(dtype)
    return Problem(
        query=query.to(device),
        keys=planes[0].to(device),
        values=planes[1].to(device),
        block_table=block_table.to(device),
        seq_lens=torch.tensor(seq_lens, device=device),
        counts=counts,
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
    ("dtype", "causal", "start"), [(torch.float32, False, 3000), (torch.bfloat16, True, 1500)]
)
def test_long_prefixes(device: torch.device, dtype: torch.dtype, causal: bool, start: int) -> None:
    """Cut into chunks beside a short row that is not, and one that ends where a chunk does."""
    posed = problem(9, [start, 70, 500], 8, device, dtype=dtype, heads=(2, 1), causal=causal)
    room, chunk = chunks_of(posed.block_table.shape[1])
    assert room * chunk * PAGE >= start and room > 5
    assert posed.error() < TOLERANCE[dtype]


def test_wide_tables_have_few_chunks(device: torch.device) -> None:
    """Longer ones: what is left of them and of the merge stays bounded."""
    assert chunks_of(1) == (1, 4) and chunks_of(128) == (32, 4)
    assert all(chunks_of(pages)[0] <= 32 for pages in range(1, 5000))
    posed = problem(2, [600, 64], 3, device, heads=(2, 1), spare=900)
    assert chunks_of(posed.block_table.shape[1]) == (32, 29)
    assert posed.error() < 1e-5


@pytest.mark.parametrize("dtype", TYPES)
def test_ragged_chains(device: torch.device, dtype: torch.dtype) -> None:
    """A prompt among continued ones, one of them cut; a row without tokens; tiles that are empty.

    The prompt is more than a tile holds, behind an earlier chunk: later tiles read more pages.
    """
    counts, seq_lens = [MOST_SPLIT + 3, 1, 0, MOST_SPLIT], [70, 500, 5, 300]
    posed = problem(4, seq_lens, counts, device, dtype=dtype, heads=(2, 1), causal=True)
    assert posed.error() < TOLERANCE[dtype]
    # The host may not know how many tokens the longest row has.
    metadata = replace(posed.metadata(posed.block_table), max_query_len=80)
    again = OPS.tree_attention(posed.query, posed.keys, posed.values, metadata)
    assert torch.equal(again, posed.run())


@pytest.mark.parametrize("count", [5, MOST_SPLIT + 6])
def test_a_row_alone_has_the_same_bits(device: torch.device, count: int) -> None:
    """Alone, beside a longer and a shorter row, and whatever stands in front of it."""
    posed = problem(11, [500, 300, 40], [count, 100, 2], device, heads=(2, 1), causal=True)
    for row, part in enumerate(posed.rows_of(posed.run())):
        alone = replace(
            posed,
            query=posed.rows_of(posed.query)[row],
            block_table=posed.block_table[row : row + 1],
            seq_lens=posed.seq_lens[row : row + 1],
            counts=[posed.counts[row]],
        )
        assert torch.equal(alone.run(), part), row


@pytest.mark.parametrize("spare", [0, 40])
def test_queries_that_see_nothing(device: torch.device, spare: int) -> None:
    """An empty slot of a batch yields zeros and disturbs nobody."""
    posed = problem(7, [0, 5], 3, device, spare=spare)
    assert posed.mask is not None
    posed.mask[0] = 0
    empty, other = posed.rows_of(posed.run())
    assert (empty == 0).all()
    assert not other.isnan().any()


@pytest.mark.parametrize("causal", [False, True])
def test_rows_do_not_depend_on_other_rows(device: torch.device, causal: bool) -> None:
    """Bit for bit, whatever the others hold and however long they are."""
    posed = problem(8, [150, 300, 40], 5, device, causal=causal)
    other = replace(posed, query=posed.query.clone(), seq_lens=posed.seq_lens.clone())
    other.query[5:] *= -7
    other.seq_lens[1:] = torch.tensor([7, 120])
    assert torch.equal(other.run()[:5], posed.run()[:5])


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
        replace(posed, query=posed.query.flip(1)),
    ]
    if posed.mask is not None:
        itself = 1 << torch.arange(6, device=device)
        planted.append(replace(posed, mask=posed.mask & ~itself))
    for wrong in planted:
        error = (wrong.run().double() - wanted).abs().nan_to_num(nan=1.0).max()
        assert float(error) > 100 * TOLERANCE[torch.float32]
