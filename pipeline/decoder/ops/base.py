"""Every operation of the decoder in plain torch: the definition that kernels are tested against.

Shapes: B rows (requests), N tokens a row, T = B·N tokens, H hidden size, V vocabulary, Q query
heads, G key/value heads, d head size, C candidates, D deepest draft, P pages a row.

A cache plane is [pages, G, PAGE, d]; entry e of row b lies in page block_table[b, e // PAGE] at
e % PAGE, and its *slot* is page · PAGE + e % PAGE. Entries behind the ones an operation names may
hold anything, NaN included, and never matter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.decoder.ops.layer import AttentionMetadata, LayerWeights, Packed
from pipeline.decoder.ops.philox import uniform
from pipeline.decoder.tree import WINDOW, SamplingTensors, Tree, VerifyOutput

#: Cache entries in a page. One page of one head is the block that an attention kernel loads at
#: once.
PAGE = 64


class TorchOps:
    """The reference. Other backends inherit what they do not replace."""

    name = "torch"

    def pack(self, weight: Tensor) -> Packed:
        """A weight [out, in] in the form that `linear` wants; shares memory where it can."""
        return weight

    def linear(self, x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
        """x [T, in] → [T, out]; `weight` has been through `pack`."""
        return F.linear(x, weight, bias)

    def add_rms_norm(
        self, x: Tensor, update: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(normed, sum) [T, H]: sum = x + update in x's type, normed its RMS norm.

        normed = sum / sqrt(mean(sum²) + eps) · weight
        """
        total = x if update is None else x + update
        return F.rms_norm(total, (total.shape[-1],), weight, eps), total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2I] → [T, I]: silu(first half) · second half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def layer(
        self,
        weights: LayerWeights,
        following_norm: Tensor,
        eps: float,
        metadata: AttentionMetadata,
        hidden: Tensor,
        normed: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """A decoder layer: hidden [T, H], normed for its input → its output, normed and as it is.

        The output is normed with `following_norm` [H], the next layer's or the model's last. Keys
        and values go to their slots of the layer's planes.
        """
        qkv = self.linear(normed, weights.qkv, weights.qkv_bias)  # [T, (Q + 2G) d]
        where = metadata.rotary, metadata.positions, metadata.slots
        query = self.rope_write(qkv, weights.head_norms, eps, *where, keys, values)  # [T, Q, d]
        by_row = query.view(metadata.rows, -1, *query.shape[1:])  # [B, N, Q, d]
        seen = metadata.block_table, metadata.seq_lens, metadata.mask
        mixed = self.tree_attention(by_row, keys, values, *seen)
        update = self.linear(mixed.view(len(hidden), -1), weights.output, weights.output_bias)
        normed, hidden = self.add_rms_norm(hidden, update, weights.post_norm, eps)
        update = self.linear(self.silu_mul(self.linear(normed, weights.gate_up)), weights.down)
        return self.add_rms_norm(hidden, update, following_norm, eps)

    def rope_write(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        rotary: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Rotate queries and keys, store keys and values in their slots; returns queries [T, Q, d].

        qkv [T, (Q + 2G) d]; `norms`, weights [d] of RMS norms over each query and key head, come
        before the rotation (Qwen3); rotary (cos, sin) [S, d] in the half-split layout; positions,
        slots [T].
        """
        heads, size = keys.shape[1], keys.shape[3]
        split = qkv.view(len(qkv), -1, size)  # [T, Q + 2G, d]
        query, key, value = torch.split(split, [split.shape[1] - 2 * heads, heads, heads], dim=1)
        if norms is not None:
            query = F.rms_norm(query, (size,), norms[0], eps)
            key = F.rms_norm(key, (size,), norms[1], eps)
        cos, sin = rotary[0][positions][:, None], rotary[1][positions][:, None]  # [T, 1, d]
        page, offset = slots // PAGE, slots % PAGE
        keys[page, :, offset] = _rotate(key, cos, sin)
        values[page, :, offset] = value
        return _rotate(query, cos, sin)

    def tree_attention(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """query [B, N, Q, d] → [B, N, Q, d], softmax scale d^-0.5, over the rows' pages.

        Every query of row b sees the entries below seq_lens[b]. Behind them it sees entry
        seq_lens[b] + m where bit m of mask [B, N] is set; without `mask` query n sees entries
        seq_lens[b] … seq_lens[b] + n.
        """
        (rows, count, heads, size), groups = query.shape, keys.shape[1]
        window = count if mask is None else WINDOW
        pages = min(-(-(int(seq_lens.max()) + window) // PAGE), block_table.shape[1])
        gathered = [
            plane[block_table[:, :pages]].transpose(1, 2).flatten(2, 3)  # [B, G, S, d]
            for plane in (keys, values)
        ]
        entry = torch.arange(pages * PAGE, device=query.device)
        offset = entry - seq_lens[:, None]  # [B, S]; negative: prefix
        if mask is None:
            seen = offset[:, None] <= torch.arange(count, device=query.device)[:, None]  # [B, N, S]
        else:
            bit = (mask[:, :, None] >> offset.clamp(0, WINDOW - 1)[:, None]) & 1
            seen = (offset < 0)[:, None] | ((offset < WINDOW)[:, None] & bit.bool())
        # A weight of zero times NaN would be NaN: what nobody sees is not read at all.
        unseen = ~seen.any(1)[:, None, :, None]  # [B, 1, S, 1]
        key, value = (part.masked_fill(unseen, 0) for part in gathered)
        # Queries that share a key become rows of one problem, so no key is repeated in memory.
        folded = query.view(rows, count, groups, -1, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
        bias = torch.zeros_like(seen, dtype=query.dtype)  # [B, N, S]
        bias = bias.masked_fill_(~seen, float("-inf")).repeat(1, heads // groups, 1)[:, None]
        mixed = F.scaled_dot_product_attention(folded, key, value, attn_mask=bias)
        mixed = mixed.view(rows, groups, -1, count, size).permute(
            0, 3, 1, 2, 4
        )  # [B, N, G, Q/G, d]
        return mixed.reshape(rows, count, heads, size).contiguous()

    def argmax(self, logits: Tensor) -> Tensor:
        """logits [.., V] → index of the largest, the lowest of equals; -1 where a logit is NaN."""
        best, index = logits.max(-1)
        return torch.where(best.isnan(), -1, index)

    def propose(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """logits [T, V] → log-probabilities (float32) and indices [T, k], the most likely first."""
        scores, index = logits.float().log_softmax(-1).topk(k, dim=-1)
        return scores, index

    def grow_tree(
        self, roots: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int
    ) -> Tree:
        """Keep the best `nodes - 1` of C candidates below `roots` [B].

        tokens, parents, scores [B, C] list the candidates in the order in which they were drafted,
        so that parents come first. `parents` holds candidate indices, -1 for the root; `scores` are
        cumulative log-probabilities, never above the parent's, so that the best candidates form a
        connected tree; of equal scores the earlier candidate is the better. Kept candidates keep
        their order.
        """
        rows, count = tokens.shape
        kept = min(nodes - 1, count)
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :kept]
        chosen = order.sort(dim=-1).values  # [B, kept], parents before children again
        # Candidate index → node index; candidates that were not kept are never looked up.
        node_of = torch.zeros(rows, count + 1, dtype=torch.int64, device=tokens.device)
        nodes_kept = torch.arange(1, kept + 1, device=tokens.device)
        node_of.scatter_(1, chosen, nodes_kept.expand(rows, -1))
        node_of[:, count] = 0  # index -1: the root
        above = parents.gather(1, chosen)
        above = node_of.gather(1, torch.where(above < 0, count, above))  # [B, kept]
        root = torch.zeros(rows, 1, dtype=torch.int64, device=tokens.device)
        # A column a node, each [B].
        ancestors, depth = [torch.ones_like(roots)], [torch.zeros_like(roots)]
        for node in range(1, kept + 1):
            parent = above[:, node - 1 : node]
            bit = 1 << node if node < 63 else -(1 << 63)
            ancestors.append(torch.stack(ancestors, 1).gather(1, parent)[:, 0] | bit)
            depth.append(torch.stack(depth, 1).gather(1, parent)[:, 0] + 1)
        return Tree(
            torch.cat((roots[:, None], tokens.gather(1, chosen)), dim=1),
            torch.cat((root, above), dim=1),
            torch.stack(ancestors, dim=1),
            torch.stack(depth, dim=1),
        )

    def verify(self, tree: Tree, predicted: Tensor, depth: int) -> VerifyOutput:
        """Accept the branch on which every node is the target's choice at its parent.

        predicted [B, N] are the target's choices. The walk starts at the root and takes the first
        child that agrees; `depth` D is the deepest a tree can be.
        """
        rows, count = tree.tokens.shape
        node = torch.zeros(rows, dtype=torch.int64, device=predicted.device)
        path, counts = [node], torch.ones_like(node)
        index = torch.arange(count, device=predicted.device)
        for _ in range(depth):
            wanted = predicted.gather(1, node[:, None])  # [B, 1]
            child = (tree.parents == node[:, None]) & (tree.tokens == wanted)  # [B, N]
            child &= index > 0
            agrees = child.any(1)
            # Once no child agrees the node stays, and none agrees again.
            node = torch.where(agrees, child.int().argmax(1), node)
            counts = counts + agrees
            path.append(node)
        walked = torch.stack(path, dim=1)  # [B, D + 1]
        return VerifyOutput(walked, counts, predicted.gather(1, walked))

    def sample(
        self, logits: Tensor, tree: Tree, sampling: SamplingTensors, positions: Tensor, depth: int
    ) -> Tensor:
        """Draw the target's choice at every node that a walk can reach.

        logits [B, N, V] → predicted [B, N]; positions [B, N] is where the drawn token will stand.
        Nodes off the walked branch may hold anything that names no child of theirs; -1 stands for a
        NaN among the logits.
        """
        rows, count, _ = logits.shape
        predicted = torch.full((rows, count), -1, dtype=torch.int64, device=logits.device)
        node = torch.zeros(rows, 1, dtype=torch.int64, device=logits.device)
        each = torch.arange(rows, device=logits.device)
        for _ in range(depth + 1):
            position = positions.gather(1, node)[:, 0]
            drawn = self.draw(logits[each, node[:, 0]], sampling, position)  # [B]
            predicted.scatter_(1, node, drawn[:, None])
            child = (tree.parents == node) & (tree.tokens == drawn[:, None])
            child[:, 0] = False
            first = child.int().argmax(1, keepdim=True)
            node = torch.where(child.any(1, keepdim=True), first, node)
        return predicted

    def draw(self, logits: Tensor, sampling: SamplingTensors, positions: Tensor) -> Tensor:
        """One token a row of logits [B, V], inverting the cumulative distribution; -1 for a NaN."""
        greedy = self.argmax(logits)
        total = cumulative(logits, sampling)
        threshold = uniform(sampling.seeds, positions)[:, None].double() * total[:, -1:]
        # The first token whose cumulative mass lies above the threshold always has mass of its own.
        drawn = (total <= threshold).sum(-1).clamp(max=logits.shape[-1] - 1)
        return torch.where((sampling.temperature == 0) | (greedy < 0), greedy, drawn)

    def compact(self, planes: Tensor, block_table: Tensor, seq_lens: Tensor, path: Tensor) -> None:
        """Move entry seq_lens[b] + path[b, e] to seq_lens[b] + e in every layer.

        planes [layers, 2, pages, G, PAGE, d]; path [B, E] ascends, and path[b, e] ≥ e wherever node
        e of the branch is a real one.
        """
        entry = torch.arange(path.shape[1], device=path.device).expand_as(path)
        source = entry_slots(block_table, seq_lens[:, None] + path)
        target = entry_slots(block_table, seq_lens[:, None] + entry)
        moved = planes[:, :, source // PAGE, :, source % PAGE]
        planes[:, :, target // PAGE, :, target % PAGE] = moved


def entry_slots(block_table: Tensor, entries: Tensor) -> Tensor:
    """Slots of entries [B, E] of each row."""
    return block_table.gather(1, entries // PAGE) * PAGE + entries % PAGE


def cumulative(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """What each row of logits [B, V] is drawn from, summed up by token id: float64 [B, V]."""
    scaled = logits.float() / sampling.temperature.clamp(min=1e-6)[:, None]
    return _keep_top(scaled, sampling).softmax(-1).double().cumsum(-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (RoFormer, eq. 34), half-split; x [T, heads, d], cos and sin [T, 1, d]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def _keep_top(scaled: Tensor, sampling: SamplingTensors) -> Tensor:
    """scaled [B, V] with -inf outside top-k, then outside top-p; equals of the last kept stay."""
    ordered = scaled.sort(-1, descending=True).values  # [B, V]
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    limit = torch.where(sampling.top_k > 0, sampling.top_k, scaled.shape[-1])[:, None]
    last = ordered.gather(1, (limit - 1).clamp(max=scaled.shape[-1] - 1))  # [B, 1]: k-th largest
    within_k = ordered.masked_fill(ordered < last, float("-inf"))
    total = within_k.softmax(-1).double().cumsum(-1)  # [B, V]
    # A token is kept while the mass before it is below top_p; the first one always is. Over a large
    # vocabulary float32 masses sum to 1 ± 1e-5 only, hence top_p of what they do sum to.
    before, top_p = F.pad(total[:, :-1], (1, 0)), sampling.top_p[:, None]
    inside = (((before < top_p * total[:, -1:]) | (top_p >= 1)) & (ordered >= last)) | (rank == 0)
    least = ordered.gather(1, inside.sum(-1, keepdim=True) - 1)
    return scaled.masked_fill(scaled < least, float("-inf"))
