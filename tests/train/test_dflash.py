"""Blocks in training: against the definition one anchor at a time, what they may see, the stage."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.config import TreeSection
from pipeline.config.train import Loss
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Request
from pipeline.errors import ConfigError
from pipeline.heads.dflash.blocks import (
    BlockObjective,
    Blocks,
    DflashModel,
    cut_blocks,
    draw_anchors,
)
from pipeline.heads.dflash.drafter import DflashDrafter
from pipeline.heads.dflash.init import BlockFit, solve_least_squares
from pipeline.heads.dflash.shape import BlockLayer, DflashHead, DflashShape
from pipeline.heads.init import random_init
from pipeline.heads.registry import load_head
from pipeline.heads.trained import StepResult
from pipeline.learning.batches import ReadAhead, Schedule, TrainBatch, read_batch
from pipeline.learning.corpus import Piece
from pipeline.store.states import StatesSample
from pipeline.target.rotary import RotaryTable, rotate
from pipeline.train.plan import plan
from pipeline.train.stage import run
from tests.train.conftest import SMALL, SMALL_VOCABULARY, make_sample
from tests.train.memory_corpus import MemoryCorpus, pack_samples
from tests.train.runs import Configure, Store, head_of, lines_of, stop_at, without_speed
from tests.train.test_unroll import Constants, constants, documents

BLOCK, DECAY = 4, 2.0
CPU = torch.device("cpu")


@pytest.fixture
def head() -> DflashHead:
    """A random float64 drafter of two layers of the small sizes."""
    shape = DflashShape(
        **SMALL,
        num_hidden_layers=2,
        block_size=BLOCK,
        mask_token_id=23,
    )
    return random_head(shape)


def random_head(shape: DflashShape, seed: int = 4) -> DflashHead:
    """In float64, with the small vocabulary."""
    made = DflashHead(shape)
    random_init(made, 3)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
            else:
                parameter.mul_(30 if "markov" in name else 8)
    made.set_vocabulary(SMALL_VOCABULARY)
    return made.double()


def model_of(head: DflashHead, anchors: int = 99, **changes: Any) -> DflashModel:
    objective = BlockObjective(anchors, DECAY, 0)._replace(**changes)
    return DflashModel(head, *constants(), objective, max_length=12, dtype=torch.float64)


class Mistake(NamedTuple):
    """Planted off-by-ones."""

    context: int = 0  # entries that a block sees beyond those before its anchor
    rope: int = 0
    teacher: int = 0
    weight: int = 0


def attended(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One query [Q, d] over keys and values, each [G, d] → [Q, d]."""
    groups = query.shape[0] // keys[0].shape[0]
    key, value = (torch.stack(each).repeat_interleave(groups, 1) for each in (keys, values))
    weights = ((key * query).sum(-1) / query.shape[-1] ** 0.5).softmax(0)
    return torch.as_tensor((weights[..., None] * value).sum(0))


def block_by_definition(
    head: DflashHead, fixed: Constants, sample: StatesSample, anchor: int, mistake: Mistake
) -> Tensor:
    """What lm_head reads at each position of the block behind `anchor` [b, H], query by query."""
    rotary = RotaryTable(head.shape.rope_config(), 64, device=CPU, dtype=torch.float64)
    seen = sample.aux_states[: anchor + mistake.context]
    tokens = [int(sample.token_ids[anchor]), *[head.shape.mask_token_id] * (BLOCK - 1)]
    hidden = fixed.embedding[torch.tensor(tokens)]
    states = head.hidden_norm(seen @ head.fc.weight.T)

    def turned(x: Tensor, position: int) -> Tensor:
        return rotate(x, *rotary.at(torch.tensor(position)))

    for layer in head.layers:
        assert isinstance(layer, BlockLayer)
        own = layer.self_attn
        normed = layer.input_layernorm(hidden)
        keys, values = [], []
        for index, row in enumerate([*states, *normed]):
            inside = index - len(states)
            position = index if inside < 0 else anchor + inside + mistake.rope
            keys.append(turned(own.k_norm((own.k_proj.weight @ row).view(-1, 4)), position))
            values.append((own.v_proj.weight @ row).view(-1, 4))
        mixed = []
        for index, row in enumerate(normed):
            query = own.q_norm((own.q_proj.weight @ row).view(-1, 4))
            query = turned(query, anchor + index + mistake.rope)
            mixed.append(attended(query, keys, values).flatten())
        hidden = hidden + torch.stack(mixed) @ own.o_proj.weight.T
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return torch.as_tensor(head.norm(hidden))


def by_definition(
    head: DflashHead, fixed: Constants, mistake: Mistake
) -> tuple[Tensor, list[int], list[int]]:
    """Loss, hits and labels of each position, with every anchor."""
    drafts = head.target_ids().tolist()
    loss, anchors = torch.zeros((), dtype=torch.float64), 0
    hits, counted = [0] * (BLOCK - 1), [0] * (BLOCK - 1)
    for sample in documents():
        teachers = {position: row for row, position in enumerate(sample.final_positions.tolist())}
        x, length = sample.token_ids.tolist(), len(sample.token_ids)
        labels = {j for j in range(2, length) if sample.supervised_mask[j]}
        for anchor in sorted(j - 1 for j in labels):
            anchors += 1
            states = block_by_definition(head, fixed, sample, anchor, mistake)
            for k in range(1, BLOCK):
                j = anchor + k
                if not all(between in labels for between in range(anchor + 1, j + 1)):
                    break
                counted[k - 1] += 1
                logits = head.lm_head(states[k])
                hits[k - 1] += drafts[int(logits.argmax())] == x[j]
                if x[j] in drafts:
                    row = min(teachers[j - 1] + mistake.teacher, len(sample.final_states) - 1)
                    target = fixed.lm_head[torch.tensor(drafts)] @ sample.final_states[row]
                    weight = math.exp(-(k - 1 + mistake.weight) / DECAY)
                    loss = loss - weight * (target.softmax(-1) * logits.log_softmax(-1)).sum()
    return loss / anchors, hits, counted


def test_loss_accuracy_and_gradients_follow_the_definition(head: DflashHead) -> None:
    result = model_of(head)(pack_samples(documents()))
    parameters = list(head.parameters())
    gradients = torch.autograd.grad(result.loss, parameters)
    expected, hits, counted = by_definition(head, constants(), Mistake())
    torch.testing.assert_close(result.loss, expected, rtol=1e-10, atol=1e-10)
    assert result.hits.tolist() == hits and result.labels.tolist() == counted
    assert counted == [12, 8, 5] and sum(hits) > 0
    defined = torch.autograd.grad(expected, parameters)
    torch.testing.assert_close(gradients, defined, rtol=1e-8, atol=1e-9)
    assert all(float(gradient.abs().max()) > 0 for gradient in gradients)


@pytest.mark.parametrize(
    "mistake",
    [
        Mistake(context=1),
        Mistake(context=-1),
        Mistake(rope=1),
        Mistake(teacher=1),
        Mistake(weight=1),
    ],
    ids=str,
)
def test_planted_off_by_one_is_noticed(head: DflashHead, mistake: Mistake) -> None:
    loss = model_of(head)(pack_samples(documents())).loss
    wrong, _, _ = by_definition(head, constants(), mistake)
    assert abs(float(loss.detach() - wrong.detach())) > 1e-4


def blocks_of(batch: TrainBatch) -> Blocks:
    return cut_blocks(batch, draw_anchors(batch, 99, 0), BLOCK)


@torch.no_grad()
def test_a_block_sees_what_is_before_its_anchor_and_nothing_else(head: DflashHead) -> None:
    """Each context entry and each anchor's token is changed in turn: which blocks notice?"""
    batch, model = pack_samples(documents()), model_of(head)
    blocks = blocks_of(batch)
    before = model.draft(batch, blocks)
    starts = [0, 9, 21, 26]
    document = [max(at for at, start in enumerate(starts) if start <= i) for i in range(26)]
    anchors = blocks.anchors.tolist()
    for entry in range(batch.tokens):
        aux = batch.aux_states.clone()
        aux[entry] += 1
        moved = (model.draft(replace(batch, aux_states=aux), blocks) - before).abs().amax((1, 2))
        own = [anchor > entry and document[anchor] == document[entry] for anchor in anchors]
        assert (moved > 1e-9).tolist() == own
        token_ids = batch.token_ids.clone()
        token_ids[entry] = (token_ids[entry] + 1) % 23
        changed = replace(batch, token_ids=token_ids)
        moved = (model.draft(changed, blocks) - before).abs().amax((1, 2))
        assert (moved > 1e-9).tolist() == [anchor == entry for anchor in anchors]


@torch.no_grad()
def test_a_block_is_what_it_would_be_alone(head: DflashHead) -> None:
    batch, model = pack_samples(documents()), model_of(head)
    every = model.draft(batch, blocks_of(batch))
    for number in range(len(batch.labels)):
        alone = cut_blocks(batch, torch.tensor([number]), BLOCK)
        torch.testing.assert_close(model.draft(batch, alone)[0], every[number])


def test_alignment_by_hand() -> None:
    """Document x0…x7 behind another, supervised x3 x4 x6 x7: drafting ends where the reply does."""
    mask = [0, 0, 0, 1, 1, 0, 1, 1]
    states = torch.zeros(8, 3), torch.zeros(8, 1)
    before = make_sample("a", [0] * 4, [2, 3], states[0][:4], states[1][:4])
    supervised = [index for index, own in enumerate(mask) if own]
    batch = pack_samples([before, make_sample("b", list(range(10, 18)), supervised, *states)])
    blocks = blocks_of(batch)
    assert blocks.anchors.tolist() == [1, 2, 6, 7, 9, 10]
    assert blocks.positions.tolist() == [1, 2, 2, 3, 5, 6]
    none = -1
    assert blocks.labels.tolist() == [
        [0, 1, none],
        [1, none, none],
        [2, 3, none],
        [3, none, none],
        [4, 5, none],
        [5, none, none],
    ]


def test_batches_carry_their_number() -> None:
    samples = documents()
    pieces = [Piece(0, number, 0, len(each.token_ids)) for number, each in enumerate(samples)]
    schedule = Schedule(pieces, budget=12, seed=0, epochs=4)
    numbers = [5, 0, 7, 1]
    with ReadAhead(MemoryCorpus(samples), schedule, numbers) as reader:
        assert [reader.take().number for _ in numbers] == numbers


def test_anchors_are_drawn_by_the_number_of_the_batch(head: DflashHead) -> None:
    batch = pack_samples(documents())
    draws = [draw_anchors(replace(batch, number=number), 5, 0).tolist() for number in range(40)]
    assert all(draw == sorted(set(draw)) and len(draw) == 5 for draw in draws)
    assert draws[3] == draw_anchors(replace(batch, number=3), 5, 0).tolist()
    assert draws[3] != draw_anchors(replace(batch, number=3), 5, 1).tolist()
    assert {number for draw in draws for number in draw} == set(range(len(batch.labels)))
    model = model_of(head, anchors=5)
    assert model.counted(batch) == 5 == int(model(batch).labels[0])
    losses = torch.stack([model(replace(batch, number=number)).loss for number in range(300)])
    whole = model_of(head)(batch).loss
    assert abs(float((losses.mean() - whole).detach())) < 0.03 * float(whole.detach())


def test_parts_of_a_long_sample_have_the_gradient_of_the_whole(head: DflashHead) -> None:
    """But for blocks that would reach over a cut: of one token, there are none."""
    head.shape = head.shape.model_copy(update={"block_size": 2})
    samples = documents()
    corpus, model = MemoryCorpus(samples), model_of(head)
    whole = read_batch(corpus, [Piece(0, 1, 0, 12)])
    parts = read_batch(corpus, [Piece(0, 1, start, start + 4) for start in (0, 4, 8)])
    parameters = list(head.parameters())
    gradients = [
        torch.autograd.grad(model(batch, divisor=7.0).loss, parameters) for batch in (whole, parts)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-11)


def test_kl_is_nothing_for_the_teacher_itself(head: DflashHead) -> None:
    """A drafter whose every state is the teacher's, over the whole vocabulary."""
    shape = head.shape.model_copy(update={"draft_vocab_size": 24})
    sure = DflashHead(shape).double()
    sure.set_vocabulary(torch.arange(24))
    batch = pack_samples(documents())
    batch = replace(batch, teacher_states=torch.ones_like(batch.teacher_states))
    with torch.no_grad():
        for layer in sure.layers:
            assert isinstance(layer, BlockLayer)
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        sure.lm_head.weight.copy_(constants().lm_head)
        embedding = torch.ones_like(constants().embedding)  # its norm is all ones
    objective = BlockObjective(99, DECAY, 0, "kl")
    fixed = (embedding, constants().lm_head)
    model = DflashModel(sure, *fixed, objective, max_length=12, dtype=torch.float64)
    assert abs(float(model(batch).loss.detach())) < 1e-4
    assert float(model_of(head, loss="kl")(pack_samples(documents())).loss.detach()) > 0.1


def linear_target(shape: DflashShape) -> tuple[Constants, list[TrainBatch]]:
    """A target whose next state is a linear map of the last token's embedding and of the state
    before it, which can be told from each other as those of real targets: by their means."""
    generator = torch.Generator().manual_seed(1)
    fixed = Constants(*(each.float() for each in constants()))
    fixed.embedding[:, 0] = 3.0
    fixed.embedding[shape.mask_token_id, 0] = -3.0
    maps = torch.randn(2, 16, 16, generator=generator) / 4

    def sample(number: int) -> StatesSample:
        ids = torch.randint(0, 23, (24,), generator=generator)
        aux = torch.randn(24, 48, generator=generator)
        aux[:, 0] = 3.0
        final = aux[:, 32:].roll(1, 0) @ maps[0] + fixed.embedding[ids] @ maps[1]
        final[:, 1] += 4
        final = 4 * final / final.square().mean(-1, keepdim=True).sqrt()
        return make_sample(str(number), ids.tolist(), range(4, 24), aux, final)

    return fixed, [
        pack_samples([sample(4 * number + each) for each in range(4)]) for number in range(9)
    ]


def started_on(
    shape: DflashShape, fixed: Constants, batches: list[TrainBatch], *, solve: bool, loss: Loss
) -> tuple[DflashModel, BlockFit | None]:
    """The model of a head that starts from `linear_target`, solved or random."""
    made, fit = DflashHead(shape), None
    random_init(made, 3)
    made.set_vocabulary(torch.arange(24))
    with torch.no_grad():
        made.lm_head.weight.copy_(fixed.lm_head)
    if solve:
        setting: dict[str, Any] = {"anchors": 99, "decay": DECAY, "seed": 0}
        fit = solve_least_squares(made, fixed.embedding, batches, **setting)
    objective = BlockObjective(99, DECAY, 0, loss)
    return DflashModel(made, *fixed, objective, max_length=24, dtype=torch.float32), fit


@torch.no_grad()
def moved_by(model: DflashModel, batch: TrainBatch, block: Blocks, back: int) -> list[float]:
    """By how much each position moves when the entry so far behind the root changes."""
    aux = batch.aux_states.clone()
    aux[int(block.anchors) - back, 32:] += torch.randn(16, generator=torch.Generator())
    change = model.draft(replace(batch, aux_states=aux), block) - model.draft(batch, block)
    return [float(each.norm()) for each in change[0]]


#: What `linear_target` needs of a shape.
LINEAR = {"draft_vocab_size": 24, "num_attention_heads": 8, "head_dim": 8}


def test_a_start_by_least_squares_knows_more_than_a_random_one(head: DflashHead) -> None:
    shape = head.shape.model_copy(update=LINEAR)
    fixed, batches = linear_target(shape)

    def started(solve: bool) -> tuple[DflashModel, StepResult]:
        model, fit = started_on(shape, fixed, batches, solve=solve, loss="cross_entropy")
        if fit:
            assert fit.rows == 9 * 80 and fit.held_out > 0
            assert fit.explained > 0.8 and 0.1 < fit.explained_by_attention < fit.explained
        return model, model(batches[1])

    (first, solved), (second, _), (_, plain) = started(True), started(True), started(False)
    for one, other in zip(first.head.parameters(), second.head.parameters(), strict=True):
        assert torch.equal(one, other)
    assert float(solved.loss.detach()) < 0.9 * float(plain.loss.detach())
    batch = batches[0]
    block = cut_blocks(batch, torch.tensor([15]), BLOCK)
    near, far = (moved_by(first, batch, block, back)[1] for back in (1, 4))
    assert near > 3 * far > 0


DFLASH = {
    "algorithm": "dflash",
    "dflash": {
        "draft_vocab_size": 96,
        "intermediate_size": 32,
        "block_size": 4,
        "max_share_of_target": 2.0,
        "anchors": 12,
    },
}
EVALUATION = {
    "evaluate_every": 10,
    "evaluate_prompts": 2,
    "evaluate_tokens": 8,
    "evaluate_tree": {"top_k": 2, "steps": 3, "nodes": 6},
}


def test_overfits_exports_and_drafts(
    tiny_config: Configure, store_states: Store, states: list[StatesSample]
) -> None:
    settings = {"epochs": 150, "batch_tokens": 48, "learning_rate": 1e-2, "checkpoint_every": 200}
    dflash = {**DFLASH["dflash"], "anchors": 40}  # type: ignore[dict-item]
    config = tiny_config("run", **{**DFLASH, **settings, "dflash": dflash})
    parent = store_states(config, states[:2])
    manifest = run(config)
    first, last = lines_of(config)[0], lines_of(config)[-1]
    assert last["loss"] < 0.8 * first["loss"]
    assert last["acc_0"] > 0.9 > first["acc_0"] and last["acc_2"] > 0.8
    head, card = load_head(head_of(config), expected=parent.contract)
    assert isinstance(head, DflashHead) and head.shape.block_size == 4
    assert card.metrics["acc_0"] == last["acc_0"]
    assert manifest.details["parameters"] == head.count_parameters()
    body = json.loads((head_of(config) / "config.json").read_text())
    assert body["architectures"] == ["DFlashDraftModel"] and body["model_type"] == "qwen3"
    layers = list(parent.contract.capture_layers)
    assert body["dflash_config"]["target_layer_ids"] == layers
    assert body["num_target_layers"] == 8 and body["block_size"] == 4
    planned = plan(config)
    assert planned.state == "complete" and f"{head.count_parameters():,}" in planned.basis[0]
    model = DecoderModel.load(
        Path(config.target.source), tuple(layers), device=CPU, dtype=torch.float32, max_length=64
    )
    sample = states[0]
    prompt = tuple(sample.token_ids[: int(sample.supervised_mask.int().argmax())].tolist())
    request = Request("a", prompt, 12, ())
    tree = TreeSection(top_k=2, steps=3, nodes=7)
    engine = Engine(model, drafter=DflashDrafter(head, model, tree))
    (drafted,), (plain,) = list(engine.generate([request])), list(Engine(model).generate([request]))
    assert drafted.token_ids == plain.token_ids
    assert drafted.statistics.rounds < plain.statistics.rounds / 2


def test_a_head_that_borrows_its_rows_is_trained_resumed_and_tuned(
    tiny_config: Configure, store_states: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that holds the target's rows as its own, and keeps them."""
    dflash = {**DFLASH["dflash"], "target_lm_head": True}  # type: ignore[dict-item]
    settings = {"algorithm": "dflash", "dflash": dflash, "learning_rate": 5e-3, **EVALUATION}
    schedule = {"max_steps": 8, "checkpoint_every": 2, "keep_checkpoints": 9, "evaluate_every": 4}
    config = tiny_config("run", **{**settings, **schedule})
    parent = store_states(config)
    manifest, lines = run(config), lines_of(config)
    head, _ = load_head(head_of(config), expected=parent.contract)
    assert isinstance(head, DflashHead) and head.shape.target_lm_head
    assert head.shape.draft_vocab_size == parent.contract.vocab_size
    assert manifest.details["parameters"] == head.count_parameters()
    assert "lm_head.weight" not in load_file(head_of(config) / "model.safetensors")
    assert f"{head.count_parameters():,}" in plan(config).basis[0]
    assert any("tau" in line for line in lines)
    whole = {**settings, **schedule, "dflash": DFLASH["dflash"], "train_lm_head": False}
    frozen = tiny_config("frozen", **whole)
    store_states(frozen)
    run(frozen)
    same = without_speed(lines)
    assert [each["loss"] for each in same] == [each["loss"] for each in lines_of(frozen)]
    tensors = load_head(head_of(frozen))[0].state_dict()
    del tensors["lm_head.weight"]
    assert tensors.keys() == head.state_dict().keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in head.state_dict().items())
    stop_at(config, 4)
    again = run(config)
    assert "continuing from checkpoint step-000004" in capsys.readouterr().out
    assert [shard.sha256 for shard in again.shards] == [shard.sha256 for shard in manifest.shards]
    kept = {"max_share_of_target": 2.0}
    tuned = tiny_config(
        "tuned", algorithm="dflash", start_from=str(head_of(config)), dflash=kept, max_steps=2
    )
    store_states(tuned)
    run(tuned)
    assert load_head(head_of(tuned))[0].shape == head.shape


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_training_that_was_stopped_continues_bit_for_bit(
    tiny_config: Configure, store_states: Store, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    settings = {**DFLASH, "checkpoint_every": 2, "max_steps": 8, "keep_checkpoints": 9}
    config = tiny_config("run", **settings, **{**EVALUATION, "evaluate_every": 3}, dtype=dtype)
    store_states(config)
    manifest, lines = run(config), lines_of(config)
    assert any("tau" in line for line in lines)
    stop_at(config, 4)
    capsys.readouterr()
    again = run(config)
    assert "continuing from checkpoint step-000004" in capsys.readouterr().out
    assert without_speed(lines_of(config)) == without_speed(lines)
    assert [shard.sha256 for shard in again.shards] == [shard.sha256 for shard in manifest.shards]


def test_fine_tuning_keeps_the_shape_and_refuses_another(
    tiny_config: Configure, store_states: Store
) -> None:
    first = tiny_config("first", **DFLASH, max_steps=2)
    store_states(first)
    run(first)
    earlier, _ = load_head(head_of(first))
    kept = {"max_share_of_target": 2.0}
    settings = {"algorithm": "dflash", "start_from": str(head_of(first)), "max_steps": 1}
    again = tiny_config("again", **settings, dflash=kept)
    store_states(again)
    run(again)
    assert load_head(head_of(again))[0].shape == earlier.shape
    for name, changes, field in (
        ("longer", {**settings, "dflash": {**kept, "block_size": 6}}, "train.dflash.block_size"),
        ("other", {**settings, "algorithm": "eagle3"}, "train.algorithm"),
    ):
        config = tiny_config(name, **changes)
        store_states(config)
        with pytest.raises(ConfigError) as refused:
            run(config)
        assert refused.value.where == field


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"dflash": {"draft_vocab_size": 97}}, "train.dflash.draft_vocab_size"),
        ({"dflash": {"num_key_value_heads": 3}}, "train.dflash.num_key_value_heads"),
        ({"dflash": {"mask_token_id": 96}}, "train.dflash.mask_token_id"),
        ({"dflash": {"layers": 9}}, "train.dflash.layers"),
        ({"dflash": {"max_share_of_target": 0.05}}, "train.dflash.max_share_of_target"),
    ],
    ids=str,
)
def test_impossible_shapes_are_refused_by_name(
    tiny_config: Configure, store_states: Store, changes: dict[str, Any], what: str
) -> None:
    dflash = {**DFLASH["dflash"], **changes["dflash"]}  # type: ignore[dict-item]
    config = tiny_config("run", algorithm="dflash", dflash=dflash)
    store_states(config)
    with pytest.raises(ConfigError) as refused:
        run(config)
    assert refused.value.where == what


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"compile": True}, "compile is only supported with algorithm: eagle3"),
        ({**EVALUATION, "evaluate_tree": {"steps": 4}}, "a block of 4 predicts 3 tokens"),
        ({"dflash": {"block_size": 17}}, "block_size"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other(
    tiny_config: Configure, changes: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        tiny_config("run", **{**DFLASH, **changes})
