"""Operations that the target and the drafters share.

Shapes: B rows, N queries, S cache entries, Q query heads, G key/value heads, d head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Boolean mask → what is added to attention scores: 0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def fold_mask(mask: Tensor, shared: int) -> Tensor:
    """[B, N, S] → [B, 1, shared·N, S]: one copy for each of the query heads that share a key."""
    rows, count, length = mask.shape
    return mask[:, None, None].expand(-1, 1, shared, -1, -1).reshape(rows, 1, shared * count, length)


def tree_attention(query: Tensor, keys: Tensor, values: Tensor, folded_mask: Tensor) -> Tensor:
    """Masked grouped-query attention: query [B, N, Q, d], keys and values [B, G, S, d] → [B, N, Q, d].

    Queries that share a key become rows of one problem, so no key is repeated in memory:

        head 0: n0 n1 …  ┐
        head 1: n0 n1 …  ├─ G = 1 problem of (Q/G)·N queries over S keys
        head 2: n0 n1 …  ┘
    """
    rows, count, heads, size = query.shape
    groups = keys.shape[1]
    folded = query.view(rows, count, groups, heads // groups, size).permute(0, 2, 3, 1, 4).reshape(rows, groups, -1, size)
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=folded_mask)
    return mixed.view(rows, groups, heads // groups, count, size).permute(0, 3, 1, 2, 4).reshape(rows, count, heads, size)
