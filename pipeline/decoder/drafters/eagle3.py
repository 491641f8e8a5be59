"""Drafting with an EAGLE-3 head (arXiv:2503.01840): extend on real states, then unroll on its own.

A row with L committed tokens x0…x(L-1) and root xL has L entries in the head's cache. Entry i was
made from (embedding of x(i+1), fc(aux i)) at position i:

    entry        0      1     …    L-1                 its output predicts x(L+1): depth 1
    token        x1     x2    …    xL (root)
    state        g0     g1    …    g(L-1)

Draft step s = 1…depth-1 reads one token of depth s with the output that proposed it, at position
L-1+s; it sees all L entries, then its own ancestors among the drafted ones:

    columns   0 … L-1 | depth 1: k | depth 2: k | …      k beams a step, rewritten every round
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config import TreeSection
from pipeline.decoder.kv import KVCache
from pipeline.decoder.ops import additive, fold_mask, tree_attention
from pipeline.decoder.tree import Tree, causal_mask, grow
from pipeline.eagle3.head import Eagle3Head
from pipeline.eagle3.layers import RotaryTable, rotate


class Eagle3Drafter:
    """One head, its own one-layer cache, and the dynamic tree."""

    def __init__(self, head: Eagle3Head, embedding: Tensor, tree: TreeSection) -> None:
        """`embedding` [V, H] is the target's; a copy of the head computes in its type and on its device."""
        self.head = copy.deepcopy(head).to(embedding.device, embedding.dtype).eval()  # a head in training stays as it is
        self.embedding = embedding
        self.depth, self.top_k = tree.steps, min(tree.top_k, head.shape.draft_vocab_size)
        candidates = self.top_k + (self.depth - 1) * self.top_k**2
        self.nodes = min(tree.nodes, candidates + 1)
        self.target_ids = head.target_ids().to(embedding.device)  # [Vd]
        #: Set to a list to record every step's logits [B, beams, Vd], root first (tests, analysis).
        self.trace: list[Tensor] | None = None

    def allocate(self, slots: int, length: int) -> None:
        shape, device, dtype = self.head.shape, self.embedding.device, self.embedding.dtype
        scratch = self.depth * max(self.top_k, self.depth + 1)
        self.cache = KVCache.zeros(1, slots, length + scratch, shape.num_key_value_heads, shape.head_dim, device=device, dtype=dtype)
        self.rotary = RotaryTable(shape.rope_config(), length + scratch, device=device, dtype=dtype)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)  # entries per row
        self.outputs = torch.zeros(slots, shape.hidden_size, device=device, dtype=dtype)  # of the last entry

    def prefill(self, row: int, tokens: Tensor, aux: Tensor) -> None:
        count = len(aux)
        columns = torch.arange(count, device=aux.device)[None]  # [1, T]
        mask = causal_mask(count, 0, aux.dtype, aux.device)
        output = self._step(tokens[None, 1:], self.head.project(aux[None]), columns, columns, mask, first_row=row)
        self.outputs[row] = output[0, -1]
        self.lengths[row] = count

    def extend(self, tokens: Tensor, aux: Tensor, counts: Tensor) -> None:
        rows, width = tokens.shape
        lengths = self.lengths[:rows]
        columns = lengths[:, None] + torch.arange(width, device=tokens.device)  # [B, E]
        # Entries behind the valid ones are written too; the next round overwrites them unseen.
        seen = int(lengths.max()) + width
        mask = additive(torch.arange(seen, device=tokens.device) <= columns[:, :, None], aux.dtype)
        output = self._step(tokens, self.head.project(aux), columns, columns, mask)  # [B, E, H]
        self.outputs[:rows] = output[torch.arange(rows, device=tokens.device), counts - 1]
        self.lengths[:rows] += counts

    def draft(self, roots: Tensor) -> Tree:
        rows, k = len(roots), self.top_k
        scores, drafted = self._propose(self.outputs[:rows, None])  # each [B, 1, k]
        tokens, parents, cumulative = [drafted[:, 0]], [torch.full_like(drafted[:, 0], -1)], [scores[:, 0]]
        beams = torch.arange(k, device=roots.device).expand(rows, -1)  # [B, k] candidate indices
        hidden = self.outputs[:rows, None].expand(-1, k, -1)  # [B, k, H]
        lineage = torch.zeros(rows, k, 0, dtype=torch.bool, device=roots.device)  # beams × drafted columns
        score, token = scores[:, 0], drafted[:, 0]  # [B, k]
        for step in range(1, self.depth):
            lineage = torch.cat((lineage, torch.eye(k, dtype=torch.bool, device=roots.device).expand(rows, -1, -1)), dim=-1)
            hidden = self._beam_step(step, token, hidden, lineage)  # [B, k, H]
            gained, drafted = self._propose(hidden)  # [B, k, k]
            total = (score[:, :, None] + gained).flatten(1)  # [B, k k]
            base = sum(part.shape[1] for part in tokens)
            tokens.append(drafted.flatten(1))
            parents.append(beams[:, :, None].expand(-1, -1, k).flatten(1))
            cumulative.append(total)
            score, best = total.topk(k, dim=-1)
            token = drafted.flatten(1).gather(1, best)
            beams = base + best
            above = best // k  # the beam that each kept candidate continues
            hidden = hidden.gather(1, above[:, :, None].expand_as(hidden))
            lineage = lineage.gather(1, above[:, :, None].expand(-1, -1, lineage.shape[-1]))
        return grow(roots, torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(cumulative, 1), self.nodes, self.depth)

    def move(self, source: int, target: int) -> None:
        self.cache.move(source, target, int(self.lengths[source]))
        self.lengths[target] = self.lengths[source]
        self.outputs[target] = self.outputs[source]

    def _beam_step(self, step: int, token: Tensor, hidden: Tensor, lineage: Tensor) -> Tensor:
        """One draft step for k beams a row: token [B, k], hidden [B, k, H], lineage [B, k, step·k]."""
        rows, k = token.shape
        lengths = self.lengths[:rows, None]
        columns = lengths + (step - 1) * k + torch.arange(k, device=token.device)  # [B, k]
        positions = (lengths + step - 1).expand(-1, k)
        offset = torch.arange(int(lengths.max()) + step * k, device=token.device) - lengths  # [B, S]
        inside = (offset >= 0) & (offset < step * k)
        drafted = lineage.gather(2, offset.clamp(0, step * k - 1)[:, None].expand(-1, k, -1))
        visible = (offset < 0)[:, None] | (inside[:, None] & drafted)
        return self._step(token, hidden, positions, columns, additive(visible, hidden.dtype))

    def _step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, columns: Tensor, mask: Tensor, first_row: int = 0) -> Tensor:
        """The head's layer on tokens [B, N] and hidden [B, N, H]; mask [B, N, S] over its cache."""
        rows = len(tokens)
        cos, sin = self.rotary.at(positions)  # [B, N, d]
        index = torch.arange(first_row, first_row + rows, device=tokens.device)[:, None]
        keys_of, values_of = self.cache.data[0]  # each [slots, G, length, d]

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys_of[index, :, columns] = rotate(key, cos, sin)
            values_of[index, :, columns] = value
            seen = slice(first_row, first_row + rows), slice(None), slice(0, mask.shape[-1])
            folded = fold_mask(mask, query.shape[2] // key.shape[2])
            return tree_attention(rotate(query, cos, sin), keys_of[seen], values_of[seen], folded)

        return self.head.step(F.embedding(tokens, self.embedding), hidden, attend)

    def _propose(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Un-normed outputs [B, n, H] → log-probabilities and target ids [B, n, k] of the best k tokens."""
        logits = self.head.logits(output).float()  # [B, n, Vd]
        if self.trace is not None:
            self.trace.append(logits)
        scores, draft_ids = logits.log_softmax(-1).topk(self.top_k, dim=-1)
        return scores, self.target_ids[draft_ids]
