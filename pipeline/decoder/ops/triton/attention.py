"""Attention of a few queries a row over a paged cache (FlashAttention-2, Dao 2023; split over the keys as in
Flash-Decoding, Dao et al. 2023; grouped queries, Ainslie et al. 2023).

Queries that share a key/value head are rows of one problem, m = node · SHARED + query head of the group:

                    prefix: seen by all          window: seen by bit      unseen
    pages         | 0        | 1        | 2    :     | 3        | 4
    entries       |##########|##########|######:## # |#  #      |            read once for all rows m
    split                 0             |          1            |

Pages that lie wholly in the prefix need no mask. In the others, entries that no row sees are not even
read: they may hold anything, and zero times NaN is NaN. Each split of the pages leaves its own softmax
with the logarithm (base 2) of its mass, and the merge weighs them; a split without work leaves -inf.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.language import Block, Pointer, Scalar, jit


@jit
def tree_attention_kernel(
    query: Pointer,
    keys: Pointer,
    values: Pointer,
    table: Pointer,
    starts: Pointer,
    visible: Pointer,
    out: Pointer,
    partial: Pointer,
    mass_log2: Pointer,
    scale_log2: Scalar,
    count: Scalar,
    pages: Scalar,
    splits: Scalar,
    page_stride: Scalar,
    head_stride: Scalar,
    entry_stride: Scalar,
    table_stride: Scalar,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    LEAST_PAGES: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """ROWS_BLOCK folded queries of one row and group, over one split of its pages; grid [tiles, B·G, splits]."""
    problem = tl.program_id(1).to(tl.int64)  # row · G + group
    row, group = problem // GROUPS, problem % GROUPS
    start = tl.load(starts + row).to(tl.int32)
    m = tl.program_id(0) * ROWS_BLOCK + tl.arange(0, ROWS_BLOCK)  # [m]
    node, real = m // SHARED, m < count * SHARED
    if CAUSAL:
        sight = tl.where(real, node, -1)  # the last entry behind the prefix that is seen
        reach = tl.max(sight, axis=0) + 1
    else:
        sight = tl.load(visible + row * count + node, mask=real, other=0)  # bits
        room = PAGE - start % PAGE  # entries of the window in the page where it begins
        spilled = tl.max(((sight >> tl.minimum(room, PAGE - 1)) != 0).to(tl.int32), axis=0)
        reach = tl.where(spilled > 0, PAGE, room)
    # Shares are as long as this row's pages make them, their number is not: the grid never depends on data.
    used = tl.minimum(tl.cdiv(start + reach, PAGE), pages)
    share = tl.maximum(tl.cdiv(used, splits), LEAST_PAGES)
    first = tl.program_id(2) * share
    last = tl.minimum(first + share, used)
    whole = tl.minimum(start // PAGE, last)

    column = tl.arange(0, DIM_BLOCK)  # [c]
    stored = real[:, None] & (column < DIM)[None, :]
    head = node * (GROUPS * SHARED) + group * SHARED + m % SHARED
    place = (row * count * (GROUPS * SHARED) + head)[:, None] * DIM + column[None, :]
    rows = tl.load(query + place, mask=stored, other=0.0)  # [m, c]
    peak = tl.full([ROWS_BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS_BLOCK], tl.float32)
    mixed = tl.zeros([ROWS_BLOCK, DIM_BLOCK], tl.float32)
    table += row * table_stride
    keys += group * head_stride
    values += group * head_stride
    for page in range(first, whole):
        base = tl.load(table + page).to(tl.int64) * page_stride
        peak, mass, mixed = _fold(
            rows,
            sight,
            page * PAGE - start,
            peak,
            mass,
            mixed,
            keys + base,
            values + base,
            entry_stride,
            scale_log2,
            PAGE,
            DIM,
            DIM_BLOCK,
            CAUSAL,
            False,
            WIDEN,
        )
    for page in range(tl.maximum(first, whole), last):
        base = tl.load(table + page).to(tl.int64) * page_stride
        peak, mass, mixed = _fold(
            rows,
            sight,
            page * PAGE - start,
            peak,
            mass,
            mixed,
            keys + base,
            values + base,
            entry_stride,
            scale_log2,
            PAGE,
            DIM,
            DIM_BLOCK,
            CAUSAL,
            True,
            WIDEN,
        )
    mass = tl.where(
        mass == 0, 1.0, mass
    )  # a query that sees nothing yields zeros, as in the reference
    mixed = mixed / mass[:, None]
    if SPLIT:
        place = (tl.program_id(2) * tl.num_programs(1) + problem) * (count * SHARED) + m  # [m]
        tl.store(mass_log2 + place, peak + tl.log2(mass), mask=real)
        tl.store(
            partial + place[:, None] * DIM + column[None, :], mixed, mask=stored & (first < last)
        )
    else:
        tl.store(out + place, mixed.to(out.dtype.element_ty), mask=stored)


@jit
def _fold(
    rows: Block,
    sight: Block,
    base: Block,
    peak: Block,
    mass: Block,
    mixed: Block,
    keys: Pointer,
    values: Pointer,
    entry_stride: Scalar,
    scale_log2: Scalar,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    WIDEN: tl.constexpr,
) -> Block:
    """One page into the running softmax (peak, mass [m], mixed [m, c]); `base` is its first entry, less the prefix."""
    offset = base + tl.arange(0, PAGE)  # [e]; negative: prefix
    column = tl.arange(0, DIM_BLOCK)
    place = tl.arange(0, PAGE)[:, None] * entry_stride + column[None, :]  # [e, c]
    if MASKED:
        if CAUSAL:
            seen = offset[None, :] <= sight[:, None]  # [m, e]
        else:
            bit = (sight[:, None] >> tl.minimum(tl.maximum(offset, 0), PAGE - 1)[None, :]) & 1
            seen = (offset < 0)[None, :] | ((offset < PAGE)[None, :] & (bit != 0))
        needed = (tl.max(seen.to(tl.int32), axis=0) > 0)[:, None] & (column < DIM)[None, :]
        key = tl.load(keys + place, mask=needed, other=0.0)
        value = tl.load(values + place, mask=needed, other=0.0)
    elif DIM == DIM_BLOCK:
        key = tl.load(keys + place)
        value = tl.load(values + place)
    else:
        key = tl.load(keys + place, mask=(column < DIM)[None, :], other=0.0)
        value = tl.load(values + place, mask=(column < DIM)[None, :], other=0.0)
    scores = _dot(rows, tl.trans(key), WIDEN) * scale_log2  # [m, e]
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    shift = tl.where(
        higher == float("-inf"), 0.0, higher
    )  # nothing seen so far: exp2(-inf - 0) is zero
    weight = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(peak - shift)
    mass = mass * fade + tl.sum(weight, axis=1)
    mixed = mixed * fade[:, None] + _dot(weight.to(value.dtype), value, WIDEN)
    return higher, mass, mixed


@jit
def _dot(left: Block, right: Block, WIDEN: tl.constexpr) -> Block:
    """Matrix product in float32; float32 itself is not rounded to TF32. The interpreter cannot multiply bfloat16: WIDEN."""
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@jit
def merge_splits_kernel(
    partial: Pointer,
    mass_log2: Pointer,
    out: Pointer,
    count: Scalar,
    splits: Scalar,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
) -> None:
    """Weigh the splits of one folded query by their mass; grid [N·SHARED, B·G]."""
    m, problem = tl.program_id(0), tl.program_id(1).to(tl.int64)
    split, column = tl.arange(0, SPLITS_BLOCK), tl.arange(0, DIM_BLOCK)
    place = (split * tl.num_programs(1) + problem) * (count * SHARED) + m  # [s]
    logs = tl.load(mass_log2 + place, mask=split < splits, other=float("-inf"))
    peak = tl.max(logs, axis=0)
    weight = tl.exp2(logs - tl.where(peak == float("-inf"), 0.0, peak))
    # What a split without work left behind is not read.
    worked = (logs != float("-inf"))[:, None] & (column < DIM)[None, :]
    part = tl.load(
        partial + place[:, None] * DIM + column[None, :], mask=worked, other=0.0
    )  # [s, c]
    mass = tl.sum(weight, axis=0)
    mixed = tl.sum(part * weight[:, None], axis=0) / tl.where(mass == 0, 1.0, mass)
    head = (m // SHARED) * (GROUPS * SHARED) + (problem % GROUPS) * SHARED + m % SHARED
    place_out = (problem // GROUPS * count * (GROUPS * SHARED) + head) * DIM + column
    tl.store(out + place_out, mixed.to(out.dtype.element_ty), mask=column < DIM)
