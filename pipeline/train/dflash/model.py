"""Teacher, loss and accuracy of blocks.

The loss of an optimiser step with A anchors, blocks of size b and decay γ:

    loss = 1/M · Σ_anchors Σ_k exp(-(k - 1)/γ) D(teacher at a+k-1 , drafter at position k)

for k = 1 … b-1 (arXiv:2602.06036: a first wrong token costs all behind it). M is A, or with
`normalise: all` the number of tokens. The teacher is the target's distribution behind the true
tokens between, of which the drafter knows none: what it learns is their mean. D and the teacher's
restriction to the draft vocabulary are those of `pipeline.train.ttt.model`.

Shapes: N tokens, S labels, A anchors, b block size, K = b-1 positions, R labels that position k
predicts and that give loss, H hidden size, V target and Vd draft vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config.train import Loss
from pipeline.eagle3.dflash.head import DflashHead
from pipeline.train.data.batches import TrainBatch
from pipeline.train.dflash.blocks import BlockAttention, Blocks, cut_blocks, draw_anchors
from pipeline.train.ttt.trained import StepResult, TrainedModel, count_coarse_rows


class BlockObjective(NamedTuple):
    """What is minimised."""

    anchors: int  # of a micro-batch, at most
    decay: float  # γ
    seed: int  # that anchors are drawn by
    loss: Loss = "cross_entropy"
    temperature: float = 1.0  # of the teacher's softmax


class DflashModel(TrainedModel[DflashHead]):
    """The block drafter."""

    def __init__(
        self,
        head: DflashHead,
        embedding: Tensor,
        target_lm_head: Tensor,
        objective: BlockObjective,
        *,
        max_length: int,
        dtype: torch.dtype,
    ) -> None:
        """As of `TrainedModel`; max_length is the longest document."""
        super().__init__(
            *(head, embedding, target_lm_head),
            loss=objective.loss,
            temperature=objective.temperature,
            length=max_length + head.shape.block_size,
            dtype=dtype,
        )
        self.objective = objective

    def counted(self, batch: TrainBatch) -> int:
        return min(self.objective.anchors, len(batch.labels))

    def forward(self, batch: TrainBatch, divisor: float | None = None) -> StepResult:
        """Draft the blocks of `batch` and compare them with the teacher.

        divisor is M over the number of micro-batches; the anchors of this one if it is alone.
        """
        drawn = draw_anchors(batch, self.objective.anchors, self.objective.seed)
        blocks = cut_blocks(batch, drawn, self.head.shape.block_size)
        states = self.draft(batch, blocks)  # [A, b, H]
        return self._compare(
            states, blocks, batch, self.counted(batch) if divisor is None else divisor
        )

    def draft(self, batch: TrainBatch, blocks: Blocks) -> Tensor:
        """What lm_head reads at every position of the blocks [A, b, H]."""
        head, size = self.computing(), self.head.shape.block_size
        attend = BlockAttention(batch.lengths, blocks, size, self.rotary())
        tokens = head.block_tokens(batch.token_ids[blocks.anchors])  # [A, b]
        embedded = F.embedding(tokens.flatten(), self.embedding)
        states = head.run(embedded, head.context(batch.aux_states), attend)
        return states.view(-1, size, states.shape[-1])

    def _compare(
        self, states: Tensor, blocks: Blocks, batch: TrainBatch, divisor: float
    ) -> StepResult:
        """Loss and accuracy of every position, one after the other."""
        counted = self.giving_loss(batch)  # [S]
        # The type of the scales, and of all sums.
        exact = torch.promote_types(batch.aux_states.dtype, torch.float32)
        loss, hits = torch.zeros((), dtype=exact, device=states.device), list[Tensor]()
        for k, labels in enumerate(blocks.labels.unbind(1)):  # [A]
            rows = ((labels >= 0) & counted[labels]).nonzero().flatten()  # [R]
            weight = math.exp(-k / self.objective.decay) / divisor
            own_loss, own_hits = self.compare(
                states[None, rows, k + 1],
                batch.teacher_states[labels[rows]],
                batch.token_ids[batch.labels[labels[rows]]],
                torch.full((1, len(rows)), weight, dtype=exact, device=states.device),
                predicted=torch.ones(1, len(rows), dtype=torch.bool, device=states.device),
            )
            loss = loss + own_loss
            hits.append(own_hits)
        coarse_rows = count_coarse_rows(batch.trained(batch.aux_states))
        return StepResult(loss, torch.cat(hits), (blocks.labels >= 0).sum(0), coarse_rows)
