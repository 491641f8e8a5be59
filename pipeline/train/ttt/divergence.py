"""How far the head's distribution q is from the teacher's p, with the output layer inside.

    cross_entropy  -Σ p log q             EAGLE-3 (Li et al. 2025, arXiv:2503.01840)
    kl             Σ p log(p/q)           the same gradients; 0 for a perfect head
                                          (DistillSpec, arXiv:2310.08461)
    tv             1 - a,  a = Σ min(p,q) a is the probability that a drafted token is accepted
                                          (Leviathan et al. 2023, arXiv:2211.17192, corollary 3.6)
    lk             -log a                 LK losses (Samarin et al. 2026, arXiv:2602.23881)

With z the logits, q = softmax(z), the gradients that `OutputLoss` uses:

    cross_entropy, kl   q - p
    tv                  q (s - m),  m = [q < p], s = Σ m q        and divided by a for lk

All are over the draft vocabulary, to which p is restricted, and in float32 or wider.

Shapes: L labels, K steps, R = K·c rows of a chunk of c labels, b labels of a part of it, H hidden
size, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

Loss = Literal["cross_entropy", "kl", "tv", "lk"]

#: Logits held at one time, in the compute type. Each chunk reads all of lm_head and adds to all of
#: its gradient; from a thousand rows upward (draft vocabulary 8,192) the products are fast.
_CHUNK_LOGITS = 8 << 20
#: Logits taken through softmax at one time, in float32: as many as stay in a core's cache.
_PART_LOGITS = 1 << 18


class OutputLoss(torch.autograd.Function):
    """Output layer, softmax, divergence and accuracy in one pass over chunks of labels.

    The gradient of the logits is known as soon as they are, and overwrites them: logits of all
    labels never exist together, nor do logits and gradients, and each label's teacher distribution
    is computed once for all steps.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        teacher_states: Tensor,
        target_output_rows: Tensor,
        scales: Tensor,
        draft_ids: Tensor,
        loss: Loss,
    ) -> tuple[Tensor, Tensor]:
        """→ loss, hits [K]. states [K, L, H], teacher_states [L, H], scales [K, L], draft_ids [L];
        weight and target_output_rows [Vd, H] make the head's and the teacher's logits.

        A weight that requires no gradient (a frozen lm_head) costs none.
        """
        steps, labels, _ = states.shape
        states_wanted, weight_wanted, *_ = ctx.needs_input_grad
        total = scales.new_zeros(())
        hits = torch.zeros(steps, dtype=torch.int64, device=states.device)
        states_grad = torch.empty_like(states) if states_wanted else None
        weight_grad = torch.zeros_like(weight, dtype=scales.dtype) if weight_wanted else None
        size = max(1, min(labels, _CHUNK_LOGITS // (steps * len(weight))))
        # One for all chunks: fresh pages are slow.
        memory = states.new_empty(steps * size, len(weight))
        for start in range(0, labels, size):
            chunk = slice(start, min(start + size, labels))
            x = states[:, chunk].flatten(0, 1)  # [R, H]
            logits = torch.mm(x, weight.T, out=memory[: len(x)])  # [R, Vd]
            chunk_loss, chunk_hits = _compare_in_place(
                logits.view(steps, -1, len(weight)),
                teacher_states[chunk] @ target_output_rows.T,
                scales[:, chunk],
                draft_ids[chunk],
                loss,
            )
            total, hits = total + chunk_loss, hits + chunk_hits
            if states_grad is not None:
                states_grad[:, chunk] = (logits @ weight).view(steps, -1, x.shape[1])
            if weight_grad is not None:
                weight_grad += logits.T @ x
        if weight_grad is not None:
            weight_grad = weight_grad.to(weight.dtype)
        ctx.save_for_backward(states_grad, weight_grad)
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The stored gradients times that of the loss."""
        stored = (None if grad is None else grad * grads[0] for grad in ctx.saved_tensors)
        return *stored, None, None, None, None, None


def _compare_in_place(
    logits: Tensor, teacher_logits: Tensor, scales: Tensor, draft_ids: Tensor, loss: Loss
) -> tuple[Tensor, Tensor]:
    """Scaled sum of the divergences, and hits [K]; gradients overwrite the logits [K, c, Vd].

    teacher_logits [c, Vd], scales [K, c] in the type to compute in, draft_ids [c].
    """
    steps, labels, width = logits.shape
    total, hits = scales.new_zeros(()), torch.zeros(steps, dtype=torch.int64, device=logits.device)
    size = max(1, _PART_LOGITS // (steps * width))
    for start in range(0, labels, size):
        part = slice(start, start + size)
        scale = scales[:, part]  # [K, b]
        p = torch.softmax(teacher_logits[part].to(scales.dtype), dim=-1)  # [b, Vd]
        z = logits[:, part].to(scales.dtype)  # [K, b, Vd]
        best = z.max(-1)
        hits += ((best.indices == draft_ids[part]) & (scale > 0)).sum(1)
        divergence, slope = _divergence(z, best.values, p, loss)
        total += (divergence * scale).sum()
        logits[:, part] = slope.mul_(scale[..., None])
    return total, hits


def _divergence(z: Tensor, best: Tensor, p: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Divergence [K, b] of softmax(z [K, b, Vd]) from p [b, Vd], and its gradient by z [K, b, Vd].

    best [K, b] is z's maximum.
    """
    q = torch.softmax(z, dim=-1)
    if loss in ("cross_entropy", "kl"):
        # log Σ exp z, from the largest logit and its probability
        normaliser = best - q.amax(-1).log()
        divergence = normaliser - (z * p).sum(-1)
        entropy = -torch.xlogy(p, p).sum(-1) if loss == "kl" else 0
        return divergence - entropy, q.sub_(p)
    captured = (q < p).to(q.dtype)  # m
    accepted = torch.minimum(q, p).sum(-1)  # a
    slope = q * ((q * captured).sum(-1, keepdim=True) - captured)
    if loss == "tv":
        return 1 - accepted, slope
    return -accepted.log(), slope.div_(accepted.unsqueeze(-1))
