"""Drafting with an EAGLE-3 head (arXiv:2503.01840): extend on real states, then unroll on its own.

A row with L committed tokens x0…x(L-1) and root xL has L entries in the head's cache. Entry i was
made from (embedding of x(i+1), fc(aux i)) at position i:

    entry        0      1     …    L-1                 its output predicts x(L+1): depth 1
    token        x1     x2    …    xL (root)           and is kept in drafter_state
    state        g0     g1    …    g(L-1)

The head is loaded into the same form as layers of the target, and drafts with `ops.draft_beams`.
Entries of a second layer are made of what the first one gives for the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipeline.config import DrafterSection, Eagle3DrafterSection, TreeSection
from pipeline.decoder.batch import DecodeBatch, RowState
from pipeline.decoder.drafter import (
    Drafter,
    DrafterFactory,
    DraftWork,
    ReadTokens,
    TreeDrafter,
    Trees,
)
from pipeline.decoder.kv import Planes, PlaneShape
from pipeline.decoder.model import DecoderModel, fuse_layer, pack_lm_head, stored
from pipeline.decoder.ops.draft import Candidates, DraftHead
from pipeline.decoder.ops.layer import AttentionMetadata, LayerStack, Packed, packed_bytes
from pipeline.decoder.ops.tree import HEADROOM
from pipeline.errors import HeadError
from pipeline.heads.eagle3.shape import Eagle3Head, has_other_window
from pipeline.learning.window import seen_pages
from pipeline.target.rotary import RotaryTable


class Eagle3Drafter(TreeDrafter):
    """One head, and the dynamic tree."""

    def __init__(
        self,
        head: Eagle3Head,
        model: DecoderModel,
        trees: Trees,
        *,
        draft_window: int | None = None,
        float8: bool = False,
    ) -> None:
        """The head's weights are copied, `float8`: its matrices rounded; the target's embedding,
        type, device and operations are used. `draft_window` takes the place of the head's own.
        Raises HeadError when head and target do not fit.
        """
        head.check_fits(model.config.hidden_size, model.vocabulary)
        window = head.shape.draft_window if draft_window is None else draft_window
        if window and (other := has_other_window(head.shape)):
            problem = f"draft_window is {window}, and the head has {other}"
            raise HeadError(problem, where="drafter.draft_window", fix="leave it out")
        super().__init__(trees, head.shape.draft_vocab_size)
        self.ops, self.dtype = model.ops, model.dtype
        self.shape = head.shape
        if draft_window is not None:
            self.shape = head.shape.model_copy(update={"draft_window": draft_window})
        # An extension writes an entry more than a draft has steps.
        self.lookahead = max(self.lookahead, self.depth + 1)
        self.state = RowState(head.shape.hidden_size, model.dtype)
        self._division = head.shape.division(model.group)
        key = self._division.part.groups, head.shape.head_dim
        self.planes = (PlaneShape(head.shape.num_hidden_layers, *key, model.dtype),)
        self._load(head, model, self.ops.pack_float8 if float8 else self.ops.pack)
        #: Set to a list to record every step's logits [B, beams, Vd], root first (tests, analysis).
        self.trace: list[Tensor] | None = None

    def prefill(self, batch: DecodeBatch, planes: Planes, read: ReadTokens, ended: int) -> None:
        del ended
        self.extend(batch, planes, read)

    def extend(self, batch: DecodeBatch, planes: Planes, read: ReadTokens) -> None:
        # Entries behind the valid ones are written too; the next round overwrites them unseen.
        metadata, plane = batch.metadata(self.ops, self._head.rotary, read.rows), planes.drafter[0]
        if self.shape.sliding_window:
            first_seen = (metadata.positions + (1 - self.shape.sliding_window)).clamp(min=0)
            metadata = replace(metadata, first_seen=first_seen)
        hidden, tokens = self.project(read.aux), read.next_tokens.clamp(min=0)
        last = read.rows.cu_seqlens_q[:-1] + read.counts - 1  # [B] valid tokens of the rows
        _, output = self.ops.draft_step(self._head, tokens, hidden, metadata, plane)  # [T, H]
        output = output[last]
        if self.shape.draft_window:
            # Those keys and values are everyone's; what the last token sees is its window.
            metadata = self._last_of(batch, metadata.slot_mapping[last], read.counts)
            inputs = tokens[last], hidden[last]
            _, output = self.ops.draft_step(self._head, *inputs, metadata, plane)  # [B, H]
        batch.drafter_state.copy_(output)

    def candidates(self, batch: DecodeBatch, planes: Planes, shape: TreeSection) -> Candidates:
        entries = self._seen(batch.block_table, batch.seq_lens)
        row = batch.drafter_state, *entries, batch.seq_lens
        steps, k = shape.steps, self.shapes.beams(shape)
        plane, noise = planes.drafter[0], batch.noise()
        return self.ops.draft_beams(self._head, *row, plane, steps, k, self.trace, noise)

    def work(self, shape: TreeSection) -> DraftWork:
        """A step passes the layer and lm_head; an extension `fc` and the layer for steps + 1
        tokens, and lm_head for the last one. Of a head that is divided, this rank's part."""
        size, beams, accepted = self.shape, shape.top_k, shape.steps + 1
        part, group = self._division.part, self._division.group
        queries, entry = part.queries * part.head_dim, 2 * part.groups * part.head_dim
        count, read = size.num_hidden_layers, size.aux_layers * size.target_width
        layer = size.hidden_size * (3 * queries + 2 * entry + 3 * part.inner)
        layer += (count - 1) * (layer - size.hidden_size * (queries + entry))
        tokens = -(-size.draft_vocab_size // (group.size if group else 1))
        lm_head, fc = tokens * size.hidden_size, read * size.hidden_size
        return DraftWork(
            step=[(layer, beams), (lm_head, beams)],
            extension=[(layer + fc, accepted), (lm_head, 1)],
            beams=beams,
            accepted=accepted,
            entry=count * entry,
            queries=count * queries,
            dtype=self.dtype,
            weight_bytes=packed_bytes(self._fc) / fc,
            window=size.sliding_window or size.draft_window,
        )

    def _seen(self, block_table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """What the head's window leaves of `lengths` [B] entries: pages [B, P], and how many."""
        if not self.shape.draft_window:
            return block_table, lengths
        return seen_pages(block_table, lengths, self.shape.draft_window, self.lookahead)

    def _last_of(
        self, batch: DecodeBatch, slot_mapping: Tensor, counts: Tensor
    ) -> AttentionMetadata:
        """Of each row's last token [B], which is stored at `slot_mapping` already."""
        lengths = batch.seq_lens + counts
        block_table, seen = self._seen(batch.block_table, lengths)
        return AttentionMetadata(
            rotary=self._head.rotary,
            positions=lengths - 1,
            slot_mapping=slot_mapping,
            block_table=block_table,
            seq_lens=seen - 1,
            cu_seqlens_q=torch.arange(len(slot_mapping) + 1, device=slot_mapping.device),
            max_query_len=1,
            mask=None,
        )

    def project(self, aux: Tensor) -> Tensor:
        """Aux states [T, L · W] → the hidden input of step 0 [T, H]."""
        eps = self._head.stack.eps
        if self._input_norm is not None:
            aux, _ = self.ops.add_rms_norm(aux, None, self._input_norm, eps)
        if self._fc_norms:
            pairs = zip(aux.chunk(len(self._fc_norms), -1), self._fc_norms, strict=True)
            normed = [self.ops.add_rms_norm(part, None, norm, eps)[0] for part, norm in pairs]
            aux = torch.cat(normed, dim=-1)
        return self.ops.linear(aux, self._fc)

    def _load(
        self, head: Eagle3Head, model: DecoderModel, pack: Callable[[Tensor], Packed]
    ) -> None:
        """Copy the head's weights into the form that the operations want, matrices by `pack`."""
        device, ops = model.device, self.ops
        weights: dict[str, Tensor] = {
            name: tensor.clone() for name, tensor in head.state_dict().items()
        }
        count = self.shape.num_hidden_layers
        names = ["midlayer.", *(f"layers.{number}." for number in range(1, count))]

        def norm(name: str) -> Tensor:
            return weights[f"{name}.weight"].to(device, torch.float32)

        rotary = RotaryTable(
            self.shape.rope_config(), model.max_length + HEADROOM, device=device, dtype=self.dtype
        )
        inside = [
            {
                name.removeprefix(prefix): weights[name]
                for name in weights
                if name.startswith(prefix)
            }
            for prefix in names
        ]
        division = self._division
        layers = tuple(fuse_layer(each, ops, device, pack, division=division) for each in inside)
        norms = *(norm(f"{name}input_layernorm") for name in names[1:]), norm("norm")
        own = head.embedding
        self._head = DraftHead(
            embedding=model.embedding if own is None else own.to(device, self.dtype),
            embed_norm=norm("midlayer.input_layernorm"),
            hidden_norm=norm("midlayer.hidden_norm"),
            stack=LayerStack(layers, norms, self.shape.rms_norm_eps, captured=()),
            lm_head=pack_lm_head(stored(weights["lm_head.weight"], device), pack, division.group),
            target_ids=head.target_ids().to(device),
            norm_output=self.shape.norm_output,
            rotary=(rotary.cos, rotary.sin),
            norm_before_residual=self.shape.norm_before_residual,
            sliding_window=self.shape.sliding_window,
        )
        self._input_norm = norm("input_norm") if self.shape.norm_before_fc else None
        parts = self.shape.aux_layers if self.shape.fc_norm else 0
        self._fc_norms = [norm(f"fc_norm.{part}") for part in range(parts)]
        self._fc = pack(stored(weights["fc.weight"], device))


def make_drafter(head: Eagle3Head, model: DecoderModel, trees: Trees) -> Drafter:
    """With the window that the head was trained with."""
    return Eagle3Drafter(head, model, trees)


def drafter_factory(
    section: DrafterSection, head: Eagle3Head, model: DecoderModel
) -> DrafterFactory:
    """With the window and the weights' type of `section`, for any trees."""
    settings = section.settings(Eagle3DrafterSection)
    options: dict[str, Any] = {
        "draft_window": settings.draft_window,
        "float8": settings.weights == "fp8",
    }
    return DrafterFactory(lambda trees: Eagle3Drafter(head, model, trees, **options))
