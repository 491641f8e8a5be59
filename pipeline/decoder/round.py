"""One round: draft a tree, verify it, accept a branch, keep its keys, let the drafter read what was learnt.

tree     root ─ a ─ c      entries   … | r a b c      verified together behind the prefix
accepted root ─ a ─ c                … | r a c        compacted: the prefix grows by three
emitted  a c x                                        x, the bonus, is the next root

Everything happens in the batch's static buffers and nothing here looks at a value: the same calls
run eagerly on a CPU and, captured once, as one CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.decoder.batch import Batch
from pipeline.decoder.drafters.base import Drafter
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.tree import Acceptance, Tree, root_only


def decode_round(model: DecoderModel, plane: Tensor, drafter: Drafter | None, batch: Batch, *, sampling: bool) -> None:
    """Advance every active row by at least one token, leaving them in `batch.emitted` and `batch.counts`.

    `plane` holds the target's keys and values; `sampling` says that some row may have a temperature.
    """
    if drafter is None:
        tree, depth = root_only(batch.roots), 0
    else:
        shape = drafter.shape_for(len(batch))
        tree, depth = drafter.draft(batch, shape), shape.steps
    aux, accepted = verify(model, plane, batch, tree, depth, sampling=sampling)
    if drafter is not None:
        model.ops.compact(plane, batch.table, batch.starts, accepted.path)
        branch = aux.gather(1, accepted.path[:, :, None].expand(-1, -1, aux.shape[-1]))  # [B, D + 1, 3H]
        drafter.extend(batch, accepted.tokens, branch, accepted.counts)
    batch.advance(accepted)


def verify(model: DecoderModel, plane: Tensor, batch: Batch, tree: Tree, depth: int, *, sampling: bool) -> tuple[Tensor, Acceptance]:
    """One forward over all nodes: their aux states [B, N, 3H], and the branch that the target agrees with."""
    ops, positions = model.ops, batch.starts[:, None] + tree.depth  # [B, N]
    output = model.forward(tree.tokens, positions, batch.table, batch.starts, tree.ancestors, plane)
    logits = model.logits(output.final.flatten(0, 1)).view(*tree.tokens.shape, -1)  # [B, N, V]
    predicted = ops.sample(logits, tree, batch.sampling, positions + 1, depth) if sampling else ops.argmax(logits)  # [B, N]
    return output.aux, ops.verify(tree, predicted, depth)


def prefill_chunk(model: DecoderModel, plane: Tensor, drafter: Drafter | None, batch: Batch, tokens: Tensor, following: Tensor | None) -> None:
    """Read `tokens` [1, n] of one row's prompt behind what is cached already.

    `following` [1] is the prompt's token behind the chunk. Without it the chunk is the last one, and
    the row's first token is drawn: it becomes the root, and is left in `batch.emitted`.
    """
    ops, count = model.ops, tokens.shape[1]
    positions = batch.starts[:, None] + torch.arange(count, device=tokens.device)  # [1, n]
    output = model.forward(tokens, positions, batch.table, batch.starts, None, plane)
    first = following is None
    if following is None:
        following = ops.draw(model.logits(output.final[:, -1]), batch.sampling, positions[:, -1] + 1)  # [1]
    if drafter is not None:
        counts = torch.full_like(batch.starts, count)
        drafter.extend(batch, torch.cat((tokens[:, 1:], following[:, None]), dim=1), output.aux, counts)
    batch.starts.add_(count)
    if first:
        batch.roots.copy_(following.clamp(min=0))
        batch.emitted[:, 0].copy_(following)
        batch.counts.fill_(1)
