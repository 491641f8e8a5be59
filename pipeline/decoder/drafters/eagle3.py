"""Drafting with an EAGLE-3 head (arXiv:2503.01840): extend on real states, then unroll on its own.

A row with L committed tokens x0…x(L-1) and root xL has L entries in the head's cache. Entry i was
made from (embedding of x(i+1), fc(aux i)) at position i:

    entry        0      1     …    L-1                 its output predicts x(L+1): depth 1
    token        x1     x2    …    xL (root)           and is kept in drafter_state
    state        g0     g1    …    g(L-1)

Draft step s = 1…steps-1 reads one token of depth s with the output that proposed it, at position
L-1+s; it sees all L entries, then its own ancestors among the drafted ones:

    entries   0 … L-1 | depth 1: k | depth 2: k | …      k beams a step, written anew every round
    bits                0 … k-1      k … 2k-1            of the mask
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.kv import PageAllocator
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.base import TorchOps, entry_slots
from pipeline.decoder.tree import Tree
from pipeline.eagle3.head import Eagle3Head, RmsNorm
from pipeline.eagle3.layers import RotaryTable
from pipeline.errors import HeadError


class Eagle3Drafter:
    """One head, its own plane of the page pool, and the dynamic tree."""

    def __init__(
        self, head: Eagle3Head, model: DecoderModel, tree: TreeSection | Mapping[int, TreeSection]
    ) -> None:
        """`tree` is one shape for all batches, or the shape from each batch size upward.

        A copy of the head computes with the target's embedding, type, device and operations. Raises
        HeadError when head and target do not fit.
        """
        check_fits(head, model)
        self.ops, self.embedding, self.dtype = model.ops, model.embedding, model.dtype
        self.shape = head.shape
        self._trees = {0: tree} if isinstance(tree, TreeSection) else dict(tree)
        shapes = self._trees.values()
        self.depth = max(shape.steps for shape in shapes)
        self.nodes = max(self._nodes(shape) for shape in shapes)
        # A draft writes all its beams; an extension one entry more than a draft has steps.
        self.lookahead = max(max((each.steps - 1) * each.top_k, each.steps + 1) for each in shapes)
        self.state_size = head.shape.hidden_size
        self.target_ids = head.target_ids().to(self.embedding.device)  # [Vd]
        copied = copy.deepcopy(head)  # a head in training stays as it is
        self.head = with_ops(copied.to(self.embedding.device, self.dtype).eval(), model.ops)
        length = model.max_length + self.lookahead
        rotary = RotaryTable(
            self.shape.rope_config(), length, device=model.device, dtype=model.dtype
        )
        self._rotary = rotary.cos, rotary.sin
        #: Set to a list to record every step's logits [B, beams, Vd], root first (tests, analysis).
        self.trace: list[Tensor] | None = None

    def make_plane(self, allocator: PageAllocator) -> None:
        kv_heads, head_dim = self.shape.num_key_value_heads, self.shape.head_dim
        self._keys, self._values = allocator.plane(1, kv_heads, head_dim, self.dtype)[0]

    def shape_for(self, rows: int) -> TreeSection:
        return self._trees[max(size for size in self._trees if size <= rows)]

    def extend(self, batch: DecodeBatch, tokens: Tensor, aux: Tensor, counts: Tensor) -> None:
        # Entries behind the valid ones are written too; the next round overwrites them unseen.
        entries = batch.seq_lens[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        slots = entry_slots(batch.block_table, entries)  # [B, E]
        hidden = self.head.project(aux)  # [B, E, H]
        output = self._step(batch, tokens.clamp(min=0), hidden, entries, slots, None)  # [B, E, H]
        last = (counts - 1)[:, None, None].expand(-1, 1, output.shape[-1])
        batch.drafter_state.copy_(output.gather(1, last)[:, 0])

    def draft(self, batch: DecodeBatch, shape: TreeSection) -> Tree:
        tokens, parents, scores = self.candidates(batch, shape)
        return self.ops.grow_tree(batch.roots, tokens, parents, scores, self._nodes(shape))

    def candidates(self, batch: DecodeBatch, shape: TreeSection) -> tuple[Tensor, Tensor, Tensor]:
        """All that such a draft proposes: tokens, parents, cumulative log-probabilities [B, C].

        The first k candidates have depth 1; after them every depth has k·k, k for each of its
        beams, best first. `parents` are candidate indices, -1 for the root.
        """
        rows, k, device = len(batch), self._beams(shape), batch.roots.device
        # The drafted entries, step by step, k beams each.
        drafted = torch.arange((shape.steps - 1) * k, device=device)  # [W]
        slots = entry_slots(batch.block_table, batch.seq_lens[:, None] + drafted)  # [B, W]
        positions = batch.seq_lens[:, None] + drafted // k  # [B, W]
        bits = (1 << drafted).expand(rows, -1)  # [B, W]
        scores, proposed = self._propose(batch.drafter_state[:, None], k)
        score, token = scores[:, 0], proposed[:, 0]  # [B, k] of each beam
        tokens, parents, cumulative = [token], [torch.full_like(token, -1)], [score]
        # Of each beam [B, k]: the candidate that it continues, and its ancestors among drafted
        # entries.
        candidates = torch.arange(k, device=device).expand(rows, -1)
        lineage = torch.zeros(rows, k, dtype=torch.int64, device=device)
        hidden = batch.drafter_state[:, None].expand(-1, k, -1)  # [B, k, H]
        for step in range(1, shape.steps):
            own = slice((step - 1) * k, step * k)
            lineage = lineage | bits[:, own]
            hidden = self._step(batch, token, hidden, positions[:, own], slots[:, own], lineage)
            gained, proposed = self._propose(hidden, k)  # each [B, k, k]
            total = (score[:, :, None] + gained).flatten(1)  # [B, k·k]
            proposed = proposed.flatten(1)
            tokens.append(proposed)
            parents.append(candidates[:, :, None].expand(-1, -1, k).flatten(1))
            cumulative.append(total)
            if step == shape.steps - 1:
                break
            score, best = total.topk(k, dim=-1)
            token = proposed.gather(1, best)
            candidates = best + (k + (step - 1) * k * k)
            above = best // k  # the beam that each kept candidate continues
            hidden = hidden.gather(1, above[:, :, None].expand_as(hidden))
            lineage = lineage.gather(1, above)
        return torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(cumulative, 1)

    def _step(
        self,
        batch: DecodeBatch,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor | None,
    ) -> Tensor:
        """The head's output [B, N, H] for tokens [B, N] and hidden [B, N, H], cached in `slots`."""
        rows, count = tokens.shape

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            qkv = torch.cat((query, key, value), dim=-2).view(rows * count, -1)
            where, target = positions.reshape(-1), slots.reshape(-1)
            turned = self.ops.rope_write(
                qkv, None, 0.0, self._rotary, where, target, self._keys, self._values
            ).view_as(query)
            keys, values, table, lengths = (
                self._keys,
                self._values,
                batch.block_table,
                batch.seq_lens,
            )
            return self.ops.tree_attention(turned, keys, values, table, lengths, visible)

        return self.head.step(F.embedding(tokens, self.embedding), hidden, attend)

    def _propose(self, output: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Un-normed outputs [B, n, H] → log-probabilities, target ids of the best k [B, n, k]."""
        logits = self.head.logits(output)  # [B, n, Vd]
        if self.trace is not None:
            self.trace.append(logits.float())
        scores, draft_ids = self.ops.propose(logits.flatten(0, 1), k)
        shape = *output.shape[:2], k
        return scores.view(shape), self.target_ids[draft_ids].view(shape)

    def _nodes(self, shape: TreeSection) -> int:
        """Nodes of a tree; a small draft may have fewer candidates than the budget."""
        beams = self._beams(shape)
        return min(shape.nodes, 1 + beams + (shape.steps - 1) * beams**2)

    def _beams(self, shape: TreeSection) -> int:
        return min(shape.top_k, self.shape.draft_vocab_size)


class _Linear(nn.Module):
    def __init__(self, linear: nn.Linear, ops: TorchOps) -> None:
        super().__init__()
        self._ops, self._weight = ops, ops.pack(linear.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.linear(x.reshape(-1, x.shape[-1]), self._weight).view(*x.shape[:-1], -1)


class _Norm(nn.Module):
    def __init__(self, norm: RmsNorm, ops: TorchOps) -> None:
        super().__init__()
        self._ops, self._weight, self._eps = ops, norm.weight.detach(), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        normed, _ = self._ops.add_rms_norm(flat, None, self._weight, self._eps)
        return normed.view_as(x)


def with_ops(head: Eagle3Head, ops: TorchOps) -> Eagle3Head:
    """The same head with its projections and norms computed by `ops`."""
    for parent in list(head.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, _Linear(child, ops))
            elif isinstance(child, RmsNorm):
                setattr(parent, name, _Norm(child, ops))
    return head


def check_fits(head: Eagle3Head, model: DecoderModel) -> None:
    """Raise HeadError where the head's shape contradicts the target's."""
    hidden = model.config.hidden_size
    for field, value, wanted in (
        ("hidden_size", head.shape.hidden_size, hidden),
        ("vocab_size", head.shape.vocab_size, model.vocabulary),
        ("aux states", head.fc.in_features, 3 * hidden),
    ):
        if value != wanted:
            raise HeadError(
                f"{field} is {value}, the target's is {wanted}",
                where="head",
                fix="use the head that was trained for this target",
            )
