"""How a toy head drafts: the hidden state after the root is kept, beams go on from it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config import DrafterSection, TreeSection
from pipeline.decoder.batch import DecodeBatch, RowState
from pipeline.decoder.drafter import Drafter, DrafterFactory, ReadTokens, TreeDrafter, Trees
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel, stored
from pipeline.decoder.ops.draft import Candidates, DraftedRows, ProposalHead
from pipeline.decoder.ops.layer import AttentionMetadata

from .shape import ToyHead


class ToyDrafter(TreeDrafter):
    def __init__(self, head: ToyHead, model: DecoderModel, trees: Trees) -> None:
        head.check_fits(model.config.hidden_size, model.vocabulary)
        super().__init__(trees, head.shape.draft_vocab_size)
        self.state = RowState(head.shape.hidden_size, model.dtype)
        self._model, self._eps, device = model, head.shape.rms_norm_eps, model.device
        self._fc, self._token, lm_head = (
            model.ops.pack(stored(each.weight.detach().clone(), device))
            for each in (head.fc, head.token, head.lm_head)
        )
        self._proposals = ProposalHead(lm_head, head.target_ids().to(device))
        self._norm = head.norm.weight.detach().to(device, torch.float32)

    def prefill(self, batch: DecodeBatch, planes: Planes, read: ReadTokens, ended: int) -> None:
        self.extend(batch, planes, read)

    def extend(self, batch: DecodeBatch, planes: Planes, read: ReadTokens) -> None:
        last = read.rows.cu_seqlens_q[:-1] + read.counts - 1  # [B] each row's last valid token
        hidden = self._model.ops.linear(read.aux[last], self._fc)
        batch.drafter_state.copy_(self._step(read.next_tokens[last].clamp(min=0), hidden))

    def candidates(self, batch: DecodeBatch, planes: Planes, shape: TreeSection) -> Candidates:
        rows = DraftedRows(self._model.rotary, batch.block_table, batch.seq_lens, batch.seq_lens)
        steps, k, hidden = shape.steps, self.shapes.beams(shape), batch.drafter_state
        normed = self._normed(hidden)
        return self._model.ops.search_beams(
            self._beam_step, self._proposals, normed, hidden, rows, steps, k
        )

    def _beam_step(
        self, tokens: Tensor, hidden: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        output = self._step(tokens, hidden)
        return self._normed(output), output

    def _step(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        embedded = F.embedding(tokens, self._model.embedding)
        return hidden + self._model.ops.linear(embedded, self._token)

    def _normed(self, hidden: Tensor) -> Tensor:
        return self._model.ops.add_rms_norm(hidden, None, self._norm, self._eps)[0]


def make_drafter(head: ToyHead, model: DecoderModel, trees: Trees) -> Drafter:
    return ToyDrafter(head, model, trees)


def drafter_factory(section: DrafterSection, head: ToyHead, model: DecoderModel) -> DrafterFactory:
    return DrafterFactory(lambda trees: ToyDrafter(head, model, trees))
