"""The trainer's switches.

A frozen lm_head, EAGLE-3.1 norms, recomputation, compilation; losses are in test_divergence.py.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.eagle3.ttt import TttModel, draw_dropout
from pipeline.heads.init import random_init
from pipeline.heads.trained import StepResult
from pipeline.heads.unrolled import Objective
from tests.train.dense import dense_loss
from tests.train.memory_corpus import pack_samples
from tests.train.test_unroll import DECAY, STEPS, constants, documents

OBJECTIVE = Objective(STEPS, DECAY)


def run(
    head: Eagle3Head, objective: Objective = OBJECTIVE, *, number: int = 0, **switches: Any
) -> StepResult:
    model = TttModel(head, *constants(), objective, max_length=12, dtype=torch.float64, **switches)
    result: StepResult = model(replace(pack_samples(documents()), number=number))
    return result


def test_a_frozen_lm_head_gets_no_gradient_and_changes_no_other(small_head: Eagle3Head) -> None:
    trained = torch.autograd.grad(run(small_head).loss, small_head.fc.weight)
    small_head.lm_head.weight.requires_grad_(False)
    result = run(small_head)
    node = result.loss.grad_fn
    assert node is not None and node.grads[1] is None  # type: ignore[attr-defined]
    torch.testing.assert_close(torch.autograd.grad(result.loss, small_head.fc.weight), trained)


def variant(head: Eagle3Head, **flags: bool) -> Eagle3Head:
    """The same head with EAGLE-3.1's norms, none of whose weights is one."""
    other = Eagle3Head(head.shape.model_copy(update=flags)).double()
    random_init(other, 3)
    other.load_state_dict(head.state_dict(), strict=False)
    for name, parameter in other.named_parameters():
        if "norm" in name:
            generator = torch.Generator().manual_seed(len(name))
            drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_(drawn + 0.5)
    return other


@pytest.mark.parametrize(
    "flags",
    [{"fc_norm": True}, {"norm_output": True}, {"fc_norm": True, "norm_output": True}],
    ids=str,
)
def test_norms_of_eagle_31(small_head: Eagle3Head, flags: dict[str, bool]) -> None:
    """The flags' maths by hand; the trainer's loss and gradients against the dense unroll."""
    head, fixed, batch = variant(small_head, **flags), constants(), pack_samples(documents())
    names = {name for name, _ in head.named_parameters()} - {
        name for name, _ in small_head.named_parameters()
    }
    assert names == ({f"fc_norm.{i}.weight" for i in range(3)} if "fc_norm" in flags else set())
    states = batch.aux_states[:4]  # [4, 3H]
    if "fc_norm" in flags:
        parts = states.chunk(3, dim=-1)
        weights = [norm for name, norm in head.named_parameters() if name.startswith("fc_norm")]
        normed = [
            part * part.square().mean(-1, keepdim=True).add(1e-5).rsqrt() * weight
            for part, weight in zip(parts, weights, strict=True)
        ]
        torch.testing.assert_close(head.project(states), torch.cat(normed, -1) @ head.fc.weight.T)
    if "norm_output" in flags:
        plain = variant(small_head, **{**flags, "norm_output": False})
        embedding, hidden = fixed.embedding[:4], states[:, :16]
        before, behind = (one.step(embedding, hidden, lambda q, k, v: q) for one in (plain, head))
        torch.testing.assert_close(behind, plain.norm(before))
        torch.testing.assert_close(head.logits(behind), plain.logits(before))
    loss, rows = run(head).loss, fixed.lm_head[head.target_ids()]
    expected = dense_loss(head, fixed.embedding, rows, batch, steps=STEPS, decay=DECAY)
    torch.testing.assert_close(loss, expected)
    without = run(variant(small_head)).loss
    assert abs(float(loss.detach() - without.detach())) > 1e-3, "the flags must matter"
    parameters = list(head.parameters())
    gradients = [torch.autograd.grad(one, parameters) for one in (loss, expected)]
    torch.testing.assert_close(*gradients)


def test_dropout_is_drawn_by_seed_and_batch(small_head: Eagle3Head) -> None:
    """So a training that was stopped, or another number of processes, draws the same."""
    plain, half = run(small_head).loss, run(small_head, dropout=0.5).loss
    assert torch.equal(half, run(small_head, dropout=0.5).loss)
    others = [run(small_head, number=1, dropout=0.5), run(small_head, dropout=0.5, seed=1)]
    assert len({plain.item(), half.item(), *(other.loss.item() for other in others)}) == 4


def test_dropout_scales_what_it_keeps() -> None:
    draw = draw_dropout(pack_samples(documents()), 0.25, seed=0, width=64)
    first, second = draw(500), draw(500)
    assert sorted(set(first.flatten().tolist())) == pytest.approx([0, 4 / 3])
    assert 0.24 < float((first == 0).double().mean()) < 0.26
    assert not torch.equal(first, second), "each step has draws of its own"


def test_dropout_is_of_what_the_layer_reads_alone(
    small_head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the hidden half dropped, all of a step but its residual is a function of the tokens."""
    hidden, seen = small_head.shape.hidden_size, []
    kept = torch.ones(2 * hidden, dtype=torch.float64).index_fill(
        0, torch.arange(hidden, 2 * hidden), 0
    )
    draw = lambda rows: kept.expand(rows, -1)  # noqa: E731
    monkeypatch.setattr("pipeline.heads.eagle3.ttt.draw_dropout", lambda *_, **__: draw)
    project = small_head.midlayer.self_attn.project_qkv

    def spy(x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(x)
        return project(x, rows)

    monkeypatch.setattr(small_head.midlayer.self_attn, "project_qkv", spy)
    run(small_head, dropout=0.5)
    assert len(seen) == STEPS
    assert all(not x[:, hidden:].any() and x[:, :hidden].any() for x in seen)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recomputation_changes_no_bit_and_saves_memory(
    small_head: Eagle3Head, dropout: float
) -> None:
    parameters, gradients, saved = list(small_head.parameters()), [], []
    for checkpointing in (False, True):
        held: list[int] = []

        def pack(tensor: Tensor, held: list[int] = held) -> Tensor:
            held.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = run(small_head, checkpointing=checkpointing, dropout=dropout).loss
        gradients.append([loss, *torch.autograd.grad(loss, parameters)])
        saved.append(sum(held))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert saved[1] < saved[0] / 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on CPU needs g++")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_layer_equals_the_plain_one(small_head: Eagle3Head) -> None:
    parameters = list(small_head.parameters())
    plain, compiled = (run(small_head, compiled=each, dropout=0.3) for each in (False, True))
    torch.testing.assert_close(compiled.loss, plain.loss)
    torch.testing.assert_close(
        *(torch.autograd.grad(result.loss, parameters) for result in (compiled, plain))
    )
