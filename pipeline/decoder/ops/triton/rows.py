"""What happens to each row of hidden states by itself: residual and RMS norm, SiLU times gate."""

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
    """One row of [T, SIZE] a program (Zhang & Sennrich 2019).

    Without an update, `update` and `total` are not touched.
    """
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(x + row + column, mask=inside, other=0.0)
    if HAS_UPDATE:
        # Rounded to the residual stream's type before it is normed: the next layer reads that.
        added = tl.load(update + row + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total + row + column, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + column, (wide * scale * gain).to(normed.dtype.element_ty), mask=inside)


@jit
def silu_mul_kernel(
    gate_up: Pointer, out: Pointer, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """One block of one row [gate | up] of [T, 2·SIZE] a program (SwiGLU, Shazeer 2020)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    fade = tl.exp(-tl.abs(gate))  # never overflows
    silu = gate * tl.where(gate < 0, fade, 1.0) / (1 + fade)
    tl.store(out + row * SIZE + column, (silu * up).to(out.dtype.element_ty), mask=inside)
