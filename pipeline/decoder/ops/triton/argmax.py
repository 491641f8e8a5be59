"""The largest logit of each row, in two steps so that many programs share a long row."""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.language import Pointer, Scalar, jit
from pipeline.decoder.ops.triton.order import index_of, is_nan_key, key_of


@jit
def argmax_part_kernel(logits: Pointer, keys: Pointer, size: Scalar, BLOCK: tl.constexpr) -> None:
    """The largest key of one block of one row; grid [rows, blocks]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * size + column, mask=column < size, other=float("-inf")).to(
        tl.float32
    )
    key = tl.where(column < size, key_of(x, column), -(2**63))
    tl.store(keys + row * tl.num_programs(1) + tl.program_id(1), tl.max(key, axis=0))


@jit
def argmax_join_kernel(
    keys: Pointer, index: Pointer, parts: Scalar, PARTS_BLOCK: tl.constexpr
) -> None:
    """The index of the largest key of a row, -1 where it is NaN's; grid [rows]."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_BLOCK)
    key = tl.max(tl.load(keys + row * parts + part, mask=part < parts, other=-(2**63)), axis=0)
    tl.store(index + row, tl.where(is_nan_key(key), -1, index_of(key)))
