"""What a step does to the weights: Muon beside AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import TrainSection
from pipeline.errors import ConfigError
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.store.states import StatesSample
from pipeline.target.weights import TargetWeights
from pipeline.train import trainer
from pipeline.train.trainer import Muon, Trainer, orthogonal
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
        assert outside.norm() < 1e-4 * within.norm(), name


#: Long and tall, square, and one whose rank is less than its sides.
SHAPES = [(12, 40), (40, 12), (16, 16), (24, 20)]


def drawn(shape: tuple[int, int]) -> Tensor:
    rank = 7 if shape == SHAPES[-1] else min(shape)
    return torch.randn(shape[0], rank) @ torch.randn(rank, shape[1])


@pytest.mark.parametrize("fault", [None, "momentum", "decay"])
@pytest.mark.parametrize("shape", SHAPES)
def test_in_bfloat16_muon_is_torchs(
    shape: tuple[int, int], fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "momentum":
        monkeypatch.setattr(trainer, "MOMENTUM", 0.9)
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(start := drawn(shape)), nn.Parameter(start.clone()))
    section = TrainSection(learning_rate=RATE, weight_decay=0.2 if fault == "decay" else 0.1)
    own = Muon([{"params": [ours]}], section, torch.bfloat16)
    referee = torch.optim.Muon([theirs], lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        ours.grad = drawn(shape)
        theirs.grad = ours.grad.clone()
        own.step()
        referee.step()  # type: ignore[no-untyped-call]
    assert torch.equal(ours, theirs) == (fault is None)


@pytest.mark.parametrize("shape", SHAPES)
def test_in_float32_the_singular_values_alone_change(shape: tuple[int, int]) -> None:
    """By float64's singular value decomposition; in bfloat16 they are a hundredth off."""
    torch.manual_seed(1)
    matrix = drawn(shape)
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    exact = u @ torch.diag(s) @ vh
    within = 1e-4 * exact.abs().max()
    assert (orthogonal(matrix, torch.float32) - exact).abs().max() < within
    assert (orthogonal(matrix, torch.bfloat16) - exact).abs().max() > 10 * within


def test_muon_does_not_go_with_zero_1(tiny_config: Configure) -> None:
    with pytest.raises(ConfigError, match="set zero_stage to 0"):
        tiny_config(optimizer="muon", zero_stage=1)
