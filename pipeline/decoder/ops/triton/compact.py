"""Accepted entries to the places right behind the prefix, in every layer at once."""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.language import Pointer, Scalar, jit


@jit
def compact_kernel(
    planes: Pointer,
    table: Pointer,
    starts: Pointer,
    path: Pointer,
    moved: Scalar,
    layer_stride: Scalar,
    side_stride: Scalar,
    page_stride: Scalar,
    head_stride: Scalar,
    entry_stride: Scalar,
    table_stride: Scalar,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    MOVED_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
) -> None:
    """One head of one row, of one layer's keys or values; grid [layers · 2, B, G]."""
    row = tl.program_id(1).to(tl.int64)
    side = tl.program_id(0).to(tl.int64)
    plane = (
        planes + side // 2 * layer_stride + side % 2 * side_stride + tl.program_id(2) * head_stride
    )
    entry, column = tl.arange(0, MOVED_BLOCK), tl.arange(0, DIM_BLOCK)
    start = tl.load(starts + row)
    source = start + tl.load(path + row * moved + entry, mask=entry < moved, other=0)  # [e]
    target = start + entry
    inside = (entry < moved)[:, None] & (column < DIM)[None, :]
    source_page = tl.load(
        table + row * table_stride + source // PAGE, mask=entry < moved, other=0
    ).to(tl.int64)
    target_page = tl.load(
        table + row * table_stride + target // PAGE, mask=entry < moved, other=0
    ).to(tl.int64)
    source_place = source_page * page_stride + source % PAGE * entry_stride
    target_place = target_page * page_stride + target % PAGE * entry_stride
    held = tl.load(plane + source_place[:, None] + column[None, :], mask=inside)
    # One entry's target is another's source: all are read before any is written.
    tl.debug_barrier()
    tl.store(plane + target_place[:, None] + column[None, :], held, mask=inside)
