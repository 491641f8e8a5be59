"""DSpark's objective against its definition, and a training of such a block drafter."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor

from pipeline.config import TrainSection, TreeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Request
from pipeline.errors import ConfigError
from pipeline.heads.dflash.blocks import BlockObjective, DflashModel, cut_blocks
from pipeline.heads.dflash.drafter import DflashDrafter
from pipeline.heads.dflash.init import _blank_outputs
from pipeline.heads.dflash.shape import DflashHead, DflashShape
from pipeline.heads.registry import algorithm_of, load_head
from pipeline.store.states import StatesSample
from pipeline.train.plan import plan
from pipeline.train.stage import run
from pipeline.train.trainer import MuonAndAdamW, make_optimizer
from tests.train.conftest import SMALL
from tests.train.memory_corpus import pack_samples
from tests.train.runs import Configure, Store, head_of, lines_of, stop_at, without_speed
from tests.train.test_dflash import (
    LINEAR,
    Mistake,
    block_by_definition,
    linear_target,
    moved_by,
    random_head,
    started_on,
)
from tests.train.test_unroll import Constants, constants, documents

BLOCK, RANK, DECAY = 4, 3, 2.0  # a block of test_dflash.py


@pytest.fixture
def head() -> DflashHead:
    """A random float64 drafter of two layers of the small sizes."""
    shape = DflashShape(
        **SMALL,
        num_hidden_layers=2,
        block_size=BLOCK,
        mask_token_id=23,
        anchor_predicts=True,
        markov_rank=RANK,
        confidence=True,
    )
    return random_head(shape, seed=5)


def model_of(head: DflashHead, **changes: Any) -> DflashModel:
    objective = BlockObjective(99, DECAY, 0, "ce_tv")._replace(**changes)
    return DflashModel(head, *constants(), objective, max_length=12, dtype=torch.float64)


class Slip(NamedTuple):
    """Planted faults."""

    before: int = 0  # the token that the bias is of, off by so much
    predicts: int = 0  # which token a position predicts
    shared: float = 1.0  # factor of the overlap that the confidence is held against


def by_definition(head: DflashHead, fixed: Constants, slip: Slip) -> tuple[Tensor, list[int]]:
    """Loss and hits of each position, with every anchor."""
    drafts = head.target_ids().tolist()
    loss, anchors, hits = torch.zeros((), dtype=torch.float64), 0, [0] * BLOCK
    markov, confidence = head.markov_head, head.confidence_head
    assert markov is not None and confidence is not None
    for sample in documents():
        teachers = {position: row for row, position in enumerate(sample.final_positions.tolist())}
        x, length = sample.token_ids.tolist(), len(sample.token_ids)
        labels = {j for j in range(2, length) if sample.supervised_mask[j]}
        for anchor in sorted(j - 1 for j in labels):
            anchors += 1
            states = block_by_definition(head, fixed, sample, anchor, Mistake())
            for k in range(BLOCK):
                j = anchor + k + 1 + slip.predicts
                if not all(between in labels for between in range(anchor + 1, j + 1)):
                    break
                latent = markov.markov_w1.weight[x[j - 1 + slip.before]]
                logits = head.lm_head.weight @ states[k] + markov.markov_w2.weight @ latent
                hits[k] += drafts[int(logits.argmax())] == x[j]
                if x[j] not in drafts:
                    continue
                rows = fixed.lm_head[torch.tensor(drafts)]
                p, q = (rows @ sample.final_states[teachers[j - 1]]).softmax(-1), logits.softmax(-1)
                variation = (p - q).abs().sum() / 2
                odds = (confidence.proj.weight @ torch.cat((states[k], latent)))[0]
                sure = torch.sigmoid(odds + confidence.proj.bias[0])
                shared = (1 - variation.detach()) * slip.shared
                bit = -shared * sure.log() - (1 - shared) * (1 - sure).log()
                lost = -0.1 * (p * q.log()).sum() + 0.9 * variation + bit
                loss = loss + math.exp(-k / DECAY) * lost
    return loss / anchors, hits


def test_loss_accuracy_and_gradients_follow_the_definition(head: DflashHead) -> None:
    result = model_of(head)(pack_samples(documents()))
    parameters = list(head.parameters())
    gradients = torch.autograd.grad(result.loss, parameters)
    expected, hits = by_definition(head, constants(), Slip())
    torch.testing.assert_close(result.loss, expected, rtol=1e-10, atol=1e-10)
    assert result.hits.tolist() == hits and sum(hits) > 0
    assert result.labels.tolist() == [12, 8, 5, 3]
    defined = torch.autograd.grad(expected, parameters)
    torch.testing.assert_close(gradients, defined, rtol=1e-8, atol=1e-9)
    assert all(float(gradient.abs().max()) > 0 for gradient in gradients)


@pytest.mark.parametrize("slip", [Slip(before=-1), Slip(predicts=1), Slip(shared=0.9)], ids=str)
def test_planted_faults_are_noticed(head: DflashHead, slip: Slip) -> None:
    loss = model_of(head)(pack_samples(documents())).loss
    planted, _ = by_definition(head, constants(), slip)
    assert abs(float((loss - planted).detach())) > 1e-4


def test_half_precision_computes_about_the_same(head: DflashHead) -> None:
    """Of weights in float32, whose gradients are whole."""
    single, batch = head.float(), pack_samples(documents()).to(torch.device("cpu"), torch.float32)
    fixed = Constants(*(each.float() for each in constants()))
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        objective = BlockObjective(99, DECAY, 0, "ce_tv")
        model = DflashModel(single, *fixed, objective, max_length=12, dtype=dtype)
        loss = model(batch.to(torch.device("cpu"), dtype)).loss
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] != losses[1] and losses[1] == pytest.approx(losses[0], rel=0.05)
    assert all(each.grad is not None and each.grad.any() for each in single.parameters())


def test_a_start_by_least_squares_knows_more_than_a_random_one(head: DflashHead) -> None:
    """The next state is a linear map of the last token's embedding and of the state before it,
    which the root's own position has to look up as the masks' do."""
    shape = head.shape.model_copy(update=LINEAR)
    fixed, batches = linear_target(shape)
    solved, fit = started_on(shape, fixed, batches, solve=True, loss="ce_tv")
    plain, _ = started_on(shape, fixed, batches, solve=False, loss="ce_tv")
    assert fit and fit.explained_by_attention > 0.2
    batch = batches[1]
    assert float(solved(batch).loss.detach()) < 0.9 * float(plain(batch).loss.detach())
    block = cut_blocks(batch, torch.tensor([15]), BLOCK + 1)
    near, far = (moved_by(solved, batch, block, back)[0] for back in (1, 4))
    assert near > 3 * far > 0


def test_a_new_head_s_bias_and_confidence_say_nothing(head: DflashHead) -> None:
    generator = torch.Generator().manual_seed(5)
    embedding = torch.randn(24, 16, generator=generator) * torch.arange(1, 17)
    embedding[7] = embedding[9]
    assert "3 directions" in _blank_outputs(head, embedding)[0]
    markov, sure = head.markov_head, head.confidence_head
    assert markov is not None and sure is not None
    w1 = markov.markov_w1.weight.detach()
    assert torch.equal(w1[7], w1[9]) and not markov.markov_w2.weight.any()
    moments = w1.T @ w1 / len(w1)
    torch.testing.assert_close(moments, torch.eye(RANK, dtype=moments.dtype), atol=1e-4, rtol=0)
    _, sizes, directions = torch.linalg.svd(embedding.double(), full_matrices=False)
    largest = embedding.double() @ directions[:RANK].T / sizes[:RANK] * 24**0.5
    along = (w1.T @ largest / 24).abs().sum(0)
    torch.testing.assert_close(along, torch.ones(RANK).double(), atol=1e-4, rtol=0)
    assert float(sure.proj(torch.randn(1, 19).double()).detach()) == 0


def test_muon_steps_no_rows_of_tokens(head: DflashHead) -> None:
    """Nor an output: what it makes orthogonal are matrices of fc and of layers."""
    section = TrainSection.model_validate({"algorithm": "dspark", "optimizer": "muon"})
    optimizer = make_optimizer(head.float(), section, torch.float32, fc_scale=1.0)
    muon, adamw = cast("MuonAndAdamW", optimizer)._parts
    names = {id(parameter): name for name, parameter in head.named_parameters()}
    stepped, others = (
        {names[id(each)] for group in part.param_groups for each in group["params"]}
        for part in (muon, adamw)
    )
    assert all(name == "fc.weight" or "_proj.weight" in name for name in stepped)
    assert {"markov_head.markov_w1.weight", "lm_head.weight"} < others
    assert stepped | others == {*names.values()}


DSPARK: dict[str, Any] = {
    "algorithm": "dspark",
    "dspark": {
        "draft_vocab_size": 96,
        "intermediate_size": 32,
        "block_size": 3,
        "markov_rank": 4,
        "max_share_of_target": 2.0,
        "anchors": 40,
    },
}


def test_overfits_exports_and_drafts(
    tiny_config: Configure, store_states: Store, states: list[StatesSample]
) -> None:
    settings = {"epochs": 150, "batch_tokens": 48, "learning_rate": 1e-2, "checkpoint_every": 200}
    config = tiny_config("run", **DSPARK, **settings)
    assert config.train.loss == "ce_tv"
    parent = store_states(config, states[:2])
    manifest = run(config)
    first, last = lines_of(config)[0], lines_of(config)[-1]
    assert last["loss"] < 0.8 * first["loss"]
    assert last["acc_0"] > 0.9 > first["acc_0"] and last["acc_2"] > 0.8
    head, _ = load_head(head_of(config), expected=parent.contract)
    assert isinstance(head, DflashHead) and algorithm_of(head).name == "dspark"
    assert (head.shape.block_size, head.shape.markov_rank) == (3, 4)
    assert head.shape.anchor_predicts and head.shape.confidence
    assert manifest.details["parameters"] == head.count_parameters()
    body = json.loads((head_of(config) / "config.json").read_text())
    assert body["architectures"] == ["DSparkDraftModel"] and body["model_type"] == "qwen3"
    planned = plan(config)
    assert planned.state == "complete" and f"{head.count_parameters():,}" in planned.basis[0]
    layers = tuple(parent.contract.capture_layers)
    model = DecoderModel.load(
        Path(config.target.source),
        layers,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_length=64,
    )
    sample = states[0]
    prompt = tuple(sample.token_ids[: int(sample.supervised_mask.int().argmax())].tolist())
    request = Request("a", prompt, 12, ())
    tree = TreeSection(top_k=2, steps=3, nodes=7)
    engine = Engine(model, drafter=DflashDrafter(head, model, tree))
    (drafted,), (plain,) = list(engine.generate([request])), list(Engine(model).generate([request]))
    assert drafted.token_ids == plain.token_ids
    assert drafted.statistics.rounds < plain.statistics.rounds / 2


def test_training_is_evaluated_resumed_and_goes_on_with_its_own_shape(
    tiny_config: Configure, store_states: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = {"evaluate_every": 3, "evaluate_prompts": 2, "evaluate_tokens": 8}
    tree = {"evaluate_tree": {"top_k": 2, "steps": 3, "nodes": 6}}
    schedule = {"max_steps": 8, "checkpoint_every": 2, "keep_checkpoints": 9}
    config = tiny_config("run", **DSPARK, **evaluation, **tree, **schedule)
    store_states(config)
    manifest, lines = run(config), lines_of(config)
    assert any("tau" in line for line in lines)
    stop_at(config, 4)
    again = run(config)
    assert "continuing from checkpoint step-000004" in capsys.readouterr().out
    assert without_speed(lines_of(config)) == without_speed(lines)
    assert [shard.sha256 for shard in again.shards] == [shard.sha256 for shard in manifest.shards]
    kept = {"max_share_of_target": 2.0}
    start = {"start_from": str(head_of(config)), "max_steps": 1}
    tuned = tiny_config("tuned", algorithm="dspark", dspark=kept, **start)
    store_states(tuned)
    run(tuned)
    assert load_head(head_of(tuned))[0].shape == load_head(head_of(config))[0].shape
    for name, changes, field in (
        ("rank", {"dspark": {**kept, "markov_rank": 5}}, "train.dspark.markov_rank"),
        ("other", {"algorithm": "dflash", "dflash": kept}, "train.algorithm"),
    ):
        other = tiny_config(name, **{"algorithm": "dspark", **start, **changes})
        store_states(other)
        with pytest.raises(ConfigError) as refused:
            run(other)
        assert refused.value.where == field


def test_a_tree_is_as_deep_as_a_block_predicts(tiny_config: Configure) -> None:
    deep = {"evaluate_every": 1, "evaluate_tree": {"top_k": 2, "steps": 4, "nodes": 6}}
    with pytest.raises(ConfigError, match="a block of 3 predicts 3 tokens"):
        tiny_config("run", **DSPARK, **deep)
