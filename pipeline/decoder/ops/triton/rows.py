"""What happens to each row of hidden states by itself: residual and RMS norm, SiLU times gate."""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.language import Block, Pointer, Scalar, Table, jit


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
    tl.store(normed + row + column, _normed(value, weight, eps, SIZE, BLOCK), mask=inside)


@jit
def embed_concat_kernel(
    tokens: Table,
    embedding: Pointer,
    hidden: Pointer,
    embed_norm: Pointer,
    hidden_norm: Pointer,
    out: Pointer,
    eps: Scalar,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One half of one row of [T, 2·SIZE]: the token's embedding, or the hidden state, normed.

    Grid [T, 2].
    """
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    to = out + row * (2 * SIZE) + half * SIZE + column
    if half == 0:
        token = tl.load(tokens + row)
        value = tl.load(embedding + token * SIZE + column, mask=inside, other=0.0)
        tl.store(to, _normed(value, embed_norm, eps, SIZE, BLOCK), mask=inside)
    else:
        value = tl.load(hidden + row * SIZE + column, mask=inside, other=0.0)
        tl.store(to, _normed(value, hidden_norm, eps, SIZE, BLOCK), mask=inside)


@jit
def _normed(
    value: Block, weight: Pointer, eps: Scalar, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> Block:
    """RMS norm of one row, in its type."""
    column = tl.arange(0, BLOCK)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    gain = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    return (wide * scale * gain).to(value.dtype)


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
