"""Residual addition and RMS norm (Zhang & Sennrich 2019) in one pass over a row."""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.language import Pointer, Scalar, jit


@jit
def add_rms_norm_kernel(
    x: Pointer,
    update: Pointer,
    weight: Pointer,
    normed: Pointer,
    total: Pointer,
    eps: Scalar,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_UPDATE: tl.constexpr,
) -> None:
    """One row of [T, SIZE] a program; without an update, `update` and `total` are not touched."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(x + row + column, mask=inside, other=0.0)
    if HAS_UPDATE:
        # Rounded to the type of the residual stream before it is normed: the next layer reads it so.
        value = (
            value.to(tl.float32)
            + tl.load(update + row + column, mask=inside, other=0.0).to(tl.float32)
        ).to(x.dtype.element_ty)
        tl.store(total + row + column, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + column, (wide * scale * gain).to(normed.dtype.element_ty), mask=inside)
