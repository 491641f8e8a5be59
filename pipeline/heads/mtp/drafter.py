"""Drafting with chained heads: one a step, each with a plane of its own; a dynamic tree.

A row with L committed tokens x0…x(L-1) and root xL. Head k's entry t was made from the embedding of
x(t+k+1) and what head k-1 gave at position t, so of head k the first L-k entries are certain:

    position     …  L-3     L-2     L-1
    head 0       …  x(L-2)  x(L-1)  xL        its output at L-1 proposes depth 1
    head 1       …  x(L-1)  xL    │ d1        at L-1 depth 2
    head 2       …  xL    │ d1      d2        at L-1 depth 3            d: drafted, of that depth

So at step k head k reads all that has been drafted, a node of depth d at position L-k+d-1, with
what head k-1 gave at the node's parent. A node of depth 1 continues a certain entry, the last one
of head k-1, whose output is kept in drafter_state. Steps behind the last head's read new beams
only, with its own outputs. An extension does the same with what was accepted: to head k its tokens
stand k positions further to the front, and where a prompt begins the first k are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.config import DrafterSection, Eagle3DrafterSection, TreeSection
from pipeline.decoder.batch import DecodeBatch, RowState, TokenRows
from pipeline.decoder.drafter import Drafter, DrafterFactory, ReadTokens, TreeDrafter, Trees
from pipeline.decoder.kv import Planes, PlaneShape
from pipeline.decoder.model import DecoderModel, fuse_layer, pack_lm_head, stored
from pipeline.decoder.ops.draft import Candidates, DraftedRows, ProposalHead
from pipeline.decoder.ops.layer import AttentionMetadata, LayerStack, Packed, entry_slots
from pipeline.decoder.ops.tree import HEADROOM
from pipeline.errors import ConfigError
from pipeline.heads.mtp.shape import ChainedHead
from pipeline.target.rotary import RotaryTable


@dataclass(frozen=True, eq=False)
class ChainLink:
    """One head's weights."""

    token_norm: Tensor  # [H]
    hidden_norm: Tensor  # [H]
    input_proj: Packed  # [H, 2H], of [token ; hidden]
    input_norm: Tensor  # [H]
    stack: LayerStack  # one layer, and the norm before lm_head


class ChainedDrafter(TreeDrafter):
    """All heads of a chain, and the dynamic tree."""

    def __init__(self, head: ChainedHead, model: DecoderModel, trees: Trees) -> None:
        """The heads' weights are copied; the target's embedding, type, device and operations are
        used. Raises HeadError when heads and target do not fit.
        """
        head.check_fits(model.config.hidden_size, model.vocabulary)
        super().__init__(trees, head.shape.draft_vocab_size)
        self.ops, self.dtype = model.ops, model.dtype
        self.shape = head.shape
        # An extension writes an entry more than a draft has steps.
        self.lookahead = max(self.lookahead, self.depth + 1)
        self._division = head.shape.division(model.group)
        key = self._division.part.groups, head.shape.head_dim
        self.planes = (PlaneShape(1, *key, model.dtype),) * head.shape.heads
        self._load(head, model)
        #: Of all heads but the last, which nobody continues; of one head, what proposes depth 1.
        self._num_states = max(len(self.links) - 1, 1)
        self.state = RowState(self._num_states * head.shape.hidden_size, model.dtype)
        #: Set to a list to record every step's logits [B, beams, Vd], root first (tests, analysis).
        self.trace: list[Tensor] | None = None

    def prefill(self, batch: DecodeBatch, planes: Planes, read: ReadTokens, ended: int) -> None:
        del ended
        self.extend(batch, planes, read)

    def extend(self, batch: DecodeBatch, planes: Planes, read: ReadTokens) -> None:
        # Entries behind the valid ones are written too; the next round overwrites them unseen.
        rows, next_tokens = read.rows, read.next_tokens.clamp(min=0)
        index = torch.arange(len(next_tokens), device=next_tokens.device)
        starts, last = (
            rows.cu_seqlens_q[:-1],
            (rows.cu_seqlens_q[1:] - 1)[rows.row],
        )  # of each token's row
        hidden, states = self._first_hidden(read.aux), list[Tensor]()
        for k, link in enumerate(self.links):
            if k:
                hidden = self._moved(k, hidden, batch, rows)
            shifted = replace(batch, seq_lens=(batch.seq_lens - k).clamp(min=0))
            metadata = shifted.metadata(self.ops, self.rotary, rows)
            missing = (k - batch.seq_lens).clamp(min=0)  # [B] tokens in front of head k's first
            tokens = next_tokens[torch.minimum(index + missing[rows.row], last)]
            if k == self._num_states:  # the last head's output is nobody's
                self._write_keys(link, tokens, hidden, metadata, planes.drafter[k])
                break
            hidden = self.step(k, tokens, hidden, metadata, planes.drafter[k])
            states.append(hidden[starts + (read.counts - 1 - missing).clamp(min=0)])
        batch.drafter_state.copy_(torch.cat(states, dim=-1))

    def candidates(self, batch: DecodeBatch, planes: Planes, shape: TreeSection) -> Candidates:
        table, lengths = batch.block_table, batch.seq_lens
        place = DraftedRows(self.rotary, table, lengths, lengths, noise=batch.noise())
        states, vocabulary = self._states(batch), ProposalHead(self._lm_head, self._target_ids)
        steps, k = shape.steps, self.shapes.beams(shape)
        draft = _ChainedDraft(self, batch, planes, states, k)
        root = states[:, 0]
        return self.ops.search_beams(draft, vocabulary, root, root, place, steps, k, self.trace)

    def _moved(self, k: int, hidden: Tensor, batch: DecodeBatch, rows: TokenRows) -> Tensor:
        """What head k reads [T, H], of what head k-1 has just given [T, H].

        Its entries begin one position further to the front, with what is kept of head k-1, unless
        both begin at position 0.
        """
        index = torch.arange(len(hidden), device=hidden.device)
        before = hidden[(index - 1).clamp(min=0)]
        first, last_state = (rows.within == 0)[:, None], self._states(batch)[rows.row, k - 1]
        has_earlier = (batch.seq_lens >= k)[rows.row, None]
        return torch.where(has_earlier, torch.where(first, last_state, before), hidden)

    def step(
        self,
        number: int,
        tokens: Tensor,
        hidden: Tensor,
        metadata: AttentionMetadata,
        plane: Tensor,
    ) -> Tensor:
        """Head `number` over tokens [T], hidden [T, H] → outputs [T, H]."""
        link = self.links[number]
        normed, joined = self._enter(link, tokens, hidden, metadata)
        return self.ops.layers(link.stack, metadata, joined, normed, plane)[0]

    def _write_keys(
        self,
        link: ChainLink,
        tokens: Tensor,
        hidden: Tensor,
        metadata: AttentionMetadata,
        plane: Tensor,
    ) -> None:
        """The keys and values of `step` alone."""
        weights, (keys, values) = link.stack.layers[0], plane[0]
        normed, _ = self._enter(link, tokens, hidden, metadata)
        projected = self.ops.linear(normed, weights.qkv, weights.qkv_bias)
        eps = link.stack.eps
        self.ops.rope_write(projected, weights.head_norms, eps, metadata, keys, values)

    def _enter(
        self, link: ChainLink, tokens: Tensor, hidden: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """What a head's layer reads, normed and as it is [T, H]."""
        ops, eps, size = self.ops, link.stack.eps, hidden.shape[1]
        norms = link.token_norm, link.hidden_norm
        inputs = ops.embed_concat(tokens, self._embedding, hidden, *norms, eps)  # [T, 2H]
        # Where a text begins the embedding is zero, as in training, and so is its norm.
        begins = (metadata.positions == 0)[:, None]
        inputs = torch.cat((inputs[:, :size].masked_fill(begins, 0), inputs[:, size:]), dim=-1)
        return ops.add_rms_norm(ops.linear(inputs, link.input_proj), None, link.input_norm, eps)

    def _states(self, batch: DecodeBatch) -> Tensor:
        """What each row keeps [B, K - 1, H]: head k's output at its last certain entry."""
        return batch.drafter_state.view(len(batch), self._num_states, -1)

    def _first_hidden(self, aux: Tensor) -> Tensor:
        """Aux states [T, L · H] → what head 0 reads [T, H]."""
        if self._fc is not None:
            return self.ops.linear(aux, self._fc)
        final = aux[:, -self.shape.hidden_size :].contiguous()
        return self.ops.add_rms_norm(final, None, self._target_norm, self.shape.rms_norm_eps)[0]

    def _load(self, head: ChainedHead, model: DecoderModel) -> None:
        """Copy the heads' weights into the form that the operations want."""
        device, ops, size = model.device, self.ops, head.shape.hidden_size
        self.links = []
        for layer in head.layers:
            inside = {name: tensor.clone() for name, tensor in layer.state_dict().items()}

            def norm(name: str, inside: dict[str, Tensor] = inside) -> Tensor:
                return inside[f"{name}.weight"].to(device, torch.float32)

            of_hidden, of_token = inside["input_proj.weight"].split(size, dim=1)
            swapped = torch.cat((of_token, of_hidden), dim=1)
            last, eps = (norm("final_layernorm"),), head.shape.rms_norm_eps
            fused = fuse_layer(inside, ops, device, division=self._division)
            self.links.append(
                ChainLink(
                    token_norm=norm("token_layernorm"),
                    hidden_norm=norm("hidden_layernorm"),
                    input_proj=ops.pack(stored(swapped, device)),
                    input_norm=norm("input_layernorm"),
                    stack=LayerStack((fused,), last, eps, captured=()),
                )
            )
        projection = head.aux_projection
        self._fc: Packed | None = None
        if projection is None:
            self._target_norm = head.target_norm.to(device, torch.float32)
        else:
            self._fc = ops.pack(stored(projection.weight.detach().clone(), device))
        lm_head = stored(head.lm_head.weight.detach().clone(), device)
        self._lm_head = pack_lm_head(lm_head, ops.pack, self._division.group)
        self._target_ids, self._embedding = head.target_ids().to(device), model.embedding
        length = model.max_length + HEADROOM
        rotary = RotaryTable(self.shape.rope_config(), length, device=device, dtype=self.dtype)
        self.rotary = rotary.cos, rotary.sin


class _ChainedDraft:
    """The steps of one draft, in turn: `BeamStep` for k beams a row."""

    def __init__(
        self, drafter: ChainedDrafter, batch: DecodeBatch, planes: Planes, states: Tensor, k: int
    ) -> None:
        self._drafter, self._batch, self._planes, self._k = drafter, batch, planes, k
        self._states = states  # [B, K - 1, H]
        self._depth = 0  # of the beams that were read last
        # Of all nodes that were drafted, depth by depth.
        self._tokens: list[Tensor] = []  # each [B, k]
        self._masks: list[Tensor] = []  # each [B, k]
        self._above: list[Tensor] = []  # node that each continues, from depth 2 on, each [B, k]
        self._outputs = states  # of the last head that read them all [B, nodes, H]

    def __call__(
        self, tokens: Tensor, hidden: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """Tokens [B · k], the outputs that they continue [B · k, H] → their outputs, twice."""
        assert metadata.mask is not None
        self._depth += 1
        mask, heads = metadata.mask.view(-1, self._k), len(self._drafter.links)
        if self._depth >= heads:
            output = self._run(heads - 1, self._depth, tokens.view_as(mask), hidden, mask)
            return output.flatten(0, 1), output.flatten(0, 1)
        if self._depth > 1:
            self._above.append(self._parents(mask))
        self._tokens.append(tokens.view_as(mask))
        self._masks.append(mask)
        everything = torch.cat(self._tokens, 1), self._continued(), torch.cat(self._masks, 1)
        self._outputs = self._run(self._depth, 1, *everything)
        newest = self._outputs[:, -self._k :].flatten(0, 1)
        return newest, newest

    def _continued(self) -> Tensor:
        """What each drafted node continues [B · nodes, H]: the head before gave it at the parent,
        or at its last certain entry."""
        first = self._states[:, None, self._depth - 1].expand(-1, self._k, -1)
        if not self._above:
            return first.flatten(0, 1)
        above = torch.cat(self._above, 1)[:, :, None]
        deeper = self._outputs.gather(1, above.expand(-1, -1, first.shape[-1]))
        return torch.cat((first, deeper), 1).flatten(0, 1)

    def _parents(self, mask: Tensor) -> Tensor:
        """The node, of all that were drafted, that each new beam [B, k] continues: of the depth
        before, the one whose bit its beam_mask has."""
        start = (self._depth - 2) * self._k
        bits = torch.arange(start, start + self._k, device=mask.device)
        return start + (mask[:, :, None] >> bits & 1).argmax(-1)

    def _run(self, number: int, depth: int, tokens: Tensor, hidden: Tensor, mask: Tensor) -> Tensor:
        """Head `number` over nodes [B, n], of which the first are of `depth` → outputs [B, n, H].

        Nodes before a text's first position are seen by nobody.
        """
        batch, k, count = self._batch, self._k, tokens.shape[1]
        rows, device = len(batch), tokens.device
        nodes = torch.arange((depth - 1) * k, (depth - 1) * k + count, device=device)
        entries = (batch.seq_lens - number).clamp(min=0)  # [B] certain ones
        absent = (number - batch.seq_lens).clamp(min=0)[:, None]  # depths before position 0
        positions = (batch.seq_lens - number)[:, None] + nodes // k
        metadata = AttentionMetadata(
            rotary=self._drafter.rotary,
            positions=positions.clamp(min=0).flatten(),
            slot_mapping=entry_slots(batch.block_table, entries[:, None] + nodes).flatten(),
            block_table=batch.block_table,
            seq_lens=entries,
            cu_seqlens_q=torch.arange(0, rows * count + 1, count, device=device),
            max_query_len=count,
            mask=(mask >> absent * k << absent * k).flatten(),
        )
        plane = self._planes.drafter[number]
        outputs = self._drafter.step(number, tokens.flatten(), hidden, metadata, plane)
        return outputs.view(rows, count, -1)


def make_drafter(head: ChainedHead, model: DecoderModel, trees: Trees) -> Drafter:
    """The chain's drafter."""
    return ChainedDrafter(head, model, trees)


def drafter_factory(
    section: DrafterSection, head: ChainedHead, model: DecoderModel
) -> DrafterFactory:
    """For any trees. Raises ConfigError for a window, which a chain was not trained with, and for
    other weights than those stored."""
    settings = section.settings(Eagle3DrafterSection)
    fix = "leave it out, or draft with a head that was trained with one layer"
    if settings.draft_window is not None:
        problem = "chained heads see the whole text"
        raise ConfigError(problem, where="drafter.draft_window", fix=fix)
    if settings.weights != "stored":
        problem = f"chained heads cannot draft with {settings.weights}"
        raise ConfigError(problem, where="drafter.weights", fix=fix)
    return DrafterFactory(lambda trees: ChainedDrafter(head, model, trees))
