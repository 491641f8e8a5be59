"""The objective of a toy head, at position i and step k:

step 0   token  x[i+1]    hidden  fc(aux[i])           teacher of x[i+2]
step k   token  x[i+k+1]  hidden  output of step k-1   teacher of x[i+k+2]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.config import TrainSection
from pipeline.heads.unrolled import Objective, Unroll, UnrolledModel, embed_tokens, rows_by_position
from pipeline.learning.batches import TrainBatch

from .shape import ToyHead


class ToyModel(UnrolledModel[ToyHead]):
    def unrolled(self, head: ToyHead, batch: TrainBatch, rows: Tensor) -> Unroll:
        hidden, outputs = head.fc(batch.aux_states[rows]), []
        for k in range(self.objective.steps):
            hidden = head.step(embed_tokens(self.embedding, batch, rows + k + 1), hidden)
            outputs.append(hidden)
        return Unroll(tuple(outputs), rows, rows_by_position(batch, rows))


def trained_model(
    section: TrainSection,
    head: ToyHead,
    embedding: Tensor,
    lm_head: Tensor,
    *,
    max_length: int,
    dtype: torch.dtype,
    seed: int,
) -> ToyModel:
    fixed: Any = head, embedding, lm_head, Objective.of(section)
    return ToyModel(*fixed, max_length=max_length, dtype=dtype)
