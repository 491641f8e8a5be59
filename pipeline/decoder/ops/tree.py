"""The draft tree (EAGLE-2, Li et al. 2024, arXiv:2406.16858, §4): nodes, links, and who sees whom.

Node 0 is the root: the last token of the request, already certain but not yet seen by the target.

    root ─┬─ a ─┬─ c          node         0    1 2 3 4 5
          │     └─ d          tokens       root a b c d e
          └─ b ─── e          parents      0    0 0 1 1 2
                              depth        0    1 1 2 2 2

    tree_mask     r a b c d e          parents stand before children; a node sees itself,
            r     1                    its ancestors and the whole prefix
            a     1 1
            b     1   1                kept as bits, column m of node n being
            c     1 1   1              (tree_mask[n] >> m) & 1, so a tree has at most 64 nodes
            d     1 1     1
            e     1   1     1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Bits of a mask: nodes of a tree, and entries after the prefix that a draft step can see.
WINDOW = 64
#: Positions beyond the longest prompt + reply that rotary tables have, the target's and a drafter's
#: alike: a round may start that far after it when it was launched before the request's end was
#: known, and draft and verify a tree on top.
HEADROOM = 4 * WINDOW


@dataclass(frozen=True)
class Tree:
    """B trees of N nodes each, all int64."""

    tokens: Tensor  # [B, N] target token ids
    parents: Tensor  # [B, N] node indices; the root is its own parent
    tree_mask: Tensor  # [B, N] bits; each node sees itself
    depth: Tensor  # [B, N]; 0 for the root


@dataclass(frozen=True)
class Beams:
    """What k beams of each of B rows propose, and the k of it that are drafted on, best first."""

    total: Tensor  # [B, k · k] log-probability of every continuation, float32
    best: Tensor  # [B, k] the kept ones, as indices into `total`
    score: Tensor  # [B, k] their log-probabilities
    token: Tensor  # [B, k] their tokens
    beam_mask: Tensor  # [B, k] bits of the drafted entries that each will see, its own included
    hidden: Tensor  # [B · k, H] the output of the beam that each continues


@dataclass(frozen=True)
class VerifyOutput:
    """The longest branch of each tree that the target would have generated itself, all int64.

    tree      root ─ a ─ c            path    [0 1 3 3]   node indices, padded with the last one
    target         a   c   x          counts  3           nodes on it, root included
                                      tokens  a c x x     what the round emits: `counts` tokens
    """

    path: Tensor  # [B, D + 1]
    counts: Tensor  # [B]
    tokens: Tensor  # [B, D + 1]; row b holds counts[b] emitted tokens, the last one is the bonus


@dataclass(frozen=True)
class SamplingTensors:
    """How each of B rows draws its tokens; a row with temperature 0 is greedy.

    Order as in Hugging Face: temperature, then top-k, then top-p. A draw depends on the row's
    distribution, its seed and the position of the token, and on nothing else: not on the batch,
    the tree or the drafter.
    """

    temperature: Tensor  # [B] float32
    top_p: Tensor  # [B] float32; 1 keeps every token
    top_k: Tensor  # [B] int64; 0 keeps every token
    seeds: Tensor  # [B] int64, not negative


def root_only(roots: Tensor) -> Tree:
    """Trees of one node: plain decoding. roots [B]."""
    zeros = torch.zeros(len(roots), 1, dtype=torch.int64, device=roots.device)
    return Tree(roots[:, None], zeros, torch.ones_like(zeros), zeros)
