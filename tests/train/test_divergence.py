"""Losses: each against autograd, what the acceptance losses say, types of gradients, memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config.train import ACCEPTANCE_LOSSES, Loss
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.eagle3.ttt import TttModel
from pipeline.heads.unrolled import Objective
from pipeline.learning.losses import OutputLoss, Teacher
from tests.train.dense import dense_unroll
from tests.train.formulas import divergence_of, teacher_of
from tests.train.memory_corpus import pack_samples
from tests.train.test_unroll import DECAY, LENGTHS, STEPS, constants, documents

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

    def apply(self, loss: Loss) -> tuple[Tensor, Tensor]:
        full = loss in ACCEPTANCE_LOSSES
        rows = self.lm_head if full else self.lm_head[self.columns]
        teacher = Teacher(self.teacher_states, rows, self.columns if full else None)
        inputs = self.states, self.weight, teacher, self.scales, self.draft_ids, loss
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
    given = example()
    value, hits = given.apply(loss)
    logits = given.states @ given.weight.T
    p = teacher_of(given.teacher_states @ given.lm_head.T, given.columns, loss)
    expected = (divergence_of(logits, p, loss) * given.scales).sum()
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    learned = given.states, given.weight
    gradients = [torch.autograd.grad(3 * one, learned) for one in (value, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    assert hits.tolist() == (logits.argmax(-1) == given.draft_ids).sum(1).tolist()


def test_losses_of_a_perfect_head() -> None:
    given = example()
    whole = given._replace(lm_head=given.weight, columns=torch.arange(VD))
    perfect = whole._replace(states=given.teacher_states.expand(K, -1, -1))
    losses = {loss: float(perfect.apply(loss)[0].detach()) for loss in LOSSES}
    p = (given.teacher_states @ given.weight.detach().T).softmax(-1)
    entropy = float((-(p * p.log()).sum(-1) * given.scales).sum())  # the teacher's
    assert losses.pop("cross_entropy") == pytest.approx(entropy)
    assert losses == pytest.approx(dict.fromkeys(losses, 0), abs=1e-12)


def expected_acceptance(target_logits: Tensor, draft_logits: Tensor, ids: Tensor) -> Tensor:
    """Of one token: drafted from q, accepted with probability min(1, p/q); over all V tokens."""
    q = torch.zeros_like(target_logits).index_put((ids,), draft_logits.softmax(-1))
    p = target_logits.softmax(-1)
    drafted = q > 0
    return (q[drafted] * (p[drafted] / q[drafted]).clamp(max=1)).sum()


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("loss", ["tv", "lk"])
def test_acceptance_losses_are_what_verification_accepts(
    loss: Loss, temperature: float, small_head: Eagle3Head
) -> None:
    fixed, batch = constants(), pack_samples(documents())
    model = TttModel(
        small_head,
        *fixed,
        Objective(STEPS, DECAY, loss, temperature),
        max_length=12,
        dtype=torch.float64,
    )
    result = model(batch)
    inside = small_head.t2d[batch.token_ids[batch.labels]]
    assert 0 < int(inside.sum()) < len(inside), "labels inside and outside the draft vocabulary"
    outputs = dense_unroll(small_head, fixed.embedding, batch, steps=STEPS)
    expected = torch.zeros((), dtype=torch.float64)
    for k, output in enumerate(outputs):
        for label, depth, state in zip(
            batch.labels.tolist(), batch.depths.tolist(), batch.teacher_states, strict=True
        ):
            if depth >= k + 2:
                drafted = small_head.logits(output[label - k - 2])
                target_logits = fixed.lm_head @ state / temperature
                accepted = expected_acceptance(target_logits, drafted, small_head.target_ids())
                value = 1 - accepted if loss == "tv" else -accepted.log()
                expected = expected + DECAY**k * value / len(batch.labels)
    torch.testing.assert_close(result.loss, expected, rtol=1e-10, atol=1e-12)
    parameters = list(small_head.parameters())
    gradients = [torch.autograd.grad(one, parameters) for one in (result.loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-9)
    others = TttModel(
        small_head, *fixed, Objective(STEPS, DECAY), max_length=12, dtype=torch.float64
    )
    counts = others(batch)
    assert (result.hits.tolist(), result.labels.tolist()) == (
        counts.hits.tolist(),
        counts.labels.tolist(),
    )
    assert len(model.target_output_rows) == 24 and len(others.target_output_rows) == 14


@pytest.mark.parametrize("loss", ["cross_entropy", "tv"])
@pytest.mark.parametrize("chunk", [1 << 20, 1], ids=["one chunk", "chunks of one label"])
def test_steps_weigh_what_the_drafts_in_front_are_accepted(
    loss: Loss, chunk: int, small_head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along each chain, document by document; what is no label breaks a chain."""
    monkeypatch.setattr("pipeline.learning.losses._CHUNK_LOGITS", chunk)
    fixed, batch = constants(), pack_samples(documents())
    _, *inside = sorted(set(batch.token_ids[batch.labels].tolist()))  # all but one of the labels'
    others = [token for token in range(24) if token not in batch.token_ids[batch.labels]]
    small_head.set_vocabulary(torch.tensor(sorted([*inside, *others][:14])))
    objective = Objective(STEPS, None, loss)
    model = TttModel(small_head, *fixed, objective, max_length=12, dtype=torch.float64)
    outputs = dense_unroll(small_head, fixed.embedding, batch, steps=STEPS)
    teachers = {
        label: teacher_of((fixed.lm_head @ state)[None], small_head.target_ids(), loss)
        for label, state in zip(batch.labels.tolist(), batch.teacher_states, strict=True)
        if loss == "tv" or small_head.t2d[batch.token_ids[label]]
    }
    depths = dict(zip(batch.labels.tolist(), batch.depths.tolist(), strict=True))
    expected, chains = torch.zeros((), dtype=torch.float64), 0
    for root in range(batch.tokens):
        weight = 1.0
        for k, label in enumerate(range(root + 2, root + 2 + STEPS)):
            if label not in teachers or depths[label] < k + 2:
                break
            logits = small_head.logits(outputs[k][root])[None, None]
            value = divergence_of(logits, teachers[label], loss)[0, 0]
            expected, chains = expected + weight * value / len(batch.labels), chains + (k > 0)
            weight *= float(torch.minimum(logits.detach().softmax(-1)[0], teachers[label]).sum())
    firsts = [label for label in teachers if label - 1 not in teachers]
    assert chains > 5 and len(firsts) > 3, "the example needs chains, and labels that none leads to"
    result = model(batch)
    torch.testing.assert_close(result.loss, expected, rtol=1e-10, atol=1e-12)
    parameters = list(small_head.parameters())
    gradients = [torch.autograd.grad(one, parameters) for one in (result.loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-9)


def test_accuracy_does_not_depend_on_what_steps_weigh(small_head: Eagle3Head) -> None:
    """With one token to propose, which every label is, each prediction is right, at all steps."""
    fixed, batch = constants(), pack_samples(documents())
    batch = replace(batch, token_ids=torch.full_like(batch.token_ids, 7))
    head = Eagle3Head(small_head.shape.model_copy(update={"draft_vocab_size": 1})).double()
    head.set_vocabulary(torch.tensor([7]))
    for decay in (DECAY, None):
        objective = Objective(STEPS, decay, "tv")
        result = TttModel(head, *fixed, objective, max_length=12, dtype=torch.float64)(batch)
        assert result.hits.tolist() == result.labels.tolist()
        assert 0 < result.labels[-1] < result.labels[0], "later steps have fewer labels"


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
    objective = Objective(1, 1.0, "tv")
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


@pytest.mark.parametrize("loss", sorted(ACCEPTANCE_LOSSES))
def test_a_teacher_with_nothing_in_the_draft_vocabulary(loss: Loss) -> None:
    """Its probabilities there underflow: the loss is finite and teaches nothing."""
    given = example(torch.float32)
    outside = torch.ones(V, dtype=torch.bool).index_fill(0, given.columns, False)
    lm_head = given.lm_head.masked_fill(outside[:, None], 0)
    lm_head[outside, 0], lm_head[given.columns, 0] = 200, -200
    states = torch.zeros(L, H)
    states[:, 0] = 1
    value, _ = given._replace(lm_head=lm_head, teacher_states=states).apply(loss)
    assert bool(torch.isfinite(value))
    gradients = torch.autograd.grad(value, (given.states, given.weight))
    assert all(not gradient.any() for gradient in gradients)


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


@pytest.mark.parametrize("loss", ["cross_entropy", "lk_hybrid"])
def test_logits_of_all_labels_never_exist_together(
    loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.learning.losses._CHUNK_LOGITS", 2 * V)
    given = example(hidden=1)
    with Largest() as seen, torch.no_grad():  # type: ignore[no-untyped-call]
        given.apply(loss)
    assert K * VD <= seen.elements <= 2 * V
