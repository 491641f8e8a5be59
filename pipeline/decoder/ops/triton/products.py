"""Matrix products of a few tokens, with what a layer does before and after them.

    hidden ─ norm ─▶ qkv ──────▶ norm of heads, rotate ─▶ queries; keys and values in their slots
    mixed ─────────▶ output ───▶ + hidden ──────────────▶ hidden, squares
    hidden ─ norm ─▶ gate_up ──▶ silu(gate) · up
    inner ─────────▶ down ─────▶ + hidden ──────────────▶ hidden, squares

Of up to 64 tokens the weights are the floor: each is read once, whatever the number of tokens. A
program multiplies all tokens with two blocks of HALF rows of the weight, which belong together: the
low and the high half of a head, a gate and its factor, or just two parts of the output.

                 SIZE
            | s = 0 | s = 1 |      split: each program sums over a share of the inputs, and
    first   |#######|.......|      leaves the sum behind. The one that is last to arrive at a
    second  |#######|.......|      block adds them in order, and goes on with the result; so the
                                   bits do not depend on who that is (Stream-K's fix-up, Osama
                                   et al. 2023, arXiv:2301.03598).

A residual stream is written with the squares of its rows, summed by block: the next product norms
what it reads with them, instead of a kernel in between. Results are rounded where separate kernels
would round them. A weight may be bytes of float8, whose rows' scales multiply the sums.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.launch import (
    Block,
    Pointer,
    Scalar,
    Stride,
    Table,
    dot,
    is_last,
    jit,
)
from pipeline.decoder.ops.triton.layers import gate_mul, write_rotated


@jit
def project_heads_kernel(
    x: Pointer,
    gain: Pointer,
    squares: Pointer,
    weight: Pointer,
    scales: Pointer,
    bias: Pointer,
    partial: Pointer,
    arrived: Pointer,
    tokens: Scalar,
    eps: Scalar,
    query_gain: Pointer,
    key_gain: Pointer,
    cos: Pointer,
    sin: Pointer,
    positions: Table,
    slot_mapping: Table,
    query: Pointer,
    keys: Pointer,
    values: Pointer,
    page_stride: Stride,
    head_stride: Stride,
    entry_stride: Stride,
    QUERY_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_NORMS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """x [T, SIZE] → queries [T, Q, 2 · HALF], and keys and values in their slots; weight
    [(Q + 2G) · 2 · HALF, SIZE]. Grid: Q + 2G, SPLITS."""
    head = tl.program_id(0)
    low, high, last = _products(
        x, gain, squares, weight, scales, bias, partial, arrived, tokens, eps,
        head.to(tl.int64) * (2 * HALF), HALF, HALF,
        SIZE, HALF, TOKENS_BLOCK, SIZE_BLOCK, SHARE, SPLITS, PARTS, PARTS_BLOCK, BIASED, SCALED,
        WIDEN,
    )  # fmt: skip
    if last:
        token = tl.arange(0, TOKENS_BLOCK)[:, None]  # [m, 1]
        column = tl.arange(0, HALF)[None, :]
        write_rotated(
            low, high, token, head, column, token < tokens, token < tokens, column < HALF,
            query_gain, key_gain, eps, cos, sin, positions, slot_mapping, query, keys, values,
            page_stride, head_stride, entry_stride, QUERY_HEADS, GROUPS, HALF, PAGE, HEAD_NORMS,
        )  # fmt: skip


@jit
def add_product_kernel(
    x: Pointer,
    gain: Pointer,
    squares: Pointer,
    weight: Pointer,
    scales: Pointer,
    bias: Pointer,
    partial: Pointer,
    arrived: Pointer,
    tokens: Scalar,
    eps: Scalar,
    hidden: Pointer,
    total: Pointer,
    totals: Pointer,
    OUTPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """total [T, OUTPUTS] = hidden + x [T, SIZE] · weightᵀ; totals [T, blocks], sums of total² over
    each block's columns. Grid: blocks, SPLITS."""
    block = tl.program_id(0)
    first = block * HALF
    left, right, last = _products(
        x, gain, squares, weight, scales, bias, partial, arrived, tokens, eps,
        first.to(tl.int64), OUTPUTS // 2, OUTPUTS // 2 - first,
        SIZE, HALF, TOKENS_BLOCK, SIZE_BLOCK, SHARE, SPLITS, PARTS, PARTS_BLOCK, BIASED, SCALED,
        WIDEN,
    )  # fmt: skip
    if last:
        token = tl.arange(0, TOKENS_BLOCK)
        column = first + tl.arange(0, HALF)
        inside = (token < tokens)[:, None] & (column < OUTPUTS // 2)[None, :]
        at = token.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
        left = _added(left, hidden + at, total + at, inside)
        at += OUTPUTS // 2
        right = _added(right, hidden + at, total + at, inside)
        sums = tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)
        tl.store(totals + token * tl.num_programs(0) + block, sums, mask=token < tokens)


@jit
def product_kernel(
    x: Pointer,
    gain: Pointer,
    squares: Pointer,
    weight: Pointer,
    scales: Pointer,
    bias: Pointer,
    partial: Pointer,
    arrived: Pointer,
    tokens: Scalar,
    eps: Scalar,
    out: Pointer,
    OUTPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """out [T, OUTPUTS] = x [T, SIZE] · weightᵀ. Grid: blocks, SPLITS."""
    block = tl.program_id(0)
    first = block * HALF
    left, right, last = _products(
        x, gain, squares, weight, scales, bias, partial, arrived, tokens, eps,
        first.to(tl.int64), OUTPUTS // 2, OUTPUTS // 2 - first,
        SIZE, HALF, TOKENS_BLOCK, SIZE_BLOCK, SHARE, SPLITS, PARTS, PARTS_BLOCK, BIASED, SCALED,
        WIDEN,
    )  # fmt: skip
    if last:
        token, column = tl.arange(0, TOKENS_BLOCK)[:, None], first + tl.arange(0, HALF)[None, :]
        inside = (token < tokens) & (column < OUTPUTS // 2)
        at = token.to(tl.int64) * OUTPUTS + column
        tl.store(out + at, left.to(out.dtype.element_ty), mask=inside)
        tl.store(out + at + OUTPUTS // 2, right.to(out.dtype.element_ty), mask=inside)


@jit
def gated_product_kernel(
    x: Pointer,
    gain: Pointer,
    squares: Pointer,
    weight: Pointer,
    scales: Pointer,
    bias: Pointer,
    partial: Pointer,
    arrived: Pointer,
    tokens: Scalar,
    eps: Scalar,
    out: Pointer,
    OUTPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """x [T, SIZE] → [T, OUTPUTS]; weight [2 · OUTPUTS, SIZE], gates first. Grid: blocks, SPLITS."""
    first = tl.program_id(0) * HALF
    gate, up, last = _products(
        x, gain, squares, weight, scales, bias, partial, arrived, tokens, eps,
        first.to(tl.int64), OUTPUTS, OUTPUTS - first,
        SIZE, HALF, TOKENS_BLOCK, SIZE_BLOCK, SHARE, SPLITS, PARTS, PARTS_BLOCK, BIASED, SCALED,
        WIDEN,
    )  # fmt: skip
    if last:
        token = tl.arange(0, TOKENS_BLOCK)
        column = first + tl.arange(0, HALF)
        inside = (token < tokens)[:, None] & (column < OUTPUTS)[None, :]
        at = token.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
        tl.store(out + at, gate_mul(gate, up, GELU=False).to(out.dtype.element_ty), mask=inside)


@jit
def _products(
    x: Pointer,
    gain: Pointer,
    squares: Pointer,
    weight: Pointer,
    scales: Pointer,
    bias: Pointer,
    partial: Pointer,
    arrived: Pointer,
    tokens: Scalar,
    eps: Scalar,
    first_row: Scalar,
    apart: Scalar,
    rows: Scalar,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    WIDEN: tl.constexpr,
) -> Block:
    """x times the weight's rows from `first_row` and from `first_row + apart` on, `rows` of them at
    most: each [TOKENS_BLOCK, HALF] as x's type rounds it, in float32, and whether this program is
    the one that has them. x is normed first where it comes with PARTS sums of squares a row."""
    token, row, column = tl.arange(0, TOKENS_BLOCK), tl.arange(0, HALF), tl.arange(0, SIZE_BLOCK)
    real, inside = token < tokens, row < rows
    if PARTS > 0:
        part = tl.arange(0, PARTS_BLOCK)
        summed = real[:, None] & (part < PARTS)[None, :]
        sums = tl.load(squares + token[:, None] * PARTS + part[None, :], mask=summed, other=0.0)
        scale = tl.rsqrt(tl.sum(sums, axis=1) / SIZE + eps)[:, None]  # [m, 1]
    left = tl.zeros([TOKENS_BLOCK, HALF], tl.float32)
    right = tl.zeros([TOKENS_BLOCK, HALF], tl.float32)
    split = tl.program_id(1)
    weight += first_row * SIZE
    for step in range(SHARE):
        inner = (split * SHARE + step) * SIZE_BLOCK + column  # [i]
        known = inner < SIZE
        at = token[:, None] * SIZE + inner[None, :]
        held = tl.load(x + at, mask=real[:, None] & known[None, :], other=0.0)
        if PARTS > 0:
            gains = tl.load(gain + inner, mask=known, other=0.0).to(tl.float32)[None, :]
            held = (held.to(tl.float32) * scale * gains).to(x.dtype.element_ty)
        at = row[:, None] * SIZE + inner[None, :]
        read = inside[:, None] & known[None, :]
        rows_of = _widened(tl.load(weight + at, mask=read, other=0), x.dtype.element_ty, SCALED)
        left += dot(held, tl.trans(rows_of), WIDEN)
        at += apart * SIZE
        rows_of = _widened(tl.load(weight + at, mask=read, other=0), x.dtype.element_ty, SCALED)
        right += dot(held, tl.trans(rows_of), WIDEN)
    last = True
    if SPLITS > 1:
        block = tl.program_id(0)
        partial += block.to(tl.int64) * (SPLITS * 2 * HALF) * tokens
        at = token[:, None] * (2 * HALF) + row[None, :]
        mine, each = partial + split * (2 * HALF) * tokens, real[:, None]
        tl.store(mine + at, left, mask=each)
        tl.store(mine + at + HALF, right, mask=each)
        last = is_last(arrived + block, SPLITS)
        if last:
            left = tl.zeros([TOKENS_BLOCK, HALF], tl.float32)
            right = tl.zeros([TOKENS_BLOCK, HALF], tl.float32)
            for other in range(SPLITS):
                theirs = partial + other * (2 * HALF) * tokens
                left += tl.load(theirs + at, mask=each, other=0.0, cache_modifier=".cg")
                right += tl.load(theirs + at + HALF, mask=each, other=0.0, cache_modifier=".cg")
    if SCALED:
        left *= tl.load(scales + first_row + row, mask=inside, other=0.0)[None, :]
        right *= tl.load(scales + first_row + apart + row, mask=inside, other=0.0)[None, :]
    if BIASED:
        left += tl.load(bias + first_row + row, mask=inside, other=0.0).to(tl.float32)[None, :]
        bias += first_row + apart
        right += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[None, :]
    dtype = x.dtype.element_ty
    return left.to(dtype).to(tl.float32), right.to(dtype).to(tl.float32), last


@jit
def _widened(held: Block, dtype: tl.constexpr, SCALED: tl.constexpr) -> Block:
    """A weight's numbers as x's type; SCALED: bytes of float8, 1 sign, 4 exponent and 3 mantissa
    bits, which every GPU reads so. In float32 they stand 2^120 lower, as its exponent's bias is
    127 and not 7; bfloat16 holds each of them exactly."""
    if SCALED:
        bits = held.to(tl.int32)
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        held = (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)
    return held


@jit
def _added(update: Block, hidden: Pointer, total: Pointer, inside: Block) -> Block:
    """Store hidden + update; returns it as it is stored, and zeros outside."""
    held = tl.load(hidden, mask=inside, other=0.0)
    added = (held.to(tl.float32) + update).to(held.dtype)
    tl.store(total, added, mask=inside)
    return tl.where(inside, added.to(tl.float32), 0.0)
