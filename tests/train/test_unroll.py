"""The unroll against two independent computations: a dense mask, and the bare definition."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config import TrainSection
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.eagle3.ttt import (
    Instead,
    TttModel,
    draw_alternatives,
    trained_model,
    unroll,
)
from pipeline.heads.unrolled import (
    Objective,
    Unroll,
    gather_predictions,
    predicting_rows,
)
from pipeline.learning.attention import UnrolledAttention
from pipeline.learning.batches import TrainBatch, read_batch
from pipeline.learning.corpus import Piece
from pipeline.store.states import StatesSample, teacher_positions
from pipeline.target.rotary import RotaryTable, rotate
from tests.train.dense import dense_loss, dense_unroll
from tests.train.memory_corpus import MemoryCorpus, pack_samples

STEPS, DECAY = 4, 0.7
LENGTHS = (9, 12, 5)


def documents() -> list[StatesSample]:
    """Three with prompts and gaps between supervised spans; of the last little can be predicted."""
    supervised = [[4, 5, 6, 7, 8], [1, 2, 3, 8, 9, 10, 11], [0, 1, 4]]
    generator = torch.Generator().manual_seed(5)
    made = []
    for number, length in enumerate(LENGTHS):
        mask = torch.zeros(length, dtype=torch.uint8)
        mask[supervised[number]] = 1
        positions = teacher_positions(mask)
        made.append(
            StatesSample(
                f"doc-{number}",
                "test",
                torch.randint(0, 24, (length,), generator=generator, dtype=torch.int32),
                mask,
                torch.randn(length, 48, generator=generator, dtype=torch.float64),
                torch.randn(len(positions), 16, generator=generator, dtype=torch.float64),
                positions,
            )
        )
    return made


class Constants(NamedTuple):
    embedding: Tensor  # [V, H]
    lm_head: Tensor  # [V, H]


def constants(dtype: torch.dtype = torch.float64) -> Constants:
    generator = torch.Generator().manual_seed(6)
    return Constants(
        torch.randn(24, 16, generator=generator).to(dtype),
        torch.randn(24, 16, generator=generator).to(dtype),
    )


def rotary_of(head: Eagle3Head, dtype: torch.dtype = torch.float64) -> RotaryTable:
    return RotaryTable(head.shape.rope_config(), 64, device=torch.device("cpu"), dtype=dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_unroll_equals_dense_mask_with_gradients(
    small_head: Eagle3Head, dtype: torch.dtype, tolerance: float
) -> None:
    head = small_head.to(dtype)
    batch = pack_samples(documents()).to(torch.device("cpu"), dtype)
    embedding = constants(dtype).embedding
    rows = predicting_rows(batch, torch.ones(len(batch.labels), dtype=torch.bool), STEPS)
    assert 0 < len(rows) < batch.tokens
    results = []
    for dense in (False, True):
        aux = batch.aux_states.clone().requires_grad_()
        mine = TrainBatch(**{**vars(batch), "aux_states": aux})
        if dense:
            every = dense_unroll(head, embedding, mine, steps=STEPS)
            outputs = [output[rows] for output in every]
        else:
            rotary = rotary_of(head, dtype)
            outputs = list(unroll(head, embedding, mine, rotary, rows=rows, steps=STEPS).outputs)
        generator = torch.Generator().manual_seed(9)
        loss = sum(
            (output * torch.randn(output.shape, generator=generator).to(dtype)).sum()
            for output in outputs
        )
        assert isinstance(loss, Tensor)
        named = head.named_parameters()
        layer = [weight for name, weight in named if name.startswith(("fc", "midlayer"))]
        results.append([*outputs, *torch.autograd.grad(loss, [aux, *layer])])
    for fast, slow in zip(*results, strict=True):
        scale = max(1.0, float(slow.detach().abs().max()))
        assert float((fast - slow).detach().abs().max()) <= tolerance * scale


def test_attention_ignores_other_documents_and_later_tokens(small_head: Eagle3Head) -> None:
    batch = pack_samples(documents())
    rows = torch.arange(batch.tokens)
    rotary = rotary_of(small_head)

    def mixed(changed: int | None) -> Tensor:
        generator = torch.Generator().manual_seed(2)
        query, key, value = (
            torch.randn(batch.tokens, heads, 4, generator=generator, dtype=torch.float64)
            for heads in (4, 2, 2)
        )
        if changed is not None:
            value[changed] += 1
        return UnrolledAttention(batch.lengths, rows, rotary).attend(0, query, key, value, [])[0]

    moved = (mixed(12) - mixed(None)).abs().amax((1, 2)) > 1e-9  # position 3 of the second document
    assert moved.nonzero().flatten().tolist() == list(range(12, 21))


#: (position, step) → tensor
Chain = dict[tuple[int, int], Tensor]


class Mistake(NamedTuple):
    """Planted off-by-ones."""

    token: int = 0
    rope: int = 0
    teacher: int = 0
    past: int = 0


def by_definition(
    head: Eagle3Head, fixed: Constants, mistake: Mistake
) -> tuple[Tensor, list[float]]:
    """Loss and accuracies from the definition, one document, one query and one label at a time."""
    rotary = rotary_of(head)
    drafts = head.target_ids().tolist()
    loss, hits, counted, labels = torch.zeros((), dtype=torch.float64), [0] * STEPS, [0] * STEPS, 0
    for sample in documents():
        rows = {position: row for row, position in enumerate(sample.final_positions.tolist())}
        x, length = sample.token_ids.tolist(), len(sample.token_ids)
        supervised = {j for j in range(length) if sample.supervised_mask[j]}
        labels += len([j for j in supervised if j >= 2])
        g = head.project(sample.aux_states)
        keys: Chain = {}
        values: Chain = {}
        for k in range(STEPS):
            following = {}
            for i in range(length):
                if i + k + 1 >= length:
                    continue

                def attend(
                    query: Tensor,
                    key: Tensor,
                    value: Tensor,
                    i: int = i,
                    k: int = k,
                    keys: Chain = keys,
                    values: Chain = values,
                ) -> Tensor:
                    cos, sin = rotary.at(torch.tensor(i + k + mistake.rope * k))
                    keys[i, k], values[i, k] = rotate(key, cos, sin), value
                    past = [(p, 0) for p in range(max(1, i + 1 + mistake.past))]
                    chain = [(i, step) for step in range(1, k + 1)]
                    attended = [pair for pair in (*past, *chain) if pair in keys]
                    groups = query.shape[0] // key.shape[0]
                    every_key, every_value = (
                        torch.stack([of[pair] for pair in attended]).repeat_interleave(groups, 1)
                        for of in (keys, values)
                    )  # [attended, Q, d]
                    scores = (every_key * rotate(query, cos, sin)).sum(-1) / query.shape[-1] ** 0.5
                    weights = scores.softmax(0)
                    return torch.as_tensor((weights[..., None] * every_value).sum(0))

                token = x[min(i + k + 1 + mistake.token, length - 1)]
                following[i] = head.step(fixed.embedding[token], g[i], attend)
                j = i + k + 2
                if j < length and j in supervised:
                    counted[k] += 1
                    logits = head.logits(following[i])
                    hits[k] += drafts[int(logits.argmax())] == x[j]
                    if x[j] in drafts:
                        row = min(rows[j - 1] + mistake.teacher, len(sample.final_states) - 1)
                        target_output_rows = fixed.lm_head[torch.tensor(drafts)]
                        teacher = (target_output_rows @ sample.final_states[row]).softmax(-1)
                        loss = loss - DECAY**k * (teacher * logits.log_softmax(-1)).sum()
            none = torch.zeros(16, dtype=torch.float64)
            g = torch.stack([following.get(i, none) for i in range(length)])
    return loss / labels, [hit / count for hit, count in zip(hits, counted, strict=True)]


def model_of(head: Eagle3Head, fixed: Constants) -> TttModel:
    objective = Objective(STEPS, DECAY)
    return TttModel(head, *fixed, objective, max_length=12, dtype=torch.float64)


def test_loss_accuracy_and_gradients_follow_the_definition(small_head: Eagle3Head) -> None:
    fixed, batch = constants(), pack_samples(documents())
    in_vocabulary = small_head.t2d[batch.token_ids[batch.labels]]
    needed = "the example needs labels inside and outside the draft vocabulary"
    assert 0 < int(in_vocabulary.sum()) < len(in_vocabulary), needed
    result = model_of(small_head, fixed)(batch)
    parameters = list(small_head.parameters())
    gradients = torch.autograd.grad(result.loss, parameters)
    expected, accuracies = by_definition(small_head, fixed, Mistake())
    torch.testing.assert_close(result.loss, expected, rtol=1e-10, atol=1e-10)
    defined = torch.autograd.grad(expected, parameters)
    torch.testing.assert_close(gradients, defined, rtol=1e-8, atol=1e-9)
    assert (result.hits / result.labels).tolist() == pytest.approx(accuracies)
    rows = fixed.lm_head[small_head.target_ids()]
    dense = dense_loss(small_head, fixed.embedding, rows, batch, steps=STEPS, decay=DECAY)
    torch.testing.assert_close(dense, expected, rtol=1e-10, atol=1e-10)


def with_alternatives(count: int = 3) -> list[StatesSample]:
    """The documents with other tokens at each of their final states."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for sample in documents():
        finals = len(sample.final_positions)
        ids = torch.randint(0, 24, (finals, count), generator=generator, dtype=torch.int32)
        states = torch.randn(finals, count * 16, generator=generator, dtype=torch.float64)
        made.append(replace(sample, alternative_ids=ids, alternative_states=states))
    return made


def alternatives_by_definition(
    head: Eagle3Head, fixed: Constants, batch: TrainBatch, instead: Instead
) -> Tensor:
    """Each document anew with one token replaced, by the dense mask; of it one row teaches."""
    rows = fixed.lm_head[head.target_ids()]
    loss = torch.zeros((), dtype=torch.float64)
    drawn = zip(*(part[instead.real] for part in instead[:3]), strict=True)
    for row, token, teacher in drawn:
        ids = batch.token_ids.clone()
        ids[row + 1] = token
        changed = TrainBatch(**{**vars(batch), "token_ids": ids})
        (output,) = dense_unroll(head, fixed.embedding, changed, steps=1)
        logits = head.logits(output[row])
        loss = loss - ((rows @ teacher).softmax(-1) * logits.log_softmax(-1)).sum()
    return loss / len(batch.labels)


def test_alternatives_teach_what_the_target_says_after_them(small_head: Eagle3Head) -> None:
    """Beside the labels' loss, with its gradients; each is one of the label's own three."""
    fixed, batch = constants(), pack_samples(with_alternatives())
    assert batch.alternative_ids is not None and batch.alternative_states is not None
    instead = draw_alternatives(batch, seed=0, weight=0.5)
    assert instead is not None and len(instead.rows) == 32 > instead.real.sum() > 5
    for row, token, teacher in zip(*instead[:3], strict=True):
        label = (batch.labels == row + 2).nonzero().item()
        assert batch.depths[label] > 2
        number = (batch.alternative_ids[label] == token).nonzero().flatten().tolist()
        assert any(
            torch.equal(teacher, batch.alternative_states[label].view(3, -1)[each])
            for each in number
        )
    objective = Objective(STEPS, DECAY)
    options: dict[str, Any] = {"max_length": 12, "dtype": torch.float64}
    model = TttModel(small_head, *fixed, objective, alternative_weight=0.5, **options)
    plain, beside = model_of(small_head, fixed)(batch), model(batch)
    assert torch.equal(plain.hits, beside.hits) and torch.equal(plain.labels, beside.labels)
    expected = plain.loss + 0.5 * alternatives_by_definition(small_head, fixed, batch, instead)
    torch.testing.assert_close(beside.loss, expected, rtol=1e-10, atol=1e-10)
    parameters = list(small_head.parameters())
    gradients = (torch.autograd.grad(loss, parameters) for loss in (beside.loss, expected))
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-9)


def test_a_configuration_says_what_alternatives_weigh(small_head: Eagle3Head) -> None:
    batch = pack_samples(with_alternatives()).to(torch.device("cpu"), torch.float32)
    fixed, head = constants(torch.float32), small_head.float()

    def loss(weight: float) -> float:
        section = TrainSection(ttt_steps=STEPS, alternative_weight=weight)
        options: dict[str, Any] = {"max_length": 12, "dtype": torch.float32, "seed": 0}
        return float(trained_model(section, head, *fixed, **options)(batch).loss.detach())

    without, half, whole = loss(0), loss(0.5), loss(1)
    assert without + 0.1 < half and whole - without == pytest.approx(2 * (half - without), rel=1e-4)


def test_other_batches_draw_other_alternatives(small_head: Eagle3Head) -> None:
    batch = pack_samples(with_alternatives())
    first, again, other = (
        draw_alternatives(replace(batch, number=number), seed=0, weight=1) for number in (0, 0, 1)
    )
    assert first and again and other
    assert torch.equal(first.token_ids, again.token_ids)
    assert not torch.equal(first.token_ids, other.token_ids)
    assert draw_alternatives(pack_samples(documents()), seed=0, weight=1) is None


@pytest.mark.parametrize("cuts", [(0, 12), (0, 6, 12), (0, 1, 2, 5, 9, 12)], ids=str)
def test_parts_of_a_long_sample_have_the_gradient_of_the_whole(
    small_head: Eagle3Head, cuts: tuple[int, ...]
) -> None:
    """Each with its past, in a batch of its own, and all of them in one."""
    fixed, samples = constants(), documents()
    corpus, model = MemoryCorpus(samples), model_of(small_head, fixed)
    parts = [Piece(0, 1, start, stop) for start, stop in pairwise(cuts)]
    whole = read_batch(corpus, [Piece(0, 1, 0, 12)])
    parameters = list(small_head.parameters())

    def results(batches: list[TrainBatch]) -> list[Tensor]:
        done = [model(batch, divisor=len(whole.labels)) for batch in batches if len(batch.labels)]
        loss = torch.stack([result.loss for result in done]).sum()
        counts = [sum(result.hits for result in done), sum(result.labels for result in done)]
        return [
            loss.detach(),
            *torch.autograd.grad(loss, parameters),
            *map(torch.as_tensor, counts),
        ]

    expected = results([whole])
    assert expected[-1].tolist() == [6, 5, 4, 4][:STEPS], "of labels 2 3 8 9 10 11"
    for batches in ([read_batch(corpus, [part]) for part in parts], [read_batch(corpus, parts)]):
        torch.testing.assert_close(results(batches), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "mistake",
    [Mistake(token=1), Mistake(token=-1), Mistake(rope=1), Mistake(teacher=1), Mistake(past=-1)],
    ids=str,
)
def test_planted_off_by_one_is_noticed(small_head: Eagle3Head, mistake: Mistake) -> None:
    fixed = constants()
    loss = model_of(small_head, fixed)(pack_samples(documents())).loss
    wrong, _ = by_definition(small_head, fixed, mistake)
    assert abs(float(loss.detach() - wrong.detach())) > 1e-4


def test_alignment_by_hand() -> None:
    """Document x0…x6, supervised x3 x4 x6: which position predicts what, and who teaches."""
    mask = torch.tensor([0, 0, 0, 1, 1, 0, 1], dtype=torch.uint8)
    positions = teacher_positions(mask)
    assert positions.tolist() == [2, 3, 5]
    final = positions[:, None].double()  # each final state is its own position
    sample = StatesSample(
        "a",
        "test",
        torch.arange(10, 17, dtype=torch.int32),
        mask,
        torch.zeros(7, 3),
        final,
        positions,
    )
    before = StatesSample(
        "b",
        "test",
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(4, dtype=torch.uint8),
        torch.zeros(4, 3),
        final[:0],
        positions[:0],
    )
    batch = pack_samples([before, sample])
    assert batch.token_ids[batch.labels].tolist() == [13, 14, 16]
    assert batch.teacher_states.flatten().tolist() == [2.0, 3.0, 5.0]  # j-1, in the document
    rows = predicting_rows(batch, torch.ones(3, dtype=torch.bool), 3)
    # step 0: 1 2 4, step 1: 0 1 3, step 2: 0 2
    assert (rows - 4).tolist() == [0, 1, 2, 3, 4]
    row_of = torch.zeros(11, dtype=torch.int64)
    row_of[rows] = torch.arange(5)
    outputs = tuple(
        torch.tensor([[100.0 * k + position] for position in range(5)]) for k in range(3)
    )
    gathered = gather_predictions(Unroll(outputs, rows, row_of), batch.labels).flatten(1)
    predicted = batch.depths >= torch.arange(3)[:, None] + 2
    assert [step[own].tolist() for step, own in zip(gathered, predicted, strict=True)] == [
        [1, 2, 4],
        [100, 101, 103],
        [200, 202],
    ]


class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations whose result is as long as values say, for which a host waits on a GPU."""

    waited = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.index.Tensor, aten.index_put_.default):
            _, indices, *_ = args
            self.waited += any(index is not None and index.dtype == torch.bool for index in indices)
        self.waited += func is aten.nonzero.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("steps", [1, 7])
def test_a_host_waits_for_two_counts_of_a_batch(small_head: Eagle3Head, steps: int) -> None:
    """Of rows that predict and of labels that give loss, whatever the steps."""
    batch = pack_samples(documents())
    objective = Objective(steps, DECAY)
    model = TttModel(small_head, *constants(), objective, max_length=12, dtype=torch.float64)
    model.rotary()
    # How blocks of a CPU are cut, and hits are looked for there, is no part of it.
    with (
        patch("pipeline.learning.attention._kernel", lambda *_: lambda query, *_: query),
        patch("pipeline.learning.losses._hits", lambda z, *_: torch.zeros(len(z)).long()),
        Counts() as seen,  # type: ignore[no-untyped-call]
    ):
        model(batch)
    assert seen.waited == 2


def test_chunks_do_not_change_the_result(
    small_head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed, batch = constants(), pack_samples(documents())
    whole = model_of(small_head, fixed)(batch)
    monkeypatch.setattr("pipeline.learning.losses._CHUNK_LOGITS", 3 * STEPS * 14)
    parts = model_of(small_head, fixed)(batch)
    torch.testing.assert_close(parts.loss, whole.loss)
    assert parts.hits.tolist() == whole.hits.tolist()
    parameters = list(small_head.parameters())
    gradients = [torch.autograd.grad(result.loss, parameters) for result in (parts, whole)]
    torch.testing.assert_close(*gradients)
