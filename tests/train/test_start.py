"""The head before its first step."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pipeline.config import HeadSection
from pipeline.eagle3.checkpoint import load_head
from pipeline.eagle3.head import Eagle3Head
from pipeline.eagle3.init import DraftVocabulary
from pipeline.errors import ConfigError, ContractMismatch, HeadError, TargetError
from pipeline.store.states import StatesSample
from pipeline.target.weights import TargetWeights
from pipeline.train import run
from pipeline.train.loop import rate_at, total_steps
from pipeline.train.start.initial_head import check_share, head_shape, new_head
from tests.train.runs import Configure, Store, head_of


def test_share_is_measured_and_refused(target_directory: Path) -> None:
    shape = head_shape(HeadSection(draft_vocab_size=48), target_directory, 96)
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
        head_shape(section, target_directory, 96)
    assert caught.value.where == f"train.head_config.{field}"


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True}, {"norm_output": True}], ids=str)
def test_norms_of_the_configuration_reach_the_head(
    target_directory: Path, flags: dict[str, bool]
) -> None:
    section = HeadSection.model_validate({"draft_vocab_size": 48, **flags})
    shape = head_shape(section, target_directory, 96)
    assert shape.fc_norm == flags.get("fc_norm", False)
    assert shape.norm_output == flags.get("norm_output", False)


def test_starting_weights_come_from_the_target(target_directory: Path) -> None:
    section = HeadSection(draft_vocab_size=10, intermediate_size=16)
    shape = head_shape(section, target_directory, 96)
    vocabulary = DraftVocabulary(torch.arange(5, 95, 9), 1.0)
    weights = TargetWeights(target_directory)
    head, again = (
        new_head(section, shape, vocabulary, weights, last_layer=7, seed=4) for _ in range(2)
    )
    assert torch.equal(head.lm_head.weight, weights.lm_head()[vocabulary.target_ids].float())
    query = weights.layer(7)["self_attn.q_proj.weight"].float()
    assert torch.equal(head.midlayer.self_attn.q_proj.weight[:, 32:], query)
    pairs = zip(head.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    unlike = section.model_copy(update={"init_lm_head": "random", "init_layer": "random"})
    random = new_head(unlike, shape, vocabulary, weights, last_layer=7, seed=4)
    assert not torch.equal(random.lm_head.weight, head.lm_head.weight)
    with pytest.raises(TargetError, match="init_layer=random"):
        new_head(section, shape, vocabulary, weights, last_layer=8, seed=4)


def test_learning_rate(tiny_config: Configure) -> None:
    section = tiny_config(learning_rate=1.0, warmup_share=0.1).train
    rates = [rate_at(step, 100, section) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0 and rates[-1] == pytest.approx(0.05)
    assert all(before > after for before, after in pairwise(rates[10:]))


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
        head={"draft_vocab_size": 4096},
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
        problem = f"{asked} is asked for, but the head that training starts from has {own}"
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
