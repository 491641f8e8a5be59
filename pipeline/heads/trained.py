"""What the trainer steps, whichever algorithm trains the head: its loss on one micro-batch.

eagle3   ttt/model.py      the head unrolled on its own outputs, K steps
         chained/model.py  a head for each step, then the last one unrolled
dflash   dflash/blocks.py  blocks behind anchors, K positions
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from pipeline.config.train import Loss
from pipeline.heads.base import DraftingHead
from pipeline.learning.batches import TrainBatch
from pipeline.learning.losses import OutputLoss, Teacher
from pipeline.target.rotary import RotaryTable

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
            path, _, own = name.rpartition(".")
            setattr(self.head.get_submodule(path), own, buffer)


class TrainedModel(nn.Module, Generic[Kind]):
    """A head with what it is trained against; `forward(batch, divisor)` gives a StepResult.

    What is trained are the parameters of `head`. The embedding [V, H], the target's unless the head
    has its own, and the target's output rows of the draft vocabulary [Vd, H] are constants: buffers
    that no checkpoint holds.
    """

    head: Kind
    embedding: Tensor
    target_output_rows: Tensor

    def __init__(
        self,
        head: Kind,
        embedding: Tensor,
        target_lm_head: Tensor,
        *,
        loss: Loss,
        temperature: float,
        length: int,
        dtype: torch.dtype,
    ) -> None:
        """target_lm_head [V, H]; temperature of the teacher's softmax; length is of the longest
        document with all steps; dtype is the compute type.

        The head itself stays as it is, in float32.
        """
        super().__init__()
        self.head, self._loss, self._length = head, loss, length
        rows = target_lm_head[head.target_ids()].detach() / temperature
        embedding = embedding if head.embedding is None else head.embedding
        self.register_buffer("embedding", embedding.detach().to(dtype), persistent=False)
        self.register_buffer("target_output_rows", rows.to(dtype), persistent=False)
        own = next(head.parameters()).dtype
        self._compute = None if dtype == own else ComputeHead(head, dtype)
        self._rotary: RotaryTable | None = None

    def counted(self, batch: TrainBatch) -> int:
        """Losses of a micro-batch, each of all K steps: what their sum is divided by."""
        raise NotImplementedError

    def computing(self) -> Kind:
        """The head that computes, with the weights as they are now."""
        if self._compute is None:
            return self.head
        self._compute.refresh()
        return self._compute.head

    def rotary(self) -> RotaryTable:
        """Covers the longest document and all steps."""
        if self._rotary is None:  # now, because only now are device and type final
            config, like = self.head.shape.rope_config(), self.embedding
            self._rotary = RotaryTable(config, self._length, device=like.device, dtype=like.dtype)
        return self._rotary

    def giving_loss(self, batch: TrainBatch) -> Tensor:
        """Labels that give loss [S]: those inside the draft vocabulary."""
        return self.head.t2d[batch.token_ids[batch.labels]]

    def compare(
        self,
        states: Tensor,
        teacher_states: Tensor,
        tokens: Tensor,
        weights: Tensor,
        predicted: Tensor,
        output_rows: Tensor | None = None,
        overlaps: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Loss and hits int64 [K] of states [K, L, H] that predict `tokens` [L], of which the
        target said `teacher_states` [L, H].

        weights [K, L], zero where a step has no such state; predicted [K, L] says where it has one.
        The logits are products with `output_rows` [Vd, H], by default lm_head's; overlaps [K, L] is
        overwritten with what the two distributions share.
        """
        draft_ids = (self.head.t2d.cumsum(0) * self.head.t2d - 1)[tokens]  # [L], or -1
        value, hits = OutputLoss.apply(  # type: ignore[no-untyped-call]
            states,
            self.head.lm_head.weight if output_rows is None else output_rows,
            Teacher(teacher_states, self.target_output_rows),
            weights,
            draft_ids.where(predicted, -1),
            self._loss,
            overlaps,
        )
        return value, hits


def count_coarse_rows(aux_states: Tensor, layers: int) -> Tensor:
    """States of one token and layer, most of whose numbers are 0: int64 scalar; aux_states
    [N, L · H] of `layers` L.

    int8 has one scale a row and layer. Where a channel is 250 times the others, those become 0.
    """
    numbers = aux_states.view(len(aux_states), layers, -1)  # [N, L, H]
    return (2 * (numbers == 0).sum(-1) > numbers.shape[-1]).sum()
