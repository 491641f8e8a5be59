"""What a toy head is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.heads.base import DraftingHead, DraftShape, RmsNorm


class ToyShape(DraftShape):
    """Nothing beside what every head has."""


class ToyHead(DraftingHead):
    """hidden [.., H] + token(embedding [.., H]) is the next hidden state, and what is proposed."""

    shape: ToyShape

    def __init__(self, shape: ToyShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.token = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self._add_vocabulary(shape)

    def step(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        return hidden + torch.as_tensor(self.token(embedding))

    def normed_output(self, output: Tensor) -> Tensor:
        return torch.as_tensor(self.norm(output))


SHAPE, HEAD = ToyShape, ToyHead
