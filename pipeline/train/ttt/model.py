"""Teacher, loss and accuracy of an unrolled head.

The loss of a batch with S labels, K steps and decay γ:

    loss = 1/M · Σ_k γ^k Σ_labels  D(teacher at j-1 , head at step k, position j-k-2)

M is S, or with `normalise: all` the number of tokens N. Trainers differ in this: speculators
divides by the sum of the loss mask, SafeAILab's EAGLE and SpecForge take the mean over all
positions. D is one of `pipeline.train.ttt.divergence`.

The teacher is the target's softmax restricted to the draft vocabulary. A label outside the draft
vocabulary gives no loss: there the restricted softmax would spread the mass of a token that the
head cannot propose over tokens that were not chosen. It still counts in every accuracy, as a miss.

Shapes: N tokens, S labels, L labels inside the draft vocabulary, K steps, H hidden size, V target
and Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.eagle3.head import Eagle3Head
from pipeline.eagle3.layers import RotaryTable
from pipeline.train.data.batches import TrainBatch
from pipeline.train.ttt.divergence import Loss, OutputLoss
from pipeline.train.ttt.unroll import Layer, Unroll, continuing_rows, unroll


class Objective(NamedTuple):
    """What is minimised."""

    steps: int  # K
    decay: float  # γ
    loss: Loss = "cross_entropy"
    normalise: Literal["supervised", "all"] = "supervised"


class StepResult(NamedTuple):
    """One micro-batch."""

    loss: Tensor  # scalar, float32
    hits: Tensor  # int64 [K], labels whose token the head proposes first
    labels: Tensor  # int64 [K], labels that step k predicts, also outside the draft vocabulary


class TttModel(nn.Module):
    """The head with what it is trained against; `forward(batch)` is one unroll and its loss.

    The target's embedding [V, H] and its output rows of the draft vocabulary [Vd, H] are constants:
    buffers that no checkpoint holds.
    """

    embedding: Tensor
    target_output_rows: Tensor

    def __init__(
        self,
        head: Eagle3Head,
        embedding: Tensor,
        target_lm_head: Tensor,
        objective: Objective,
        *,
        max_length: int,
        dtype: torch.dtype,
        checkpointing: bool = False,
        compiled: bool = False,
    ) -> None:
        """target_lm_head [V, H]; max_length is the longest document; dtype is the compute type."""
        super().__init__()
        self.head, self.objective = head, objective
        rows = target_lm_head[head.target_ids()]
        self.register_buffer("embedding", embedding.detach().to(dtype), persistent=False)
        self.register_buffer("target_output_rows", rows.detach().to(dtype), persistent=False)
        self._layer = Layer.of(head, checkpointing=checkpointing, compiled=compiled)
        self._length = max_length + objective.steps
        self._rotary: Any = None

    def forward(self, batch: TrainBatch) -> StepResult:
        """Unroll the head over `batch` and compare it with the teacher."""
        if self._rotary is None:  # now, because only now are device and type final
            self._rotary = RotaryTable(
                self.head.shape.rope_config(),
                self._length,
                device=self.embedding.device,
                dtype=self.embedding.dtype,
            )
        steps = self.objective.steps
        in_vocabulary = self.head.t2d[batch.token_ids[batch.labels]]  # [S]
        rows = continuing_rows(batch, in_vocabulary, steps)
        unrolled = unroll(
            self.head,
            self.embedding,
            batch,
            self._rotary,
            rows=rows,
            steps=steps,
            layer=self._layer,
        )
        return self._compare(unrolled, batch, in_vocabulary)

    def _compare(self, unrolled: Unroll, batch: TrainBatch, in_vocabulary: Tensor) -> StepResult:
        """Loss and accuracy; in_vocabulary [S]: label inside the draft vocabulary."""
        head, (steps, decay, loss, normalise) = self.head, self.objective
        k = torch.arange(steps, device=batch.labels.device)
        predicted = batch.depths >= k[:, None] + 2  # [K, S]
        # The type of the scales, and of all sums.
        exact = torch.promote_types(batch.aux_states.dtype, torch.float32)
        divisor = len(batch.labels) if normalise == "supervised" else batch.tokens
        scale = decay ** k.to(exact) / divisor  # [K]
        # [K, L], zero where step k has no such position
        weights = (predicted * scale[:, None])[:, in_vocabulary]
        labels = batch.labels[in_vocabulary]  # [L]
        states = head.normed_output(gather_predictions(unrolled, labels))  # [K, L, H]
        draft_ids = (head.t2d.cumsum(0) - 1)[batch.token_ids[labels]]  # [L]
        value, hits = OutputLoss.apply(  # type: ignore[no-untyped-call]
            states,
            head.lm_head.weight,
            batch.teacher_states[in_vocabulary],
            self.target_output_rows,
            weights,
            draft_ids,
            loss,
        )
        return StepResult(value, hits, predicted.sum(1))


def gather_predictions(unrolled: Unroll, labels: Tensor) -> Tensor:
    """Outputs [K, L, H] that predict each label: step k at flat position j-k-2, clamped at 0."""
    gathered = []
    for k, output in enumerate(unrolled.outputs):
        positions = (labels - k - 2).clamp(min=0)
        gathered.append(output[positions if k == 0 else unrolled.row_of[positions]])
    return torch.stack(gathered)
