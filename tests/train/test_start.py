"""The head before its first step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pipeline.config import HeadSection, RunConfig
from pipeline.eagle3.head import Eagle3Head
from pipeline.eagle3.vocab import DraftVocabulary
from pipeline.errors import ConfigError, TargetError
from pipeline.records import Manifest
from pipeline.target.weights import TargetWeights
from pipeline.train import run
from pipeline.train.loop import rate_at, total_steps
from pipeline.train.start import check_share, head_shape, start_head


def test_share_is_measured_and_refused(target_directory: Path) -> None:
    shape = head_shape(HeadSection(draft_vocab_size=48), target_directory, 96)
    parameters, share = check_share(shape, 100_000, 1.0)
    assert parameters == Eagle3Head(shape).count_parameters()
    assert share == parameters / 100_000
    with pytest.raises(ConfigError) as caught:
        check_share(shape, 100_000, 0.05)
    assert f"{parameters:,} parameters" in str(caught.value) and f"{share:.1%}" in str(caught.value)
    assert "train.head.draft_vocab_size (now 48)" in caught.value.fix


def test_stage_refuses_a_large_head(tiny_config: Callable[..., RunConfig], store_states: Callable[..., Manifest]) -> None:
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
    assert caught.value.where == f"train.head.{field}"


def test_starting_weights_come_from_the_target(target_directory: Path) -> None:
    section = HeadSection(draft_vocab_size=10, intermediate_size=16)
    shape = head_shape(section, target_directory, 96)
    vocabulary = DraftVocabulary(torch.arange(5, 95, 9), 1.0)
    weights = TargetWeights(target_directory)
    head, again = (start_head(section, shape, vocabulary, weights, last_layer=7, seed=4) for _ in range(2))
    assert torch.equal(head.lm_head.weight, weights.lm_head()[vocabulary.target_ids].float())
    assert torch.equal(head.midlayer.self_attn.q_proj.weight[:, 32:], weights.layer(7)["self_attn.q_proj.weight"].float())
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))
    random = start_head(section.model_copy(update={"init_lm_head": "random", "init_layer": "random"}), shape, vocabulary, weights, last_layer=7, seed=4)
    assert not torch.equal(random.lm_head.weight, head.lm_head.weight)
    with pytest.raises(TargetError, match="init_layer=random"):
        start_head(section, shape, vocabulary, weights, last_layer=8, seed=4)


def test_learning_rate(tiny_config: Callable[..., RunConfig]) -> None:
    section = tiny_config(learning_rate=1.0, warmup_share=0.1).train
    rates = [rate_at(step, 100, section) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0 and rates[-1] == pytest.approx(0.05)
    assert all(before > after for before, after in pairwise(rates[10:]))


def test_number_of_steps(tiny_config: Callable[..., RunConfig]) -> None:
    section = tiny_config(accumulate=3).train
    assert [total_steps(section, batches, 2) for batches in (5, 6, 17, 18)] == [1, 1, 2, 3]
    assert total_steps(tiny_config(max_steps=7).train, 100, 1) == 7
