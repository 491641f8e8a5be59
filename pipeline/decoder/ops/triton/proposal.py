"""The k most likely tokens of each row and their log-probabilities, without sorting and without a copy of the logits.

row      | block 0         | block 1         | …      part: each block's k largest keys, peak and mass
keys     | k               | k               | …      join: the k largest of those, the row's mass
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.language import Pointer, Scalar, jit
from pipeline.decoder.ops.triton.order import index_of, key_of, value_of


@jit
def propose_part_kernel(
    logits: Pointer,
    keys: Pointer,
    peaks: Pointer,
    masses: Pointer,
    size: Scalar,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One block of one row; grid [T, blocks]."""
    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = logits + tl.program_id(0).to(tl.int64) * size + column
    x = tl.load(source, mask=column < size, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, axis=0)
    tl.store(peaks + part, peak)
    tl.store(masses + part, tl.sum(tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak)), axis=0))
    key = tl.where(column < size, key_of(x, column), -(2**63))
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
    place = tl.arange(0, KEYS_BLOCK)
    key = tl.load(keys + row * parts * K + place, mask=place < parts * K, other=-(2**63))
    for rank in range(K):
        best = tl.max(key, axis=0)
        tl.store(scores + row * K + rank, value_of(best) - top - total)
        tl.store(index + row * K + rank, index_of(best))
        key = tl.where(key == best, -(2**63), key)
