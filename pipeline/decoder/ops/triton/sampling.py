"""Drawing the target's tokens along the walk through a tree.

In this order: temperature, top-k, top-p, inverse of the cumulative distribution. Nothing is sorted.
A row's *candidates*, in token order, are the logits near the largest, and hold all that top-k and
top-p can keep; if they turn out too few, all logits are candidates. What top-k and top-p keep lies
above a threshold, and the weight above a threshold only falls as that rises, so the exact threshold
is found by bisecting the integers that order the floats (WAYS of them at once):

    logits       |  . x .   X x  .   x . |      largest X, near x; scaled by the temperature
    candidates   [ x X x x ]                    top-k: weights 1, top-p: weights exp(x - X)
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.language import Block, Pointer, Scalar, jit
from pipeline.decoder.ops.triton.top_k import image_of, index_of, is_nan_key, key_of, value_of


@jit
def sample_kernel(
    logits: Pointer,
    tokens: Pointer,
    parents: Pointer,
    positions: Pointer,
    temperature: Pointer,
    top_p: Pointer,
    top_k: Pointer,
    seeds: Pointer,
    values: Pointer,
    index: Pointer,
    predicted: Pointer,
    nodes: Scalar,
    size: Scalar,
    steps: Scalar,
    NEAR: tl.constexpr,
    NODES_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
) -> None:
    """One walk a program; values, index [B, size] are its scratch for the candidates."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES_BLOCK)
    inside = (node > 0) & (node < nodes)
    token = tl.load(tokens + row * nodes + node, mask=inside, other=-1)
    parent = tl.load(parents + row * nodes + node, mask=inside, other=-1)
    temperature, top_p = tl.load(temperature + row), tl.load(top_p + row)
    top_k, seed = tl.load(top_k + row), tl.load(seeds + row)
    choice = tl.full([NODES_BLOCK], -1, tl.int64)
    at, step = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while step < steps:
        number = uniform(seed, tl.load(positions + row * nodes + at))
        drawn = _draw(
            logits + (row * nodes + at) * size, values + row * size, index + row * size,
            temperature, top_p, top_k, number, size, NEAR, BLOCK, WAYS,
        )  # fmt: skip
        choice = tl.where(node == at, drawn, choice)
        child = tl.min(tl.where((parent == at) & (token == drawn), node, NODES_BLOCK), axis=0)
        at = tl.where(child < NODES_BLOCK, child, at)
        step = tl.where(child < NODES_BLOCK, step + 1, steps)
    tl.store(predicted + row * nodes + node, choice, mask=node < nodes)


@jit
def _draw(
    logits: Pointer,
    values: Pointer,
    index: Pointer,
    temperature: Scalar,
    top_p: Scalar,
    top_k: Scalar,
    number: Scalar,
    size: Scalar,
    NEAR: tl.constexpr,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
) -> Block:
    """One token from a row of logits; -1 where one of them is NaN."""
    largest = _largest(logits, size, BLOCK)
    token = tl.where(is_nan_key(largest), -1, index_of(largest))
    if (token >= 0) & (temperature != 0):
        temperature = tl.maximum(temperature, 1e-6)
        peak = tl.div_rn(value_of(largest), temperature)
        count, least = keep_top(
            logits, values, index, temperature, peak, top_p, top_k, size, NEAR, BLOCK, WAYS
        )
        total = _mass_from(values, count, peak, least, BLOCK)
        entry = _invert(values, count, peak, least, number.to(tl.float64) * total, BLOCK)
        token = tl.where(entry < 0, token, tl.load(index + tl.maximum(entry, 0)).to(tl.int64))
        tl.debug_barrier()  # the next step writes the list anew
    return token


@jit
def keep_top(
    logits: Pointer,
    values: Pointer,
    index: Pointer,
    temperature: Scalar,
    peak: Scalar,
    top_p: Scalar,
    top_k: Scalar,
    size: Scalar,
    NEAR: tl.constexpr,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
) -> Block:
    """List a row's candidates; returns how many, and the lowest image that top-k and top-p keep."""
    cut = (top_k > 0) | (top_p < 1)
    floor = tl.where(cut, peak - NEAR, float("-inf"))
    count, near, total = _collect(logits, values, index, temperature, peak, floor, size, BLOCK)
    too_few, too_light = count < tl.minimum(top_k, size), near < top_p.to(tl.float64) * total
    if cut & tl.where(top_k > 0, too_few, too_light):
        tl.debug_barrier()  # the list is written anew
        count, near, total = _collect(
            logits, values, index, temperature, peak, float("-inf"), size, BLOCK
        )
    tl.debug_barrier()  # other threads read what these have written
    least = tl.full((), -(2**31), tl.int64)
    if top_k > 0:
        least = _threshold(values, count, peak, top_k.to(tl.float64), least, False, BLOCK, WAYS)
    if top_p < 1:
        wanted = top_p.to(tl.float64) * _mass_from(values, count, peak, least, BLOCK)
        least = _threshold(values, count, peak, wanted, least, True, BLOCK, WAYS)
    return count, least


@jit
def _largest(logits: Pointer, size: Scalar, BLOCK: tl.constexpr) -> Block:
    """The key of the largest logit."""
    best = tl.full([BLOCK], -(2**63), tl.int64)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < size, other=float("-inf")).to(tl.float32)
        best = tl.maximum(best, tl.where(column < size, key_of(x, column), -(2**63)))
    return tl.max(best, axis=0)


@jit
def _collect(
    logits: Pointer,
    values: Pointer,
    index: Pointer,
    temperature: Scalar,
    peak: Scalar,
    floor: Scalar,
    size: Scalar,
    BLOCK: tl.constexpr,
) -> Block:
    """List the scaled logits from `floor` on, and their tokens.

    Returns how many, their mass, and the mass of all.
    """
    count = tl.full((), 0, tl.int32)
    near, total = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        # Correctly rounded division: the same ties as in the reference.
        logit = tl.load(logits + column, mask=column < size, other=float("-inf")).to(tl.float32)
        x = tl.div_rn(logit, tl.zeros([BLOCK], tl.float32) + temperature)
        listed = (x >= floor) & (column < size)
        entry = count + tl.cumsum(listed.to(tl.int32), axis=0) - 1
        tl.store(values + entry, x, mask=listed)
        tl.store(index + entry, column, mask=listed)
        weight = tl.exp(x - peak).to(tl.float64)
        count += tl.sum(listed.to(tl.int32), axis=0)
        near += tl.sum(tl.where(listed, weight, 0.0), axis=0)
        total += tl.sum(weight, axis=0)
    return count, near, total


@jit
def _threshold(
    values: Pointer,
    count: Scalar,
    peak: Scalar,
    wanted: Scalar,
    least: Scalar,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
) -> Block:
    """The lowest image t ≥ least above which the candidates weigh less than `wanted`.

    At most the peak's.
    """
    most = image_of(peak).to(tl.int64)
    way = tl.arange(0, WAYS)
    while least < most:
        tried = least + (way + 1) * (most - least) // (WAYS + 1)  # [w], least … most - 1, ascending
        above = tl.zeros([BLOCK, WAYS], tl.float64)
        for start in range(0, count, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            x = tl.load(values + entry, mask=entry < count, other=float("-inf"))
            weight = (entry < count).to(tl.float64)
            if MASS:
                weight = tl.exp(x - peak).to(tl.float64)
            image = image_of(x).to(tl.int64)
            above += tl.where(image[:, None] > tried[None, :], weight[:, None], 0.0)
        enough = tl.sum(above, axis=0) < wanted  # [w], false … false true … true
        raised = tl.max(tl.where(enough, least, tried + 1), axis=0)
        most = tl.min(tl.where(enough, tried, most), axis=0)
        least = raised
    return least


@jit
def _mass_from(
    values: Pointer, count: Scalar, peak: Scalar, least: Scalar, BLOCK: tl.constexpr
) -> Block:
    """The mass of the candidates whose image is at least `least`."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, count, BLOCK):
        total += tl.sum(_weights(values, start, count, peak, least, BLOCK), axis=0)
    return total


@jit
def _weights(
    values: Pointer, start: Scalar, count: Scalar, peak: Scalar, least: Scalar, BLOCK: tl.constexpr
) -> Block:
    """exp(x - peak) of a block of candidates, zero below `least`; float64."""
    entry = start + tl.arange(0, BLOCK)
    x = tl.load(values + entry, mask=entry < count, other=float("-inf"))
    kept = (entry < count) & (image_of(x).to(tl.int64) >= least)
    return tl.where(kept, tl.exp(x - peak), 0.0).to(tl.float64)


@jit
def _invert(
    values: Pointer, count: Scalar, peak: Scalar, least: Scalar, goal: Scalar, BLOCK: tl.constexpr
) -> Block:
    """The first candidate whose cumulative mass is above `goal`; -1 where none has mass.

    Blocks are passed over by their sums until the goal lies inside one. Sums in different orders
    differ in the last bit, so only a candidate with mass can be the answer, and the last such one
    stands in for none.
    """
    chosen, latest = tl.full((), -1, tl.int32), tl.full((), -1, tl.int32)
    start = tl.full((), 0, tl.int32)
    before = tl.full((), 0.0, tl.float64)
    while (start < count) & (chosen < 0):
        weight = _weights(values, start, count, peak, least, BLOCK)
        entry = start + tl.arange(0, BLOCK)
        block = tl.sum(weight, axis=0)
        latest = tl.maximum(latest, tl.max(tl.where(weight > 0, entry, -1), axis=0))
        if before + block > goal:
            hit = (before + tl.cumsum(weight, axis=0) > goal) & (weight > 0)
            first = tl.min(tl.where(hit, entry, 0x7FFFFFFF), axis=0)
            chosen = tl.where(first < 0x7FFFFFFF, first, chosen)
        before += block
        start += BLOCK
    return tl.where(chosen < 0, latest, chosen)


# Philox 4x32-10 (Salmon et al. 2011), number for number as in `pipeline.decoder.ops.philox`.
@jit
def uniform(seed: Block, position: Block) -> Block:
    """Numbers in [0, 1) with 24 random bits, float32; seed, position int64, not negative."""
    key_low, key_high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    first, second = position & 0xFFFFFFFF, (position >> 32) & 0xFFFFFFFF
    third, fourth = position & 0, position & 0
    for _ in tl.static_range(10):
        # Products wrap in int64, and the wrapped bits are the right ones.
        left, right = first * 0xD2511F53, third * 0xCD9E8D57
        first, second = ((right >> 32) & 0xFFFFFFFF) ^ second ^ key_low, right & 0xFFFFFFFF
        third, fourth = ((left >> 32) & 0xFFFFFFFF) ^ fourth ^ key_high, left & 0xFFFFFFFF
        key_low = (key_low + 0x9E3779B9) & 0xFFFFFFFF
        key_high = (key_high + 0xBB67AE85) & 0xFFFFFFFF
    return (first >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
