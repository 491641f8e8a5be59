"""One tree of several proposed continuations, as every n-gram match proposes one.

    chains    a b c      weight 8       depth 1     a (12)   d (2)
              a b e      weight 4       depth 2     b (12)   f (2)
              d f a      weight 2       depth 3     c (8)    e (4)   a (2)

Equal beginnings are one node, and its weight the sum of its chains'. A child's probability below
its parent is its share of the parent's weight, one more counted for what no chain foresees: the
escape of prediction by partial matching (Cleary and Witten 1984), method A.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.decoder.ops.draft import Candidates

#: A match longer by one token weighs twice as much, up to here: sums of float32 stay exact, and the
#: same in every batch.
_HEAVIEST = 16


def tree_of_chains(tokens: Tensor, lengths: Tensor, top_k: int) -> Candidates:
    """Chains tokens [B, W, D] behind matches of `lengths` [B, W], the longest first, 0 for none.

    A node keeps its `top_k` heaviest children, of equals the earlier chain's. W candidates a depth,
    best first; those that are nothing of their own score -inf. Where a row proposes anything such a
    candidate repeats the best of its depth and stands behind it, so that no walk ever reaches it;
    where a row proposes nothing all tokens are 0.
    """
    _, count, depth = tokens.shape
    weight = torch.where(lengths > 0, 1 << lengths.clamp(max=_HEAVIEST), 0).float()  # [B, W]
    tokens = torch.where(lengths[:, :1, None] > 0, tokens, 0).transpose(1, 2)  # [B, D, W]
    equal = tokens[..., :, None] == tokens[..., None, :]
    shared = equal.int().cumprod(1).bool()  # [B, D, W, W] the first d tokens are the same
    mass = (shared * weight[:, None, None, :]).sum(-1)  # [B, D, W]
    chain = torch.arange(count, device=tokens.device)  # [W]
    first = torch.where(shared, chain, count).amin(-1)  # [B, D, W] chain whose node it is
    kept = _among_best(mass, first, shared, top_k).int().cumprod(1).bool()  # [B, D, W]
    real = kept & (first == chain)
    above = torch.cat((weight.sum(1)[:, None, None].expand(-1, 1, count), mass[:, :-1]), 1)
    score = (mass.log() - (above + 1).log()).cumsum(1)  # -inf without a match
    score = score.masked_fill(~real, -torch.inf)
    score, order = score.sort(dim=-1, descending=True, stable=True)  # [B, D, W]
    place = torch.empty_like(order).scatter_(2, order, chain.expand_as(order))
    step = torch.arange(depth, device=tokens.device)[:, None]  # [D, 1]
    behind = place.gather(2, first) + step * count  # [B, D, W] candidate of each chain's node
    parent = torch.cat((torch.full_like(behind[:, :1], -1), behind[:, :-1]), 1).gather(2, order)
    token, empty = tokens.gather(2, order), score == -torch.inf
    token = torch.where(empty, token[..., :1], token)
    parent = torch.where(empty, parent[..., :1], parent)
    depths = (step + 1).expand(-1, count).flatten()  # [D · W]
    return Candidates(token.flatten(1), parent.flatten(1), score.flatten(1), depths)


def no_chains(rows: int, count: int, depth: int) -> Candidates:
    """What `tree_of_chains` makes where no row proposes anything, on a host."""
    step = torch.arange(depth).repeat_interleave(count)  # [D · W]
    parent = torch.where(step > 0, (step - 1) * count, -1).expand(rows, -1)
    score = torch.full(parent.shape, -torch.inf)
    return Candidates(torch.zeros_like(parent), parent, score, step + 1)


def _among_best(mass: Tensor, first: Tensor, shared: Tensor, top_k: int) -> Tensor:
    """Whether each chain's node is among the `top_k` heaviest children of its parent [B, D, W]."""
    chain = torch.arange(mass.shape[-1], device=mass.device)
    root = torch.ones_like(shared[:, :1])  # all chains continue it
    siblings = torch.cat((root, shared[:, :-1]), 1) & (first == chain)[..., None, :]
    ours, theirs = mass[..., :, None], mass[..., None, :]
    earlier = chain < first[..., :, None]
    heavier = (theirs > ours) | ((theirs == ours) & earlier)  # [B, D, W, W] v before w
    return (siblings & heavier).sum(-1) < top_k
