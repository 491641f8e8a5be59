"""Philox 4x32-10 (Salmon et al. 2011), number for number as in `pipeline.decoder.ops.philox`."""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.language import Block, jit


@jit
def uniform(seed: Block, position: Block) -> Block:
    """Numbers in [0, 1) with 24 random bits, float32; seed, position int64 of one shape, not negative."""
    key_low, key_high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    first, second = position & 0xFFFFFFFF, (position >> 32) & 0xFFFFFFFF
    third, fourth = position & 0, position & 0
    for _ in tl.static_range(10):
        # Products wrap in int64, and the wrapped bits are the right ones.
        left, right = first * 0xD2511F53, third * 0xCD9E8D57
        first, second = ((right >> 32) & 0xFFFFFFFF) ^ second ^ key_low, right & 0xFFFFFFFF
        third, fourth = ((left >> 32) & 0xFFFFFFFF) ^ fourth ^ key_high, left & 0xFFFFFFFF
        key_low, key_high = (
            (key_low + 0x9E3779B9) & 0xFFFFFFFF,
            (key_high + 0xBB67AE85) & 0xFFFFFFFF,
        )
    return (first >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
