"""What a step does to the weights: Muon beside AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pipeline.config import TrainSection
from pipeline.errors import ConfigError
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.store.states import StatesSample
from pipeline.target.weights import TargetWeights
from pipeline.train.trainer import Trainer
from tests.train.runs import Configure
from tests.train.test_least_squares import fresh, weights
from tests.train.test_trainer import CPU, batch_of, model_of

__all__ = ["weights"]  # a fixture
RATE = 0.02


def trainer_of(head: Eagle3Head, target: TargetWeights, **settings: Any) -> Trainer:
    section = TrainSection(dtype="float32", clip_norm=1e9, **settings)
    return Trainer(model_of(head, target, torch.float32), section, CPU, fc_scale=0.25)


def gradients_of(
    head: Eagle3Head, target: TargetWeights, states: Sequence[StatesSample]
) -> dict[str, torch.Tensor]:
    """Of the step that `trainer_of` would take next."""
    batch = batch_of(*states).to(CPU, torch.float32)
    loss = model_of(head, target, torch.float32)(batch, len(batch.labels)).loss
    names, parameters = zip(*head.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def test_muon_steps_the_matrices_and_adamw_the_rest(
    small_head: Eagle3Head, weights: TargetWeights, states: list[StatesSample]
) -> None:
    """Of a first step, by its definition: along U·Vᵀ of the gradient U·S·Vᵀ, 0.2·√(longer side)
    of the rate; of AdamW, the rate by the gradient's sign."""
    head = fresh(small_head, weights)
    before = {name: each.detach().clone() for name, each in head.named_parameters()}
    gradients = gradients_of(head, weights, states)
    trainer_of(head, weights, optimizer="muon").step([batch_of(*states)], RATE)
    for name, after in head.named_parameters():
        moved, gradient = (before[name] - after).detach(), gradients[name]
        rate = RATE * (0.25 if name == "fc.weight" else 1)
        if after.ndim == 1 or name == "lm_head.weight":
            sure = gradient.abs() > 1e-6
            assert torch.allclose(moved[sure], rate * gradient[sure].sign(), rtol=0.02), name
            continue
        u, s, vh = torch.linalg.svd(gradient.double(), full_matrices=False)
        size = rate * 0.2 * max(after.shape) ** 0.5
        # Five steps of Newton and Schulz leave singular values near 1, those that are not tiny.
        within = torch.linalg.diagonal(u.T @ (moved.double() / size) @ vh.T)
        assert ((within > 0.5) & (within < 1.3))[s > 0.02 * s.norm()].all(), name
        outside = moved.double() / size - u @ torch.diag(within) @ vh
        assert outside.norm() < 0.3 * within.norm(), name  # in bfloat16


def test_muon_does_not_go_with_zero_1(tiny_config: Configure) -> None:
    with pytest.raises(ConfigError, match="ZeRO cuts: zero_stage 0"):
        tiny_config(optimizer="muon", zero_stage=1)
