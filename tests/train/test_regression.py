"""A start by least squares: the solution against numpy's, and what it is worth before the first step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.config import RunConfig, TrainSection
from pipeline.eagle3.head import Eagle3Head
from pipeline.eagle3.init import random_init, start_lm_head
from pipeline.records import Manifest
from pipeline.store.states import StatesSample
from pipeline.target.weights import TargetWeights
from pipeline.train import run
from pipeline.train.data.batches import TrainBatch, pack_samples
from pipeline.train.metrics import read_lines
from pipeline.train.start.least_squares import fc_scale, start_by_least_squares
from pipeline.train.trainer import Trainer
from pipeline.train.ttt.model import TttModel

Configure = Callable[..., RunConfig]
Store = Callable[..., Manifest]


def whole(samples: list[StatesSample]) -> list[TrainBatch]:
    """One batch a sample, in float32."""
    return [pack_samples([sample]).to(torch.device("cpu"), torch.float32) for sample in samples]


@pytest.fixture
def weights(target_directory: Path) -> TargetWeights:
    return TargetWeights(target_directory)


def fresh(small: Eagle3Head, weights: TargetWeights, **shape: int) -> Eagle3Head:
    """A random head of the tiny target over its whole vocabulary, with the target's output layer."""
    vocabulary, hidden = weights.lm_head().shape
    sizes = {
        "vocab_size": vocabulary,
        "draft_vocab_size": vocabulary,
        "hidden_size": hidden,
        **shape,
    }
    head = Eagle3Head(small.shape.model_copy(update=sizes))
    random_init(head, 0)
    head.set_vocabulary(torch.arange(vocabulary))
    start_lm_head(head, weights.lm_head(), weights.final_norm())
    return head


def regressors(
    batches: list[TrainBatch], embedding: Tensor
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    rows = []
    for batch in batches:
        tokens = embedding[batch.token_ids[batch.labels - 1]].double()
        tokens = tokens / (tokens.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        rows.append(torch.cat((batch.aux_states[batch.labels - 2].double(), tokens), dim=-1))
    return torch.cat(rows).numpy()


def test_fc_and_the_product_of_values_are_the_ridge_solution(
    small_head: Eagle3Head, weights: TargetWeights, states: list[StatesSample]
) -> None:
    """With room for the full rank in the values, v and o give back B exactly."""
    hidden = weights.embedding().shape[1]
    head = fresh(
        small_head, weights, num_attention_heads=8, num_key_value_heads=4, head_dim=hidden // 4
    )
    batches = whole(states)
    norm = head.norm.weight.detach().double().numpy()
    undo = norm / (norm**2 + (0.05 * np.sqrt((norm**2).mean())) ** 2)
    found = start_by_least_squares(head, weights.embedding(), batches)

    x = regressors(batches, weights.embedding())
    y = torch.cat([batch.teacher_states for batch in batches]).double().numpy() * undo
    spread = np.sqrt((x**2).mean(0)) + 1e-3
    scaled = x / spread
    # Ridge as ordinary least squares with rows √λ · 1 under the data.
    extended = np.concatenate((scaled, np.sqrt(0.005 * len(x)) * np.eye(x.shape[1])))
    solved = (
        np.linalg.lstsq(extended, np.concatenate((y, np.zeros((x.shape[1], hidden)))), rcond=None)[
            0
        ]
        / spread[:, None]
    )
    assert found.rows == len(x)
    np.testing.assert_allclose(head.fc.weight.detach().numpy(), solved[: 3 * hidden].T, atol=2e-4)
    attention = head.midlayer.self_attn
    groups, size = head.shape.num_key_value_heads, head.shape.head_dim
    read = (
        attention.v_proj.weight[:, :hidden]
        .detach()
        .view(groups, 1, size, hidden)
        .expand(-1, 2, -1, -1)
        .reshape(-1, hidden)
    )
    np.testing.assert_allclose(
        (attention.o_proj.weight.detach() @ read).numpy(), solved[3 * hidden :].T, atol=2e-4
    )
    rest = y - scaled @ (solved * spread[:, None])
    assert found.explained == pytest.approx(
        1 - (rest**2).sum() / ((y - y.mean(0)) ** 2).sum(), abs=1e-4
    )
    assert 0 < found.explained_by_mlp < 1


def test_a_solved_head_proposes_better_than_an_unsolved_one(
    small_head: Eagle3Head, weights: TargetWeights, states: list[StatesSample]
) -> None:
    """With values of low rank, as heads have them. On its own samples: a random target has nothing that carries over to others."""
    head = fresh(small_head, weights)
    solved = copy.deepcopy(head)
    batches = whole(states)
    start_by_least_squares(solved, weights.embedding(), batches)

    def accuracy(one: Eagle3Head) -> float:
        model = TttModel(
            one,
            weights.embedding(),
            weights.lm_head(),
            steps=1,
            decay=0.8,
            max_length=64,
            dtype=torch.float32,
        )
        results = [model(batch) for batch in batches]
        return float(sum(result.hits[0] for result in results)) / float(
            sum(result.rows[0] for result in results)
        )

    assert accuracy(solved) > accuracy(head) + 0.1


def test_solving_is_repeatable(
    small_head: Eagle3Head, weights: TargetWeights, states: list[StatesSample]
) -> None:
    heads = [fresh(small_head, weights) for _ in range(2)]
    for head in heads:
        start_by_least_squares(head, weights.embedding(), whole(states))
    for name, tensor in heads[0].state_dict().items():
        assert torch.equal(tensor, heads[1].state_dict()[name]), name


def test_fc_learns_as_slowly_as_its_input_is_large(
    small_head: Eagle3Head, weights: TargetWeights, states: list[StatesSample]
) -> None:
    head, batches = fresh(small_head, weights), whole(states)
    rows = torch.cat([batch.aux_states[batch.labels - 2] for batch in batches])
    louder = [
        batch.__class__(
            **{**vars(batch), "aux_states": batch.aux_states * 16 / rows.square().mean().sqrt()}
        )
        for batch in batches
    ]
    assert fc_scale(head, louder) == pytest.approx(1 / 16, rel=0.05)
    quieter = [
        batch.__class__(**{**vars(batch), "aux_states": batch.aux_states * 1e-3})
        for batch in batches
    ]
    assert fc_scale(head, quieter) == 1.0


def test_the_engine_gives_fc_its_own_rate(
    small_head: Eagle3Head, weights: TargetWeights, states: list[StatesSample]
) -> None:
    head = fresh(small_head, weights)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    model = TttModel(
        head,
        weights.embedding(),
        weights.lm_head(),
        steps=2,
        decay=0.8,
        max_length=64,
        dtype=torch.float32,
    )
    engine = Trainer(model, TrainSection(dtype="float32"), torch.device("cpu"), fc_scale=0.0)
    list(engine.step(whole(states)[:1], 1e-2))
    after = engine.weights()
    assert torch.equal(after["fc.weight"], before["fc.weight"])
    assert not torch.equal(
        after["midlayer.self_attn.q_proj.weight"], before["midlayer.self_attn.q_proj.weight"]
    )


def test_a_run_begins_better_than_from_the_targets_last_layer(
    tiny_config: Configure, store_states: Store
) -> None:
    first = []
    for start in ("least_squares", "target_last"):
        config = tiny_config(start, epochs=1, dtype="float32", head={"init_layer": start})
        store_states(config)
        run(config)
        first.append(read_lines(Path(config.run.uri) / "train" / "metrics.jsonl")[0]["acc_0"])
    assert first[0] > first[1]
