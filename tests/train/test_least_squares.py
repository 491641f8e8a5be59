"""A start by least squares: the solution against numpy's, and what it is worth."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.config import TrainSection
from pipeline.errors import DataError
from pipeline.heads.eagle3.init import solve_least_squares
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.eagle3.ttt import TttModel
from pipeline.heads.init import fc_scale, init_lm_head, random_init
from pipeline.heads.unrolled import Objective
from pipeline.learning.batches import Schedule, TrainBatch
from pipeline.learning.corpus import survey
from pipeline.learning.least_squares import (
    STRENGTHS,
    FirstBatches,
    Ridge,
    labels_needed,
    solve_ridge,
)
from pipeline.store.states import StatesSample
from pipeline.target.weights import TargetWeights
from pipeline.train.stage import run
from pipeline.train.trainer import Trainer
from tests.train.conftest import make_sample
from tests.train.memory_corpus import MemoryCorpus, pack_samples
from tests.train.runs import Configure, Store, lines_of


def whole(samples: list[StatesSample]) -> list[TrainBatch]:
    """One batch a sample, in float32."""
    return [pack_samples([sample]).to(torch.device("cpu"), torch.float32) for sample in samples]


@pytest.fixture
def weights(target_directory: Path) -> TargetWeights:
    return TargetWeights(target_directory)


def fresh(small: Eagle3Head, weights: TargetWeights, **shape: int) -> Eagle3Head:
    """A random head over the tiny target's whole vocabulary, with the target's output layer."""
    vocabulary, hidden = weights.lm_head().shape
    sizes = {"vocab_size": vocabulary, "draft_vocab_size": vocabulary, "hidden_size": hidden}
    head = Eagle3Head(small.shape.model_copy(update=sizes | shape))
    random_init(head, 0)
    head.set_vocabulary(torch.arange(vocabulary))
    init_lm_head(head, weights.lm_head(), weights.final_norm())
    return head


def model_of(head: Eagle3Head, weights: TargetWeights, steps: int) -> TttModel:
    return TttModel(
        head,
        weights.embedding(),
        weights.lm_head(),
        Objective(steps, 0.8),
        max_length=64,
        dtype=torch.float32,
    )


def regressors(
    batches: list[TrainBatch], embedding: Tensor
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    rows = []
    for batch in batches:
        read = [batch.token_ids[batch.labels - 1]]
        if batch.alternative_ids is not None:
            read += batch.alternative_ids.unbind(1)
        for ids in read:
            tokens = embedding[ids].double()
            tokens = tokens / (tokens.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            rows.append(torch.cat((batch.aux_states[batch.labels - 2].double(), tokens), dim=-1))
    return torch.cat(rows).numpy()


def with_alternatives(samples: list[StatesSample], count: int) -> list[StatesSample]:
    """Tokens drawn anyhow, and states to match none."""
    generator, made = torch.Generator().manual_seed(3), []
    for sample in samples:
        finals, hidden = sample.final_states.shape
        ids = torch.randint(0, 40, (finals, count), generator=generator, dtype=torch.int32)
        states = torch.randn(finals, count * hidden, generator=generator).bfloat16()
        made.append(replace(sample, alternative_ids=ids, alternative_states=states))
    return made


@pytest.mark.parametrize("alternatives", [0, 2])
@pytest.mark.parametrize("block", [1024, 7], ids=["one block", "blocks of seven"])
def test_fc_and_the_product_of_values_are_the_ridge_solution(
    small_head: Eagle3Head,
    weights: TargetWeights,
    states: list[StatesSample],
    block: int,
    alternatives: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With room for the full rank in the values, v and o give back B exactly."""
    monkeypatch.setattr("pipeline.learning.least_squares._BLOCK", block)
    hidden = weights.embedding().shape[1]
    head = fresh(
        small_head, weights, num_attention_heads=8, num_key_value_heads=4, head_dim=hidden // 4
    )
    batches = whole(with_alternatives(states, alternatives) if alternatives else states)
    norm = head.norm.weight.detach().double().numpy()
    inverse = norm / (norm**2 + (0.05 * np.sqrt((norm**2).mean())) ** 2)
    fit = solve_least_squares(head, weights.embedding(), batches)

    def ridge(some: list[TrainBatch], strength: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        """As ordinary least squares with rows √λ · 1 under the data."""
        x, y = regressors(some, weights.embedding()), truth(some)
        spread = np.sqrt((x**2).mean(0)) + 1e-3
        extended = np.concatenate((x / spread, np.sqrt(strength * len(x)) * np.eye(x.shape[1])))
        targets = np.concatenate((y, np.zeros((x.shape[1], hidden))))
        solution: np.ndarray[Any, np.dtype[np.float64]]
        solution = np.linalg.lstsq(extended, targets, rcond=None)[0] / spread[:, None]
        return solution

    def truth(some: list[TrainBatch]) -> np.ndarray[Any, np.dtype[np.float64]]:
        states = []
        for batch in some:
            states.append(batch.teacher_states)
            if batch.alternative_states is not None:
                states += batch.alternative_states.chunk(alternatives, dim=1)
        return np.asarray(torch.cat(states).double().numpy() * inverse)

    held_out = [batch for number, batch in enumerate(batches) if number % 8 == 1]
    others = [batch for number, batch in enumerate(batches) if number % 8 != 1]
    x, y = regressors(held_out, weights.embedding()), truth(held_out)
    explained = {
        strength: 1 - ((y - x @ ridge(others, strength)) ** 2).sum() / ((y - y.mean(0)) ** 2).sum()
        for strength in STRENGTHS
    }
    assert fit.strength == max(STRENGTHS, key=lambda strength: explained[strength])
    assert fit.explained == pytest.approx(explained[fit.strength], abs=1e-4)
    assert (fit.rows, fit.held_out) == (len(regressors(batches, weights.embedding())), len(x))
    solved = ridge(batches, fit.strength)
    np.testing.assert_allclose(head.fc.weight.detach().numpy(), solved[: 3 * hidden].T, atol=2e-4)
    attention = head.midlayer.self_attn
    groups, size = head.shape.num_key_value_heads, head.shape.head_dim
    values = attention.v_proj.weight.detach()[:, :hidden].view(groups, 1, size, hidden)
    read = values.expand(-1, 2, -1, -1).reshape(-1, hidden)
    product = attention.o_proj.weight.detach() @ read
    np.testing.assert_allclose(product.numpy(), solved[3 * hidden :].T, atol=2e-4)


def test_strengths_are_compared_by_some_of_many_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth here, and solved for all: what is explained and the cosine are of the fourth."""
    monkeypatch.setattr("pipeline.learning.least_squares._COMPARED", 3)
    generator = torch.Generator().manual_seed(1)
    x, noise = torch.randn(9, 40, 5, generator=generator), torch.randn(9, 40, 10)
    y = x @ torch.randn(5, 10, generator=generator) + noise * torch.arange(10)

    def rows_of(batch: Any) -> tuple[Tensor, Tensor]:
        return batch[0], batch[1]

    def solved(step: int) -> Ridge:
        batches: Any = list(zip(x, y[..., ::step], strict=True))
        return solve_ridge(batches, rows_of)

    whole, fourth = solved(1), solved(4)
    assert (whole.strength, whole.held_out, whole.rows) == (fourth.strength, 40, 360)
    assert (whole.explained, whole.cosine) == (fourth.explained, fourth.cosine)
    assert whole.weights.shape == (5, 10)
    torch.testing.assert_close(whole.weights[:, ::4], fourth.weights)
    torch.testing.assert_close(whole.moments, (x.flatten(0, 1).T @ x.flatten(0, 1)) / 360)


@pytest.mark.parametrize(("samples", "heads"), [(1, 1), (12, 1), (12, 2)])
def test_next_to_nothing_is_trained_on_or_refused(
    tiny_config: Configure, store_states: Store, samples: int, heads: int
) -> None:
    """The same label in each sample, so nothing varies; a second head has none at all."""
    ids, rows = [3, 5, 7], torch.randn(3, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    config = tiny_config(head={"heads": heads}, batch_tokens=32, max_steps=2)
    same = [
        make_sample(f"s{number}", ids, [2], rows, rows[:, :32].clone()) for number in range(samples)
    ]
    store_states(config, same)
    if heads == 1:
        assert run(config).details["steps"] == 2
    else:
        with pytest.raises(DataError, match="no label teaches one of the heads"):
            run(config)


def test_a_solved_head_proposes_better_than_an_unsolved_one(
    small_head: Eagle3Head, weights: TargetWeights, states: list[StatesSample]
) -> None:
    """With values of low rank, as heads have them.

    On its own samples: a random target has nothing that carries over to others.
    """
    head = fresh(small_head, weights)
    solved = copy.deepcopy(head)
    batches = whole(states)
    solve_least_squares(solved, weights.embedding(), batches)

    def accuracy(one: Eagle3Head) -> float:
        model = model_of(one, weights, steps=1)
        results = [model(batch) for batch in batches]
        hits = sum(int(result.hits[0]) for result in results)
        return hits / sum(int(result.labels[0]) for result in results)

    assert accuracy(solved) > accuracy(head) + 0.1


def test_the_start_is_the_same_where_the_output_is_normed(
    small_head: Eagle3Head, weights: TargetWeights, states: list[StatesSample]
) -> None:
    """EAGLE-3.1's norm changes what step 1 reads; step 0, which is solved, proposes the same."""
    heads = [fresh(small_head, weights, norm_output=switch) for switch in (False, True)]
    for head in heads:
        solve_least_squares(head, weights.embedding(), whole(states))
    for name, tensor in heads[0].state_dict().items():
        assert torch.equal(tensor, heads[1].state_dict()[name]), name


def test_a_start_reads_labels_enough_for_its_regressors(states: list[StatesSample]) -> None:
    """And no further than the first epoch, whose labels come again in the next."""
    corpus = MemoryCorpus(states)
    surveyed = survey(corpus, vocab_size=96, budget=32)
    schedule = Schedule(surveyed.pieces, budget=32, seed=0, epochs=3)

    def labels(**limits: int) -> int:
        return sum(len(batch.labels) for batch in FirstBatches(corpus, schedule, **limits))

    every = labels(labels=labels_needed(32))
    assert every == sum(int(sample.supervised_mask[2:].sum()) for sample in states)
    assert 20 <= labels(labels=20) < 60 < every
    assert labels_needed(4096) == 30 * 4 * 4096


def test_solving_is_repeatable(
    small_head: Eagle3Head, weights: TargetWeights, states: list[StatesSample]
) -> None:
    heads = [fresh(small_head, weights) for _ in range(2)]
    for head in heads:
        solve_least_squares(head, weights.embedding(), whole(states))
    for name, tensor in heads[0].state_dict().items():
        assert torch.equal(tensor, heads[1].state_dict()[name]), name


def test_fc_learns_as_slowly_as_its_input_is_large(
    small_head: Eagle3Head, weights: TargetWeights, states: list[StatesSample]
) -> None:
    head, batches = fresh(small_head, weights), whole(states)
    rows = torch.cat([batch.aux_states[batch.labels - 2] for batch in batches])

    def scale_of(factor: float) -> float:
        scaled = (replace(batch, aux_states=batch.aux_states * factor) for batch in batches)
        return fc_scale(head, scaled)

    assert scale_of(16 / float(rows.square().mean().sqrt())) == pytest.approx(1 / 16, rel=0.05)
    assert scale_of(1e-3) == 1.0


def test_the_trainer_gives_fc_its_own_rate(
    small_head: Eagle3Head, weights: TargetWeights, states: list[StatesSample]
) -> None:
    head = fresh(small_head, weights)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    model, section = model_of(head, weights, steps=2), TrainSection(dtype="float32")
    trainer = Trainer(model, section, torch.device("cpu"), fc_scale=0.0)
    trainer.step(whole(states)[:1], 1e-2)
    after, query = trainer.weights(), "midlayer.self_attn.q_proj.weight"
    assert torch.equal(after["fc.weight"], before["fc.weight"])
    assert not torch.equal(after[query], before[query])


def test_a_run_begins_better_than_from_the_targets_last_layer(
    tiny_config: Configure, store_states: Store
) -> None:
    first = []
    for start in ("least_squares", "target_last"):
        config = tiny_config(start, epochs=1, dtype="float32", head={"init_layer": start})
        store_states(config)
        run(config)
        first.append(lines_of(config)[0]["acc_0"])
    assert first[0] > first[1]
