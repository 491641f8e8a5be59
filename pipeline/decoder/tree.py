"""The draft tree (EAGLE-2, Li et al. 2024, arXiv:2406.16858, §4): nodes, links, and who sees whom.

Node 0 is the root: the last token of the request, already certain but not yet seen by the target.

    root ─┬─ a ─┬─ c          tokens     root a b c d e
          │     └─ d          parents       0 0 0 1 1 2
          └─ b ─── e          depth         0 1 1 2 2 2

    ancestors     r a b c d e          parents stand before children, a node sees itself,
            r     1                    its ancestors and the whole prefix
            a     1 1
            b     1   1
            c     1 1   1
            d     1 1     1
            e     1   1     1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.decoder.ops import additive


@dataclass(frozen=True)
class Tree:
    """B trees of N nodes each."""

    tokens: Tensor  # [B, N] target token ids
    parents: Tensor  # [B, N] node indices; the root is its own parent
    ancestors: Tensor  # [B, N, N] bool; row sees column, itself included
    depth: Tensor  # [B, N]; 0 for the root


def root_only(tokens: Tensor) -> Tree:
    """Trees of one node: plain decoding. tokens [B]."""
    rows = len(tokens)
    zeros = torch.zeros(rows, 1, dtype=torch.int64, device=tokens.device)
    return Tree(tokens[:, None], zeros, torch.ones(rows, 1, 1, dtype=torch.bool, device=tokens.device), zeros)


def grow(roots: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int, steps: int) -> Tree:
    """Keep the best `nodes - 1` candidates below each root.

    roots [B]; tokens, parents, scores [B, C]: candidates in the order in which they were drafted, so
    that parents come first. `parents` holds candidate indices, -1 for the root; `scores` cumulative
    log-probabilities, never above the parent's, so that the best candidates form a connected tree.
    A stable sort lets a parent win a tie against its child.
    """
    rows, count = tokens.shape
    kept = min(nodes - 1, count)
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :kept]
    chosen = order.sort(dim=-1).values  # [B, kept], parents before children again
    # Candidate index → node index; candidates that were not kept are never looked up.
    node_of = torch.zeros(rows, count + 1, dtype=torch.int64, device=tokens.device)
    node_of.scatter_(1, chosen, torch.arange(1, kept + 1, device=tokens.device).expand(rows, -1))
    node_of[:, count] = 0  # index -1: the root
    above = parents.gather(1, chosen)
    above = torch.where(above < 0, torch.full_like(above, count), above)
    root = torch.zeros(rows, 1, dtype=torch.int64, device=tokens.device)
    parents = torch.cat((root, node_of.gather(1, above)), dim=1)  # [B, N]
    tokens = torch.cat((roots[:, None], tokens.gather(1, chosen)), dim=1)
    ancestors = _ancestors(parents, steps)
    return Tree(tokens, parents, ancestors, ancestors.sum(-1) - 1)


def _ancestors(parents: Tensor, steps: int) -> Tensor:
    """Transitive closure of `parents` [B, N] for trees of depth up to `steps`."""
    rows, count = parents.shape
    eye = torch.eye(count, dtype=torch.bool, device=parents.device).expand(rows, -1, -1)
    index = parents[:, :, None].expand(-1, -1, count)
    seen = eye
    for _ in range(steps):
        seen = eye | seen.gather(1, index)
    return seen


def attention_mask(ancestors: Tensor, starts: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, N, length]: nodes see the prefix below `starts` [B] and their ancestors.

    Node n of row b sits at column starts[b] + n.

        columns   0 … start-1 | start … start+N-1 | beyond
        node n    0 0 0 0 0 0 | 0 if ancestor     | -inf
    """
    count = ancestors.shape[1]
    offset = torch.arange(length, device=starts.device)[None] - starts[:, None]  # [B, length]; negative: prefix
    inside = (offset >= 0) & (offset < count)
    index = offset.clamp(0, count - 1)[:, None].expand(-1, count, -1)  # [B, N, length]
    visible = (offset < 0)[:, None] | (inside[:, None] & ancestors.gather(2, index))
    return additive(visible, dtype)


def causal_mask(count: int, start: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask [1, count, start + count] of a chain of tokens behind `start` cached ones."""
    visible = torch.ones(count, start + count, dtype=torch.bool, device=device).tril(start)
    return additive(visible[None], dtype)
