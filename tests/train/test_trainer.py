"""One optimiser step: what a label weighs, and in what its gradients are summed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Literal

import pytest
import torch

from pipeline.config import TrainSection
from pipeline.errors import DataError
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.eagle3.ttt import TttModel
from pipeline.heads.trained import count_coarse_rows
from pipeline.heads.unrolled import Objective
from pipeline.learning.batches import TrainBatch
from pipeline.store.states import StatesSample
from pipeline.target.weights import TargetWeights
from pipeline.train.trainer import Trainer
from tests.train.memory_corpus import pack_samples
from tests.train.test_least_squares import fresh, weights

__all__ = ["weights"]  # a fixture
CPU = torch.device("cpu")


def model_of(head: Eagle3Head, weights: TargetWeights, dtype: torch.dtype) -> TttModel:
    embedding, output = weights.embedding(), weights.lm_head()
    return TttModel(head, embedding, output, Objective(2, 0.8), max_length=64, dtype=dtype)


def batch_of(*samples: StatesSample) -> TrainBatch:
    return pack_samples(list(samples))


def test_a_label_weighs_the_same_in_every_micro_batch(
    small_head: Eagle3Head, weights: TargetWeights, states: list[StatesSample]
) -> None:
    """Few labels in one, many in the other: the gradient is that of both packed together."""
    head = fresh(small_head, weights)
    model = model_of(head, weights, torch.float32)
    few, many = batch_of(states[0]), batch_of(*states[1:])
    together = batch_of(*states).to(CPU, torch.float32)
    loss = model(together, len(together.labels)).loss
    parameters = list(head.parameters())
    expected = torch.autograd.grad(loss, parameters)
    section = TrainSection(dtype="float32", accumulate=2, clip_norm=1e9)
    trainer = Trainer(model, section, CPU)
    sums = trainer.step([few, many], 0.0)
    assert sums.loss == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.stack([gradient.norm() for gradient in expected]).norm()
    assert sums.gradient_norm == pytest.approx(float(norm), rel=1e-4)
    assert (sums.tokens, sums.labels) == (together.tokens, len(together.labels))


def test_micro_batches_add_up_in_float32(
    small_head: Eagle3Head, weights: TargetWeights, states: list[StatesSample]
) -> None:
    """Of 256 equal ones the mean is one of them; a sum in bf16 stops growing on the way."""
    batch, norms = batch_of(*states[:3]), []
    for accumulate in (1, 256):
        model = model_of(fresh(small_head, weights), weights, torch.bfloat16)
        section = TrainSection(dtype="bfloat16", accumulate=accumulate, clip_norm=1e9)
        trainer = Trainer(model, section, CPU)
        norms.append(trainer.step([batch] * accumulate, 0.0).gradient_norm)
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_gradient_is_clipped_to_its_norm(
    small_head: Eagle3Head, weights: TargetWeights, states: list[StatesSample], stage: Literal[0, 1]
) -> None:
    """AdamW's first moment after one step is a tenth of the clipped gradient."""
    model = model_of(fresh(small_head, weights), weights, torch.float32)
    section = TrainSection(dtype="float32", zero_stage=stage, clip_norm=1e-2)
    trainer = Trainer(model, section, CPU)
    assert trainer.step([batch_of(*states)], 0.0).gradient_norm > 1e-2
    state = trainer.state()
    assert state is not None
    first = [moment for name, moment in state.moments.items() if name.startswith("exp_avg/")]
    norm = torch.stack([moment.norm() for moment in first]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


def test_the_copy_that_computes_has_the_weights_of_each_step(
    small_head: Eagle3Head, weights: TargetWeights, states: list[StatesSample]
) -> None:
    """In bf16 with recomputed steps the gradients are those without, and training goes on."""
    batch, losses = batch_of(*states[:4]), []
    for checkpointing in (False, True):
        head = fresh(small_head, weights)
        model = TttModel(
            head,
            weights.embedding(),
            weights.lm_head(),
            Objective(3, 0.8),
            max_length=64,
            dtype=torch.bfloat16,
            checkpointing=checkpointing,
        )
        trainer = Trainer(model, TrainSection(dtype="bfloat16"), CPU)
        losses.append([trainer.step([batch], 1e-2).loss for _ in range(4)])
        assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]


def test_gradients_that_are_not_finite_stop_training(
    small_head: Eagle3Head, weights: TargetWeights, states: list[StatesSample]
) -> None:
    head = fresh(small_head, weights)
    model = model_of(head, weights, torch.float32)
    trainer = Trainer(model, TrainSection(dtype="float32"), CPU)
    before = head.fc.weight.detach().clone()
    head.fc.weight.register_hook(lambda gradient: gradient * float("nan"))  # type: ignore[no-untyped-call]
    with pytest.raises(DataError, match="gradient norm is nan"):
        trainer.step([batch_of(*states)], 1e-2)
    assert torch.equal(head.fc.weight, before)


def test_rows_that_int8_holds_badly_are_counted() -> None:
    states = torch.ones(4, 3, 8)
    states[1, 2, :5] = 0  # five of eight
    states[3, 0, :4] = 0  # half is not most
    assert int(count_coarse_rows(states.view(4, 24), 3)) == 1


def test_memory_that_a_step_frees_serves_the_next() -> None:
    """Blocks of 20 MB, written and freed: a page is fetched from the system once, not each time.

    Where glibc begins is fixed, as its own choice depends on what came before.
    """
    program = """
import resource, sys
import torch
from pipeline.config import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [torch.ones(5 << 20) for _ in range(3)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
before = faults()
keep_freed_memory()
faults()
print(before, faults())
"""
    stingy = {f"MALLOC_{name}_THRESHOLD_": str(128 << 10) for name in ("TRIM", "MMAP")}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **stingy},
        capture_output=True,
        check=True,
        text=True,
    )
    given, kept = map(int, ended.stdout.split())
    assert kept < given / 100, (kept, given)
