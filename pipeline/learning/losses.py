"""How far the head's distribution q is from the teacher's p, with the output layer inside.

    cross_entropy  -Σ p log q             EAGLE-3 (Li et al. 2025, arXiv:2503.01840)
    kl             Σ p log(p/q)           the same gradients; 0 for a perfect head
                                          (DistillSpec, arXiv:2310.08461)
    ce_tv          -0.1 Σ p log q         DSpark (arXiv:2607.05147); the second sum over 2 is the
                   + 0.9 Σ |q - p| / 2    total variation, the share of drafts that is rejected

All sums are over the draft vocabulary, to which the target's softmax is restricted:

    target, in %     50 10  4  3 20  3  5  5      4, 3 and 3: not in the draft vocabulary
    p, in %          56 11  ·  · 22  ·  6  6      the softmax of the others alone: Σ p = 1

With z the logits and q = softmax(z), the gradient by z is q - p in float32 or wider; that of the
total variation is q (s - Σ q s) / 2, with s the signs of q - p. Overlaps are Σ min(p, q), one less
the total variation.

Shapes: L labels, K steps, R = K·c rows of a chunk of c labels, b labels of a part of it, H hidden
size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.config.train import TV_SHARE, Loss
from pipeline.learning.batches import ROW_MULTIPLE

#: Logits held at one time, in the compute type. Each chunk reads all of lm_head and adds to all of
#: its gradient; from a thousand rows upward (draft vocabulary 8,192) the products are fast.
_CHUNK_LOGITS = 8 << 20


#: The same on CUDA, where the products outrun memory: 4,096 rows of a draft vocabulary of 32,768.
_CUDA_CHUNK_LOGITS = 128 << 20


#: Logits taken through softmax at one time, in float32: as many as stay in a core's cache.
_PART_LOGITS = 1 << 18


#: Rows of lm_head whose gradient is added at one time: torch first widens what it adds, and all of
#: it would be fresh pages, which are slow.
_ADDED_ROWS = 1024


class Teacher(NamedTuple):
    """The target's distributions over the draft vocabulary: the softmax of states @ rows.T."""

    states: Tensor  # [L, H]
    rows: Tensor  # [Vd, H], of the target's output layer


#: `_compare_in_place` and its counterpart in losses_kernel.py
Comparison = Callable[[Tensor, Tensor, Tensor, Tensor, Loss, Tensor | None], tuple[Tensor, Tensor]]


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
        teacher: Teacher,
        scales: Tensor,
        draft_ids: Tensor,
        loss: Loss,
        overlaps: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """→ loss, hits [K]. states [K, L, H], weight [Vd, H], scales [K, L], draft_ids [K, L], -1
        where a label is outside the draft vocabulary, or not predicted by the step. `overlaps`
        [K, L], in the type of the scales, is overwritten with the overlap of each state.

        The products are in the type of the states. The weight's gradient is summed in that of the
        scales, and is rounded to the weight's when it is complete. A weight that requires no
        gradient (a frozen lm_head) costs none.
        """
        steps, labels, _ = states.shape
        needs_states, needs_weight, *_ = ctx.needs_input_grad
        total = scales.new_zeros(())
        hits = torch.zeros(steps, dtype=torch.int64, device=states.device)
        states_grad = torch.empty_like(states) if needs_states else None
        weight_grad = torch.zeros_like(weight, dtype=scales.dtype) if needs_weight else None
        ctx.weight_dtype, weight = weight.dtype, weight.to(states.dtype)
        compare, most = _comparison(scales), _chunk_logits(states)
        size = max(1, min(labels, most // max(steps * len(weight), len(teacher.rows))))
        size -= size % ROW_MULTIPLE if size > ROW_MULTIPLE else 0
        # One for all chunks: fresh pages are slow.
        memory = states.new_empty(steps * size, len(weight))
        product = torch.empty_like(weight) if needs_weight else None
        for start in range(0, labels, size):
            chunk = slice(start, min(start + size, labels))
            x = states[:, chunk].flatten(0, 1)  # [R, H]
            logits = torch.mm(x, weight.T, out=memory[: len(x)])  # [R, Vd]
            chunk_loss, chunk_hits = compare(
                logits.view(steps, -1, len(weight)),
                teacher.states[chunk] @ teacher.rows.T,
                scales[:, chunk],
                draft_ids[:, chunk],
                loss,
                None if overlaps is None else overlaps[:, chunk],
            )
            total, hits = total + chunk_loss, hits + chunk_hits
            if states_grad is not None:
                states_grad[:, chunk] = (logits @ weight).view(steps, -1, x.shape[1])
            if weight_grad is not None and product is not None:
                _add_rows(weight_grad, torch.mm(logits.T, x, out=product))
        ctx.grads = states_grad, weight_grad
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The stored gradients times that of the loss, in place: there is one backward pass."""
        stored, ctx.grads = ctx.grads, None
        states_grad, weight_grad = (
            grad if grad is None else grad.mul_(grads[0]) for grad in stored
        )
        if weight_grad is not None:
            weight_grad = weight_grad.to(ctx.weight_dtype)
        return states_grad, weight_grad, None, None, None, None, None


def _add_rows(total: Tensor, product: Tensor) -> None:
    """total += product [Vd, H], of which total's type is the wider."""
    size = len(total) if total.is_cuda else _ADDED_ROWS
    for start in range(0, len(total), size):
        total[start : start + size] += product[start : start + size]


def _chunk_logits(states: Tensor) -> int:
    """Logits of a chunk where the states are."""
    return _CUDA_CHUNK_LOGITS if states.is_cuda else _CHUNK_LOGITS


def _comparison(scales: Tensor) -> Comparison:
    """How a chunk is compared where the scales are.

    On CUDA by one kernel, which computes in float32; elsewhere, and in float64, by torch.
    """
    if scales.is_cuda and scales.dtype == torch.float32:
        from pipeline.learning.losses_kernel import compare_in_place

        return compare_in_place
    return _compare_in_place


def _compare_in_place(
    logits: Tensor,
    teacher_logits: Tensor,
    scales: Tensor,
    draft_ids: Tensor,
    loss: Loss,
    overlaps: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scaled sum of the divergences, and hits [K]; gradients overwrite the logits [K, c, Vd].

    teacher_logits [c, Vd], scales [K, c] in the type to compute in, draft_ids [K, c], overlaps
    [K, c] to overwrite.
    """
    steps, labels, width = logits.shape
    total, hits = scales.new_zeros(()), torch.zeros(steps, dtype=torch.int64, device=logits.device)
    size = max(1, _PART_LOGITS // (steps * width))
    for start in range(0, labels, size):
        part = slice(start, start + size)
        scale = scales[:, part]  # [K, b]
        p = torch.softmax(teacher_logits[part].to(scales.dtype), dim=-1)  # [b, Vd]
        z = logits[:, part].to(scales.dtype)  # [K, b, Vd]
        best = z.amax(-1)  # [K, b]
        hits += _hits(z, best, draft_ids[:, part])
        overlap = None if overlaps is None else overlaps[:, part]
        divergence, slope = _divergence(z, best, p, loss, overlap)
        total += (divergence * scale).sum()
        logits[:, part] = slope.mul_(scale[..., None])
    return total, hits


def _hits(z: Tensor, best: Tensor, draft_ids: Tensor) -> Tensor:
    """Of each step [K], labels whose token is the first of those with the largest logit.

    z [K, b, Vd], best [K, b] its maximum, draft_ids [K, b] or -1. To find the first is slow, so it
    is looked for only where the token is among them.
    """
    ids = draft_ids.clamp(min=0)
    among = (z.gather(-1, ids[..., None]).squeeze(-1) == best) & (draft_ids >= 0)
    hit = torch.zeros_like(among)
    hit[among] = z[among].argmax(-1) == ids[among]
    return hit.sum(1)


def _divergence(
    z: Tensor, best: Tensor, p: Tensor, loss: Loss, overlap: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Divergence [K, b] of softmax(z [K, b, Vd]) from p [b, Vd], and its gradient by z [K, b, Vd].

    best [K, b] is z's maximum, overlap [K, b] is overwritten.
    """
    q = torch.softmax(z, dim=-1)
    if overlap is not None:
        overlap.copy_(torch.minimum(p, q).sum(-1))
    # log Σ exp z, from the largest logit and its probability
    normaliser = best - q.amax(-1).log()
    divergence = normaliser - (z * p).sum(-1)
    if loss == "kl":
        divergence = divergence + torch.xlogy(p, p).sum(-1)
    if loss != "ce_tv":
        return divergence, q.sub_(p)
    slope = q - p
    divergence = divergence.lerp(slope.abs().sum(-1) / 2, TV_SHARE)
    signs = slope.sign()
    leaning = (q * signs).sum(-1, keepdim=True)
    return divergence, slope.lerp_(signs.sub_(leaning).mul_(q).div_(2), TV_SHARE)
