"""Rotary embedding (RoFormer, Su et al. 2021) of queries and keys; keys and values into their cache slots.

a token's row    [ query heads : Q | key heads : G | value heads : G ]   each of d = 2 · HALF
a head           [ low : HALF | high : HALF ]
rotated          low · cos - high · sin | high · cos + low · sin
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.language import Pointer, Scalar, jit


@jit
def rope_write_kernel(
    qkv: Pointer,
    query_gain: Pointer,
    key_gain: Pointer,
    eps: Scalar,
    cos: Pointer,
    sin: Pointer,
    positions: Pointer,
    slots: Pointer,
    query: Pointer,
    keys: Pointer,
    values: Pointer,
    page_stride: Scalar,
    head_stride: Scalar,
    entry_stride: Scalar,
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
    inside = (head < QUERY_HEADS + 2 * GROUPS) & (column < HALF)
    is_query, is_value = head < QUERY_HEADS, head >= QUERY_HEADS + GROUPS
    source = qkv + (token * (QUERY_HEADS + 2 * GROUPS) + head) * (2 * HALF) + column
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(
            (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * HALF) + eps
        )[:, None]  # [h, 1]
        gain_low = tl.where(
            is_query,
            tl.load(query_gain + column, mask=column < HALF),
            tl.load(key_gain + column, mask=column < HALF),
        )
        gain_high = tl.where(
            is_query,
            tl.load(query_gain + HALF + column, mask=column < HALF),
            tl.load(key_gain + HALF + column, mask=column < HALF),
        )
        # Rounded as a norm of its own would round it.
        normed_low = (low * scale * gain_low.to(tl.float32)).to(qkv.dtype.element_ty).to(tl.float32)
        normed_high = (
            (high * scale * gain_high.to(tl.float32)).to(qkv.dtype.element_ty).to(tl.float32)
        )
        low, high = tl.where(is_value, low, normed_low), tl.where(is_value, high, normed_high)
    angle = tl.load(positions + token) * (2 * HALF) + column
    cos_low = tl.load(cos + angle, mask=column < HALF, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + HALF, mask=column < HALF, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angle, mask=column < HALF, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angle + HALF, mask=column < HALF, other=0.0).to(tl.float32)
    out_low = tl.where(is_value, low, low * cos_low - high * sin_low).to(qkv.dtype.element_ty)
    out_high = tl.where(is_value, high, high * cos_high + low * sin_high).to(qkv.dtype.element_ty)
    rotated = query + (token * QUERY_HEADS + head) * (2 * HALF) + column
    tl.store(rotated, out_low, mask=inside & is_query)
    tl.store(rotated + HALF, out_high, mask=inside & is_query)
    slot = tl.load(slots + token)
    entry = slot // PAGE * page_stride + slot % PAGE * entry_stride + column
    key = keys + entry + (head - QUERY_HEADS) * head_stride
    tl.store(key, out_low, mask=inside & ~is_query & ~is_value)
    tl.store(key + HALF, out_high, mask=inside & ~is_query & ~is_value)
    value = values + entry + (head - QUERY_HEADS - GROUPS) * head_stride
    tl.store(value, out_low, mask=inside & is_value)
    tl.store(value + HALF, out_high, mask=inside & is_value)
