"""Attention of a few queries a row over a paged cache.

FlashAttention-2 (Dao 2023), split over the keys as in Flash-Decoding (Dao et al. 2023), with
grouped queries (Ainslie et al. 2023): those that share a key/value head are rows of one problem,
row m being node · GROUP_SIZE + query head of the group.

                prefix: seen by all          window: seen by bit      unseen
    pages     | 0        | 1        | 2    :     | 3        | 4
    entries   |##########|##########|######:## # |#  #      |            read once for all rows m
    split             0             |          1            |

Pages that lie wholly in the prefix need no mask. In the others, entries that no row sees are not
even read: they may hold anything, and zero times NaN is NaN. Each split of the pages leaves its own
softmax with the logarithm (base 2) of its mass, and the merge weighs them; a split without work
leaves -inf.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.language import Block, Pointer, Scalar, jit


@jit
def tree_attention_kernel(
    query: Pointer,
    keys: Pointer,
    values: Pointer,
    block_table: Pointer,
    seq_lens: Pointer,
    mask: Pointer,
    out: Pointer,
    partial: Pointer,
    lse_log2: Pointer,
    scale_log2: Scalar,
    count: Scalar,
    pages: Scalar,
    splits: Scalar,
    page_stride: Scalar,
    head_stride: Scalar,
    entry_stride: Scalar,
    block_table_stride: Scalar,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    LEAST_PAGES: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """ROWS_BLOCK folded queries of one row and group, over one split of its pages.

    Grid [tiles, B·G, splits].
    """
    problem = tl.program_id(1).to(tl.int64)  # row · G + group
    row, group = problem // GROUPS, problem % GROUPS
    seq_len = tl.load(seq_lens + row).to(tl.int32)
    m = tl.program_id(0) * ROWS_BLOCK + tl.arange(0, ROWS_BLOCK)  # [m]
    node, real = m // GROUP_SIZE, m < count * GROUP_SIZE
    if CAUSAL:
        row_mask = tl.where(real, node, -1)  # the last entry behind the prefix that is seen
        reach = tl.max(row_mask, axis=0) + 1
    else:
        row_mask = tl.load(mask + row * count + node, mask=real, other=0)  # bits
        in_page = PAGE - seq_len % PAGE  # entries of the window in the page where it begins
        spilled = tl.max(((row_mask >> tl.minimum(in_page, PAGE - 1)) != 0).to(tl.int32), axis=0)
        reach = tl.where(spilled > 0, PAGE, in_page)
    # A row's pages decide how long its splits are, not how many: the grid never depends on data.
    used = tl.minimum(tl.cdiv(seq_len + reach, PAGE), pages)
    per_split = tl.maximum(tl.cdiv(used, splits), LEAST_PAGES)
    first = tl.program_id(2) * per_split
    last = tl.minimum(first + per_split, used)
    whole = tl.minimum(seq_len // PAGE, last)

    column = tl.arange(0, DIM_BLOCK)  # [c]
    stored = real[:, None] & (column < DIM)[None, :]
    head = node * (GROUPS * GROUP_SIZE) + group * GROUP_SIZE + m % GROUP_SIZE
    at = (row * count * (GROUPS * GROUP_SIZE) + head)[:, None] * DIM + column[None, :]
    rows = tl.load(query + at, mask=stored, other=0.0)  # [m, c]
    peak = tl.full([ROWS_BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS_BLOCK], tl.float32)
    mixed = tl.zeros([ROWS_BLOCK, DIM_BLOCK], tl.float32)
    block_table += row * block_table_stride
    keys += group * head_stride
    values += group * head_stride
    for MASKED in tl.static_range(2):  # pages that lie wholly in the prefix, then the others
        begin = tl.maximum(first, whole) if MASKED else first
        for page in range(begin, last if MASKED else whole):
            base = tl.load(block_table + page).to(tl.int64) * page_stride
            peak, mass, mixed = _fold(
                rows, row_mask, page * PAGE - seq_len, peak, mass, mixed,
                keys + base, values + base, entry_stride, scale_log2,
                PAGE, DIM, DIM_BLOCK, CAUSAL, MASKED, WIDEN,
            )  # fmt: skip
    # A query that sees nothing yields zeros, as in the reference.
    mass = tl.where(mass == 0, 1.0, mass)
    mixed = mixed / mass[:, None]
    if SPLIT:
        at = (tl.program_id(2) * tl.num_programs(1) + problem) * (count * GROUP_SIZE) + m  # [m]
        tl.store(lse_log2 + at, peak + tl.log2(mass), mask=real)
        part = partial + at[:, None] * DIM + column[None, :]
        tl.store(part, mixed, mask=stored & (first < last))
    else:
        tl.store(out + at, mixed.to(out.dtype.element_ty), mask=stored)


@jit
def _fold(
    rows: Block,
    row_mask: Block,
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
    """One page into the running softmax: peak, mass [m] and mixed [m, c].

    `base` is the page's first entry, less the prefix.
    """
    offset = base + tl.arange(0, PAGE)  # [e]; negative: prefix
    column = tl.arange(0, DIM_BLOCK)
    at = tl.arange(0, PAGE)[:, None] * entry_stride + column[None, :]  # [e, c]
    if MASKED:
        if CAUSAL:
            seen = offset[None, :] <= row_mask[:, None]  # [m, e]
        else:
            bit = (row_mask[:, None] >> tl.minimum(tl.maximum(offset, 0), PAGE - 1)[None, :]) & 1
            seen = (offset < 0)[None, :] | ((offset < PAGE)[None, :] & (bit != 0))
        needed = (tl.max(seen.to(tl.int32), axis=0) > 0)[:, None] & (column < DIM)[None, :]
        key = tl.load(keys + at, mask=needed, other=0.0)
        value = tl.load(values + at, mask=needed, other=0.0)
    elif DIM == DIM_BLOCK:
        key = tl.load(keys + at)
        value = tl.load(values + at)
    else:
        key = tl.load(keys + at, mask=(column < DIM)[None, :], other=0.0)
        value = tl.load(values + at, mask=(column < DIM)[None, :], other=0.0)
    scores = _dot(rows, tl.trans(key), WIDEN) * scale_log2  # [m, e]
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    # Nothing seen so far: exp2(-inf - 0) is zero.
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(peak - shift)
    mass = mass * fade + tl.sum(weight, axis=1)
    mixed = mixed * fade[:, None] + _dot(weight.to(value.dtype), value, WIDEN)
    return higher, mass, mixed


@jit
def _dot(left: Block, right: Block, WIDEN: tl.constexpr) -> Block:
    """Matrix product in float32; float32 itself is not rounded to TF32.

    WIDEN: the interpreter cannot multiply bfloat16.
    """
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@jit
def merge_splits_kernel(
    partial: Pointer,
    lse_log2: Pointer,
    out: Pointer,
    count: Scalar,
    splits: Scalar,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
) -> None:
    """Weigh the splits of one folded query by their mass; grid [N·GROUP_SIZE, B·G]."""
    m, problem = tl.program_id(0), tl.program_id(1).to(tl.int64)
    split, column = tl.arange(0, SPLITS_BLOCK), tl.arange(0, DIM_BLOCK)
    at = (split * tl.num_programs(1) + problem) * (count * GROUP_SIZE) + m  # [s]
    logs = tl.load(lse_log2 + at, mask=split < splits, other=float("-inf"))
    peak = tl.max(logs, axis=0)
    weight = tl.exp2(logs - tl.where(peak == float("-inf"), 0.0, peak))
    # What a split without work left behind is not read.
    worked = (logs != float("-inf"))[:, None] & (column < DIM)[None, :]
    source = partial + at[:, None] * DIM + column[None, :]  # [s, c]
    part = tl.load(source, mask=worked, other=0.0)
    mass = tl.sum(weight, axis=0)
    mixed = tl.sum(part * weight[:, None], axis=0) / tl.where(mass == 0, 1.0, mass)
    head = (
        (m // GROUP_SIZE) * (GROUPS * GROUP_SIZE) + (problem % GROUPS) * GROUP_SIZE + m % GROUP_SIZE
    )
    at_out = (problem // GROUPS * count * (GROUPS * GROUP_SIZE) + head) * DIM + column
    tl.store(out + at_out, mixed.to(out.dtype.element_ty), mask=column < DIM)
