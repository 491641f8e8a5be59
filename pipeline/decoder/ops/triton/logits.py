"""The largest logits of each row, one or k, without sorting and without a copy of the logits.

row      | block 0         | block 1         | …    part: each block's k largest keys, peak, mass
keys     | k               | k               | …    join: the k largest of those, the row's mass

What is compared are *keys*, (float, index) pairs as single integers. A float's bits sort like a
signed integer's once those of negative numbers are flipped:

    float   -inf … -1.0 … 0.0 … 1.0 … inf   NaN
    image    low …  ..  …  0  …  ..  …  ..   2^31 - 1     both zeros have the image 0

    key     [ image : 32 | 2^32 - 1 - index : 32 ]        the largest key is the largest float, and
                                                          the first of equals; no two are the same


Drawing the target's token at every node: Gumbel-max, as `pipeline.decoder.ops.draws` defines it.

No token waits for another, so the noise is made inside the arg-max, over all blocks of all nodes at
once (and `argmax_join_kernel` ends it):

    threshold   node                    the least scaled logit that top-k and top-p keep
    part        node x block of tokens  scale, drop below the threshold, add noise, largest key
    join        node                    largest key of the blocks

The threshold is exact, and nothing is sorted. What top-k and top-p keep lies above it, and the
weight above a threshold only falls as that rises, so it is found by bisecting the integers that
order the floats (WAYS of them at once). Mostly few logits matter: those near the largest are copied
beside each other first. If they turn out too few, or too many, the row itself is bisected.

    logits       |  . x .   X x  .   x . |      largest X, near x; scaled by the temperature
    candidates   [ x X x x ]                    top-k: weights 1, top-p: weights exp(x - X)
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.launch import Block, Pointer, Scalar, Table, jit


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
    target_ids: Pointer,
    scores: Pointer,
    index: Pointer,
    parts: Scalar,
    K: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    KEYS_BLOCK: tl.constexpr,
    MAPPED: tl.constexpr,
) -> None:
    """One row; grid [T]. MAPPED: indices become `target_ids`."""
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
        token = index_of(best)
        if MAPPED:
            token = tl.load(target_ids + token)
        tl.store(index + row * K + rank, token)
        key = tl.where(key == best, -(2**63), key)


@jit
def threshold_kernel(
    logits: Pointer,
    temperature: Table,
    top_p: Table,
    top_k: Table,
    scratch: Pointer,
    threshold: Table,
    nodes: Scalar,
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    NEAR: tl.constexpr,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
) -> None:
    """The least scaled logit that top-k, then top-p keep; -inf where neither is set.

    Grid [B·N]; scratch [B·N, CAPACITY] is for candidates, those at most NEAR below the largest.
    """
    node = tl.program_id(0).to(tl.int64)
    row = node // nodes
    temperature, top_p = tl.load(temperature + row), tl.load(top_p + row)
    top_k = tl.load(top_k + row)
    cutoff = tl.full((), float("-inf"), tl.float32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1)):
        logits += node * SIZE
        scratch += node * CAPACITY
        temperature = tl.maximum(temperature, 1e-6)
        peak = tl.div_rn(_largest(logits, SIZE, BLOCK), temperature)
        floor = peak - NEAR
        count, near, total = _collect(
            logits, scratch, temperature, peak, floor, SIZE, CAPACITY, BLOCK
        )
        tl.debug_barrier()  # other threads read what these have written
        target_mass = top_p.to(tl.float64) * total
        enough = tl.where(top_k > 0, count >= tl.minimum(top_k, SIZE), near >= target_mass)
        source, held = logits, tl.full((), SIZE, tl.int32)
        least = image_of(tl.full((), float("-inf"), tl.float32)).to(tl.int64)
        if enough & (count <= CAPACITY):
            source, held = scratch, count
            least = image_of(floor).to(tl.int64)
        if top_k > 0:
            least = _bisect(
                source, held, temperature, peak, top_k.to(tl.float64), least, False, BLOCK, WAYS
            )
            total = _mass_from(source, held, temperature, peak, least, BLOCK)
        if top_p < 1:
            target_mass = top_p.to(tl.float64) * total
            least = _bisect(source, held, temperature, peak, target_mass, least, True, BLOCK, WAYS)
        cutoff = value_of(least << 32)
    tl.store(threshold + node, cutoff)


@jit
def draw_part_kernel(
    logits: Pointer,
    threshold: Table,
    temperature: Table,
    seeds: Table,
    positions: Table,
    keys: Pointer,
    nodes: Scalar,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The largest key of one block of one node's noisy logits; grid [B·N, blocks].

    BLOCK is a multiple of four: tokens that share a counter lie in one block.
    """
    node = tl.program_id(0).to(tl.int64)
    row = node // nodes
    temperature = tl.load(temperature + row)
    group = tl.program_id(1) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)  # [g]
    column = group[:, None] * 4 + tl.arange(0, 4)[None, :]  # [g, 4]
    inside = column < SIZE
    x = tl.load(logits + node * SIZE + column, mask=inside, other=float("-inf")).to(tl.float32)
    if temperature > 0:
        # Correctly rounded division: the same ties as in the reference.
        x = _scaled(x, tl.maximum(temperature, 1e-6))
        inside = inside & ((x >= tl.load(threshold + node)) | (x != x))
        x += gumbel(tl.load(seeds + row), tl.load(positions + node), group)
    key = tl.where(inside, key_of(x, column), -(2**63))
    part = node * tl.num_programs(1) + tl.program_id(1)
    tl.store(keys + part, tl.max(tl.max(key, axis=1), axis=0))


# Philox 4x32-10, number for number as in `pipeline.decoder.ops.draws`; Triton has it, too.
@jit
def gumbel(seed: Scalar, position: Scalar, group: Block) -> Block:
    """Gumbel numbers of the four tokens of each group: [g] → [g, 4]."""
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    group = group.to(tl.uint32)
    first, second, third, fourth = tl.philox(seed, group * 0 + low, group * 0 + high, group, 0)
    # Pairs of pairs: the last axis of a join is the new one.
    words = tl.join(tl.join(first, third), tl.join(second, fourth))  # [g, 2, 2]
    v = (tl.reshape(words, [group.shape[0], 4]).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    v = tl.minimum(v, 0.99999994)  # 1 - 2^-24
    # log(1 - v) to the last bits of a small v, from 1 - v as it was rounded (Kahan): what that
    # lost is made good by the ratio.
    rest = 1 - v
    ratio = v / tl.where(rest == 1, 1.0, 1 - rest)
    return -tl.log(tl.where(rest == 1, v, -tl.log(rest) * ratio))


@jit
def _mass_of(x: Block, peak: Scalar) -> Block:
    """exp(x - peak), float64; of an infinite peak only that equals have all the mass matters."""
    finite = (peak > float("-inf")) & (peak < float("inf"))
    return tl.exp(x - tl.where(finite, peak, 0.0)).to(tl.float64)


@jit
def _scaled(logits: Block, temperature: Scalar) -> Block:
    return tl.div_rn(logits, tl.zeros_like(logits) + temperature)


@jit
def _largest(logits: Pointer, SIZE: tl.constexpr, BLOCK: tl.constexpr) -> Block:
    """The largest logit, float32."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, SIZE, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < SIZE, other=float("-inf")).to(tl.float32)
        best = tl.maximum(best, x)
    return tl.max(best, axis=0)


@jit
def _collect(
    logits: Pointer,
    scratch: Pointer,
    temperature: Scalar,
    peak: Scalar,
    floor: Scalar,
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Block:
    """Copy the first CAPACITY logits that scaled reach `floor`.

    Returns how many there are, their mass, and the mass of all.
    """
    count = tl.full((), 0, tl.int32)
    near, total = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for start in range(0, SIZE, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + column, mask=column < SIZE, other=float("-inf"))
        x = _scaled(logit.to(tl.float32), temperature)
        listed = (x >= floor) & (column < SIZE)
        entry = count + tl.cumsum(listed.to(tl.int32), axis=0) - 1
        tl.store(scratch + entry, logit, mask=listed & (entry < CAPACITY))
        weight = _mass_of(x, peak)
        count += tl.sum(listed.to(tl.int32), axis=0)
        near += tl.sum(tl.where(listed, weight, 0.0), axis=0)
        total += tl.sum(weight, axis=0)
    return count, near, total


@jit
def _bisect(
    source: Pointer,
    held: Scalar,
    temperature: Scalar,
    peak: Scalar,
    target_mass: Scalar,
    least: Scalar,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
) -> Block:
    """The lowest image t ≥ least above which the `held` logits weigh less than `target_mass`.

    At most the peak's.
    """
    most = image_of(peak).to(tl.int64)
    way = tl.arange(0, WAYS)
    while least < most:
        tried = least + (way + 1) * (most - least) // (WAYS + 1)  # [w], least … most - 1, ascending
        above = tl.zeros([BLOCK, WAYS], tl.float64)
        for start in range(0, held, BLOCK):
            image, weight = _weights(source, start, held, temperature, peak, MASS, BLOCK)
            above += tl.where(image[:, None] > tried[None, :], weight[:, None], 0.0)
        enough = tl.sum(above, axis=0) < target_mass  # [w], false … false true … true
        raised = tl.max(tl.where(enough, least, tried + 1), axis=0)
        most = tl.min(tl.where(enough, tried, most), axis=0)
        least = raised
    return least


@jit
def _mass_from(
    source: Pointer,
    held: Scalar,
    temperature: Scalar,
    peak: Scalar,
    least: Scalar,
    BLOCK: tl.constexpr,
) -> Block:
    """The mass of the `held` logits whose image is at least `least`."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, held, BLOCK):
        image, weight = _weights(source, start, held, temperature, peak, True, BLOCK)
        total += tl.sum(tl.where(image >= least, weight, 0.0), axis=0)
    return total


@jit
def _weights(
    source: Pointer,
    start: Scalar,
    held: Scalar,
    temperature: Scalar,
    peak: Scalar,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Block:
    """Images of a block of scaled logits, and their weights: 1, or exp(x - peak); float64."""
    entry = start + tl.arange(0, BLOCK)
    logit = tl.load(source + entry, mask=entry < held, other=float("-inf")).to(tl.float32)
    x = _scaled(logit, temperature)
    weight = (entry < held).to(tl.float64)
    if MASS:
        weight = _mass_of(x, peak)
    return image_of(x).to(tl.int64), weight
