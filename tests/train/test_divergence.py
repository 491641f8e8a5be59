"""Losses: each against autograd, what is a hit, types of gradients, memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config.train import Loss
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.eagle3.ttt import TttModel
from pipeline.heads.unrolled import Objective
from pipeline.learning.losses import OutputLoss, Teacher
from tests.train.dense import dense_unroll
from tests.train.formulas import divergence_of
from tests.train.memory_corpus import pack_samples
from tests.train.test_unroll import LENGTHS, constants, documents

LOSSES: tuple[Loss, ...] = get_args(Loss)
K, L, H, V, VD = 3, 7, 6, 50, 11


class Example(NamedTuple):
    """Random inputs; two labels are outside the draft vocabulary, one step lacks a label, another
    gives one no weight."""

    states: Tensor  # [K, L, H]
    weight: Tensor  # [Vd, H]
    teacher_states: Tensor  # [L, H]
    lm_head: Tensor  # [V, H], the target's
    columns: Tensor  # [Vd]
    scales: Tensor  # [K, L]
    draft_ids: Tensor  # [K, L]

    def apply(self, loss: Loss, overlaps: Tensor | None = None) -> tuple[Tensor, Tensor]:
        teacher = Teacher(self.teacher_states, self.lm_head[self.columns])
        inputs = self.states, self.weight, teacher, self.scales, self.draft_ids, loss, overlaps
        return OutputLoss.apply(*inputs)  # type: ignore[no-untyped-call, no-any-return]


def example(dtype: torch.dtype = torch.float64, hidden: int = H) -> Example:
    generator = torch.Generator().manual_seed(8)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    exact = torch.promote_types(dtype, torch.float32)
    scales = torch.rand(K, L, generator=generator, dtype=torch.float64).to(exact)
    scales[1, 2] = scales[2, 3] = 0
    draft_ids = torch.arange(L).masked_fill(torch.arange(L) % 3 == 1, -1).repeat(K, 1)
    draft_ids[1, 2] = -1
    columns = torch.randperm(V, generator=generator)[:VD].sort().values
    states, weight = draw(K, L, hidden).requires_grad_(), draw(VD, hidden).requires_grad_()
    return Example(states, weight, draw(L, hidden), draw(V, hidden), columns, scales, draft_ids)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("chunk", [1 << 20, 2 * K * VD], ids=["one chunk", "chunks of two labels"])
def test_loss_and_gradients_equal_autograd(
    loss: Loss, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.learning.losses._CHUNK_LOGITS", chunk)
    monkeypatch.setattr("pipeline.learning.losses._PART_LOGITS", K * VD)
    given, overlaps = example(), torch.full((K, L), torch.nan, dtype=torch.float64)
    value, hits = given.apply(loss, overlaps)
    logits = given.states @ given.weight.T
    p = (given.teacher_states @ given.lm_head[given.columns].T).softmax(-1)
    expected = (divergence_of(logits, p, loss) * given.scales).sum()
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    shared = torch.minimum(logits.detach().softmax(-1), p.detach()).sum(-1)
    torch.testing.assert_close(overlaps, shared, rtol=1e-12, atol=1e-12)
    learned = given.states, given.weight
    gradients = [torch.autograd.grad(3 * one, learned) for one in (value, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    assert hits.tolist() == (logits.argmax(-1) == given.draft_ids).sum(1).tolist()


def test_without_labels_nothing_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "empty_like", lambda *args, **kw: torch.full_like(args[0], torch.nan, **kw)
    )
    given = example()
    none = given._replace(
        states=given.states[:, :0],
        teacher_states=given.teacher_states[:0],
        scales=given.scales[:, :0],
        draft_ids=given.draft_ids[:, :0],
    )
    value, hits = none.apply("cross_entropy")
    value.backward()  # type: ignore[no-untyped-call]
    assert float(value.detach()) == 0 and hits.tolist() == [0] * K
    assert given.weight.grad is not None and given.weight.grad.tolist() == [[0.0] * H] * VD


def test_losses_of_a_perfect_head() -> None:
    given = example()
    whole = given._replace(lm_head=given.weight, columns=torch.arange(VD))
    perfect = whole._replace(states=given.teacher_states.expand(K, -1, -1))
    losses = {loss: float(perfect.apply(loss)[0].detach()) for loss in LOSSES}
    p = (given.teacher_states @ given.weight.detach().T).softmax(-1)
    entropy = float((-(p * p.log()).sum(-1) * given.scales).sum())  # the teacher's
    assert losses.pop("cross_entropy") == pytest.approx(entropy)
    assert losses.pop("ce_tv") == pytest.approx(0.1 * entropy)
    assert losses == pytest.approx(dict.fromkeys(losses, 0), abs=1e-12)


def test_a_cold_teacher_is_the_targets_choice(small_head: Eagle3Head) -> None:
    """Near 0 its cross-entropy is that of the token that the target would choose."""
    fixed, batch = constants(), pack_samples(documents())
    objective = Objective(1, 1.0, "cross_entropy", 1e-3)
    model = TttModel(small_head, *fixed, objective, max_length=12, dtype=torch.float64)
    (output,) = dense_unroll(small_head, fixed.embedding, batch, steps=1)
    counted = small_head.t2d[batch.token_ids[batch.labels]]
    choices = (batch.teacher_states @ fixed.lm_head.T)[:, small_head.target_ids()].argmax(-1)
    logits = small_head.logits(output[batch.labels - 2])
    expected = F.cross_entropy(logits[counted], choices[counted], reduction="sum")
    torch.testing.assert_close(model(batch).loss, expected / len(batch.labels))


def test_a_label_outside_the_draft_vocabulary_is_never_a_hit(small_head: Eagle3Head) -> None:
    """Of all tokens that the last label may be, one alone is what the head proposes."""
    small_head.set_vocabulary(torch.tensor([0, 1, 2, 3, *range(4, 24, 2)]))
    objective = Objective(1, 1.0)
    model = TttModel(small_head, *constants(), objective, max_length=12, dtype=torch.float64)
    batch, last = pack_samples(documents()), sum(LENGTHS[:2]) - 1
    assert last in batch.labels
    hits = []
    for token in range(24):
        token_ids = batch.token_ids.index_fill(0, torch.tensor(last), token)
        hits.append(int(model(replace(batch, token_ids=token_ids)).hits))
    proposed = hits.index(max(hits))
    assert hits == [min(hits) + (token == proposed) for token in range(24)]
    assert small_head.t2d[proposed] and not small_head.t2d[proposed + 1]


def test_the_weights_gradient_is_rounded_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """With states in bfloat16: chunks are summed in float32, as which a float32 weight gets it."""
    monkeypatch.setattr("pipeline.learning.losses._CHUNK_LOGITS", 2 * K * VD)
    given, gradients = example(torch.bfloat16, hidden=64), list[Tensor]()
    for dtype in (torch.float32, torch.bfloat16):
        weight = given.weight.detach().to(dtype).requires_grad_()
        value, _ = given._replace(weight=weight).apply("kl")
        gradients += torch.autograd.grad(value / 3, weight)
    exact, rounded = gradients
    assert (exact.dtype, rounded.dtype) == (torch.float32, torch.bfloat16)
    assert not torch.equal(exact, exact.bfloat16().float())
    assert torch.equal(rounded, exact.bfloat16())


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most elements of a result of any operation."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_logits_of_all_labels_never_exist_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.learning.losses._CHUNK_LOGITS", 2 * K * VD)
    given = example(hidden=1)
    with Largest() as seen, torch.no_grad():  # type: ignore[no-untyped-call]
        given.apply("kl")
    assert K * VD <= seen.elements <= 2 * K * VD
