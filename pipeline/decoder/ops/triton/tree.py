"""Drafting on from the best beams, growing a tree out of all candidates, and walking down it."""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.launch import Pointer, Scalar, Table, jit
from pipeline.decoder.ops.triton.logits import index_of, key_of, value_of


@jit
def select_beams_kernel(
    score: Table,
    gained: Table,
    proposed: Table,
    beam_mask: Table,
    hidden: Pointer,
    bits: Table,
    total: Table,
    best: Table,
    selected_score: Table,
    selected_token: Table,
    selected_mask: Table,
    selected_hidden: Pointer,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
) -> None:
    """One selected beam of one row; grid [B, K].

    Each finds its own continuation: ranking K² numbers again is cheaper than telling the others.
    """
    row, rank = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < K * K
    above = tl.load(score + row * K + at // K, mask=inside, other=0.0)
    x = above + tl.load(gained + row * (K * K) + at, mask=inside, other=0.0)
    if rank == 0:
        tl.store(total + row * (K * K) + at, x, mask=inside)
    key = tl.where(inside, key_of(x, at), -(2**63))
    bar = tl.max(key, axis=0)
    for _ in range(rank):
        bar = tl.max(tl.where(key < bar, key, -(2**63)), axis=0)
    chosen, out = index_of(bar), row * K + rank
    beam = row * K + chosen // K
    tl.store(best + out, chosen)
    tl.store(selected_score + out, value_of(bar))
    tl.store(selected_token + out, tl.load(proposed + row * (K * K) + chosen))
    tl.store(selected_mask + out, tl.load(beam_mask + beam) | tl.load(bits + out))
    column = tl.arange(0, SIZE_BLOCK)
    state = tl.load(hidden + beam * SIZE + column, mask=column < SIZE)
    tl.store(selected_hidden + out * SIZE + column, state, mask=column < SIZE)


@jit
def grow_tree_kernel(
    roots: Table,
    tokens: Table,
    parents: Table,
    scores: Table,
    node_tokens: Table,
    node_parents: Table,
    tree_mask: Table,
    depth: Table,
    count: Scalar,
    SELECTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One tree a program. Each candidate has its own node, then its ancestors by doubling its hops:

    candidate   0  1  2  3  4      hop      parent if selected, else itself: below the root
    selected    x     x     x      round 1  bits |= bits[hop], hop = hop[hop]: two generations
    node        1  0  2  0  3      round 2  four generations, and so on: six rounds see 64
    """
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK)
    inside = candidate < count
    score = tl.load(scores + row * count + candidate, mask=inside, other=float("-inf"))
    key = tl.where(inside, key_of(score.to(tl.float32), candidate), -(2**63))
    bar = tl.max(key, axis=0)
    for _ in range(SELECTED - 1):
        bar = tl.max(tl.where(key < bar, key, -(2**63)), axis=0)
    selected = inside & (key >= bar)
    node = tl.where(selected, tl.cumsum(selected.to(tl.int32), axis=0), 0)  # [c], 1 … SELECTED
    parent = tl.load(parents + row * count + candidate, mask=inside, other=-1).to(tl.int32)
    above = tl.where(parent < 0, 0, tl.gather(node, tl.maximum(parent, 0), 0))
    hop = tl.where(above > 0, parent, candidate)
    length = (above > 0).to(tl.int64)  # nodes between this one and the root
    bits = tl.where(selected, tl.full([BLOCK], 1, tl.int64) << node.to(tl.int64), 0) | 1
    for _ in tl.static_range(6):
        bits |= tl.gather(bits, hop, 0)
        length += tl.gather(length, hop, 0)
        hop = tl.gather(hop, hop, 0)
    out = row * (SELECTED + 1) + node
    tl.store(
        node_tokens + out, tl.load(tokens + row * count + candidate, mask=selected), mask=selected
    )
    tl.store(node_parents + out, above.to(tl.int64), mask=selected)
    tl.store(tree_mask + out, bits, mask=selected)
    tl.store(depth + out, length + 1, mask=selected)
    root = row * (SELECTED + 1)
    tl.store(node_tokens + root, tl.load(roots + row))
    tl.store(node_parents + root, 0)
    tl.store(tree_mask + root, 1)
    tl.store(depth + root, 0)


@jit
def verify_kernel(
    tokens: Table,
    parents: Table,
    predicted: Table,
    path: Table,
    counts: Table,
    emitted: Table,
    nodes: Scalar,
    steps: Scalar,
    NODES_BLOCK: tl.constexpr,
) -> None:
    """One walk a program; all nodes are compared at once, so that each step is one reduction."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES_BLOCK)
    inside = (node > 0) & (node < nodes)
    parent = tl.load(parents + row * nodes + node, mask=inside, other=0)
    choice = tl.load(predicted + row * nodes + parent, mask=inside, other=0)
    agrees = inside & (choice == tl.load(tokens + row * nodes + node, mask=inside, other=0))
    at, accepted = tl.full((), 0, tl.int32), tl.full((), 1, tl.int64)
    for step in range(steps):
        out = row * steps + step
        tl.store(path + out, at.to(tl.int64))
        tl.store(emitted + out, tl.load(predicted + row * nodes + at))
        child = tl.min(tl.where(agrees & (parent == at), node, NODES_BLOCK), axis=0)
        # The last node is stored already: its child would lie deeper than a tree can be.
        deeper = (child < NODES_BLOCK) & (step + 1 < steps)
        accepted += deeper.to(tl.int64)
        at = tl.where(deeper, child, at)
    tl.store(counts + row, accepted)
