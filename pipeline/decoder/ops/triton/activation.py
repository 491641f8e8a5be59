"""SiLU times gate (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.language import Pointer, jit


@jit
def silu_mul_kernel(
    gate_up: Pointer, out: Pointer, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """One block of one row [gate | up] of [T, 2·SIZE] a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    fade = tl.exp(-tl.abs(gate))  # never overflows
    silu = gate * tl.where(gate < 0, fade, 1.0) / (1 + fade)
    tl.store(out + row * SIZE + column, (silu * up).to(out.dtype.element_ty), mask=inside)
