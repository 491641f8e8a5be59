"""Teacher, loss and accuracy of an unrolled head.

The loss of an optimiser step with labels S, K steps of the unroll and decay γ:

    loss = 1/M · Σ_k γ^k Σ_labels  D(teacher at j-1 , head at step k, position j-k-2)

M is S, or with `normalise: all` the number of tokens N, counted over all micro-batches and
processes: a label weighs the same wherever it is packed. Trainers differ in this: speculators
divides a micro-batch by the sum of its loss mask, SafeAILab's EAGLE and SpecForge take the mean
over all its positions. D is one of `pipeline.learning.losses`.

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

import random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config import TrainSection
from pipeline.config.train import Loss
from pipeline.heads.trained import Kind, StepResult, TrainedModel, count_coarse_rows
from pipeline.learning.batches import TrainBatch
from pipeline.learning.losses import acceptance


class Objective(NamedTuple):
    """What is minimised."""

    steps: int  # K
    decay: float | None  # γ; None: by acceptance
    loss: Loss = "cross_entropy"
    temperature: float = 1.0  # of the teacher's softmax

    @classmethod
    def of(cls, section: TrainSection) -> Objective:
        """As a configuration says."""
        decay = None if section.step_decay == "acceptance" else section.step_decay
        return cls(section.ttt_steps, decay, section.loss, section.teacher_temperature)


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


class Unroll(NamedTuple):
    """Outputs of every step, as `Eagle3Head.step` returns them."""

    outputs: tuple[Tensor, ...]  # of each step [A, H]
    rows: Tensor  # int64 [A], flat positions that they were computed for
    row_of: Tensor  # int64 [N], index of a flat position in `rows`; 0 when it is not in there


def rows_by_position(batch: TrainBatch, rows: Tensor) -> Tensor:
    """Index of each flat position [N] in `rows` [A]; 0 when it is not in there."""
    row_of = torch.zeros_like(batch.token_ids)
    row_of[rows] = torch.arange(len(rows), device=rows.device)
    return row_of


def predicting_rows(batch: TrainBatch, counted: Tensor, steps: int) -> Tensor:
    """Flat positions that predict at least one counted label, ascending [A].

    counted [S] bool marks the labels that give a loss.
    """
    behind = torch.arange(2, steps + 2, device=batch.labels.device)[:, None]  # [K, 1]
    own = counted & (batch.depths >= behind)  # [K, S]
    # One more, for what is no position.
    needed = torch.zeros(batch.tokens + 1, dtype=torch.bool, device=batch.labels.device)
    needed.index_fill_(0, (batch.labels - behind).where(own, batch.tokens).flatten(), True)
    return needed[:-1].nonzero().flatten()


def position_skips(batch: TrainBatch, reach: int) -> Tensor:
    """What is added to each position [N], so that documents reach up to position `reach`.

        position in the document    0  1  2  3  4  5          cut 2, jump 40, reach at least 46
        rotary embedding sees       0  1 42 43 44 45

    Its scores depend on differences alone, so a whole document that is moved stays what it was; one
    jump inside shows distances of a longer one (PoSE, Zhu et al. 2023, arXiv:2309.10400, §3, with
    two chunks). Cut and jump are drawn by sample and length, and are the same in every epoch.
    """
    offsets = []
    for sample_id, length in zip(batch.sample_ids, batch.lengths, strict=True):
        draw = random.Random(f"{sample_id}/{length}")
        cut, jump = draw.randint(1, length), draw.randint(0, max(0, reach - length))
        offsets.append(torch.arange(length).ge(cut) * jump)
    return torch.cat(offsets).to(batch.token_ids.device)


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
