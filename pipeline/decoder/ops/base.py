"""Every operation of the decoder in plain torch: the definition that kernels are tested against.

Written to be read, not to be fast: it copies the cache and loops over rows.

Shapes: T tokens in B ragged rows (requests), N nodes a tree, H hidden size, V vocabulary, Q query
heads, G key/value heads, d head size, C candidates, k beams, D deepest draft, P pages a row.

A cache plane is [pages, G, PAGE, d]; entry e of row b lies in page block_table[b, e // PAGE] at
e % PAGE, and its *slot* is page · PAGE + e % PAGE. Entries after the ones an operation names may
hold anything, NaN included, and never matter.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.decoder.ops.draft import (
    BeamStep,
    Candidates,
    DraftedRows,
    DraftHead,
    DraftNoise,
    ProposalHead,
    beam_depths,
    beam_metadata,
    candidate_parents,
)
from pipeline.decoder.ops.draws import by_node, gumbel_of, perturb
from pipeline.decoder.ops.layer import (
    PAGE,
    AttentionMetadata,
    Float8Rows,
    LayerStack,
    LayerWeights,
    Packed,
    entry_slots,
)
from pipeline.decoder.ops.lookup import (
    continuations,
    longest_matches,
    match_lengths,
    merge_candidates,
    tree_of_chains,
)
from pipeline.decoder.ops.parallel import VocabularySlice
from pipeline.decoder.ops.tree import WINDOW, Beams, SamplingTensors, Tree, VerifyOutput


class TorchOps:
    """The reference. Other backends inherit what they do not replace."""

    name = "torch"
    #: Forwards of so many tokens, and a long one, launch all that others do.
    warm_up_lengths: tuple[int, ...] = (1,)

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        """`dtype` is the type of activations, and of keys and values."""
        self.dtype = dtype

    def scratch_bytes(self, rows: int, query_len: int, heads: int, size: int, drawn: int) -> int:
        """What operations leave for each other, at most: attention of `query_len` queries a row of
        `heads` heads of `size`, and `drawn` draws. Where memory is planned: on a GPU."""
        return 0

    def pack(self, weight: Tensor) -> Packed:
        """A weight [out, in], in the type it is stored in, in the form that `linear` wants."""
        return weight.to(self.dtype)

    def pack_float8(self, weight: Tensor) -> Packed:
        """The same of a weight that is rounded to float8, with a scale for each row; a backend
        that does not read such weights computes with what they hold."""
        return self.pack(Float8Rows.of(weight).widened())

    def pack_layer(self, weight: Tensor) -> Packed:
        """A matrix of a target's layers: as `pack`, or in float8 where a backend reads that and
        nothing is lost."""
        return self.pack(weight)

    def linear(self, x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
        """x [T, in] → [T, out]; `weight` has been through `pack`."""
        return F.linear(x, weight, bias)

    def logits(self, normed: Tensor, lm_head: Packed) -> Tensor:
        """What lm_head reads [T, H] → logits [T, V], of every rank where its rows are divided."""
        if not isinstance(lm_head, VocabularySlice):
            return self.linear(normed, lm_head)
        whole = lm_head.group.gather(self.linear(normed, lm_head.rows))
        return whole[:, : lm_head.vocabulary].contiguous()

    def add_rms_norm(
        self,
        x: Tensor,
        update: Tensor | None,
        weight: Tensor,
        eps: float,
        update_norm: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(normed, sum) [T, H]: sum = x + update in x's type, normed its RMS norm.

        normed = sum / sqrt(mean(sum²) + eps) · weight [H]. An update with an `update_norm` [H] is
        normed so itself, and rounded, before it is added.
        """
        if update is not None and update_norm is not None:
            update = rms_norm(update, update_norm, eps)
        total = x if update is None else x + update
        return rms_norm(total, weight, eps), total

    def gate_mul(self, gate_up: Tensor, *, gelu: bool = False) -> Tensor:
        """[T, 2I] → [T, I]: silu(first half) · second half; or with GELU's tanh approximation."""
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up

    def compute_slot_mapping(
        self, block_table: Tensor, seq_lens: Tensor, row: Tensor, within: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cache entries and slots [T] of tokens `within` [T] entries after their rows' last.

        block_table [B, P], seq_lens [B]; token t belongs to row[t].
        """
        entries = seq_lens[row] + within
        return entries, block_table[row, entries // PAGE] * PAGE + entries % PAGE

    def layers(
        self,
        stack: LayerStack,
        metadata: AttentionMetadata,
        hidden: Tensor,
        normed: Tensor,
        plane: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, H] and its normed input through all layers of a stack.

        Returns the last output, normed and as it is [T, H], and the captured ones side by side
        [T, C · H]. Keys and values go to `plane` [layers, 2, pages, G, PAGE, d].
        """
        captured = []
        for index, (weights, norm) in enumerate(zip(stack.layers, stack.norms, strict=True)):
            keys, values = plane[index]
            own = metadata.of(weights)
            normed, hidden = self.layer(weights, norm, stack.eps, own, hidden, normed, keys, values)
            if index in stack.captured:
                captured.append(hidden)
        return normed, hidden, torch.cat(captured, dim=-1) if captured else hidden[:, :0]

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
        """A decoder layer: hidden [T, H], and its normed input → its output, normed and as it is.

        `normed` [T, In] is what the projections to queries, keys and values read: a norm of
        `hidden`, or something wider. The output is normed with `following_norm` [H], the next
        layer's or the model's last. Keys and values go to their slots of the layer's planes.
        """
        qkv = self.linear(normed, weights.qkv, weights.qkv_bias)  # [T, (Q + 2G) d]
        query = self.rope_write(qkv, weights.head_norms, eps, metadata, keys, values)  # [T, Q, d]
        mixed = self.tree_attention(query, keys, values, metadata).flatten(1)  # [T, Q d]
        update = self.linear(mixed, weights.output, weights.output_bias)
        return self.finish_layer(weights, following_norm, eps, hidden, update)

    def finish_layer(
        self,
        weights: LayerWeights,
        following_norm: Tensor,
        eps: float,
        hidden: Tensor,
        update: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """A layer from what its attention adds on: hidden and update [T, H] → as `layer`.

        An update is of the rank's own heads where a layer is divided.
        """
        group, (attended, fed) = weights.group, weights.update_norms or (None, None)
        update = update if group is None else group.sum(update)
        normed, hidden = self.add_rms_norm(hidden, update, weights.post_norm, eps, attended)
        inner = self.gate_mul(self.linear(normed, weights.gate_up), gelu=weights.gelu)
        update = self.linear(inner, weights.down)
        update = update if group is None else group.sum(update)
        return self.add_rms_norm(hidden, update, following_norm, eps, fed)

    def embed_concat(
        self,
        tokens: Tensor,
        embedding: Tensor,
        hidden: Tensor,
        embed_norm: Tensor,
        hidden_norm: Tensor,
        eps: float,
    ) -> Tensor:
        """A draft head's input [T, 2H]: norm of the tokens' embedding, norm of `hidden` [T, H].

        tokens [T] below V, embedding [V, H], the norms' weights [H].
        """
        embedded, _ = self.add_rms_norm(embedding[tokens], None, embed_norm, eps)
        normed, _ = self.add_rms_norm(hidden, None, hidden_norm, eps)
        return torch.cat((embedded, normed), dim=-1)

    def rope_write(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        metadata: AttentionMetadata,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Rotate queries and keys, store keys and values in their slots; returns queries [T, Q, d].

        qkv [T, (Q + 2G) d]; `norms`, weights [d] of RMS norms over each query and key head, come
        before the rotation (Qwen3), which is by the tokens' positions, half-split.
        """
        heads, size = keys.shape[1], keys.shape[3]
        split = qkv.view(len(qkv), -1, size)  # [T, Q + 2G, d]
        query, key, value = torch.split(split, [split.shape[1] - 2 * heads, heads, heads], dim=1)
        if norms is not None:
            query, key = rms_norm(query, norms[0], eps), rms_norm(key, norms[1], eps)
        cos, sin = (table[metadata.positions][:, None] for table in metadata.rotary)  # [T, 1, d]
        page, offset = metadata.slot_mapping // PAGE, metadata.slot_mapping % PAGE
        keys[page, :, offset] = _rotate(key, cos, sin)
        values[page, :, offset] = value
        return _rotate(query, cos, sin)

    def tree_attention(
        self, query: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """query [T, Q, d] → [T, Q, d], softmax scale d^-0.5, over the pages of each token's row.

        Every query of row b sees the entries below seq_lens[b]. Behind them it sees entry
        seq_lens[b] + m where bit m of its mask is set; without masks query n of its row sees
        entries seq_lens[b] … seq_lens[b] + n. With `first_seen` the first entries are hidden from
        each token. A query that sees nothing gets zeros.
        """
        mixed = torch.zeros_like(query)
        starts, seq_lens = metadata.cu_seqlens_q.tolist(), metadata.seq_lens.tolist()
        for row, (first, last) in enumerate(pairwise(starts)):
            count, prefix = last - first, seq_lens[row]
            if count == 0:
                continue
            mask = metadata.mask
            window = count if mask is None else WINDOW
            pages = metadata.block_table[row, : -(-(prefix + window) // PAGE)]
            # Entry by entry: [S, G, d].
            key, value = (plane[pages].transpose(1, 2).flatten(0, 1) for plane in (keys, values))
            offsets = torch.arange(len(key), device=query.device) - prefix  # [S]; negative: prefix
            if mask is None:
                each = torch.arange(count, device=query.device)[:, None]
                seen = offsets <= each  # [n, S]
            else:
                bit = mask[first:last, None] >> offsets.clamp(0, WINDOW - 1) & 1
                seen = (offsets < 0) | ((offsets < WINDOW) & bit.bool())  # [n, S]
            if metadata.first_seen is not None:
                seen = seen & (offsets >= metadata.first_seen[first:last, None] - prefix)
            mixed[first:last] = _attend(query[first:last], key, value, seen)
        return mixed

    def argmax(self, logits: Tensor) -> Tensor:
        """logits [.., V] → index of the largest, the lowest of equals; -1 where a logit is NaN."""
        best, index = logits.max(-1)
        return torch.where(best.isnan(), -1, index)

    def propose(
        self, logits: Tensor, k: int, target_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """logits [T, V] → log-probabilities (float32) and indices [T, k], the most likely first;
        in place of the indices what `target_ids` [V] has there."""
        scores, index = logits.float().log_softmax(-1).topk(k, dim=-1)
        return scores, index if target_ids is None else target_ids[index]

    def perturb_drafts(
        self, logits: Tensor, noise: DraftNoise, target_ids: Tensor | None = None
    ) -> Tensor:
        """Logits [R · n, Vd] of n drafts for each of R rows of `noise`, with the noise that their
        tokens have in the target's draw (`perturb`): logits + weight · Gumbel number. So the lower
        a temperature, the nearer a draft is to the greedy one, which a greedy row's is.

        The tokens are `target_ids` [Vd], or all.
        """
        rows, size = len(noise.seeds), logits.shape[-1]
        tokens = torch.arange(size, device=logits.device) if target_ids is None else target_ids
        drawn = gumbel_of(noise.seeds, noise.positions, tokens)[:, None]  # [R, 1, Vd]
        noisy = logits.view(rows, -1, size).float() + noise.weights[:, None, None] * drawn
        return noisy.to(logits.dtype).view(-1, size)

    def select_beams(
        self,
        score: Tensor,
        gained: Tensor,
        proposed: Tensor,
        beam_mask: Tensor,
        hidden: Tensor,
        bits: Tensor,
    ) -> Beams:
        """The k best of the k · k continuations of k beams a row.

        score [B, k] are the beams' log-probabilities (float32), `gained` [B, k, k] those of what
        each proposes, `proposed` [B, k, k] its tokens, beam_mask [B, k] its bits, hidden [B · k, H]
        its output. `bits` [B, k] belong to the entries that the kept beams will have, best first.
        Of equal scores the earlier continuation is the better; where a row's scores hold NaN, any
        k different ones are kept.
        """
        k = score.shape[1]
        total = (score[:, :, None] + gained).flatten(1)  # [B, k · k]
        best = torch.sort(total, dim=-1, descending=True, stable=True).indices[:, :k]  # [B, k]
        above = best // k  # the beam that each kept continuation continues
        by_row = hidden.view(len(score), k, -1)
        return Beams(
            total=total,
            best=best,
            score=total.gather(1, best),
            token=proposed.flatten(1).gather(1, best),
            beam_mask=beam_mask.gather(1, above) | bits,
            hidden=by_row.gather(1, above[:, :, None].expand_as(by_row)).flatten(0, 1),
        )

    def draft_step(
        self,
        head: DraftHead,
        tokens: Tensor,
        hidden: Tensor,
        metadata: AttentionMetadata,
        plane: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """A pass of the head's layers over tokens [T], hidden [T, H]: what `lm_head` reads [T, H],
        and the next step's hidden [T, H]."""
        norms = head.embed_norm, head.hidden_norm, head.stack.eps
        joined = self.embed_concat(tokens, head.embedding, hidden, *norms)  # [T, 2H]
        if head.norm_before_residual:
            hidden = joined[:, hidden.shape[1] :]
        normed, output, _ = self.layers(head.stack, metadata, hidden, joined, plane)
        return normed, normed if head.norm_output else output

    def draft_beams(
        self,
        head: DraftHead,
        state: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        positions: Tensor,
        plane: Tensor,
        steps: int,
        k: int,
        trace: list[Tensor] | None = None,
        noise: DraftNoise | None = None,
    ) -> Candidates:
        """What an EAGLE-3 head drafts in `steps` steps of k beams a row.

        state [B, H] is the head's output at the last committed entry; positions [B] are those of
        the first drafted tokens, seq_lens where no entries are hidden. Drafted keys and values go
        after the committed entries, to `plane` [layers, 2, pages, G, PAGE, d]. Every step's logits
        [B, beams, Vd] are appended to `trace`, the root's first, before they get `noise`.
        """

        def step(
            tokens: Tensor, hidden: Tensor, metadata: AttentionMetadata
        ) -> tuple[Tensor, Tensor]:
            return self.draft_step(head, tokens, hidden, metadata, plane)

        normed = state
        if not head.norm_output:
            normed, _ = self.add_rms_norm(state, None, head.stack.norms[-1], head.stack.eps)
        place = block_table, seq_lens, positions, head.sliding_window
        rows = DraftedRows(head.rotary, *place, noise)
        proposals = ProposalHead(head.lm_head, head.target_ids)
        return self.search_beams(step, proposals, normed, state, rows, steps, k, trace)

    def search_beams(
        self,
        step: BeamStep,
        head: ProposalHead,
        normed: Tensor,
        hidden: Tensor,
        drafted_rows: DraftedRows,
        steps: int,
        k: int,
        trace: list[Tensor] | None = None,
    ) -> Candidates:
        """Draft `steps` deep with k beams a row (EAGLE-2, arXiv:2406.16858, §4.1).

        `normed` [B, H] is what lm_head reads at the root, `hidden` [B, H] the first step's input.
        """
        rows, noise = len(normed), drafted_rows.noise

        def propose(normed: Tensor, depth: int) -> tuple[Tensor, Tensor]:
            """Normed outputs [B · n, H] → log-probabilities, target ids of the best k [B, n, k]."""
            logits = self.logits(normed, head.lm_head)  # [B · n, Vd]
            if trace is not None:
                trace.append(logits.view(rows, -1, logits.shape[-1]))
            if noise is not None:
                logits = self.perturb_drafts(logits, noise.deeper(depth), head.target_ids)
            scores, ids = self.propose(logits, k, head.target_ids)
            return scores.view(rows, -1, k), ids.view(rows, -1, k)

        score, token = (each[:, 0] for each in propose(normed, 0))  # [B, k] of each beam
        tokens, cumulative, chosen = [token], [score], []
        step_metadata, bits = beam_metadata(drafted_rows, steps - 1, k)
        hidden, mask = hidden.repeat_interleave(k, dim=0), bits[0]  # [B · k, H], [B, k]
        for depth, metadata in enumerate(step_metadata, 1):
            metadata = replace(metadata, mask=mask.flatten())
            normed, hidden = step(token.flatten(), hidden, metadata)
            gained, proposed = propose(normed, depth)  # each [B, k, k]
            tokens.append(proposed.flatten(1))
            if depth == len(step_metadata):
                cumulative.append((score[:, :, None] + gained).flatten(1))
                break
            beams = self.select_beams(score, gained, proposed, mask, hidden, bits[depth])
            cumulative.append(beams.total)
            chosen.append(beams.best)
            score, token, mask, hidden = beams.score, beams.token, beams.beam_mask, beams.hidden
        parents, depths = candidate_parents(chosen, tokens, k), beam_depths(steps, k, normed.device)
        return Candidates(torch.cat(tokens, 1), parents, torch.cat(cumulative, 1), depths)

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
        below = min(nodes - 1, count)  # nodes that are not the root
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :below]
        chosen = order.sort(dim=-1).values  # [B, below], parents before children again
        # Candidate index → node index; candidates that were not kept are never looked up.
        node_of = torch.zeros(rows, count + 1, dtype=torch.int64, device=tokens.device)
        node_ids = torch.arange(1, below + 1, device=tokens.device)
        node_of.scatter_(1, chosen, node_ids.expand(rows, -1))
        node_of[:, count] = 0  # index -1: the root
        above = parents.gather(1, chosen)
        above = node_of.gather(1, torch.where(above < 0, count, above))  # [B, below]
        root = torch.zeros(rows, 1, dtype=torch.int64, device=tokens.device)
        # A column a node, each [B].
        tree_mask, depth = [torch.ones_like(roots)], [torch.zeros_like(roots)]
        for node in range(1, below + 1):
            parent = above[:, node - 1 : node]
            bit = 1 << node if node < 63 else -(1 << 63)
            tree_mask.append(torch.stack(tree_mask, 1).gather(1, parent)[:, 0] | bit)
            depth.append(torch.stack(depth, 1).gather(1, parent)[:, 0] + 1)
        return Tree(
            torch.cat((roots[:, None], tokens.gather(1, chosen)), dim=1),
            torch.cat((root, above), dim=1),
            torch.stack(tree_mask, dim=1),
            torch.stack(depth, dim=1),
        )

    def verify(self, tree: Tree, predicted: Tensor, depth: int) -> VerifyOutput:
        """Accept the branch on which every node is the target's choice at its parent.

        predicted [B, N] are the target's choices. The walk starts at the root and takes the first
        child that agrees; `depth` D is the deepest a tree can be.
        """
        rows, count = predicted.shape
        assert predicted.shape == tree.tokens.shape
        node = torch.zeros(rows, dtype=torch.int64, device=predicted.device)
        path, counts = [node], torch.ones_like(node)
        index = torch.arange(count, device=predicted.device)
        for _ in range(depth):
            choice = predicted.gather(1, node[:, None])  # [B, 1]
            child = (tree.parents == node[:, None]) & (tree.tokens == choice)  # [B, N]
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
        """Draw the target's choice at every node.

        logits [B, N, V] → predicted [B, N]; positions [B, N] is where the drawn token will stand;
        -1 stands for a NaN among the logits. Nodes that no walk of `depth` steps from the root
        reaches may hold -1, too.
        """
        count = logits.shape[1]
        noisy = perturb(logits.flatten(0, 1), by_node(sampling, count), positions.flatten())
        return self.argmax(noisy).view(-1, count)

    def draw(self, logits: Tensor, sampling: SamplingTensors, positions: Tensor) -> Tensor:
        """One token a row of logits [B, V], the largest of `perturb`'s; -1 for a NaN."""
        return self.argmax(perturb(logits, sampling, positions))

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

    def write_history(
        self,
        history: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        max_query_len: int,
        tokens: Tensor,
        next_tokens: Tensor,
        counts: Tensor,
    ) -> None:
        """Put what rows have read behind the seq_lens[b] tokens of their history [B, S].

        Of row b's tokens, at most `max_query_len` from cu_seqlens_q[b] [B + 1] on, the first
        counts[b] ≥ 1 are valid; behind them comes what follows the last of those, 0 for -1.
        """
        within = torch.arange(max_query_len + 1, device=history.device)
        read = (cu_seqlens_q[:-1, None] + within).clamp(max=len(tokens) - 1)  # [B, n + 1]
        after = next_tokens[cu_seqlens_q[:-1] + counts - 1].clamp(min=0)
        written = torch.where(within < counts[:, None], tokens[read], after[:, None])
        place = seq_lens[:, None] + within
        row, column = ((within <= counts[:, None]) & (place < history.shape[1])).nonzero().unbind(1)
        history[row, place[row, column]] = written[row, column]

    def look_up(
        self,
        history: Tensor,
        seq_lens: Tensor,
        *,
        max_match: int,
        least: int,
        most: int,
        steps: int,
    ) -> tuple[Tensor, Tensor]:
        """Where the last tokens of rows stood before, and the `steps` tokens that followed.

        history [B, S]; row b's tokens are 0 … seq_lens[b]. The `most` places whose last tokens
        agree longest, in at least `least` and at most `max_match` tokens, of equals the latest:
        lengths [B, most], the longest first, 0 for none; tokens [B, most, steps], periodic from the
        last token on, anything behind a length of 0.
        """
        history = history[:, : max(int(seq_lens.max()) + 1, most)]
        lengths = match_lengths(history, seq_lens, max_match)  # [B, S]
        lengths, ends = longest_matches(lengths, least, most)
        return lengths, continuations(history, seq_lens, ends, steps)

    def tree_of_chains(self, chains: Tensor, lengths: Tensor, top_k: int) -> Candidates:
        """See ops/lookup.py."""
        return tree_of_chains(chains, lengths, top_k)

    def merge_candidates(
        self, drafted: Candidates, looked_up: Candidates, steps: int
    ) -> Candidates:
        """See ops/lookup.py."""
        return merge_candidates(drafted, looked_up, steps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [.., H] / sqrt(mean(x²) + eps) · weight [H], rounded once, to x's type."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)


def _attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Softmax attention of one row: query [n, Q, d], key and value [S, G, d], seen [n, S]."""
    # A weight of zero times NaN would be NaN: what nobody sees is not read at all.
    unseen = ~seen.any(0)[:, None, None]  # [S, 1, 1]
    key, value = key.masked_fill(unseen, 0), value.masked_fill(unseen, 0)
    query, key, value = (part.transpose(0, 1) for part in (query, key, value))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
    return mixed.transpose(0, 1).masked_fill(~seen.any(1)[:, None, None], 0)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (RoFormer, eq. 34), half-split; x [T, heads, d], cos and sin [T, 1, d]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin
