"""Looking up what followed the last tokens before, as a tree, and merging that with another.

look_up     a program for each block of a row's history; the last of a row's to arrive joins theirs

    history  | … a b c d … | … b c f … | a b c         root c
    keys     | 3 matches   | 2 matches |               (length · S + place, 0 for none), W of each
    chains                               d … , f …     the W largest of all, and what followed them

tree_of_chains, merge   a program for each row; vectors of the W chains, a depth after the other

What needs each chain beside each other is a block [W, W], and what a column of it needs is told by
its rows: `across`.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.launch import Block, Pointer, Scalar, Table, is_last, jit


@jit
def across(x: Block, eye: Block) -> Block:
    """What stands in rows, for the columns; `eye` [n, n] is the diagonal."""
    return tl.sum(tl.where(eye, x[:, None], 0), axis=0)


@jit
def write_history_kernel(
    history: Table,
    seq_lens: Table,
    cu_seqlens_q: Table,
    tokens: Table,
    next_tokens: Table,
    counts: Table,
    size: Scalar,
    BLOCK: tl.constexpr,
) -> None:
    """Behind each row's tokens: those that it has read, and what follows them."""
    row = tl.program_id(0).to(tl.int64)
    within = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count, first = tl.load(counts + row), tl.load(cu_seqlens_q + row)
    place = tl.load(seq_lens + row) + within
    token = tl.load(tokens + first + within, mask=within < count, other=0)
    following = tl.maximum(tl.load(next_tokens + first + count - 1), 0)
    token = tl.where(within == count, following, token)
    tl.store(history + row * size + place, token, mask=(within <= count) & (place < size))


@jit
def look_up_kernel(
    history: Table,
    seq_lens: Table,
    keys: Pointer,
    arrived: Pointer,
    lengths: Table,
    chains: Table,
    size: Scalar,
    max_match: Scalar,
    least: Scalar,
    steps: Scalar,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    STEPS_BLOCK: tl.constexpr,
) -> None:
    """A block of one row's history; the last of the row's says what followed the longest matches.

    Length and place in one number: no two are equal, and the later of equals is the larger.
    """
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    text, root = history + row * size, tl.load(seq_lens + row)
    place = part * BLOCK + tl.arange(0, BLOCK)
    agrees, length = place < root, tl.zeros([BLOCK], tl.int64)
    for back in range(max_match):
        own = tl.load(text + root - back, mask=root >= back, other=-2)
        theirs = tl.load(text + place - back, mask=agrees & (place >= back), other=-1)
        agrees &= theirs == own
        length += agrees.to(tl.int64)
    key = tl.where(length >= least, length * size + place, 0)
    out = keys + (row * parts + part) * MOST
    for rank in range(MOST):
        best = tl.max(key, axis=0)
        tl.store(out + rank, best)
        key = tl.where(key == best, 0, key)
    if is_last(arrived + row, parts):
        at, step = tl.arange(0, PARTS_BLOCK), tl.arange(0, STEPS_BLOCK)
        theirs = keys + row * parts * MOST + at
        left = tl.load(theirs, mask=at < parts * MOST, other=0, cache_modifier=".cg")
        for rank in range(MOST):
            best = tl.max(left, axis=0)
            left = tl.where(left == best, 0, left)
            end = best % size
            ahead = end + 1 + step % tl.maximum(root - end, 1)
            token = tl.load(text + tl.minimum(ahead, size - 1), mask=step < steps)
            tl.store(lengths + row * MOST + rank, best // size)
            tl.store(chains + (row * MOST + rank) * steps + step, token, mask=step < steps)


@jit
def tree_of_chains_kernel(
    chains: Table,
    lengths: Table,
    tokens: Table,
    parents: Table,
    scores: Table,
    steps: Scalar,
    top_k: Scalar,
    CHAINS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAVIEST: tl.constexpr,
) -> None:
    """One row's chains as candidates, CHAINS of each depth, best first."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    i, j, inside = at[:, None], at[None, :], at < CHAINS
    eye = i == j
    length = tl.load(lengths + row * CHAINS + at, mask=inside, other=0)
    weight = tl.where(length > 0, 1 << tl.minimum(length, HEAVIEST), 0).to(tl.float32)
    weights, proposes = across(weight, eye), tl.max(length, axis=0) > 0
    alike = (i < CHAINS) & (j < CHAINS)  # chains whose tokens so far are the same
    selected, above = inside, tl.zeros([BLOCK], tl.float32) + tl.sum(weight, axis=0)
    score, node = tl.zeros([BLOCK], tl.float32), tl.full([BLOCK], -1, tl.int32)
    for depth in range(steps):
        begins = (row * CHAINS + at) * steps + depth
        token = tl.load(chains + begins, mask=inside & proposes, other=0)
        siblings, alike = alike, alike & (token[:, None] == across(token, eye)[None, :])
        mass = tl.sum(tl.where(alike, weights[None, :], 0.0), axis=1)
        first = tl.min(tl.where(alike, j, BLOCK), axis=1)  # the chain whose node it is
        leads, masses = across((first == at).to(tl.int32), eye) > 0, across(mass, eye)
        heavier = (masses[None, :] > mass[:, None]) | (
            (masses[None, :] == mass[:, None]) & (j < first[:, None])
        )
        rivals = tl.sum((siblings & leads[None, :] & heavier).to(tl.int32), axis=1)
        selected &= rivals < top_k
        # Weights begin with 2: where there is one, the logarithm is of 2 or more.
        share = tl.where(mass > 0, tl.log(tl.maximum(mass, 1.0)), float("-inf"))
        score, above = score + share - tl.log(above + 1), mass
        own = tl.where(selected & (first == at), score, float("-inf"))
        owns = across(own, eye)
        better = (owns[None, :] > own[:, None]) | ((owns[None, :] == own[:, None]) & (j < i))
        rank = tl.sum((better & (j < CHAINS)).to(tl.int32), axis=1)
        best, is_none = inside & (rank == 0), own == float("-inf")
        token = tl.where(is_none, tl.sum(tl.where(best, token, 0), axis=0), token)
        parent = tl.where(is_none, tl.sum(tl.where(best, node, 0), axis=0), node)
        out = (row * steps + depth) * CHAINS + rank
        tl.store(tokens + out, token, mask=inside)
        tl.store(parents + out, parent.to(tl.int64), mask=inside)
        tl.store(scores + out, own, mask=inside)
        leader = tl.where(j == first[:, None], across(rank, eye)[None, :], 0)
        node = depth * CHAINS + tl.sum(leader, axis=1)


@jit
def merge_kernel(
    tokens: Table,
    parents: Table,
    scores: Table,
    depths: Table,
    their_tokens: Table,
    their_parents: Table,
    their_scores: Table,
    merged_tokens: Table,
    merged_parents: Table,
    merged_scores: Table,
    count: Scalar,
    steps: Scalar,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row's `count` drafted candidates, and behind them WIDTH looked up of each depth."""
    row = tl.program_id(0).to(tl.int64)
    drafted, theirs, merged = row * count, row * steps * WIDTH, row * (count + steps * WIDTH)
    tokens, parents, scores = tokens + drafted, parents + drafted, scores + drafted
    their_tokens, their_parents = their_tokens + theirs, their_parents + theirs
    their_scores += theirs
    merged_tokens, merged_parents = merged_tokens + merged, merged_parents + merged
    merged_scores += merged
    for start in range(0, count, BLOCK):
        each = start + tl.arange(0, BLOCK)
        inside = each < count
        tl.store(merged_tokens + each, tl.load(tokens + each, mask=inside), mask=inside)
        tl.store(merged_parents + each, tl.load(parents + each, mask=inside), mask=inside)
        tl.store(merged_scores + each, tl.load(scores + each, mask=inside), mask=inside)
    tl.debug_barrier()  # some of these scores are stored again below, by other threads
    at = tl.arange(0, WIDTH_BLOCK)
    eye, inside = at[:, None] == at[None, :], at < WIDTH
    place = tl.full([WIDTH_BLOCK], -1, tl.int32)  # among all, of the depth above: of the root
    for depth in range(steps):
        index = depth * WIDTH + at
        token = tl.load(their_tokens + index, mask=inside, other=-1)
        score = tl.load(their_scores + index, mask=inside, other=float("-inf"))
        # The root's -1 becomes WIDTH - 1, where -1 stands as everywhere.
        above = tl.load(their_parents + index, mask=inside, other=0) - (depth - 1) * WIDTH
        parent = tl.where(at[None, :] == above[:, None], across(place, eye)[None, :], 0)
        parent = tl.sum(parent, axis=1)
        place, level = count + index, count
        for start in range(0, count, BLOCK):
            each = start + tl.arange(0, BLOCK)
            token_of = tl.load(tokens + each, mask=each < count, other=-2)
            parent_of = tl.load(parents + each, mask=each < count, other=-2)
            same = (token_of[None, :] == token[:, None]) & (parent_of[None, :] == parent[:, None])
            both = tl.where(same, each[None, :], count + steps * WIDTH)
            place = tl.minimum(place, tl.min(both, axis=1))
            deep = tl.load(depths + each, mask=each < count, other=0)
            level = tl.minimum(level, tl.min(tl.where(deep == depth + 1, each, count), axis=0))
        level = tl.where(level < count, level, 0)
        is_none, drafts_it = score == float("-inf"), place < count
        both = inside & drafts_it & ~is_none
        larger = tl.maximum(score, tl.load(scores + place, mask=both, other=0.0))
        tl.store(merged_scores + place, larger, mask=both)
        token = tl.where(is_none, tl.load(tokens + level), token)
        parent = tl.where(is_none, tl.load(parents + level), parent.to(tl.int64))
        out = count + index
        tl.store(merged_tokens + out, token, mask=inside)
        tl.store(merged_parents + out, parent, mask=inside)
        tl.store(merged_scores + out, tl.where(drafts_it, float("-inf"), score), mask=inside)
