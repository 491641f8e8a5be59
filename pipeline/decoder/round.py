"""One round: draft a tree, verify it, accept a branch, keep its keys, extend the drafter's cache.

tree     root ─ a ─ c      entries   … | r a b c      verified together behind the prefix
accepted root ─ a ─ c                … | r a c        compacted: the prefix grows by three
emitted  a c x                                        x, the bonus, is the next root

Everything happens in the batch's static buffers and nothing here looks at a value: the same calls
run eagerly on a CPU and, captured once, as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.drafters.base import Drafter
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.tree import Tree, VerifyOutput, root_only

#: (tree, the target's choices [B, N], deepest draft) → what is accepted.
Verify = Callable[[Tree, Tensor, int], VerifyOutput]


def decode_round(
    model: DecoderModel,
    plane: Tensor,
    drafter: Drafter | None,
    batch: DecodeBatch,
    *,
    sampling: bool,
    verify: Verify | None = None,
) -> None:
    """Advance every active row by at least one token, left in `batch.emitted` and `batch.counts`.

    `plane` holds the target's keys and values; `sampling` says that some row may have a
    temperature; `verify` replaces honest verification in simulations.
    """
    if drafter is None:
        tree, depth = root_only(batch.roots), 0
    else:
        shape = drafter.shape_for(len(batch))
        tree, depth = drafter.draft(batch, shape), shape.steps
    aux, predicted = read_tree(model, plane, batch, tree, depth, sampling=sampling)
    accepted = (verify or model.ops.verify)(tree, predicted, depth)
    if drafter is not None:
        model.ops.compact(plane, batch.block_table, batch.seq_lens, accepted.path)
        nodes = accepted.path[:, :, None].expand(-1, -1, aux.shape[-1])
        drafter.extend(batch, accepted.tokens, aux.gather(1, nodes), accepted.counts)
    batch.advance(accepted)


def read_tree(
    model: DecoderModel,
    plane: Tensor,
    batch: DecodeBatch,
    tree: Tree,
    depth: int,
    *,
    sampling: bool,
) -> tuple[Tensor, Tensor]:
    """One forward over all nodes: aux states [B, N, 3H], the target's choice after each [B, N]."""
    positions = batch.seq_lens[:, None] + tree.depth  # [B, N]
    output = model.forward(
        tree.tokens, positions, batch.block_table, batch.seq_lens, tree.ancestors, plane
    )
    logits = model.logits(output.final.flatten(0, 1)).view(*tree.tokens.shape, -1)  # [B, N, V]
    if sampling:
        return output.aux, model.ops.sample(logits, tree, batch.sampling, positions + 1, depth)
    return output.aux, model.ops.argmax(logits)


def prefill_chunk(
    model: DecoderModel,
    plane: Tensor,
    drafter: Drafter | None,
    batch: DecodeBatch,
    tokens: Tensor,
    following: Tensor | None,
) -> None:
    """Read `tokens` [1, n] of one row's prompt behind what is cached already.

    `following` [1] is the prompt's token behind the chunk. Without it the chunk is the last one,
    and the row's first token is drawn: it becomes the root, and is left in `batch.emitted`.
    """
    count, last = tokens.shape[1], following is None
    positions = batch.seq_lens[:, None] + torch.arange(count, device=tokens.device)  # [1, n]
    output = model.forward(tokens, positions, batch.block_table, batch.seq_lens, None, plane)
    if following is None:
        logits = model.logits(output.final[:, -1])
        following = model.ops.draw(logits, batch.sampling, positions[:, -1] + 1)  # [1]
    if drafter is not None:
        shifted = torch.cat((tokens[:, 1:], following[:, None]), dim=1)
        drafter.extend(batch, shifted, output.aux, torch.full_like(batch.seq_lens, count))
    batch.seq_lens.add_(count)
    if last:
        batch.roots.copy_(following.clamp(min=0))
        batch.emitted[:, 0].copy_(following)
        batch.counts.fill_(1)
