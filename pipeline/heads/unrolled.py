"""Teacher, loss and accuracy of an unrolled head.

The loss of an optimiser step with labels S, K steps of the unroll and decay γ:

    loss = 1/M · Σ_k γ^k Σ_labels  D(teacher at j-1 , head at step k, position j-k-2)

M is the number of labels S, counted over all micro-batches and processes: a label weighs the same
wherever it is packed. (speculators divides a micro-batch by the sum of its loss mask, SafeAILab's
EAGLE and SpecForge take the mean over all its positions.) D is one of `pipeline.learning.losses`.

The teacher of cross-entropy and KL is the target's softmax restricted to the draft vocabulary. A
label outside it gives no loss then: there the restricted softmax would spread the mass of a token
that the head cannot propose over tokens that were not chosen. In every accuracy it counts as a
miss.

Where the states have alternatives, a label gives one loss more: step 0 reads another token in place
of the one before the label, and its teacher is what the target says after that one.

Shapes: N tokens, S labels, L labels that give loss, K steps, H hidden size, V target and Vd draft
vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config import TrainSection
from pipeline.config.train import Loss
from pipeline.heads.trained import Kind, StepResult, TrainedModel, count_coarse_rows
from pipeline.learning.batches import ROW_MULTIPLE, TrainBatch, fill_up


class Objective(NamedTuple):
    """What is minimised."""

    steps: int  # K
    decay: float  # γ
    loss: Loss = "cross_entropy"
    temperature: float = 1.0  # of the teacher's softmax

    @classmethod
    def of(cls, section: TrainSection) -> Objective:
        """As a configuration says."""
        return cls(section.ttt_steps, section.step_decay, section.loss, section.teacher_temperature)


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
    ) -> None:
        """As of `TrainedModel`; max_length is the longest document."""
        super().__init__(
            *(head, embedding, target_lm_head),
            loss=objective.loss,
            temperature=objective.temperature,
            length=max(max_length, ROW_MULTIPLE) + objective.steps,
            dtype=dtype,
        )
        self.objective = objective

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
        rows = fill_rows(predicting_rows(batch, counted, steps), batch.tokens)
        unrolled = self.unrolled(head, batch, rows)
        return self._compare(head, unrolled, batch, counted, divisor)

    def unrolled(self, head: Kind, batch: TrainBatch, rows: Tensor) -> Unroll:
        """All steps of `head`, which computes, for `rows` [A]."""
        raise NotImplementedError

    def _compare(
        self, head: Kind, unrolled: Unroll, batch: TrainBatch, counted: Tensor, divisor: float
    ) -> StepResult:
        """Loss and accuracy; counted [S]: labels that give loss."""
        steps, decay = self.objective.steps, self.objective.decay
        k = torch.arange(steps, device=batch.labels.device)
        predicted = batch.depths >= k[:, None] + 2  # [K, S]
        giving, real = fill_up(counted.nonzero().flatten())  # [L], numbers of labels
        own = predicted[:, giving] & real  # [K, L]
        # The type of the scales, and of all sums.
        exact = torch.promote_types(batch.aux_states.dtype, torch.float32)
        labels, teacher_states = batch.labels[giving], batch.teacher_states[giving]  # [L]
        states = head.normed_output(gather_predictions(unrolled, labels))  # [K, L, H]
        weights = (decay ** k.to(exact))[:, None] * own / divisor
        value, hits = self.compare(states, teacher_states, batch.token_ids[labels], weights, own)
        if beside := unrolled.beside:
            value = value + self._compare_beside(head, beside, divisor)
        coarse_rows = count_coarse_rows(batch.trained(batch.aux_states), self.head.shape.aux_layers)
        return StepResult(value, hits, predicted.sum(1), coarse_rows)

    def _compare_beside(self, head: Kind, beside: Beside, divisor: float) -> Tensor:
        """The loss of alternatives."""
        states = head.normed_output(beside.output)[None]  # [1, B, H]
        exact = torch.promote_types(states.dtype, torch.float32)
        real = beside.real[None]  # [1, B]
        weights = real.to(exact) * (beside.weight / divisor)
        return self.compare(states, beside.teacher_states, beside.token_ids, weights, real)[0]


class Beside(NamedTuple):
    """Step 0 of B rows that read another token than their document's next."""

    output: Tensor  # [B, H]
    teacher_states: Tensor  # [B, H]
    token_ids: Tensor  # int64 [B], what was read
    real: Tensor  # bool [B], which give loss
    weight: float  # of it over that of a label's step 0


class Unroll(NamedTuple):
    """Outputs of every step, as `Eagle3Head.step` returns them."""

    outputs: tuple[Tensor, ...]  # of each step [A, H]
    rows: Tensor  # int64 [A], flat positions that they were computed for
    row_of: Tensor  # int64 [N], index of a flat position in `rows`; 0 when it is not in there
    beside: Beside | None = None


def rows_by_position(batch: TrainBatch, rows: Tensor) -> Tensor:
    """Index of each flat position [N] in `rows` [A]; 0 when it is not in there."""
    row_of = torch.zeros_like(batch.token_ids)
    row_of[rows] = torch.arange(len(rows), device=rows.device)
    return row_of


def predicting_rows(batch: TrainBatch, counted: Tensor, steps: int) -> Tensor:
    """Flat positions that predict at least one counted label, ascending [A].

    counted [S] bool marks the labels that give a loss.
    """
    least_depth = torch.arange(2, steps + 2, device=batch.labels.device)[:, None]  # [K, 1]
    own = counted & (batch.depths >= least_depth)  # [K, S]
    # One more, for what is no position.
    needed = torch.zeros(batch.tokens + 1, dtype=torch.bool, device=batch.labels.device)
    needed.index_fill_(0, (batch.labels - least_depth).where(own, batch.tokens).flatten(), True)
    return needed[:-1].nonzero().flatten()


def fill_rows(rows: Tensor, tokens: int) -> Tensor:
    """Flat positions `rows`, and the first others of N `tokens` up to a multiple of ROW_MULTIPLE;
    ascending."""
    others = torch.ones(tokens, dtype=torch.bool, device=rows.device).index_fill(0, rows, False)
    rows_first = others.int().argsort(stable=True)
    return rows_first[: len(rows) + -len(rows) % ROW_MULTIPLE].sort().values


def embed_tokens(embedding: Tensor, batch: TrainBatch, positions: Tensor) -> Tensor:
    """Embeddings of the tokens at flat `positions`.

    Beyond its document a position reads a neighbour's token; such positions carry no label, and
    no other position attends to their keys.
    """
    return F.embedding(batch.token_ids[positions.clamp(max=batch.tokens - 1)], embedding)


def gather_predictions(unrolled: Unroll, labels: Tensor) -> Tensor:
    """Outputs [K, L, H] that predict each label: step k at flat position j-k-2, clamped at 0."""
    return torch.stack(
        [
            output[unrolled.row_of[(labels - k - 2).clamp(min=0)]]
            for k, output in enumerate(unrolled.outputs)
        ]
    )
