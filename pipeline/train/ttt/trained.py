"""What the trainer steps, whichever algorithm trains the head: its loss on one micro-batch.

eagle3   ttt/model.py      the head unrolled on its own outputs, K steps
         chained/model.py  a head for each step, then the last one unrolled
dflash   dflash/model.py   blocks behind anchors, K = block size - 1 positions
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from pipeline.eagle3.head import DraftingHead
from pipeline.train.data.batches import TrainBatch

Kind = TypeVar("Kind", bound=DraftingHead)


class StepResult(NamedTuple):
    """One micro-batch."""

    loss: Tensor  # scalar, float32; its sum over labels by the divisor that it was given
    hits: Tensor  # int64 [K], labels whose token the head proposes first
    labels: Tensor  # int64 [K], labels that step k predicts, also outside the draft vocabulary
    coarse_rows: Tensor  # int64 scalar, see `count_coarse_rows`


class ComputeHead(Generic[Kind]):
    """A head of another type that computes with the first one's weights.

        fp32 parameter ──cast at each forward──► plain tensor of the copy

    The cast is part of the graph, so gradients reach the parameters in float32, and the backward
    pass of a recomputed step finds the very tensors of its forward pass.
    """

    def __init__(self, head: Kind, dtype: torch.dtype) -> None:
        with torch.device("meta"):
            self.head = type(head)(head.shape)
        self._of, self._dtype = head, dtype
        for name, _ in head.named_parameters():
            path, _, own = name.rpartition(".")
            del self.head.get_submodule(path)._parameters[own]

    def refresh(self) -> None:
        """Take the weights as they are now."""
        for name, parameter in self._of.named_parameters():
            if name == "lm_head.weight":  # OutputLoss takes the head's own, for a gradient in fp32
                continue
            path, _, own = name.rpartition(".")
            setattr(self.head.get_submodule(path), own, parameter.to(self._dtype))
        for name, buffer in self._of.named_buffers():
            setattr(self.head, name, buffer)


class TrainedModel(nn.Module):
    """A head with what it is trained against; `forward(batch, divisor)` gives a StepResult.

    What is trained are the parameters of `head`; all else is constant, and in no checkpoint.
    """

    head: DraftingHead

    def counted(self, batch: TrainBatch) -> int:
        """Losses of a micro-batch, each of all K steps: what their sum is divided by where the
        loss is normalised by supervised tokens."""
        raise NotImplementedError


def count_coarse_rows(aux_states: Tensor) -> Tensor:
    """States of one token and layer, most of whose numbers are 0: int64 scalar. aux_states [N, 3H].

    int8 has one scale a row and layer. Where a channel is 250 times the others, those become 0.
    """
    numbers = aux_states.view(len(aux_states), 3, -1)  # [N, 3, H]
    return (2 * (numbers == 0).sum(-1) > numbers.shape[-1]).sum()
