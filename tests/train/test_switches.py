"""The trainer's switches.

Each loss against autograd, a frozen lm_head, EAGLE-3.1 norms, recomputation,
compilation.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.eagle3.head import Eagle3Head
from pipeline.eagle3.init import random_init
from pipeline.train.ttt.divergence import Loss, OutputLoss
from pipeline.train.ttt.model import Objective, StepResult, TttModel
from tests.train.dense import dense_loss
from tests.train.memory_corpus import pack_samples
from tests.train.test_unroll import DECAY, STEPS, constants, documents

LOSSES: tuple[Loss, ...] = ("cross_entropy", "kl", "tv", "lk")
OBJECTIVE = Objective(STEPS, DECAY)
K, L, H, VD = 3, 7, 6, 11


def by_autograd(logits: Tensor, p: Tensor, loss: Loss) -> Tensor:
    """Divergence [K, L] from its formula."""
    q = logits.softmax(-1)
    accepted = torch.minimum(p, q).sum(-1)
    return {
        "cross_entropy": -(p * q.log()).sum(-1),
        "kl": (p * (p / q).log()).sum(-1),
        "tv": (p - q).abs().sum(-1) / 2,
        "lk": -accepted.log(),
    }[loss]


def example() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scales = torch.rand(K, L, generator=generator, dtype=torch.float64)
    scales[1, 2] = 0  # a step that does not predict this label
    return (
        draw(K, L, H).requires_grad_(),
        draw(VD, H).requires_grad_(),
        draw(L, H),
        draw(VD, H),
        scales,
        torch.arange(L),
    )


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("chunk", [1 << 20, 2 * K * VD], ids=["one chunk", "chunks of two labels"])
def test_loss_and_gradients_equal_autograd(
    loss: Loss, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.train.ttt.divergence._CHUNK_LOGITS", chunk)
    monkeypatch.setattr("pipeline.train.ttt.divergence._PART_LOGITS", K * VD)
    states, weight, teacher_states, target_output_rows, scales, draft_ids = inputs = example()
    value, hits = OutputLoss.apply(*inputs, loss)  # type: ignore[no-untyped-call]
    logits = states @ weight.T
    teacher = (teacher_states @ target_output_rows.T).softmax(-1)
    expected = (by_autograd(logits, teacher, loss) * scales).sum()
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(3 * one, (states, weight)) for one in (value, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    assert hits.tolist() == ((logits.argmax(-1) == draft_ids) & (scales > 0)).sum(1).tolist()


def test_losses_of_a_perfect_head() -> None:
    _, _, states, weight, scales, draft_ids = example()
    arguments = states.expand(K, -1, -1), weight, states, weight, scales, draft_ids
    losses = {loss: float(OutputLoss.apply(*arguments, loss)[0]) for loss in LOSSES}  # type: ignore[no-untyped-call]
    p = (states @ weight.T).softmax(-1)
    entropy = float((-(p * p.log()).sum(-1) * scales).sum())  # the teacher's
    assert losses["cross_entropy"] == pytest.approx(entropy)
    assert [losses[loss] for loss in ("kl", "tv", "lk")] == pytest.approx([0, 0, 0], abs=1e-12)


def run(head: Eagle3Head, objective: Objective = OBJECTIVE, **switches: Any) -> StepResult:
    model = TttModel(head, *constants(), objective, max_length=12, dtype=torch.float64, **switches)
    result: StepResult = model(pack_samples(documents()))
    return result


def test_a_frozen_lm_head_gets_no_gradient_and_changes_no_other(small_head: Eagle3Head) -> None:
    trained = torch.autograd.grad(run(small_head).loss, small_head.fc.weight)
    small_head.lm_head.weight.requires_grad_(False)
    result = run(small_head)
    node = result.loss.grad_fn
    assert node is not None and node.saved_tensors[1] is None  # type: ignore[attr-defined]
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


def test_recomputation_changes_no_bit_and_saves_memory(small_head: Eagle3Head) -> None:
    parameters, gradients, saved = list(small_head.parameters()), [], []
    for checkpointing in (False, True):
        held: list[int] = []

        def pack(tensor: Tensor, held: list[int] = held) -> Tensor:
            held.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = run(small_head, checkpointing=checkpointing).loss
        gradients.append([loss, *torch.autograd.grad(loss, parameters)])
        saved.append(sum(held))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert saved[1] < saved[0] / 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on CPU needs g++")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_layer_equals_the_plain_one(small_head: Eagle3Head) -> None:
    parameters = list(small_head.parameters())
    plain, compiled = (run(small_head, compiled=compiled) for compiled in (False, True))
    torch.testing.assert_close(compiled.loss, plain.loss)
    torch.testing.assert_close(
        *(torch.autograd.grad(result.loss, parameters) for result in (compiled, plain))
    )
