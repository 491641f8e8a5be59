"""The training losses on a GPU, where one kernel computes them, against float64 on the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from pipeline.config.train import ACCEPTANCE_LOSSES, Loss
from pipeline.train.ttt.divergence import OutputLoss, Teacher

STEPS, LABELS, HIDDEN = 3, 32, 64
#: A result's largest difference may be this much of its largest number, in fp32: where q is all but
#: p, rounding decides which is the smaller.
DIFFERENCE = 1e-3


class Inputs(NamedTuple):
    """Random ones, for a draft vocabulary of Vd out of V tokens."""

    states: Tensor  # [K, L, H]
    weight: Tensor  # [Vd, H]
    teacher_states: Tensor  # [L, H]
    lm_head: Tensor  # [V, H], the target's
    scales: Tensor  # [K, L]

    def results(self, columns: Tensor, draft_ids: Tensor, loss: Loss) -> list[Tensor]:
        """The loss and its two gradients; columns [Vd] is the draft vocabulary."""
        full = loss in ACCEPTANCE_LOSSES
        rows = self.lm_head if full else self.lm_head[columns]
        teacher = Teacher(self.teacher_states, rows, columns if full else None)
        learned = self.states.requires_grad_(), self.weight.requires_grad_()
        value, _ = OutputLoss.apply(*learned, teacher, self.scales, draft_ids, loss)  # type: ignore[no-untyped-call]
        return [value.detach(), *torch.autograd.grad(value, learned)]


def losses_agree(proposed: int, vocabulary: int, device: torch.device) -> dict[str, Any]:
    """fp32: each loss and its gradients for such vocabularies."""
    torch.manual_seed(0)
    exact = Inputs(
        torch.randn(STEPS, LABELS, HIDDEN, dtype=torch.float64),
        torch.randn(proposed, HIDDEN, dtype=torch.float64) / 4,
        torch.randn(LABELS, HIDDEN, dtype=torch.float64),
        torch.randn(vocabulary, HIDDEN, dtype=torch.float64) / 4,
        torch.rand(STEPS, LABELS, dtype=torch.float64),
    )
    ours = Inputs(*(tensor.to(device, torch.float32) for tensor in exact))
    columns = torch.randperm(vocabulary)[:proposed].sort().values
    draft_ids = torch.randint(-1, proposed, (LABELS,))
    differences: dict[str, float] = {}
    for loss in get_args(Loss):
        pairs = zip(
            ours.results(columns.to(device), draft_ids.to(device), loss),
            exact.results(columns, draft_ids, loss),
            strict=True,
        )
        differences[loss] = max(
            float((got.cpu() - wanted).abs().max() / wanted.abs().max()) for got, wanted in pairs
        )
        assert differences[loss] < DIFFERENCE, f"{loss} differs by {differences[loss]}"
    return {"largest_differences": differences}
