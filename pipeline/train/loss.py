"""Teacher, soft cross-entropy and accuracy of an unrolled head.

The loss of a batch with S labels, K steps and decay γ:

    loss = 1/S · Σ_k γ^k Σ_labels  H(teacher at j-1 , head at step k, position j-k-2)

The teacher is the target's softmax restricted to the draft vocabulary. A label outside the draft
vocabulary gives no loss: there the restricted softmax would spread the mass of a token that the
head cannot say over tokens that were not chosen. It still counts in every accuracy, as a miss.

Shapes: S labels, L labels inside the draft vocabulary, K steps, H hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.eagle3.head import Eagle3Head
from pipeline.eagle3.layers import RotaryTable
from pipeline.train.batches import Batch
from pipeline.train.ttt import Unroll, continuing_rows, unroll

#: Logits held at one time. The rest of the loss is arithmetic on them, fastest while they stay in cache.
_CHUNK_LOGITS = 4 << 20


class StepResult(NamedTuple):
    """One micro-batch."""

    loss: Tensor  # scalar, float32
    hits: Tensor  # int64 [K], labels whose token the head proposes first
    rows: Tensor  # int64 [K], labels that step k predicts, those outside the draft vocabulary included


class TttModel(nn.Module):
    """The head with what it is trained against; `forward(batch)` is one unroll and its loss.

    The target's embedding [V, H] and its output rows of the draft vocabulary [Vd, H] are constants:
    buffers that no checkpoint holds.
    """

    embedding: Tensor
    teacher: Tensor

    def __init__(self, head: Eagle3Head, embedding: Tensor, target_lm_head: Tensor, *, steps: int, decay: float, max_length: int, dtype: torch.dtype) -> None:
        """target_lm_head [V, H]; max_length is the longest document; dtype is the compute type."""
        super().__init__()
        self.head, self.steps, self.decay = head, steps, decay
        self.register_buffer("embedding", embedding.detach().to(dtype), persistent=False)
        self.register_buffer("teacher", target_lm_head[head.target_ids()].detach().to(dtype), persistent=False)
        self._length = max_length + steps
        self._rotary: Any = None

    def forward(self, batch: Batch) -> StepResult:
        """Unroll the head over `batch` and compare it with the teacher."""
        if self._rotary is None:  # now, because only now are device and type final
            self._rotary = RotaryTable(self.head.shape.rope_config(), self._length, device=self.embedding.device, dtype=self.embedding.dtype)
        sayable = self.head.t2d[batch.token_ids[batch.labels]]  # [S]
        rows = continuing_rows(batch, sayable, self.steps)
        done = unroll(self.head, self.embedding, batch, self._rotary, rows=rows, steps=self.steps)
        return compare(self.head, self.teacher, done, batch, sayable=sayable, decay=self.decay)


def compare(head: Eagle3Head, teacher: Tensor, done: Unroll, batch: Batch, *, sayable: Tensor, decay: float) -> StepResult:
    """Loss and accuracy. teacher [Vd, H]: the target's output rows; sayable [S]: label inside the draft vocabulary."""
    steps = torch.arange(len(done.outputs), device=batch.labels.device)
    predicted = batch.depths >= steps[:, None] + 2  # [K, S]
    exact = torch.promote_types(batch.aux_states.dtype, torch.float32)
    scale = decay ** steps.to(exact) / len(batch.labels)
    weights = (predicted * scale[:, None])[:, sayable]  # [K, L], zero where step k has no such position
    normed = head.norm(gather_predictions(done, batch.labels[sayable]))  # [K, L, H]
    ids = batch.token_ids[batch.labels[sayable]]
    draft_ids = (head.t2d.cumsum(0) - 1)[ids]  # [L]
    loss, hits = SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
        normed, head.lm_head.weight, batch.teacher_states[sayable], teacher, weights, draft_ids
    )
    return StepResult(loss, hits, predicted.sum(1))


def gather_predictions(done: Unroll, labels: Tensor) -> Tensor:
    """Outputs [K, L, H] that predict each label: step k at flat position j-k-2, clamped at 0."""
    gathered = []
    for k, output in enumerate(done.outputs):
        positions = (labels - k - 2).clamp(min=0)
        gathered.append(output[positions if k == 0 else done.place[positions]])
    return torch.stack(gathered)


class SoftCrossEntropy(torch.autograd.Function):
    """Output layer, softmax, cross-entropy and accuracy in one pass over chunks of labels.

    The gradient of the logits is softmax - teacher, so it is known as soon as they are: logits of
    all steps never exist together, and each label's teacher distribution is computed once.
    """

    @staticmethod
    def forward(ctx: Any, normed: Tensor, weight: Tensor, teacher_states: Tensor, teacher: Tensor, scales: Tensor, draft_ids: Tensor) -> tuple[Tensor, Tensor]:
        """normed [K, L, H], weight and teacher [Vd, H], teacher_states [L, H], scales [K, L], draft_ids [L] → loss, hits [K]."""
        steps, labels, _ = normed.shape
        wanted = any(ctx.needs_input_grad)
        exact = torch.promote_types(normed.dtype, torch.float32)
        loss = torch.zeros((), dtype=exact, device=normed.device)
        hits = torch.zeros(steps, dtype=torch.int64, device=normed.device)
        normed_grad = torch.empty_like(normed) if wanted else None
        weight_grad = torch.zeros_like(weight, dtype=exact) if wanted else None
        size = max(1, _CHUNK_LOGITS // (steps * len(weight)))
        for start in range(0, labels, size):
            own = slice(start, min(start + size, labels))
            x = normed[:, own].flatten(0, 1)  # [K·c, H]
            truth = torch.softmax((teacher_states[own] @ teacher.T).to(exact), dim=-1)  # [c, Vd]
            logits = (x @ weight.T).view(steps, -1, len(weight)).to(exact)  # [K, c, Vd]
            hits += ((logits.max(-1).indices == draft_ids[own]) & (scales[:, own] > 0)).sum(1)
            log_probability = torch.log_softmax(logits, dim=-1)
            loss -= (torch.linalg.vecdot(log_probability, truth) * scales[:, own]).sum()
            if normed_grad is not None and weight_grad is not None:
                gradient = log_probability.exp_().sub_(truth).mul_(scales[:, own, None]).to(normed.dtype).flatten(0, 1)
                normed_grad[:, own] = (gradient @ weight).view(steps, -1, normed.shape[-1])
                weight_grad += gradient.T @ x
        if normed_grad is not None and weight_grad is not None:
            ctx.save_for_backward(normed_grad, weight_grad.to(weight.dtype))
        ctx.mark_non_differentiable(hits)
        return loss, hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The stored gradients times that of the loss."""
        normed_grad, weight_grad = ctx.saved_tensors
        scale = grads[0]
        return normed_grad * scale, weight_grad * scale, None, None, None, None
