"""What followed the last tokens before: matches, a tree of them, and that tree beside another.

Here for a host, which looks at values, and as the definition of ops/triton/lookup.py.

One tree of several proposed continuations, as every n-gram match proposes one:

    chains    a b c      weight 8       depth 1     a (12)   d (2)
              a b e      weight 4       depth 2     b (12)   f (2)
              d f a      weight 2       depth 3     c (8)    e (4)   a (2)

Equal beginnings are one node, and its weight the sum of its chains'. A child's probability below
its parent is its share of the parent's weight, one more counted for what no chain foresees: the
escape of prediction by partial matching (Cleary and Witten 1984), method A.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from pipeline.decoder.ops.draft import Candidates

#: A match longer by one token weighs twice as much, up to here: sums of float32 stay exact, and the
#: same in every batch.
HEAVIEST = 16


def last_tokens(history: Tensor, seq_lens: Tensor, count: int) -> Tensor:
    """The root, and what stands before it, the last token first: [B, count], -1 for none."""
    place = seq_lens[:, None] - torch.arange(count, device=history.device)
    return torch.where(place >= 0, history.gather(1, place.clamp(min=0)), -1)


def match_lengths(history: Tensor, seq_lens: Tensor, max_match: int) -> Tensor:
    """Of every position p of history [B, S]: with how many tokens up to p the row's last ones
    agree, at most `max_match`; [B, S], 0 from the root on.

    Only where the root's own token stands is more compared, of which there are few: for a host,
    which can look.
    """
    suffix = last_tokens(history, seq_lens, max_match)  # [B, m]
    same = history == suffix[:, :1]
    same &= torch.arange(history.shape[1]) < seq_lens[:, None]
    row, place = same.nonzero().unbind(1)  # [n]
    back = torch.arange(max_match)
    before = place[:, None] - back  # [n, m]
    agrees = (history[row[:, None], before.clamp(min=0)] == suffix[row]) & (before >= 0)
    lengths = torch.zeros_like(history)
    lengths[row, place] = torch.where(agrees, max_match, back).amin(-1)
    return lengths


def longest_matches(lengths: Tensor, least: int, most: int) -> tuple[Tensor, Tensor]:
    """Of match lengths [B, S] the `most` longest, of equals the latest: lengths, 0 where there is
    none of at least `least`, and the positions they end at, each [B, most]."""
    size = lengths.shape[1]
    # Length and position in one number: no two are equal, so every device picks the same.
    key = lengths * size + torch.arange(size, device=lengths.device)
    best = key.topk(most, dim=1).values
    length = best // size
    return torch.where(length >= least, length, 0), best % size


def continuations(history: Tensor, seq_lens: Tensor, ends: Tensor, steps: int) -> Tensor:
    """What follows the tokens at `ends` [B, W], `steps` tokens each, periodic from the root on:
    [B, W, steps]; anything where `ends` lie not before the root."""
    period = (seq_lens[:, None] - ends).clamp(min=1)[..., None]  # [B, W, 1]
    ahead = torch.arange(steps, device=history.device) % period
    place = (ends[..., None] + 1 + ahead).clamp(max=history.shape[1] - 1)
    return history.gather(1, place.flatten(1)).view_as(place)


def tree_of_chains(tokens: Tensor, lengths: Tensor, top_k: int) -> Candidates:
    """Chains tokens [B, W, D] behind matches of `lengths` [B, W], the longest first, 0 for none.

    A node keeps its `top_k` heaviest children, of equals the earlier chain's. W candidates a depth,
    best first; those that are nothing of their own score -inf. Where a row proposes anything such a
    candidate repeats the best of its depth and stands behind it, so that no walk ever reaches it;
    where a row proposes nothing all tokens are 0.
    """
    rows, count, depth = tokens.shape
    if not bool(lengths.any()):
        return _no_chains(rows, count, depth)
    weight = torch.where(lengths > 0, 1 << lengths.clamp(max=HEAVIEST), 0).float()  # [B, W]
    tokens = torch.where(lengths[:, :1, None] > 0, tokens, 0).transpose(1, 2)  # [B, D, W]
    equal = tokens[..., :, None] == tokens[..., None, :]
    shared = equal.int().cumprod(1).bool()  # [B, D, W, W] the first d tokens are the same
    mass = (shared * weight[:, None, None, :]).sum(-1)  # [B, D, W]
    chain = torch.arange(count, device=tokens.device)  # [W]
    first = torch.where(shared, chain, count).amin(-1)  # [B, D, W] chain whose node it is
    selected = _among_best(mass, first, shared, top_k).int().cumprod(1).bool()  # [B, D, W]
    real = selected & (first == chain)
    above = torch.cat((weight.sum(1)[:, None, None].expand(-1, 1, count), mass[:, :-1]), 1)
    score = (mass.log() - (above + 1).log()).cumsum(1)  # -inf without a match
    score = score.masked_fill(~real, -torch.inf)
    score, order = score.sort(dim=-1, descending=True, stable=True)  # [B, D, W]
    place = torch.empty_like(order).scatter_(2, order, chain.expand_as(order))
    step = torch.arange(depth, device=tokens.device)[:, None]  # [D, 1]
    candidate = place.gather(2, first) + step * count  # [B, D, W] candidate of each chain's node
    parent = torch.cat((torch.full_like(candidate[:, :1], -1), candidate[:, :-1]), 1).gather(
        2, order
    )
    token, empty = tokens.gather(2, order), score == -torch.inf
    token = torch.where(empty, token[..., :1], token)
    parent = torch.where(empty, parent[..., :1], parent)
    depths = chain_depths(depth, count, tokens.device)
    return Candidates(token.flatten(1), parent.flatten(1), score.flatten(1), depths)


@cache
def chain_depths(steps: int, count: int, device: torch.device) -> Tensor:
    """Depths [D · W] of the candidates of `count` chains of `steps` tokens."""
    return torch.arange(1, steps + 1, device=device).repeat_interleave(count)


def _no_chains(rows: int, count: int, depth: int) -> Candidates:
    """What `tree_of_chains` makes where no row proposes anything."""
    depths = chain_depths(depth, count, torch.device("cpu"))
    parent = torch.where(depths > 1, (depths - 2) * count, -1).expand(rows, -1)
    score = torch.full(parent.shape, -torch.inf)
    return Candidates(torch.zeros_like(parent), parent, score, depths)


def _among_best(mass: Tensor, first: Tensor, shared: Tensor, top_k: int) -> Tensor:
    """Whether each chain's node is among the `top_k` heaviest children of its parent [B, D, W]."""
    chain = torch.arange(mass.shape[-1], device=mass.device)
    root = torch.ones_like(shared[:, :1])  # all chains continue it
    siblings = torch.cat((root, shared[:, :-1]), 1) & (first == chain)[..., None, :]
    ours, theirs = mass[..., :, None], mass[..., None, :]
    earlier = chain < first[..., :, None]
    heavier = (theirs > ours) | ((theirs == ours) & earlier)  # [B, D, W, W] v before w
    return (siblings & heavier).sum(-1) < top_k


def merge_candidates(drafted: Candidates, looked_up: Candidates, depths: int) -> Candidates:
    """C candidates of a drafter and, behind them, C' of a lookup, as many at each of `depths`.

    Those that the drafter has too, and those that are none, score -inf there and repeat a candidate
    before them: no walk reaches them, for it takes the first of equal siblings.
    """
    (rows, count), size = drafted.tokens.shape, looked_up.tokens.shape[1]
    index = torch.arange(count + size, device=drafted.tokens.device)
    index, behind = index[:count], index[count:]
    equal = drafted.tokens[:, None] == looked_up.tokens[..., None]  # [B, C', C]
    # Where the root and each of the lookup's candidates stand among all.
    place = torch.cat((index[:1] - 1, behind)).repeat(rows, 1)  # [B, 1 + C']
    width = size // depths
    for depth in range(depths):
        at = slice(depth * width, (depth + 1) * width)
        parent = place.gather(1, looked_up.parents[:, at] + 1)  # [B, W]
        same = equal[:, at] & (drafted.parents[:, None] == parent[..., None])  # [B, W, C]
        place[:, 1:][:, at] = torch.where(same, index, behind[at, None]).amin(-1)
    parents, place = place.gather(1, looked_up.parents + 1), place[:, 1:]
    theirs = place < count  # the drafter has it, too
    both = looked_up.scores.masked_fill(~theirs, -torch.inf)
    scores = drafted.scores.scatter_reduce(1, place.clamp(max=count - 1), both, "amax")
    is_none = looked_up.scores == -torch.inf
    first = (drafted.depths == looked_up.depths[:, None]).int().argmax(-1)  # [C'] of each depth
    tokens = torch.where(is_none, drafted.tokens[:, first], looked_up.tokens)
    parents = torch.where(is_none, drafted.parents[:, first], parents)
    return Candidates(
        torch.cat((drafted.tokens, tokens), 1),
        torch.cat((drafted.parents, parents), 1),
        torch.cat((scores, looked_up.scores.masked_fill(theirs, -torch.inf)), 1),
        torch.cat((drafted.depths, looked_up.depths)),
    )
