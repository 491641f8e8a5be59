"""Chained heads with what they are trained against: loss and teacher are those of ttt/model.py."""

from __future__ import annotations

from torch import Tensor

from pipeline.eagle3.chained.head import ChainedHead
from pipeline.train.chained.unroll import unroll_chain
from pipeline.train.data.batches import TrainBatch
from pipeline.train.ttt.model import UnrolledModel
from pipeline.train.ttt.unroll import Unroll


class ChainedModel(UnrolledModel[ChainedHead]):
    """All heads at once: the loss of step k reaches the heads before it."""

    def unrolled(
        self, head: ChainedHead, batch: TrainBatch, rows: Tensor, offsets: Tensor | None
    ) -> Unroll:
        return unroll_chain(
            head,
            self.embedding,
            batch,
            self.rotary(),
            rows=rows,
            steps=self.objective.steps,
            offsets=offsets,
        )
