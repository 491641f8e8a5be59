"""Chained heads in training: against the definition position by position, the start, the stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pipeline.config import RunConfig, TargetSection, TreeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Request
from pipeline.errors import ConfigError, HeadError
from pipeline.exchange.export import export_head
from pipeline.exchange.imports import import_head
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.init import inverse_norm, random_init
from pipeline.heads.mtp.drafter import ChainedDrafter
from pipeline.heads.mtp.init import init_chain, solve_least_squares
from pipeline.heads.mtp.shape import ChainedHead, ChainedShape
from pipeline.heads.mtp.ttt import ChainedModel, unroll_chain
from pipeline.heads.registry import load_head
from pipeline.heads.unrolled import Objective
from pipeline.learning.batches import read_batch
from pipeline.learning.corpus import Piece
from pipeline.store.states import StatesSample
from pipeline.target.forward import capture_states, register_packed_attention
from pipeline.target.open import open_target
from pipeline.target.rotary import RotaryTable, rotate
from pipeline.train.plan import plan
from pipeline.train.stage import run
from tests.train.conftest import SMALL, SMALL_VOCABULARY, make_sample
from tests.train.memory_corpus import MemoryCorpus, pack_samples
from tests.train.runs import Configure, Store, head_of, lines_of, stop_at, without_speed
from tests.train.test_unroll import Constants, constants, documents

HEADS, STEPS, DECAY = 3, 5, 0.7
CPU = torch.device("cpu")


def chain_of(heads: int = HEADS, **changes: Any) -> ChainedHead:
    """Random float64 heads of the small sizes."""
    shape = ChainedShape(
        **SMALL,
        heads=heads,
    ).model_copy(update=changes)
    made = ChainedHead(shape)
    random_init(made, 3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
            else:
                parameter.mul_(10)
        if shape.chain_input == "final":
            made.target_norm.copy_(torch.rand(16, generator=generator) + 0.5)
    made.set_vocabulary(SMALL_VOCABULARY)
    return made.double()


def model_of(head: ChainedHead, *, steps: int = STEPS) -> ChainedModel:
    objective = Objective(steps, DECAY)
    return ChainedModel(head, *constants(), objective, max_length=12, dtype=torch.float64)


class Mistake(NamedTuple):
    """Planted off-by-ones."""

    token: int = 0
    own: int = 0  # whose keys a head attends to: those of the head so many before it
    causal: int = 0
    first: int = 0  # embeddings at the front that are zero, beyond one
    teacher: int = 0
    rope: int = 0  # of steps behind the last head


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-5).sqrt() * weight


def step_by_definition(
    head: ChainedHead, fixed: Constants, sample: StatesSample, steps: int, mistake: Mistake
) -> list[dict[int, Tensor]]:
    """What lm_head reads: of each step by position, query by query."""
    weights = {name: tensor for name, tensor in head.named_parameters()}
    rotary = RotaryTable(head.shape.rope_config(), 64, device=CPU, dtype=torch.float64)
    x, heads = sample.token_ids.tolist(), head.shape.heads
    if head.shape.chain_input == "aux":
        before = {t: weights["fc.weight"] @ aux for t, aux in enumerate(sample.aux_states)}
    else:
        last = sample.aux_states[:, 32:]
        before = {t: normed(aux, head.target_norm) for t, aux in enumerate(last)}
    keys: list[dict[int, tuple[Tensor, Tensor]]] = []
    outputs: list[dict[int, Tensor]] = []
    for step in range(steps):
        k, beyond = min(step, heads - 1), max(0, step - heads + 1)
        own = {
            name.removeprefix(f"mtp_layers.{k}."): weight
            for name, weight in weights.items()
            if name.startswith(f"mtp_layers.{k}.")
        }
        made: dict[int, tuple[Tensor, Tensor]] = {}
        keys.append(made)
        given: dict[int, Tensor] = {}
        for t in range(len(x) - step - 1):
            token = fixed.embedding[x[min(t + step + 1 + mistake.token, len(x) - 1)]]
            if t <= mistake.first and not beyond:
                token = torch.zeros_like(token)
            hidden = normed(before[t], own["hidden_layernorm.weight"])
            both = torch.cat((hidden, normed(token, own["token_layernorm.weight"])))
            joined = own["input_proj.weight"] @ both
            read = normed(joined, own["input_layernorm.weight"])
            place = torch.tensor(t + beyond + (mistake.rope if beyond else 0))
            turn = rotary.at(place)
            query, key, value = (
                own[f"self_attn.{name}_proj.weight"] @ read
                + own.get(f"self_attn.{name}_proj.bias", torch.zeros(1, dtype=torch.float64))
                for name in "qkv"
            )
            query = rotate(query.view(4, 4), *turn)
            made[t] = rotate(key.view(2, 4), *turn), value.view(2, 4)
            past = keys[max(step - beyond - mistake.own, 0)]
            seen = [past[at] for at in range(t + 1 + mistake.causal) if at in past and at <= t + 1]
            seen += [keys[step - back][t] for back in reversed(range(beyond))]
            pairs = zip(*seen, strict=True)
            theirs, values = (torch.stack(each).repeat_interleave(2, 1) for each in pairs)
            share = ((theirs * query).sum(-1) / 2).softmax(0)
            mixed = (share[..., None] * values).sum(0).flatten()
            stream = joined + own["self_attn.o_proj.weight"] @ mixed
            inner = normed(stream, own["post_attention_layernorm.weight"])
            gate = torch.nn.functional.silu(own["mlp.gate_proj.weight"] @ inner)
            stream = stream + own["mlp.down_proj.weight"] @ (
                gate * (own["mlp.up_proj.weight"] @ inner)
            )
            given[t] = normed(stream, own["final_layernorm.weight"])
        outputs.append(given)
        before = given
    return outputs


def by_definition(
    head: ChainedHead, fixed: Constants, mistake: Mistake, *, steps: int = STEPS
) -> tuple[Tensor, list[int], list[int]]:
    """Loss, hits and labels of each step."""
    drafts = head.target_ids().tolist()
    loss, labels = torch.zeros((), dtype=torch.float64), 0
    hits, counted = [0] * steps, [0] * steps
    for sample in documents():
        teachers = {position: row for row, position in enumerate(sample.final_positions.tolist())}
        x = sample.token_ids.tolist()
        outputs = step_by_definition(head, fixed, sample, steps, mistake)
        for j in (j for j in range(2, len(x)) if sample.supervised_mask[j]):
            labels += 1
            for k in range(min(steps, j - 1)):
                logits = head.lm_head(outputs[k][j - k - 2])
                counted[k] += 1
                hits[k] += drafts[int(logits.argmax())] == x[j]
                if x[j] in drafts:
                    row = min(teachers[j - 1] + mistake.teacher, len(sample.final_states) - 1)
                    target = fixed.lm_head[torch.tensor(drafts)] @ sample.final_states[row]
                    gain = (target.softmax(-1) * logits.log_softmax(-1)).sum()
                    loss = loss - DECAY**k * gain
    return loss / labels, hits, counted


@pytest.mark.parametrize("steps", [3, 5])
@pytest.mark.parametrize(
    "changes", [{}, {"chain_input": "final"}, {"attention_bias": True}], ids=str
)
def test_loss_accuracy_and_gradients_follow_the_definition(
    changes: dict[str, Any], steps: int
) -> None:
    head = chain_of(**changes)
    result = model_of(head, steps=steps)(pack_samples(documents()))
    parameters = list(head.parameters())
    gradients = torch.autograd.grad(result.loss, parameters)
    expected, hits, counted = by_definition(head, constants(), Mistake(), steps=steps)
    torch.testing.assert_close(result.loss, expected, rtol=1e-10, atol=1e-10)
    assert result.hits.tolist() == hits and result.labels.tolist() == counted
    assert counted[0] > counted[2] > 0
    defined = torch.autograd.grad(expected, parameters)
    torch.testing.assert_close(gradients, defined, rtol=1e-8, atol=1e-9)
    assert all(float(gradient.abs().max()) > 0 for gradient in gradients)


@pytest.mark.parametrize(
    "mistake",
    [
        Mistake(token=1),
        Mistake(own=1),
        Mistake(causal=1),
        Mistake(causal=-1),
        Mistake(first=1),
        Mistake(first=-1),
        Mistake(teacher=1),
        Mistake(rope=1),
    ],
    ids=str,
)
def test_planted_off_by_one_is_noticed(mistake: Mistake) -> None:
    head = chain_of()
    loss = model_of(head)(pack_samples(documents())).loss.detach()
    if mistake.causal < 0:  # a position that sees itself no longer sees nothing at the front
        mistake = mistake._replace(causal=0, own=2)
    wrong, _, _ = by_definition(head, constants(), mistake)
    assert abs(float(loss - wrong.detach())) > 1e-4


def test_heads_of_a_batch_do_not_see_its_other_documents() -> None:
    head, samples = chain_of(), documents()
    corpus = MemoryCorpus(samples)
    together = model_of(head)(pack_samples(samples), divisor=1.0).loss.detach()
    alone = [
        model_of(head)(read_batch(corpus, [Piece(0, n, 0, len(s.token_ids))]), divisor=1.0).loss
        for n, s in enumerate(samples)
    ]
    torch.testing.assert_close(together, torch.stack(alone).sum().detach())


def test_parts_of_a_long_sample_have_the_gradient_of_the_whole() -> None:
    head, corpus = chain_of(), MemoryCorpus(documents())
    model = model_of(head)
    whole = model(read_batch(corpus, [Piece(0, 1, 0, 12)]), divisor=7.0).loss
    parts = [
        model(read_batch(corpus, [Piece(0, 1, start, start + 4)]), divisor=7.0).loss
        for start in (0, 4, 8)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)


def test_fewer_steps_than_heads_are_no_training() -> None:
    with pytest.raises(AssertionError, match="without a step"):
        model_of(chain_of(), steps=2)(pack_samples(documents()))


def test_a_start_by_least_squares_knows_more_than_a_random_one() -> None:
    """A target whose next state is a linear map of the last token's embedding and the state before
    it: each head can say so of the one before."""
    generator = torch.Generator().manual_seed(1)
    fixed = Constants(*(each.float() for each in constants()))
    norm = torch.rand(16, generator=generator) + 0.5
    maps = torch.randn(2, 16, 16, generator=generator) / 4

    def sample(number: int) -> StatesSample:
        ids = torch.randint(0, 24, (24,), generator=generator)
        aux = torch.randn(24, 48, generator=generator) / 10
        state, states = torch.zeros(16), []
        for token in ids:
            state = state @ maps[0] / 2 + fixed.embedding[token] @ maps[1]
            states.append(state)
        final = torch.stack(states)
        aux[:, 32:] += final
        final = final / final.square().mean(-1, keepdim=True).sqrt() * norm
        return make_sample(str(number), ids.tolist(), range(4, 24), aux, final)

    batches = [
        pack_samples([sample(4 * number + each) for each in range(4)]) for number in range(12)
    ]

    def started(solve: bool) -> tuple[ChainedHead, Any]:
        made = ChainedHead(chain_of().shape.model_copy(update={"draft_vocab_size": 24}))
        random_init(made, 3)
        made.set_vocabulary(torch.arange(24))
        init_chain(made, fixed.lm_head, norm)
        if solve:
            with torch.no_grad():
                for layer in made.layers:
                    layer.self_attn.o_proj.weight.mul_(0.1)
                    layer.mlp.down_proj.weight.mul_(0.1)
            fits = solve_least_squares(made, fixed.embedding, norm, batches, batches)
            assert len(fits) == HEADS and all(fit.held_out > 0 for fit in fits)
            assert all(fit.explained > 0.5 for fit in fits)
        objective = Objective(HEADS, 1.0)
        model = ChainedModel(made, *fixed, objective, max_length=24, dtype=torch.float32)
        return made, model(batches[1])

    (first, solved), (second, _), (_, plain) = started(True), started(True), started(False)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    assert float(solved.loss.detach()) < 0.9 * float(plain.loss.detach())
    torch.testing.assert_close(inverse_norm(norm) * norm, torch.ones(16), atol=0.02, rtol=0)


CHAIN = {"heads": 3, "draft_vocab_size": 96, "intermediate_size": 32, "max_share_of_target": 3.0}
EVALUATION = {
    "evaluate_every": 10,
    "evaluate_prompts": 2,
    "evaluate_tokens": 8,
    "evaluate_tree": {"top_k": 2, "steps": 3, "nodes": 6},
}


def decoded(config: RunConfig, head: ChainedHead, layers: tuple[int, ...], sample: Any) -> Any:
    """(drafted, plain) completions of one prompt."""
    model = DecoderModel.load(
        Path(config.target.source), layers, device=CPU, dtype=torch.float32, max_length=64
    )
    prompt = tuple(sample.token_ids[: int(sample.supervised_mask.int().argmax())].tolist())
    request, tree = Request("a", prompt, 12, ()), TreeSection(top_k=2, steps=3, nodes=7)
    engine = Engine(model, drafter=ChainedDrafter(head, model, tree))
    return *engine.generate([request]), *Engine(model).generate([request])


def test_overfits_exports_and_drafts(
    tiny_config: Configure, store_states: Store, states: list[StatesSample]
) -> None:
    settings = {"epochs": 150, "batch_tokens": 48, "learning_rate": 1e-2, "checkpoint_every": 200}
    config = tiny_config("run", head={**CHAIN, "init_layer": "random"}, **settings)
    parent = store_states(config, states[:2])
    manifest = run(config)
    first, last = lines_of(config)[0], lines_of(config)[-1]
    assert last["loss"] < 0.8 * first["loss"]
    assert last["acc_0"] > 0.9 > first["acc_0"] and last["acc_2"] > 0.9
    head, card = load_head(head_of(config), expected=parent.contract)
    assert isinstance(head, ChainedHead) and head.shape.heads == 3
    assert card.metrics["acc_0"] == last["acc_0"]
    assert manifest.details["parameters"] == head.count_parameters()
    planned = plan(config)
    assert planned.state == "complete" and planned.parameters == head.count_parameters()
    drafted, plain = decoded(config, head, parent.contract.capture_layers, states[0])
    assert drafted.token_ids == plain.token_ids
    assert drafted.statistics.rounds < plain.statistics.rounds / 2


@pytest.mark.parametrize("init", ["least_squares", "target_last", "random"])
def test_heads_that_read_the_final_state_train(
    tiny_config: Configure,
    store_states: Store,
    states: list[StatesSample],
    target_directory: Path,
    tmp_path: Path,
    init: str,
) -> None:
    """Their states end with the last layer; others are refused. What is trained without lm_head can
    be exported, and comes back."""
    settings: dict[str, Any] = {"epochs": 60, "batch_tokens": 48, "learning_rate": 1e-2}
    settings |= {"checkpoint_every": 200, "train_lm_head": init == "random"}
    head = {**CHAIN, "chain_input": "final", "init_layer": init}
    refused = tiny_config("other", head=head, **settings)
    store_states(refused, states[:2])
    with pytest.raises(ConfigError, match="end with layer 4, the target with 7") as error:
        run(refused)
    assert error.value.where == "train.head_config.chain_input=final"
    layers = (1, 3, 7)
    plain = tiny_config("run", head=head, **settings)
    target = plain.target.model_copy(update={"capture_layers": layers})
    config = plain.model_copy(update={"target": target})
    section = TargetSection(
        source=str(target_directory), device="cpu", dtype="bfloat16", capture_layers=layers
    )
    described = open_target(section)
    opened = described.load(attention=register_packed_attention())
    samples = []
    for each in states[:2]:
        ids = each.token_ids.tolist()
        with torch.no_grad():
            ((aux, final),) = capture_states(opened, [ids])
        supervised = each.supervised_mask.nonzero().flatten().tolist()
        samples.append(make_sample(each.sample_id, ids, supervised, aux, final))
    store_states(config, samples)
    run(config)
    first, last = lines_of(config)[0], lines_of(config)[-1]
    # Of two samples, nearly all is solved before the first step.
    fallen = 0.0 if init == "least_squares" else 0.05
    assert last["loss"] < first["loss"] - fallen and last["acc_1"] > 0.8
    made, _ = load_head(head_of(config))
    assert isinstance(made, ChainedHead) and made.aux_projection is None
    torch.testing.assert_close(made.target_norm, described.weights.final_norm().float())
    seen, expected = made.project(samples[0].aux_states.float()), samples[0].final_states.float()
    seen = seen[samples[0].final_positions.long()]
    assert float((seen - expected).norm() / expected.norm()) < 0.02
    drafted, undrafted = decoded(config, made, layers, states[0])
    assert drafted.token_ids == undrafted.token_ids
    out, back = tmp_path / "mtp", tmp_path / "back"
    if init == "random":
        with pytest.raises(HeadError, match="lm_head was trained"):
            export_head(str(head_of(config)), format="mtp", out=str(out))
        return
    export_head(str(head_of(config)), format="mtp", out=str(out))
    import_head(str(out), target=str(target_directory), out=str(back))
    stored = [(each / "model.safetensors").read_bytes() for each in (head_of(config), back)]
    assert stored[0] == stored[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_training_that_was_stopped_continues_bit_for_bit(
    tiny_config: Configure, store_states: Store, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    settings = {"checkpoint_every": 2, "max_steps": 8, "keep_checkpoints": 9, "ttt_steps": 4}
    evaluation = {**EVALUATION, "evaluate_every": 3}
    config = tiny_config("run", head=CHAIN, **settings, **evaluation, dtype=dtype)
    store_states(config)
    manifest, lines = run(config), lines_of(config)
    assert any("tau" in line for line in lines)
    stop_at(config, 4)
    capsys.readouterr()
    again = run(config)
    assert "continuing from checkpoint step-000004" in capsys.readouterr().out
    assert without_speed(lines_of(config)) == without_speed(lines)
    assert [shard.sha256 for shard in again.shards] == [shard.sha256 for shard in manifest.shards]


def test_one_head_is_the_eagle3_head(tiny_config: Configure, store_states: Store) -> None:
    """With `heads: 1` in the configuration, and without a word of it: the same bytes."""
    sums = []
    for name, head in (("given", {"heads": 1}), ("default", {})):
        config = tiny_config(name, head=head, max_steps=3)
        store_states(config)
        manifest = run(config)
        sums.append([shard.sha256 for shard in manifest.shards if "safetensors" in shard.name])
        assert isinstance(load_head(head_of(config))[0], Eagle3Head)
    assert sums[0] == sums[1] and len(sums[0]) == 1


def test_fine_tuning_keeps_the_shape_and_refuses_another(
    tiny_config: Configure, store_states: Store
) -> None:
    first = tiny_config("first", head=CHAIN, max_steps=2)
    store_states(first)
    run(first)
    earlier, _ = load_head(head_of(first))
    kept = {"max_share_of_target": 3.0}
    start = {"start_from": str(head_of(first)), "max_steps": 1}
    again = tiny_config("again", head={**kept, "draft_vocab_size": 96}, **start)
    store_states(again)
    run(again)
    assert load_head(head_of(again))[0].shape == earlier.shape
    for name, settings, head, field in (
        ("more", start, {"heads": 2}, "train.head_config.heads"),
        ("norms", start, {"fc_norm": True}, "train.head_config.fc_norm"),
        ("short", {**start, "ttt_steps": 2}, {}, "train.ttt_steps"),
        ("compiled", {**start, "compile": True}, {}, "train.compile"),
        ("other", {**start, "algorithm": "dflash"}, {}, "train.algorithm"),
    ):
        config = tiny_config(name, head={**CHAIN, **kept, "heads": 1, **head}, **settings)
        store_states(config)
        with pytest.raises(ConfigError) as refused:
            run(config)
        assert refused.value.where == field


@pytest.mark.parametrize(
    ("head", "settings", "what"),
    [
        ({"heads": 9}, {}, "heads"),
        ({"heads": 0}, {}, "heads"),
        ({"chain_input": "final"}, {}, "chain_input requires heads >= 2"),
        ({"heads": 2, "fc_norm": True}, {}, "fc_norm requires heads: 1"),
        ({"heads": 2, "norm_output": True}, {}, "norm_output requires heads: 1"),
        ({"heads": 2, "draft_window": 64}, {}, "draft_window requires heads: 1"),
        ({"heads": 4}, {}, "ttt_steps is 3, too few to train 4 heads"),
        ({"heads": 2}, {"compile": True}, "compile requires head_config.heads: 1"),
        (
            {"heads": 2},
            {"activation_checkpointing": True},
            "activation_checkpointing requires head_config.heads: 1",
        ),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other(
    tiny_config: Configure, head: dict[str, Any], settings: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        tiny_config("run", head=head, **settings)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"draft_vocab_size": 97}, "train.head_config.draft_vocab_size"),
        ({"num_key_value_heads": 3}, "train.head_config.num_key_value_heads"),
        ({"max_share_of_target": 0.05}, "train.head_config.max_share_of_target"),
    ],
    ids=str,
)
def test_impossible_shapes_are_refused_by_name(
    tiny_config: Configure, store_states: Store, changes: dict[str, Any], what: str
) -> None:
    config = tiny_config("run", head={**CHAIN, **changes})
    store_states(config)
    with pytest.raises(ConfigError) as refused:
        run(config)
    assert refused.value.where == what


@torch.no_grad()
def test_outputs_are_those_of_the_rows_that_are_asked_for() -> None:
    head, batch = chain_of(), pack_samples(documents())
    rotary = RotaryTable(head.shape.rope_config(), 64, device=CPU, dtype=torch.float64)
    every = torch.arange(batch.tokens)
    given = [
        unroll_chain(head, constants().embedding, batch, rotary, rows=rows, steps=STEPS)
        for rows in (every, every[3::2].contiguous())
    ]
    for whole, some in zip(given[0].outputs, given[1].outputs, strict=True):
        torch.testing.assert_close(whole[3::2], some)
    moved = replace(batch, aux_states=batch.aux_states.roll(1, 0))
    other = unroll_chain(head, constants().embedding, moved, rotary, rows=every, steps=STEPS)
    assert float((other.outputs[2] - given[0].outputs[2]).abs().max()) > 1e-3
