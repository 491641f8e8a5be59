"""One round: verify a tree, accept a branch, keep its keys, let the drafter read what was learnt.

tree     root ─ a ─ c      columns   … | r a b c      verified together behind the prefix
accepted root ─ a ─ c                … | r a c        compacted: the prefix grows by three
emitted  a c x                                        x, the bonus, is the next root
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.decoder.drafters.base import Drafter
from pipeline.decoder.kv import KVCache
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.tree import Tree, attention_mask
from pipeline.decoder.verify import Acceptance, verify_greedy


def forward_tree(model: DecoderModel, cache: KVCache, tree: Tree, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Aux states [B, N, 3H] and logits [B, N, V] of all nodes, behind prefixes of `starts` [B] tokens."""
    count = tree.tokens.shape[1]
    columns = starts[:, None] + torch.arange(count, device=starts.device)  # [B, N]
    mask = attention_mask(tree.ancestors, starts, int(starts.max()) + count, model.dtype)
    output = model.forward(tree.tokens, starts[:, None] + tree.depth, columns, mask, cache)
    return output.aux, model.logits(output.final)


def speculative_round(model: DecoderModel, cache: KVCache, drafter: Drafter, roots: Tensor, starts: Tensor) -> Acceptance:
    """Draft below `roots` [B], verify behind `starts` [B] cached tokens, and bring both caches up to date."""
    tree = drafter.draft(roots)
    aux, logits = forward_tree(model, cache, tree, starts)
    accepted = verify_greedy(tree, logits.argmax(-1), drafter.depth)
    # Node n sits at column start + n; the branch moves to start, start + 1, …. Columns that receive
    # padding lie behind the new prefix and are overwritten by the next tree.
    targets = starts[:, None] + torch.arange(accepted.path.shape[1], device=starts.device)
    cache.compact(starts[:, None] + accepted.path, targets)
    path_aux = aux.gather(1, accepted.path[:, :, None].expand(-1, -1, aux.shape[-1]))  # [B, D + 1, 3H]
    drafter.extend(accepted.tokens, path_aux, accepted.counts)
    return accepted
