"""Attention of a few queries a row over a paged cache, in ragged rows.

FlashAttention-2 (Dao 2023), split over the keys as in Flash-Decoding (Dao et al. 2023), with
grouped queries (Ainslie et al. 2023): those that share a key/value head are rows of one problem,
row m being node · GROUP_SIZE + query head of the group.

                prefix: seen by all          window: seen by bit      unseen
    pages     | 0        | 1        | 2    :     | 3        | 4
    entries   |##########|##########|######:## # |#  #      |            read once for all rows m
    chunk             0             |          1            |

Pages that all rows see whole need no mask. In the others, entries that no row sees are not even
read: they may hold anything, and zero times NaN is NaN.

Where a row is cut depends on its own length, window and queries: into chunks of LEAST_CHUNK pages,
and of twice as many whenever they become more than the grid has room for, or whenever what they
leave behind would weigh much beside what they read (QUERIES_A_PAGE). So a short row in a wide block
table is many programs, a long row among short ones is, too, and a row gets the same bits whatever
stands beside it and however wide the table is. Programs without a chunk end at once. A row of one
chunk is written by its program, and so is one of more than MOST_SPLIT tokens, whose tiles are
enough programs. Other chunks leave a softmax each with the logarithm (base 2) of its mass, -inf
where a tile does not see them. The program that is last to arrive weighs them, in order.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.launch import (
    Block,
    Pointer,
    Scalar,
    Stride,
    Table,
    dot,
    is_last,
    jit,
)


@jit
def tree_attention_kernel(
    query: Pointer,
    keys: Pointer,
    values: Pointer,
    block_table: Table,
    seq_lens: Table,
    cu_seqlens_q: Table,
    mask: Table,
    first_seen: Table,
    out: Pointer,
    partial: Pointer,
    lse_log2: Pointer,
    arrived: Pointer,
    scale_log2: Scalar,
    pages: Scalar,
    most: Scalar,
    page_stride: Stride,
    head_stride: Stride,
    entry_stride: Stride,
    block_table_stride: Scalar,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    MOST_SPLIT: tl.constexpr,
    LEAST_CHUNK: tl.constexpr,
    QUERIES_A_PAGE: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    SLIDING: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """ROWS_BLOCK folded queries of one row and group, over one of its chunks.

    Grid [tiles, B·G, chunks]. partial and lse_log2 [chunks, B·G, most · GROUP_SIZE (, DIM)].
    """
    problem = tl.program_id(1).to(tl.int64)  # row · G + group
    row, group = problem // GROUPS, problem % GROUPS
    start = tl.load(cu_seqlens_q + row)
    count = (tl.load(cu_seqlens_q + row + 1) - start).to(tl.int32)
    seq_len = tl.load(seq_lens + row).to(tl.int32)
    # The last tile sees the most, and so begins first.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS_BLOCK
    room = tl.num_programs(2)
    skipped = 0  # pages that a window hides from all of the row's tokens: the first one's
    if SLIDING:
        skipped = (tl.load(first_seen + start, mask=count > 0, other=0) // PAGE).to(tl.int32)
    chunks, chunk = _chunks_of(
        seq_len, count, pages, skipped, room,
        GROUP_SIZE, PAGE, MOST_SPLIT, LEAST_CHUNK, QUERIES_A_PAGE, CAUSAL,
    )  # fmt: skip
    if (tile >= count * GROUP_SIZE) | (tl.program_id(2) >= chunks):
        return
    m = tile + tl.arange(0, ROWS_BLOCK)  # [m]
    node, real = m // GROUP_SIZE, m < count * GROUP_SIZE
    row_mask, first, whole, last = _pages_of_chunk(
        mask, start, seq_len, node, real, tile // GROUP_SIZE, pages, skipped, chunk, chunks,
        PAGE, CAUSAL,
    )  # fmt: skip
    lowest = m
    if SLIDING:  # the first pages are seen in part, and all are masked
        unseen = pages * PAGE
        lowest = tl.load(first_seen + start + node, mask=real, other=unseen).to(tl.int32)  # [m]
        first = tl.minimum(tl.maximum(first, tl.min(lowest, axis=0) // PAGE), last)
        whole = first

    column = tl.arange(0, DIM_BLOCK)
    stored = real[:, None] & (column < DIM)[None, :]
    head = node * (GROUPS * GROUP_SIZE) + group * GROUP_SIZE + m % GROUP_SIZE
    at = (start * (GROUPS * GROUP_SIZE) + head)[:, None] * DIM + column[None, :]
    rows = tl.load(query + at, mask=stored, other=0.0)  # [m, c]
    peak = tl.full([ROWS_BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS_BLOCK], tl.float32)
    mixed = tl.zeros([ROWS_BLOCK, DIM_BLOCK], tl.float32)
    block_table += row * block_table_stride
    keys += group * head_stride
    values += group * head_stride
    for MASKED in tl.static_range(2):  # pages that all rows see whole, then the others
        begin = tl.maximum(first, whole) if MASKED else first
        for page in range(begin, last if MASKED else whole):
            base = tl.load(block_table + page).to(tl.int64) * page_stride
            peak, mass, mixed = _fold(
                rows, row_mask, page * PAGE - seq_len, peak, mass, mixed,
                keys + base, values + base, entry_stride, scale_log2, lowest - seq_len,
                PAGE, DIM, DIM_BLOCK, CAUSAL, MASKED, SLIDING, WIDEN,
            )  # fmt: skip
    # A query that sees nothing yields zeros, as in the reference.
    mass = tl.where(mass == 0, 1.0, mass)
    mixed = mixed / mass[:, None]
    if chunks > 1:
        each = most * GROUP_SIZE * tl.num_programs(1)
        part = problem * (most * GROUP_SIZE) + m  # [m]
        mine = part + tl.program_id(2) * each
        tl.store(lse_log2 + mine, peak + tl.log2(mass), mask=real)
        weighed = stored & (first < last)
        tl.store(partial + mine[:, None] * DIM + column[None, :], mixed, mask=weighed)
        here = arrived + problem * tl.num_programs(0) + tl.program_id(0)
        if not is_last(here, chunks):
            return
        mixed = _merged(partial, lse_log2, part, each, chunks, stored, real, DIM)
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=stored)


@jit
def _merged(
    partial: Pointer,
    lse_log2: Pointer,
    part: Block,
    each: Scalar,
    chunks: Scalar,
    stored: Block,
    real: Block,
    DIM: tl.constexpr,
) -> Block:
    """The chunks of a tile, weighed by their mass, in order; `part` [m] are the first's places."""
    column = tl.arange(0, stored.shape[1])[None, :]
    peak = tl.full([stored.shape[0]], float("-inf"), tl.float32)
    mass = tl.zeros([stored.shape[0]], tl.float32)
    mixed = tl.zeros([stored.shape[0], stored.shape[1]], tl.float32)
    for _ in range(chunks):
        log = tl.load(lse_log2 + part, mask=real, other=float("-inf"), cache_modifier=".cg")
        # What a chunk that was not seen left behind is not read.
        seen = stored & (log != float("-inf"))[:, None]
        at = partial + part[:, None] * DIM + column
        theirs = tl.load(at, mask=seen, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(peak, log)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weight = tl.exp2(peak - shift), tl.exp2(log - shift)
        mass = mass * fade + weight
        mixed = mixed * fade[:, None] + theirs * weight[:, None]
        peak = higher
        part += each
    return mixed / tl.where(mass == 0, 1.0, mass)[:, None]


@jit
def _chunks_of(
    seq_len: Scalar,
    count: Scalar,
    pages: Scalar,
    skipped: Scalar,
    room: Scalar,
    GROUP_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    MOST_SPLIT: tl.constexpr,
    LEAST_CHUNK: tl.constexpr,
    QUERIES_A_PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
) -> Block:
    """Into how many chunks a row is cut, and their pages; `room` is how many the grid has."""
    window = count if CAUSAL else PAGE
    used = tl.maximum(tl.minimum(tl.cdiv(seq_len + window, PAGE), pages) - skipped, 1)
    by_length = tl.cdiv(used, LEAST_CHUNK * room)
    by_queries = tl.cdiv(count * GROUP_SIZE, LEAST_CHUNK * QUERIES_A_PAGE)
    # The next power of two: every bit below the highest is set, then one is added.
    times = tl.maximum(by_length, by_queries) - 1
    times |= times >> 1
    times |= times >> 2
    times |= times >> 4
    times |= times >> 8
    chunk = LEAST_CHUNK * (times + 1)
    chunks = tl.cdiv(used, chunk)
    return tl.where(count <= MOST_SPLIT, chunks, 1), chunk


@jit
def _pages_of_chunk(
    mask: Table,
    start: Scalar,
    seq_len: Scalar,
    node: Block,
    real: Block,
    first_node: Scalar,
    pages: Scalar,
    skipped: Scalar,
    chunk: Scalar,
    chunks: Scalar,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
) -> Block:
    """What each row [m] sees after the prefix; the chunk's first page, that up to which all rows
    see everything, and that up to which any row sees anything."""
    if CAUSAL:
        row_mask = tl.where(real, node, -1)  # the last entry after the prefix that is seen
        reach = tl.max(row_mask, axis=0) + 1
        whole = (seq_len + first_node + 1) // PAGE
    else:
        row_mask = tl.load(mask + start + node, mask=real, other=0)  # bits
        in_page = PAGE - seq_len % PAGE  # entries of the window in the page where it begins
        spilled = tl.max(((row_mask >> tl.minimum(in_page, PAGE - 1)) != 0).to(tl.int32), axis=0)
        reach = tl.where(spilled > 0, PAGE, in_page)
        whole = seq_len // PAGE
    used = tl.minimum(tl.cdiv(seq_len + reach, PAGE), pages)
    first = skipped + tl.program_id(2) * chunk
    last = tl.where(chunks > 1, tl.minimum(first + chunk, used), used)
    return row_mask, first, tl.minimum(whole, last), last


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
    entry_stride: Stride,
    scale_log2: Scalar,
    lowest: Block,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    SLIDING: tl.constexpr,
    WIDEN: tl.constexpr,
) -> Block:
    """One page into the running softmax: peak, mass [m] and mixed [m, c].

    `base` is the page's first entry, less the prefix; `lowest` [m] the first ones that rows see, so
    too.
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
        if SLIDING:
            seen = seen & (offset[None, :] >= lowest[:, None])
        needed = (tl.max(seen.to(tl.int32), axis=0) > 0)[:, None] & (column < DIM)[None, :]
        key = tl.load(keys + at, mask=needed, other=0.0)
        value = tl.load(values + at, mask=needed, other=0.0)
    elif DIM == DIM_BLOCK:
        key = tl.load(keys + at)
        value = tl.load(values + at)
    else:
        key = tl.load(keys + at, mask=(column < DIM)[None, :], other=0.0)
        value = tl.load(values + at, mask=(column < DIM)[None, :], other=0.0)
    scores = dot(rows, tl.trans(key), WIDEN) * scale_log2  # [m, e]
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    # Nothing seen so far: exp2(-inf - 0) is zero.
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(peak - shift)
    mass = mass * fade + tl.sum(weight, axis=1)
    mixed = mixed * fade[:, None] + dot(weight.to(value.dtype), value, WIDEN)
    return higher, mass, mixed
