"""One round: draft a tree, verify it, accept a branch, keep its keys, extend the drafter's cache.

tree     root ─ a ─ c      entries   … | r a b c      verified together after the prefix
accepted root ─ a ─ c                … | r a c        compacted: the prefix grows by three
emitted  a c x                                        x, the bonus, is the next root

Everything happens in the batch's static buffers and nothing here looks at a value: the same calls
run eagerly on a CPU and, captured once, as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch, TokenRows
from pipeline.decoder.drafter import Drafter, ReadTokens
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.draft import Candidates
from pipeline.decoder.ops.parallel import TensorGroup
from pipeline.decoder.ops.tree import Tree, VerifyOutput, root_only

#: (tree, the target's choices [B, N], deepest draft) → what is accepted.
Verify = Callable[[Tree, Tensor, int], VerifyOutput]


def decode_round(
    model: DecoderModel,
    planes: Planes,
    drafter: Drafter | None,
    batch: DecodeBatch,
    *,
    sampling: bool,
    verify: Verify | None = None,
) -> None:
    """Advance every active row by at least one token, left in `batch.emitted` and `batch.counts`.

    `sampling` says that some row may have a temperature; `verify` replaces honest verification in
    simulations. A round without a tree leaves the drafter ready to draft in the next.
    """
    shape = None if drafter is None else drafter.shape_for(len(batch))
    if drafter is None or shape is None:
        tree, depth, proposed = root_only(batch.roots), 0, None
    else:
        drafted = replace(batch, sampled=sampling)
        tree, proposed = draft_tree(model.ops, drafter, drafted, planes, shape, model.group)
        depth = shape.steps
    verify_and_commit(
        *(model, planes, drafter, batch, tree, depth, proposed), sampling=sampling, verify=verify
    )


def draft_tree(
    ops: TorchOps,
    drafter: Drafter,
    batch: DecodeBatch,
    planes: Planes,
    shape: TreeSection,
    group: TensorGroup | None = None,
) -> tuple[Tree, Tensor | None]:
    """The best of what the drafter proposes, of a `group` what rank 0's does, below the roots; and
    how much: `count_proposed`, or None where that is nothing.

    A score of -inf proposes nothing. A host that can look leaves out the nodes that no row proposes
    anything for, and decodes plainly where there is no other.
    """
    candidates = drafter.candidates(batch, planes, shape)
    candidates = candidates if group is None else _agreed(candidates, group)
    tokens, parents, scores, _ = candidates
    nodes = shape.nodes
    if scores.device.type == "cpu":
        nodes = min(nodes, 1 + int((scores > -torch.inf).sum(1).max()))
        if nodes == 1:
            return root_only(batch.roots), None
    tree = ops.grow_tree(batch.roots, tokens, parents, scores, nodes)
    return tree, count_proposed(candidates, tree)


def _agreed(candidates: Candidates, group: TensorGroup) -> Candidates:
    """Those of rank 0, sent in one piece."""
    tokens, parents, scores, depths = candidates
    decided = group.agree(torch.stack((tokens, parents, scores.view(torch.int32).long())))
    tokens, parents, bits = decided.unbind()
    return Candidates(tokens, parents, bits.int().view(torch.float32), depths)


def count_proposed(candidates: Candidates, tree: Tree) -> Tensor:
    """Nodes of each tree that its row proposes, and the depth of the deepest: [B, 2].

    The others pad the tree, and have the lowest scores: either all nodes are proposed, or all
    candidates that are became nodes. So the deepest is the shallower of the two's.
    """
    real = candidates.scores > -torch.inf  # [B, C]
    nodes = real.sum(1).clamp(max=tree.tokens.shape[1] - 1)
    deepest = (real * candidates.depths).amax(1)
    return torch.stack((nodes, torch.minimum(deepest, tree.depth.amax(1))), dim=1)


def verify_and_commit(
    model: DecoderModel,
    planes: Planes,
    drafter: Drafter | None,
    batch: DecodeBatch,
    tree: Tree,
    depth: int,
    proposed: Tensor | None = None,
    *,
    sampling: bool,
    verify: Verify | None = None,
) -> None:
    """The round after the draft: verify trees of `depth` D, accept, compact, extend, commit.

    `proposed` [B, 2] is `count_proposed` of the trees: a node that pads a tree of nothing else is
    not accepted, whatever the target says. None: they have no nodes but the roots.
    """
    aux, predicted = verify_forward(model, planes, batch, tree, depth, sampling=sampling)
    accepted = (verify or model.ops.verify)(tree, predicted, depth)
    if proposed is not None:
        counts = torch.minimum(accepted.counts, 1 + proposed[:, 1])
        accepted = replace(accepted, counts=counts)
    if depth:
        model.ops.compact(planes.target, batch.block_table, batch.seq_lens, accepted.path)
    if drafter is not None:
        rows, count = accepted.path.shape
        nodes = accepted.path[:, :, None].expand(-1, -1, aux.shape[-1])
        read = ReadTokens(
            rows=TokenRows.even(rows, count, aux.device),
            tokens=tree.tokens.gather(1, accepted.path).flatten(),
            next_tokens=accepted.tokens.flatten(),
            aux=aux.gather(1, nodes).flatten(0, 1),  # [B · (D + 1), L · H]
            counts=accepted.counts,
        )
        drafter.extend(batch, planes, read)
    batch.commit(accepted, proposed)


def verify_forward(
    model: DecoderModel,
    planes: Planes,
    batch: DecodeBatch,
    tree: Tree,
    depth: int,
    *,
    sampling: bool,
) -> tuple[Tensor, Tensor]:
    """One forward over all nodes: aux states [B, N, L · H], and the target's choice after each
    [B, N]."""
    rows, nodes = tree.tokens.shape
    positions = batch.seq_lens[:, None] + tree.depth  # [B, N]
    metadata = batch.metadata(
        model.ops,
        model.rotary,
        TokenRows.even(rows, nodes, positions.device),
        positions=positions.flatten(),
        mask=tree.tree_mask.flatten(),
    )
    output = model.forward(tree.tokens.flatten(), metadata, planes.target)
    logits = model.logits(output.final).view(rows, nodes, -1)  # [B, N, V]
    aux = output.aux.view(rows, nodes, -1)
    if sampling:
        predicted = model.ops.sample(logits, tree, batch.sampling, positions + 1, depth)
    else:
        predicted = model.ops.argmax(logits)
    return aux, predicted if model.group is None else model.group.agree(predicted)


def prefill(
    model: DecoderModel,
    planes: Planes,
    drafter: Drafter | None,
    batch: DecodeBatch,
    rows: TokenRows,
    tokens: Tensor,
    next_tokens: Tensor,
    *,
    last: int,
    counts: Tensor | None = None,
) -> None:
    """Read tokens [T], a chunk of each row's prompt, after what the rows have cached already.

    Of row b's tokens the first counts[b] ≥ 1 are valid, the others padding; None: all are.
    `next_tokens` [T] are the prompts' tokens after each. For the first `last` rows the chunk is the
    last one: nothing follows it yet, and the row's first token is drawn. It becomes the root, and
    is left in `batch.emitted`.
    """
    counts = rows.cu_seqlens_q.diff() if counts is None else counts
    metadata = batch.metadata(model.ops, model.rotary, rows)
    output = model.forward(tokens, metadata, planes.target)
    ended, ends = batch.rows(0, last), rows.cu_seqlens_q[:last] + counts[:last] - 1  # [last]
    if last:
        logits = model.logits(output.final[ends])
        drawn = model.ops.draw(logits, ended.sampling, metadata.positions[ends] + 1)
        drawn = drawn if model.group is None else model.group.agree(drawn)
        next_tokens = next_tokens.index_copy(0, ends, drawn)
    if drafter is not None:
        read = ReadTokens(rows, tokens, next_tokens, output.aux, counts)
        drafter.prefill(batch, planes, read, last)
    batch.seq_lens.add_(counts)
    if last:
        ended.roots.copy_(drawn.clamp(min=0))
        ended.emitted[:, 0].copy_(drawn)
        ended.counts.fill_(1)


def prefill_prompt(
    model: DecoderModel, planes: Planes, drafter: Drafter | None, batch: DecodeBatch, prompt: Tensor
) -> None:
    """Read a whole prompt [n] into a batch of one row, and draw its first token."""
    rows = TokenRows.even(1, len(prompt), prompt.device)
    prefill(model, planes, drafter, batch, rows, prompt, prompt.roll(-1), last=1)
