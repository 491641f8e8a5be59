"""Each loss from its formula, for autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.config.train import ACCEPTANCE_LOSSES, Loss


def teacher_of(logits: Tensor, columns: Tensor, loss: Loss) -> Tensor:
    """p [L, Vd] of the target's logits [L, V]; columns [Vd] is the draft vocabulary."""
    if loss in ACCEPTANCE_LOSSES:
        return logits.softmax(-1)[:, columns]
    return logits[:, columns].softmax(-1)


def divergence_of(logits: Tensor, p: Tensor, loss: Loss) -> Tensor:
    """Divergence [K, L] of softmax(logits [K, L, Vd]) from p [L, Vd], whose sum may be below 1."""
    q = logits.softmax(-1)
    accepted, mass = torch.minimum(p, q).sum(-1), p.sum(-1)
    kl = mass * (p / mass[:, None] * (p / mass[:, None] / q).log()).sum(-1)
    share = torch.exp(-3 * accepted.detach())
    return {
        "cross_entropy": -(p * q.log()).sum(-1),
        "kl": kl,
        "tv": 1 - accepted,
        "lk": -accepted.log(),
        "lk_hybrid": share * kl + (1 - share) * (1 - accepted),
    }[loss]
