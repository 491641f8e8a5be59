"""Each loss from its formula, for autograd."""

from __future__ import annotations

from torch import Tensor

from pipeline.config.train import Loss


def divergence_of(logits: Tensor, p: Tensor, loss: Loss) -> Tensor:
    """Divergence [K, L] of softmax(logits [K, L, Vd]) from p [L, Vd]."""
    log_q = logits.log_softmax(-1)
    if loss == "ce_tv":
        return -0.1 * (p * log_q).sum(-1) + 0.45 * (log_q.exp() - p).abs().sum(-1)
    return (p * ((p.log() if loss == "kl" else 0) - log_q)).sum(-1)
