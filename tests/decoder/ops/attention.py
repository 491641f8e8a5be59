"""Attention over a paged cache in which whatever nobody may see is NaN, or no page at all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.eager import EagerOps
from pipeline.decoder.ops.layer import PAGE, AttentionMetadata
from tests.decoder.ops.backends import BF16, REFERENCE, Backend, assert_near
from tests.decoder.ops.conftest import attention_metadata

NAN = float("nan")


@dataclass(frozen=True)
class Problem:
    """Queries of ragged rows, with what they read."""

    query: Tensor  # [T, Q, d]
    planes: Tensor  # [2, pages, G, PAGE, d]
    metadata: AttentionMetadata

    def solve(self, ops: TorchOps) -> Tensor:
        keys, values = self.planes
        return ops.tree_attention(self.query, keys, values, self.metadata)

    def reference(self) -> Tensor:
        """In float64 on the same numbers; pages that do not exist are page 0 to it."""
        table = self.metadata.block_table
        exists = torch.where(table < self.planes.shape[1], table, 0)
        metadata = replace(self.metadata, block_table=exists)
        return Problem(self.query.double(), self.planes.double(), metadata).solve(REFERENCE)

    def row(self, row: int) -> Problem:
        """By itself."""
        all_of, one = self.metadata, slice(row, row + 1)
        first, last = all_of.cu_seqlens_q[row : row + 2].tolist()
        mask = None if all_of.mask is None else all_of.mask[first:last]
        metadata = attention_metadata(
            all_of.block_table[one], all_of.seq_lens[one], [last - first], mask
        )
        if all_of.first_seen is not None:
            metadata = replace(metadata, first_seen=all_of.first_seen[first:last])
        return Problem(self.query[first:last], self.planes, metadata)

    def place(self, row: int, entry: int) -> tuple[int, int]:
        """Page and offset of an entry."""
        return int(self.metadata.block_table[row, entry // PAGE]), entry % PAGE


def pose(
    backend: Backend,
    rows: Sequence[tuple[int, int]],
    shape: tuple[int, int, int],
    window: int | None = None,
    spare: int = 3,
    scattered: bool = False,
    inert: int = 0,
) -> Problem:
    """Rows of (entries before, queries), in `shape` query heads, key/value heads, head size.

    A query sees itself and a random half of the `window` entries after the prefix; None: chains.
    Block tables are `spare` pages wider than needed, and views. `scattered` pages have others'
    between them. After the rows stand `inert` ones, whose queries see nothing, all on page 0.
    """
    chance = random.Random(0)
    heads, groups, size = shape
    counts = [count for _, count in rows] + [2] * inert
    prefixes = [prefix for prefix, _ in rows] + [0] * inert
    reaches = [count if window is None else window for _, count in rows]
    needed = -(
        -max(prefix + reach for (prefix, _), reach in zip(rows, reaches, strict=True)) // PAGE
    )
    pages = len(rows) * needed * (3 if scattered else 1) + 1
    # Where eager falls back on the reference, a window's pages are read that nobody sees.
    missing = 0 if isinstance(backend.ops, EagerOps) else 10**9
    table = torch.full((len(counts), 2 * (needed + spare)), missing)[:, : needed + spare]
    table[: len(rows), :needed] = 1 + torch.randperm(pages - 1)[: len(rows) * needed].view(
        -1, needed
    )
    table[len(rows) :] = 0
    planes = torch.full((2, pages, groups, PAGE, size), NAN, dtype=backend.ops.dtype)
    masks: list[int] = []
    for row, ((prefix, count), reach) in enumerate(zip(rows, reaches, strict=True)):
        shared = sum(1 << offset for offset in range(reach) if chance.random() < 0.7)
        bits = [chance.getrandbits(reach or 1) & shared | 1 << node for node in range(count)]
        masks += [each - (1 << 64) if each >> 63 else each for each in bits]
        after = [
            offset
            for offset in range(reach)
            if window is None or any(each >> offset & 1 for each in bits)
        ]
        seen = torch.tensor([*range(prefix), *(prefix + offset for offset in after)]).long()
        content = backend.numbers(len(seen), 2, groups, size).to(planes)
        planes[:, table[row, seen // PAGE], :, seen % PAGE] = content
    mask = None if window is None else torch.tensor(masks + [0] * (2 * inert))
    seq_lens = torch.tensor(prefixes, device=backend.device)
    return Problem(
        query=backend.numbers(sum(counts), heads, size),
        planes=planes.to(backend.device),
        metadata=attention_metadata(
            table.to(backend.device),
            seq_lens,
            counts,
            None if mask is None else mask.to(backend.device),
        ),
    )


def hide(posed: Problem, entries: int) -> Problem:
    """With the first entries of each row hidden, up to the last one before its queries: `entries`
    from its first token, and up to 40 more, by and by, from those after it."""
    metadata, hidden = posed.metadata, list[int]()
    starts = metadata.cu_seqlens_q.tolist()
    for row, (first, last) in enumerate(pairwise(starts)):
        most = max(int(metadata.seq_lens[row]) - 1, 0)
        each = [min(entries + 40 * index // (last - first), most) for index in range(last - first)]
        hidden += each
        for entry in range(min(each, default=0)):
            page, offset = posed.place(row, entry)
            posed.planes[:, page, :, offset] = NAN
    first_seen = torch.tensor(hidden, device=posed.query.device)
    return replace(posed, metadata=replace(metadata, first_seen=first_seen))


def check(backend: Backend, posed: Problem) -> None:
    """Near the reference; blind to what nobody sees; a row's bits are its own."""
    mixed, wanted, metadata = posed.solve(backend.ops), posed.reference(), posed.metadata
    starts = metadata.cu_seqlens_q.tolist()
    assert mixed.dtype is backend.ops.dtype
    assert_near(mixed, wanted, *backend.mixed)
    assert not mixed[(wanted == 0).all(-1)].any(), "a query that sees nothing gives zeros"
    if backend.ops.dtype is BF16 and backend.is_cpp:
        rms = wanted.square().mean().sqrt()
        assert (mixed.double() - wanted).square().mean().sqrt() < 2.0**-8 * rms
    if metadata.mask is None and max(starts) < metadata.rows * metadata.max_query_len:
        # The host may not know how many tokens the longest row has.
        longer = replace(metadata, max_query_len=metadata.max_query_len + 16)
        assert_near(replace(posed, metadata=longer).solve(backend.ops), wanted, *backend.mixed)
    if backend.bits_alone:
        for row, (first, last) in enumerate(pairwise(starts)):
            if first < last:
                assert torch.equal(posed.row(row).solve(backend.ops), mixed[first:last]), row
    if isinstance(backend.ops, EagerOps) and wanted.any(-1).all():
        # With other leftovers in the rows' own pages, and nobody to fall back on.
        planes, own = posed.planes.clone(), metadata.block_table.flatten()
        planes[:, own] = planes[:, own].nan_to_num(1e30)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TorchOps, "tree_attention", None)
            mixed = replace(posed, planes=planes).solve(EagerOps(backend.ops.dtype))
        assert_near(mixed, wanted, *backend.mixed)
    if not backend.is_triton:
        check_nan(posed, mixed, backend)


def check_nan(posed: Problem, mixed: Tensor, backend: Backend) -> None:
    """In one entry of the first row it reaches the queries that see the entry, and nobody else.

    C++ promises that of every entry, the reference of what all queries of a row see.
    """
    metadata = posed.metadata
    prefix, count = int(metadata.seq_lens[0]), int(metadata.cu_seqlens_q[1])
    after = count // 2 if backend.is_cpp else -1  # the entry, from the end of the prefix on
    if not count or prefix + after < 0:
        return
    page, offset = posed.place(0, prefix + after)
    posed.planes[1, page, :, offset] = NAN
    sees = torch.arange(len(mixed)) < count
    if after >= 0:
        bits = metadata.mask
        sees &= torch.arange(len(mixed)) >= after if bits is None else (bits >> after & 1).bool()
    spoiled = posed.solve(backend.ops)
    assert spoiled[sees].isnan().all() and spoiled[~sees].isfinite().all()
    assert not backend.is_cpp or torch.equal(spoiled[~sees], mixed[~sees])
