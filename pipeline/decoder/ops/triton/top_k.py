"""The largest logits of each row, one or k, without sorting and without a copy of the logits.

row      | block 0         | block 1         | …    part: each block's k largest keys, peak, mass
keys     | k               | k               | …    join: the k largest of those, the row's mass

What is compared are *keys*, (float, index) pairs as single integers. A float's bits sort like a
signed integer's once those of negative numbers are flipped:

    float   -inf … -1.0 … 0.0 … 1.0 … inf   NaN
    image    low …  ..  …  0  …  ..  …  ..   2^31 - 1     both zeros have the image 0

    key     [ image : 32 | 2^32 - 1 - index : 32 ]        the largest key is the largest float, and
                                                          the first of equals; no two are the same
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.language import Block, Pointer, Scalar, jit


@jit
def image_of(x: Block) -> Block:
    """float32 → int32 of the same order; NaN is above everything."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


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
    image = (key >> 32).to(tl.int32)
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def is_nan_key(key: Block) -> Block:
    """Whether the float of a key is NaN."""
    return (key >> 32) == 0x7FFFFFFF


@jit
def argmax_part_kernel(
    logits: Pointer, keys: Pointer, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """The largest key of one block of one row; grid [rows, blocks]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = logits + row * SIZE + column
    x = tl.load(source, mask=column < SIZE, other=float("-inf")).to(tl.float32)
    key = tl.where(column < SIZE, key_of(x, column), -(2**63))
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


@jit
def propose_part_kernel(
    logits: Pointer,
    keys: Pointer,
    peaks: Pointer,
    masses: Pointer,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One block of one row; grid [T, blocks]."""
    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = logits + tl.program_id(0).to(tl.int64) * SIZE + column
    x = tl.load(source, mask=column < SIZE, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, axis=0)
    tl.store(peaks + part, peak)
    tl.store(masses + part, tl.sum(tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak)), axis=0))
    key = tl.where(column < SIZE, key_of(x, column), -(2**63))
    for rank in range(K):
        best = tl.max(key, axis=0)
        tl.store(keys + part * K + rank, best)
        key = tl.where(key == best, -(2**63), key)


@jit
def propose_join_kernel(
    keys: Pointer,
    peaks: Pointer,
    masses: Pointer,
    scores: Pointer,
    index: Pointer,
    parts: Scalar,
    K: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    KEYS_BLOCK: tl.constexpr,
) -> None:
    """One row; grid [T]."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_BLOCK)
    peak = tl.load(peaks + row * parts + part, mask=part < parts, other=float("-inf"))
    mass = tl.load(masses + row * parts + part, mask=part < parts, other=0.0)
    top = tl.max(peak, axis=0)
    total = tl.log(tl.sum(mass * tl.exp(peak - top), axis=0))
    at = tl.arange(0, KEYS_BLOCK)
    key = tl.load(keys + row * parts * K + at, mask=at < parts * K, other=-(2**63))
    for rank in range(K):
        best = tl.max(key, axis=0)
        tl.store(scores + row * K + rank, value_of(best) - top - total)
        tl.store(index + row * K + rank, index_of(best))
        key = tl.where(key == best, -(2**63), key)
