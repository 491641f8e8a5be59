"""A layer without its matrix products: norms, the MLP's gate, rotary embedding, cache writes.

a token's row    [ query heads : Q | key heads : G | value heads : G ]   each of d = 2 · HALF
a head           [ low : HALF | high : HALF ]
rotated          low · cos - high · sin | high · cos + low · sin
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.launch import Block, Pointer, Scalar, Stride, Table, jit


@jit
def add_rms_norm_kernel(
    x: Pointer,
    update: Pointer,
    weight: Pointer,
    update_gain: Pointer,
    normed: Pointer,
    total: Pointer,
    eps: Scalar,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_UPDATE: tl.constexpr,
    UPDATE_NORM: tl.constexpr,
) -> None:
    """One row of [T, SIZE] a program (Zhang & Sennrich 2019).

    Without an update, `update` and `total` are not touched; `update_gain` is with UPDATE_NORM only.
    """
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(x + row + column, mask=inside, other=0.0)
    if HAS_UPDATE:
        # Rounded to the residual stream's type before it is normed: the next layer reads that.
        added = tl.load(update + row + column, mask=inside, other=0.0)
        if UPDATE_NORM:
            added = _normed(added, update_gain, eps, SIZE, BLOCK)
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
def gate_mul_kernel(
    gate_up: Pointer, out: Pointer, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr
) -> None:
    """One block of one row [gate | up] of [T, 2·SIZE] a program (SwiGLU, GEGLU; Shazeer 2020)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    mixed = gate_mul(gate, up, GELU)
    tl.store(out + row * SIZE + column, mixed.to(out.dtype.element_ty), mask=inside)


@jit
def gate_mul(gate: Block, up: Block, GELU: tl.constexpr) -> Block:
    """silu(gate) · up, or with GELU's tanh approximation (Hendrycks & Gimpel 2016), in float32."""
    z = gate
    if GELU:  # (1 + tanh(z / 2)) / 2 = 1 / (1 + e^-z)
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    fade = tl.exp(-tl.abs(z))  # never overflows
    return gate * tl.where(z < 0, fade, 1.0) / (1 + fade) * up


@jit
def rope_write_kernel(
    qkv: Pointer,
    query_gain: Pointer,
    key_gain: Pointer,
    eps: Scalar,
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
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    NORMS: tl.constexpr,
) -> None:
    """HEADS_BLOCK heads of one token a program; the gains are read with NORMS only."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]  # [h, 1]
    column = tl.arange(0, HALF_BLOCK)[None, :]  # [1, c]
    half, real = column < HALF, head < QUERY_HEADS + 2 * GROUPS
    source = qkv + (token * (QUERY_HEADS + 2 * GROUPS) + head) * (2 * HALF) + column
    low = tl.load(source, mask=real & half, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=real & half, other=0.0).to(tl.float32)
    write_rotated(
        low, high, token, head, column, token >= 0, real, half,
        query_gain, key_gain, eps, cos, sin, positions, slot_mapping, query, keys, values,
        page_stride, head_stride, entry_stride, QUERY_HEADS, GROUPS, HALF, PAGE, NORMS,
    )  # fmt: skip


@jit
def write_rotated(
    low: Block,
    high: Block,
    token: Block,
    head: Block,
    column: Block,
    exists: Block,
    real: Block,
    half: Block,
    query_gain: Pointer,
    key_gain: Pointer,
    eps: Scalar,
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
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    NORMS: tl.constexpr,
) -> None:
    """Rotate heads, and store them where they belong: low and high [r, c] in float32.

    `token` and `head` say whose they are, one of them [r, 1], the other a number. Of those are
    there: tokens that `exists` names, heads and tokens as `real` [r, 1], columns as `half` [1, c].
    """
    dtype = query.dtype.element_ty
    token = token.to(tl.int64)
    is_query, is_value = head < QUERY_HEADS, head >= QUERY_HEADS + GROUPS
    if NORMS:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]  # [r, 1]
        query_low = tl.load(query_gain + column, mask=half)
        key_low = tl.load(key_gain + column, mask=half)
        query_high = tl.load(query_gain + HALF + column, mask=half)
        key_high = tl.load(key_gain + HALF + column, mask=half)
        gain_low = tl.where(is_query, query_low, key_low).to(tl.float32)
        gain_high = tl.where(is_query, query_high, key_high).to(tl.float32)
        # Rounded as a norm of its own would round it.
        normed_low = (low * scale * gain_low).to(dtype).to(tl.float32)
        normed_high = (high * scale * gain_high).to(dtype).to(tl.float32)
        low, high = tl.where(is_value, low, normed_low), tl.where(is_value, high, normed_high)
    angle = tl.load(positions + token, mask=exists, other=0) * (2 * HALF) + column
    cos_low = tl.load(cos + angle, mask=half, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + HALF, mask=half, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angle, mask=half, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angle + HALF, mask=half, other=0.0).to(tl.float32)
    out_low = tl.where(is_value, low, low * cos_low - high * sin_low).to(dtype)
    out_high = tl.where(is_value, high, high * cos_high + low * sin_high).to(dtype)
    inside = real & half
    rotated = query + (token * QUERY_HEADS + head) * (2 * HALF) + column
    tl.store(rotated, out_low, mask=inside & is_query)
    tl.store(rotated + HALF, out_high, mask=inside & is_query)
    slot = tl.load(slot_mapping + token, mask=exists, other=0)
    entry = slot // PAGE * page_stride + slot % PAGE * entry_stride + column
    key = keys + entry + (head - QUERY_HEADS) * head_stride
    tl.store(key, out_low, mask=inside & ~is_query & ~is_value)
    tl.store(key + HALF, out_high, mask=inside & ~is_query & ~is_value)
    value = values + entry + (head - QUERY_HEADS - GROUPS) * head_stride
    tl.store(value, out_low, mask=inside & is_value)
    tl.store(value + HALF, out_high, mask=inside & is_value)


@jit
def slot_mapping_kernel(
    block_table: Table,
    seq_lens: Table,
    row: Table,
    within: Table,
    entries: Table,
    slots: Table,
    tokens: Scalar,
    block_table_stride: Scalar,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK tokens a program: their cache entries, and the slots of these."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = token < tokens
    at = tl.load(row + token, mask=real, other=0)
    entry = tl.load(seq_lens + at, mask=real, other=0) + tl.load(within + token, mask=real, other=0)
    page = tl.load(block_table + at * block_table_stride + entry // PAGE, mask=real, other=0)
    tl.store(entries + token, entry, mask=real)
    tl.store(slots + token, page * PAGE + entry % PAGE, mask=real)


@jit
def compact_kernel(
    planes: Pointer,
    block_table: Table,
    seq_lens: Table,
    path: Table,
    moved: Scalar,
    layer_stride: Stride,
    side_stride: Stride,
    page_stride: Stride,
    head_stride: Stride,
    entry_stride: Stride,
    block_table_stride: Scalar,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    MOVED_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
) -> None:
    """One head of one row, of one layer's keys or values; grid [layers · 2, B, G]."""
    row = tl.program_id(1).to(tl.int64)
    side = tl.program_id(0).to(tl.int64)
    plane = planes + side // 2 * layer_stride + side % 2 * side_stride
    plane += tl.program_id(2) * head_stride
    entry, column = tl.arange(0, MOVED_BLOCK), tl.arange(0, DIM_BLOCK)
    seq_len = tl.load(seq_lens + row)
    real = entry < moved
    source = seq_len + tl.load(path + row * moved + entry, mask=real, other=0)  # [e]
    target = seq_len + entry
    pages = block_table + row * block_table_stride
    source_page = tl.load(pages + source // PAGE, mask=real, other=0).to(tl.int64)
    target_page = tl.load(pages + target // PAGE, mask=real, other=0).to(tl.int64)
    source_at = source_page * page_stride + source % PAGE * entry_stride
    target_at = target_page * page_stride + target % PAGE * entry_stride
    inside = real[:, None] & (column < DIM)[None, :]
    held = tl.load(plane + source_at[:, None] + column[None, :], mask=inside)
    # One entry's target is another's source: all are read before any is written.
    tl.debug_barrier()
    tl.store(plane + target_at[:, None] + column[None, :], held, mask=inside)
