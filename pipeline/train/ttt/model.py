"""Teacher, loss and accuracy of an unrolled head.

The loss of an optimiser step with labels S, K steps of the unroll and decay γ:

    loss = 1/M · Σ_k γ^k Σ_labels  D(teacher at j-1 , head at step k, position j-k-2)

M is S, or with `normalise: all` the number of tokens N, counted over all micro-batches and
processes: a label weighs the same wherever it is packed. Trainers differ in this: speculators
divides a micro-batch by the sum of its loss mask, SafeAILab's EAGLE and SpecForge take the mean
over all its positions. D is one of `pipeline.train.ttt.divergence`.

The teacher of cross-entropy and KL is the target's softmax restricted to the draft vocabulary. A
label outside it gives no loss then: there the restricted softmax would spread the mass of a token
that the head cannot propose over tokens that were not chosen. The losses of acceptance take the
target's probabilities as they are, which say for every label what would be accepted, and all labels
give loss: with `tv` and γ = 1 the loss is one minus the mean acceptance probability, summed over
the steps. In every accuracy a label outside the draft vocabulary counts as a miss.

With `step_decay: acceptance` the probability that the drafts in front of it are accepted, as the
head is now, takes the place of γ^k. The label at j is drafted by step k behind those of its chain:

    chain's root   j-k-2    drafts in front   j-k … j-1, of steps 0 … k-1    weight  Π_m a_m[j-k+m]

with a_m = Σ min(p, q) of D's p and q, taken as constants. What is no label, or gives no loss, is
not accepted: no chain goes through it. A part of a long sample begins as a reply does, without
drafts in front.

Shapes: N tokens, S labels, L labels that give loss, K steps, H hidden size, V target and Vd draft
vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.config.train import Loss
from pipeline.eagle3.head import Eagle3Head
from pipeline.train.data.batches import TrainBatch
from pipeline.train.ttt.divergence import acceptance
from pipeline.train.ttt.trained import Kind, StepResult, TrainedModel, count_coarse_rows
from pipeline.train.ttt.unroll import (
    Layer,
    Unroll,
    draw_dropout,
    position_skips,
    predicting_rows,
    unroll,
)


class Objective(NamedTuple):
    """What is minimised."""

    steps: int  # K
    decay: float | None  # γ; None: by acceptance
    loss: Loss = "cross_entropy"
    temperature: float = 1.0  # of the teacher's softmax


class UnrolledModel(TrainedModel[Kind]):
    """A head that is unrolled; `forward(batch)` is one unroll and its loss."""

    def __init__(
        self,
        head: Kind,
        embedding: Tensor,
        target_lm_head: Tensor,
        objective: Objective,
        *,
        max_length: int,
        dtype: torch.dtype,
        reach: int = 0,
    ) -> None:
        """As of `TrainedModel`; max_length of the longest document, reach: `position_skips`."""
        super().__init__(
            *(head, embedding, target_lm_head),
            loss=objective.loss,
            temperature=objective.temperature,
            length=max(max_length, reach) + objective.steps,
            dtype=dtype,
        )
        self.objective, self._reach = objective, reach

    def counted(self, batch: TrainBatch) -> int:
        return len(batch.labels)

    def forward(self, batch: TrainBatch, divisor: float | None = None) -> StepResult:
        """Unroll the head over `batch` and compare it with the teacher.

        divisor is M over the number of micro-batches; the labels of this one if it is alone.
        """
        if divisor is None:
            divisor = self.counted(batch)
        head, steps = self.computing(), self.objective.steps
        counted = self.giving_loss(batch)
        rows = predicting_rows(batch, counted, steps)
        offsets = position_skips(batch, self._reach) if self._reach else None
        unrolled = self.unrolled(head, batch, rows, offsets)
        return self._compare(head, unrolled, batch, counted, divisor)

    def unrolled(
        self, head: Kind, batch: TrainBatch, rows: Tensor, offsets: Tensor | None
    ) -> Unroll:
        """All steps of `head`, which computes, for `rows` [A]; offsets as of `position_skips`."""
        raise NotImplementedError

    def _compare(
        self,
        head: Kind,
        unrolled: Unroll,
        batch: TrainBatch,
        counted: Tensor,
        divisor: float,
    ) -> StepResult:
        """Loss and accuracy; counted [S]: labels that give loss."""
        steps, decay = self.objective.steps, self.objective.decay
        k = torch.arange(steps, device=batch.labels.device)
        predicted = batch.depths >= k[:, None] + 2  # [K, S]
        giving = counted.nonzero().flatten()  # [L], numbers of labels
        own = predicted[:, giving]  # [K, L]
        # The type of the scales, and of all sums.
        exact = torch.promote_types(batch.aux_states.dtype, torch.float32)
        labels, teacher_states = batch.labels[giving], batch.teacher_states[giving]  # [L]
        states = head.normed_output(gather_predictions(unrolled, labels))  # [K, L, H]
        if decay is None:
            rows, teacher = self.head.lm_head.weight, self.teacher(teacher_states)
            weights = in_front(acceptance(states, rows, teacher, exact), labels, batch.tokens)
        else:
            weights = (decay ** k.to(exact))[:, None]
        weights = weights * own / divisor
        value, hits = self.compare(states, teacher_states, batch.token_ids[labels], weights, own)
        coarse_rows = count_coarse_rows(batch.trained(batch.aux_states))
        return StepResult(value, hits, predicted.sum(1), coarse_rows)


class TttModel(UnrolledModel[Eagle3Head]):
    """One head, unrolled on its own outputs."""

    def __init__(
        self,
        head: Eagle3Head,
        embedding: Tensor,
        target_lm_head: Tensor,
        objective: Objective,
        *,
        max_length: int,
        dtype: torch.dtype,
        reach: int = 0,
        dropout: float = 0.0,
        seed: int = 0,
        checkpointing: bool = False,
        compiled: bool = False,
    ) -> None:
        """As of `UnrolledModel`; dropout is a share as of `draw_dropout`, by seed; the last two as
        of `Layer`."""
        given = head, embedding, target_lm_head, objective
        super().__init__(*given, max_length=max_length, dtype=dtype, reach=reach)
        computing = self._compute.head if self._compute else head
        self._layer = Layer.of(computing, checkpointing=checkpointing, compiled=compiled)
        self._dropout, self._seed = dropout, seed

    def unrolled(
        self, head: Eagle3Head, batch: TrainBatch, rows: Tensor, offsets: Tensor | None
    ) -> Unroll:
        share, width = self._dropout, 2 * head.shape.hidden_size
        return unroll(
            head,
            self.embedding,
            batch,
            self.rotary(),
            rows=rows,
            steps=self.objective.steps,
            layer=self._layer,
            offsets=offsets,
            dropout=draw_dropout(batch, share, seed=self._seed, width=width) if share else None,
        )


def gather_predictions(unrolled: Unroll, labels: Tensor) -> Tensor:
    """Outputs [K, L, H] that predict each label: step k at flat position j-k-2, clamped at 0."""
    return torch.stack(
        [
            output[unrolled.row_of[(labels - k - 2).clamp(min=0)]]
            for k, output in enumerate(unrolled.outputs)
        ]
    )


def in_front(accepted: Tensor, labels: Tensor, tokens: int) -> Tensor:
    """Probability [K, L] that step k's drafts before each label are accepted: see above.

    accepted [K, L] is each draft's own, labels [L] their flat positions among `tokens`.
    """
    steps = len(accepted)
    at = accepted.new_zeros(steps, steps + tokens)  # by position, behind K that are none
    at[:, labels + steps] = accepted
    before = torch.ones_like(accepted)
    for k in range(1, steps):
        for m in range(k):
            before[k] *= at[m, labels + steps - k + m]
    return before
