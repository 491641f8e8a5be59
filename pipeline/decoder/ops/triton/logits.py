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

No token waits for another, so the noise is made inside the arg-max. A launch has a program for each
block of tokens of a node; the last of a node's to arrive ends what they began:

    largest     each block's largest key                      last: the largest of them
    threshold   copy what is near the largest, weigh all      last: the least scaled logit that
                                                              top-k and top-p keep
    draw        scale, drop below the threshold, add noise,   last: the largest of them
                largest key

The threshold is exact, and nothing is sorted. What top-k and top-p keep lies above it, and the
weight above a threshold only falls as that rises, so it is found by bisecting the integers that
order the floats (WAYS of them at once). Mostly few logits matter: those near the largest, which are
beside each other by then. If they turn out too few, or too many, the row itself is bisected.

    logits       |  . x .   X x  .   x . |      largest X, near x; scaled by the temperature
    candidates   [ x X x x ]                    top-k: weights 1, top-p: weights exp(x - X)

Weights are integers, multiples of 1 / UNIT of exp(x - X). Their sums are exact, so neither the
order in which blocks arrive nor that of the candidates changes a bit. What is cut off is at most
2^-25 of the mass of 2^18 tokens, less than what rounds each exp.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.launch import Block, Pointer, Scalar, Table, is_last, jit


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
def argmax_kernel(
    logits: Pointer,
    keys: Pointer,
    index: Pointer,
    arrived: Pointer,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
) -> None:
    """The largest key of each block of a row, and the row's index; grid [rows, blocks]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = logits + row * SIZE + column
    x = tl.load(source, mask=column < SIZE, other=float("-inf")).to(tl.float32)
    key = tl.where(column < SIZE, key_of(x, column), -(2**63))
    _join_keys(tl.max(key, axis=0), row, keys, index, arrived, PARTS_BLOCK)


@jit
def _join_keys(
    key: Scalar,
    row: Scalar,
    keys: Pointer,
    index: Pointer,
    arrived: Pointer,
    PARTS_BLOCK: tl.constexpr,
) -> None:
    """Store the key of this program's block; the last of a row stores the index of the largest, -1
    where it is NaN's."""
    tl.store(keys + row * tl.num_programs(1) + tl.program_id(1), key)
    if is_last(arrived + row, tl.num_programs(1)):
        best = _largest_key(keys, row, PARTS_BLOCK)
        tl.store(index + row, tl.where(is_nan_key(best), -1, index_of(best)))


@jit
def _largest_key(keys: Pointer, row: Scalar, PARTS_BLOCK: tl.constexpr) -> Block:
    """Of the blocks of a row."""
    part, parts = tl.arange(0, PARTS_BLOCK), tl.num_programs(1)
    key = tl.load(
        keys + row * parts + part, mask=part < parts, other=-(2**63), cache_modifier=".cg"
    )
    return tl.max(key, axis=0)


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
    keys: Pointer,
    temperature: Table,
    top_p: Table,
    top_k: Table,
    scratch: Pointer,
    masses: Pointer,
    arrived: Pointer,
    threshold: Table,
    nodes: Scalar,
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    NEAR: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    HELD_BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
) -> None:
    """The least scaled logit that top-k, then top-p keep; -inf where neither is set.

    Grid [B·N, blocks]; keys [B·N, blocks] are the blocks' largest. scratch [B·N, CAPACITY] is for
    candidates, those at most NEAR below the largest; masses [B·N, blocks]. Of `arrived` every node
    has two counters.
    """
    node, parts = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    row = node // nodes
    temperature, top_p = tl.load(temperature + row), tl.load(top_p + row)
    top_k = tl.load(top_k + row)
    best = _largest_key(keys, node, PARTS_BLOCK)
    unfiltered = (temperature <= 0) | ((top_k == 0) & (top_p >= 1)) | is_nan_key(best)
    if unfiltered:
        if tl.program_id(1) == 0:
            tl.store(threshold + node, float("-inf"))
        return
    logits += node * SIZE
    scratch += node * CAPACITY
    masses += node * parts
    temperature = tl.maximum(temperature, 1e-6)
    peak = tl.div_rn(value_of(best), temperature)
    floor = peak - NEAR
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + column, mask=column < SIZE, other=float("-inf"))
    x = _scaled(logit.to(tl.float32), temperature)
    near = (x >= floor) & (column < SIZE)
    listed = near.to(tl.int32)
    copied = arrived + tl.num_programs(0) + node
    entry = tl.atomic_add(copied, tl.sum(listed, axis=0)) + tl.cumsum(listed, axis=0) - 1
    tl.store(scratch + entry, logit, mask=near & (entry < CAPACITY))
    weight = tl.where(column < SIZE, _mass_of(x, peak, UNIT), 0)
    tl.store(masses + tl.program_id(1), tl.sum(weight, axis=0))
    if is_last(arrived + node, parts):
        count = tl.load(copied, cache_modifier=".cg")
        tl.store(copied, 0)  # as the next launch finds it
        part = tl.arange(0, PARTS_BLOCK)
        mass = tl.load(masses + part, mask=part < parts, other=0, cache_modifier=".cg")
        total = tl.sum(mass, axis=0)
        source, held = scratch, tl.minimum(count, CAPACITY)
        least = image_of(floor).to(tl.int64)
        enough = count >= tl.minimum(top_k, SIZE)
        if top_k == 0:
            mass_near = _mass_from(source, held, temperature, peak, least, UNIT, HELD_BLOCK)
            enough = mass_near >= _share(top_p, total)
        if (count > CAPACITY) | (enough == 0):
            source, held = logits, tl.full((), SIZE, tl.int32)
            least = image_of(tl.full((), float("-inf"), tl.float32)).to(tl.int64)
        if top_k > 0:
            least = _bisect(source, held, temperature, peak, top_k, least, 0, HELD_BLOCK, WAYS)
            total = _mass_from(source, held, temperature, peak, least, UNIT, HELD_BLOCK)
        if top_p < 1:
            target_mass = _share(top_p, total)
            least = _bisect(
                source, held, temperature, peak, target_mass, least, UNIT, HELD_BLOCK, WAYS
            )
        tl.store(threshold + node, value_of(least << 32))


@jit
def draw_kernel(
    logits: Pointer,
    threshold: Table,
    temperature: Table,
    seeds: Table,
    positions: Table,
    keys: Pointer,
    index: Pointer,
    arrived: Pointer,
    nodes: Scalar,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
) -> None:
    """The index of the largest of a node's noisy logits; grid [B·N, blocks].

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
    _join_keys(tl.max(tl.max(key, axis=1), axis=0), node, keys, index, arrived, PARTS_BLOCK)


# Philox 4x32-10, number for number as in `pipeline.decoder.ops.draws`; Triton has it, too.
@jit
def gumbel(seed: Scalar, position: Scalar, group: Block) -> Block:
    """Gumbel numbers of the four tokens of each group: [g] → [g, 4]."""
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    group = group.to(tl.uint32)
    first, second, third, fourth = tl.philox(seed, group * 0 + low, group * 0 + high, group, 0)
    # Pairs of pairs: the last axis of a join is the new one.
    words = tl.join(tl.join(first, third), tl.join(second, fourth))  # [g, 2, 2]
    return _gumbel_of(tl.reshape(words, [group.shape[0], 4]))


@jit
def perturb_drafts_kernel(
    logits: Pointer,
    noisy: Pointer,
    target_ids: Pointer,
    temperature: Table,
    seeds: Table,
    positions: Table,
    weight: Scalar,
    drafts: Scalar,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MAPPED: tl.constexpr,
) -> None:
    """The noise of a block of tokens, for all `drafts` of a row; grid [R, blocks]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, token = column < SIZE, column
    if MAPPED:
        token = tl.load(target_ids + column, mask=inside, other=0)
    temperature = tl.load(temperature + row)
    noise = weight * _gumbel_of_tokens(tl.load(seeds + row), tl.load(positions + row), token)
    for draft in range(drafts):
        at = (row * drafts + draft) * SIZE + column
        x = tl.load(logits + at, mask=inside).to(tl.float32)
        drawn = _scaled(x, tl.maximum(temperature, 1e-6)) + noise
        x = tl.where(temperature > 0, drawn, x)
        tl.store(noisy + at, x.to(noisy.dtype.element_ty), mask=inside)


@jit
def _gumbel_of_tokens(seed: Scalar, position: Scalar, token: Block) -> Block:
    """Gumbel numbers of tokens that share no group."""
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    group, within = (token // 4).to(tl.uint32), token % 4
    first, second, third, fourth = tl.philox(seed, group * 0 + low, group * 0 + high, group, 0)
    even = tl.where(within == 0, first, third)
    return _gumbel_of(tl.where(within % 2 == 0, even, tl.where(within == 1, second, fourth)))


@jit
def _gumbel_of(words: Block) -> Block:
    """Gumbel numbers from 32 bits each."""
    v = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    v = tl.minimum(v, 0.99999994)  # 1 - 2^-24
    # log(1 - v) to the last bits of a small v, from 1 - v as it was rounded (Kahan): what that
    # lost is made good by the ratio.
    rest = 1 - v
    ratio = v / tl.where(rest == 1, 1.0, 1 - rest)
    return -tl.log(tl.where(rest == 1, v, -tl.log(rest) * ratio))


@jit
def _mass_of(x: Block, peak: Scalar, UNIT: tl.constexpr) -> Block:
    """exp(x - peak) in units, int64; 1 for what equals the peak, an infinite one too."""
    other = x != peak
    below = tl.where(other, x, 0.0) - tl.where(other, peak, 0.0)
    return (tl.exp(below) * UNIT).to(tl.int64)


@jit
def _share(top_p: Scalar, total: Scalar) -> Block:
    """The least mass that is top_p of the total."""
    return tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)


@jit
def _scaled(logits: Block, temperature: Scalar) -> Block:
    return tl.div_rn(logits, tl.zeros_like(logits) + temperature)


@jit
def _bisect(
    source: Pointer,
    held: Scalar,
    temperature: Scalar,
    peak: Scalar,
    target_mass: Scalar,
    least: Scalar,
    UNIT: tl.constexpr,
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
        above = tl.zeros([BLOCK, WAYS], tl.int64)
        for start in range(0, held, BLOCK):
            image, weight = _weights(source, start, held, temperature, peak, UNIT, BLOCK)
            above += tl.where(image[:, None] > tried[None, :], weight[:, None], 0)
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
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Block:
    """The mass of the `held` logits whose image is at least `least`."""
    total = tl.full((), 0, tl.int64)
    for start in range(0, held, BLOCK):
        image, weight = _weights(source, start, held, temperature, peak, UNIT, BLOCK)
        total += tl.sum(tl.where(image >= least, weight, 0), axis=0)
    return total


@jit
def _weights(
    source: Pointer,
    start: Scalar,
    held: Scalar,
    temperature: Scalar,
    peak: Scalar,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Block:
    """Images of a block of scaled logits, and their weights: masses, or with UNIT 0 ones; int64."""
    entry = start + tl.arange(0, BLOCK)
    stored = entry < held
    logit = tl.load(source + entry, mask=stored, other=float("-inf"), cache_modifier=".cg")
    x = _scaled(logit.to(tl.float32), temperature)
    weight = stored.to(tl.int64)
    if UNIT > 0:
        weight = tl.where(stored, _mass_of(x, peak, UNIT), 0)
    return image_of(x).to(tl.int64), weight
