"""The head before its first step."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import HeadSection, TargetSection, TrainSection
from pipeline.errors import ConfigError, ContractMismatch, HeadError
from pipeline.heads.eagle3.init import head_shape, new_head
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.init import DraftVocabulary, random_init
from pipeline.heads.registry import load_head
from pipeline.store.states import StatesSample
from pipeline.target.architecture import decoder_of
from pipeline.target.open import Target, open_target
from pipeline.target.rotary import RotaryTable
from pipeline.target.weights import TargetWeights
from pipeline.train.loop import rate_at, total_steps
from pipeline.train.prepare import check_share
from pipeline.train.stage import run
from tests.target.families import save_family, tiny_config
from tests.train.runs import Configure, Store, head_of


def test_share_is_measured_and_refused(target_directory: Path) -> None:
    shape = head_shape(HeadSection(draft_vocab_size=48), target_directory)
    parameters, share = check_share(shape, 100_000, 1.0)
    assert parameters == Eagle3Head(shape).count_parameters()
    assert share == parameters / 100_000
    with pytest.raises(ConfigError) as caught:
        check_share(shape, 100_000, 0.05)
    assert f"{parameters:,} parameters" in str(caught.value) and f"{share:.1%}" in str(caught.value)
    assert "train.head_config.draft_vocab_size (now 48)" in caught.value.fix


def test_stage_refuses_a_large_head(tiny_config: Configure, store_states: Store) -> None:
    config = tiny_config(head={"max_share_of_target": 0.05})
    store_states(config)
    with pytest.raises(ConfigError, match=r"above the limit of 5\.0%"):
        run(config)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        (HeadSection(draft_vocab_size=97), "draft_vocab_size"),
        (HeadSection(draft_vocab_size=48, num_key_value_heads=3), "num_key_value_heads"),
    ],
)
def test_impossible_shapes(target_directory: Path, section: HeadSection, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        head_shape(section, target_directory)
    assert caught.value.where == f"train.head_config.{field}"


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True}, {"norm_output": True}], ids=str)
def test_norms_of_the_configuration_reach_the_head(
    target_directory: Path, flags: dict[str, bool]
) -> None:
    section = HeadSection.model_validate({"draft_vocab_size": 48, **flags})
    shape = head_shape(section, target_directory)
    assert shape.fc_norm == flags.get("fc_norm", False)
    assert shape.norm_output == flags.get("norm_output", False)


def test_starting_weights_come_from_the_target(target_directory: Path) -> None:
    section = HeadSection(draft_vocab_size=10, intermediate_size=16, init_layer="target_last")
    shape = head_shape(section, target_directory)
    vocabulary = DraftVocabulary(torch.arange(5, 95, 9), 1.0)
    weights = TargetWeights(target_directory)
    head, again = (
        new_head(
            TrainSection(head_config=section), shape, vocabulary, weights, num_layers=8, seed=4
        )
        for _ in range(2)
    )
    assert torch.equal(head.lm_head.weight, weights.lm_head()[vocabulary.target_ids].float())
    query = weights.layer(7)["self_attn.q_proj.weight"].float()
    assert torch.equal(head.midlayer.self_attn.q_proj.weight[:, 32:], query)
    pairs = zip(head.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    unlike = section.model_copy(update={"init_lm_head": "random", "init_layer": "random"})
    random = new_head(
        TrainSection(head_config=unlike), shape, vocabulary, weights, num_layers=8, seed=4
    )
    assert not torch.equal(random.lm_head.weight, head.lm_head.weight)
    # A layer of which nothing can be copied.
    bare = new_head(
        TrainSection(head_config=section), shape, vocabulary, weights, num_layers=9, seed=4
    )
    assert torch.equal(
        bare.midlayer.self_attn.q_proj.weight, random.midlayer.self_attn.q_proj.weight
    )
    assert torch.equal(bare.lm_head.weight, head.lm_head.weight)


#: What of the layer each family gives; "norms" and lm_head come from all of them.
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
COPIED = {
    "qwen3": {*ATTENTION, "mlp"},
    "gemma3": {*ATTENTION, "mlp"},  # wrapped; norms of 1 + weight
    "cohere": {*ATTENTION, "mlp"},
    "granite": {*ATTENTION, "mlp"},
    "mixtral": ATTENTION,
    "llama4": ATTENTION,
    "gpt_oss": ATTENTION,
    "deepseek_v3": set(),  # latent attention
    "phi3": {"o_proj"},
}


@pytest.fixture(scope="module", params=COPIED)
def started(
    request: pytest.FixtureRequest, tmp_path_factory: Any, tiny_target: Path
) -> tuple[str, Target, Eagle3Head]:
    """A family, a random target of it, and a head that begins from it."""
    directory = save_family(request.param, tmp_path_factory.mktemp("family"), tiny_target)
    target = open_target(TargetSection(source=str(directory), device="cpu", dtype="float32"))
    section = HeadSection(
        draft_vocab_size=48,
        intermediate_size=16,
        max_share_of_target=1,
        init_layer="target_last",
    )
    shape = head_shape(section, directory)
    vocabulary = DraftVocabulary(torch.arange(1, 96, 2), 1.0)
    head = new_head(
        TrainSection(head_config=section), shape, vocabulary, target.weights, num_layers=8, seed=4
    )
    return request.param, target, head


def test_a_head_takes_from_any_family_what_fits(
    started: tuple[str, Target, Eagle3Head],
) -> None:
    family, target, head = started
    blank = Eagle3Head(head.shape)
    random_init(blank, 4)
    own, plain = (dict(model.midlayer.named_parameters()) for model in (head, blank))
    changed = {name.split(".")[-2] for name in own if not torch.equal(own[name], plain[name])}
    parts = {"gate_proj", "up_proj", "down_proj"}
    copied = COPIED[family] - {"mlp"} | (parts if "mlp" in COPIED[family] else set())
    assert changed - {"hidden_norm", "post_attention_layernorm"} == copied
    layer = target.weights.layer(7)
    gemma = family == "gemma3"  # which norms what attention writes, too
    name = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
    before_mlp = layer.get(f"{name}.weight")
    if before_mlp is not None:  # Cohere's layers have one norm
        assert torch.equal(head.midlayer.post_attention_layernorm.weight, before_mlp)
    assert "hidden_norm" in changed


def test_a_head_s_output_is_the_target_s(started: tuple[str, Target, Eagle3Head]) -> None:
    """Given what the target's last layer leaves, norm and lm_head give the target's logits."""
    family, target, head = started
    model = target.load(attention="eager").model
    before: list[torch.Tensor] = []
    hook = decoder_of(model).norm.register_forward_pre_hook(lambda _m, x: before.append(x[0][0]))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[5, 17, 31, 8]])).logits[0]
        (state,) = before
        if family == "cohere":  # its norms take out the mean as well
            state = state - state.mean(-1, keepdim=True)
        torch.testing.assert_close(head.logits(state), logits[:, 1::2], rtol=1e-3, atol=1e-3)
    hook.remove()


@pytest.mark.parametrize(
    ("family", "theta"), [("gemma3", 1_000_000.0), ("glm4_moe", 10_000.0), ("qwen3_vl", 500_000.0)]
)
def test_a_head_turns_whole_heads_by_the_rotation_of_full_attention(
    family: str, theta: float, tmp_path: Path
) -> None:
    """Gemma 3 has two rotations, GLM turns half a head, Qwen3-VL has sections for images."""
    tiny_config(family).save_pretrained(tmp_path)
    shape = head_shape(HeadSection(draft_vocab_size=48), tmp_path)
    assert shape.rope_parameters == {"rope_type": "default", "rope_theta": theta}
    cpu, exact = torch.device("cpu"), torch.float32
    assert RotaryTable(shape.rope_config(), 5, device=cpu, dtype=exact).cos.shape == (5, 8)


def test_the_number_of_query_heads_need_not_divide_the_hidden_size(target_directory: Path) -> None:
    """GLM-4.5-Air has 96 on a hidden size of 4,096; a rotation is of one head."""
    section = HeadSection(draft_vocab_size=48, num_attention_heads=6)
    rope, cpu = head_shape(section, target_directory).rope_config(), torch.device("cpu")
    assert RotaryTable(rope, 5, device=cpu, dtype=torch.float32).cos.shape == (5, 8)


@torch.no_grad()
def test_scores_begin_as_large_as_the_target_s(
    started: tuple[str, Target, Eagle3Head],
) -> None:
    """A head has no norms of queries and keys and no scale of its own; random ones begin small."""
    family, target, head = started
    hidden = torch.randn(200, 32)

    def deviation(query: torch.Tensor, key: torch.Tensor, scale: float) -> float:
        groups = query.shape[1] // key.shape[1]
        keys = key.repeat_interleave(groups, 1)
        return float(torch.einsum("qhd,khd->hqk", query, keys).std() * scale)

    query, key, _ = head.midlayer.project_qkv(torch.zeros(200, 32), hidden)
    own = deviation(query, key, 8**-0.5)
    if "q_proj" not in COPIED[family]:
        assert own < 0.5
        return
    layer = decoder_of(target.load(attention="eager").model).layers[-1]
    attention, read = layer.self_attn, layer.input_layernorm(hidden)
    same = torch.nn.Identity()
    query, key = (
        getattr(attention, f"{name}_norm", same)(
            getattr(attention, f"{name}_proj")(read).view(200, -1, 8)
        )
        for name in "qk"
    )
    assert 0.8 < own / deviation(query, key, attention.scaling) < 1.25


def test_learning_rate(tiny_config: Configure) -> None:
    section = tiny_config(learning_rate=1.0, warmup_share=0.1).train
    rates = [rate_at(step, 100, section) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0 and rates[-1] == pytest.approx(0.05)
    assert all(before > after for before, after in pairwise(rates[10:]))
    short = tiny_config(warmup_share=0.9).train
    assert all(0 < rate_at(step, 3, short) <= short.learning_rate for step in range(3))


def test_number_of_steps(tiny_config: Configure) -> None:
    section = tiny_config(accumulate=3).train
    assert [total_steps(section, batches, 2) for batches in (5, 6, 17, 18)] == [1, 1, 2, 3]
    assert total_steps(tiny_config(max_steps=7).train, 100, 1) == 7


def test_fine_tuning_keeps_vocabulary_and_shape(
    tiny_config: Configure,
    store_states: Store,
    states: list[StatesSample],
) -> None:
    first = tiny_config("first", max_steps=3)
    store_states(first, states[:4])
    run(first)
    before, _ = load_head(head_of(first))
    other_data = states[6:]
    # The default draft vocabulary of 4,096 asks for nothing.
    again = tiny_config(
        "again",
        max_steps=1,
        learning_rate=1e-9,
        dtype="float32",
        start_from=str(head_of(first)),
        # What it starts from is as large as it is.
        head={"draft_vocab_size": 4096, "max_share_of_target": 0.05},
    )
    store_states(again, other_data)
    manifest = run(again)
    after, card = load_head(head_of(again))
    assert torch.equal(after.d2t, before.d2t) and torch.equal(after.t2d, before.t2d)
    assert after.shape == before.shape
    for now, then in zip(after.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=1e-6)  # one step of 1e-9 away
    supervised = [sample.token_ids[sample.supervised_mask.bool()] for sample in other_data]
    covered = before.t2d[torch.cat(supervised).long()].double().mean()
    assert manifest.details["coverage"] == pytest.approx(float(covered))
    assert manifest.details["draft_vocab_size"] == 48
    assert card.provenance["start_from"]["head"] == "head"


def test_fine_tuning_refuses_another_shape_or_target(
    tiny_config: Configure, store_states: Store, tmp_path: Path
) -> None:
    first = tiny_config("first", max_steps=1)
    store_states(first)
    run(first)
    head = str(head_of(first))
    fixed = (("draft_vocab_size", 32, 48), ("intermediate_size", 16, 32), ("fc_norm", True, False))
    for field, asked, own in fixed:
        config = tiny_config("again", start_from=head, head={field: asked})
        store_states(config)
        problem = f"{asked} is configured, but the head that training starts from has {own}"
        with pytest.raises(ConfigError, match=problem) as caught:
            run(config)
        assert caught.value.where == f"train.head_config.{field}"
        shutil.rmtree(config.run.uri)
    config = tiny_config("again", start_from=str(tmp_path))
    store_states(config)
    with pytest.raises(HeadError, match=r"has no config\.json"):
        run(config)
    card = json.loads((head_of(first) / "eagle3.json").read_text())
    card["contract"]["capture_layers"] = [0, 2, 5]
    (head_of(first) / "eagle3.json").write_text(json.dumps(card))
    shutil.rmtree(config.run.uri)
    config = tiny_config("again", start_from=head)
    store_states(config)
    with pytest.raises(ContractMismatch, match="capture_layers"):
        run(config)


def test_frozen_lm_head_stays_as_it_started(
    tiny_config: Configure,
    store_states: Store,
    target_directory: Path,
) -> None:
    config = tiny_config(
        max_steps=4, train_lm_head=False, learning_rate=1e-2, dtype="float32", checkpoint_every=2
    )
    store_states(config)
    run(config)
    head, _ = load_head(head_of(config))
    rows = TargetWeights(target_directory).lm_head()[head.target_ids()]
    assert torch.equal(head.lm_head.weight, rows.float())
    assert not torch.equal(head.norm.weight, TargetWeights(target_directory).final_norm().float())
