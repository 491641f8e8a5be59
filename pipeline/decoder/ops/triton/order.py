"""Floats as integers of the same order, and (float, index) pairs as single integers.

A float's bits sort like a signed integer's once those of negative numbers are flipped:

    float   -inf … -1.0 … 0.0 … 1.0 … inf   NaN
    image    low …  ..  …  0  …  ..  …  ..   2^31 - 1     negative and positive zero share the image 0

    key     [ image : 32 | 2^32 - 1 - index : 32 ]        the largest key is the largest float, and the
                                                          first of equals; no two keys are the same
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.language import Block, jit


@jit
def image_of(x: Block) -> Block:
    """float32 → int32 of the same order; NaN is above everything."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@jit
def float_of(image: Block) -> Block:
    """int32 → the float32 that it is the image of."""
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def key_of(x: Block, index: Block) -> Block:
    """(float32, index) → int64."""
    return (image_of(x).to(tl.int64) << 32) | (0xFFFFFFFF - index.to(tl.int64))


@jit
def index_of(key: Block) -> Block:
    """int64 → its index."""
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)


@jit
def value_of(key: Block) -> Block:
    """int64 → its float32."""
    return float_of((key >> 32).to(tl.int32))


@jit
def is_nan_key(key: Block) -> Block:
    """Whether the float of a key is NaN."""
    return (key >> 32) == 0x7FFFFFFF
