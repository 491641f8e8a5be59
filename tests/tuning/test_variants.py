"""What a drafter leaves open beside the tree: budgets, blocks, and the variant that is picked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.config import DrafterSection, EvalSection, SynthSection, TreeSection
from pipeline.decoder.drafter import DrafterFactory
from pipeline.decoder.model import DecoderModel
from pipeline.drafters.registry import load_drafter
from pipeline.errors import ConfigError
from pipeline.heads.dflash.drafter import DflashDrafter
from pipeline.tuning import tune
from pipeline.tuning import tune as decode_plan
from pipeline.tuning.cost import Costs
from pipeline.tuning.trace import acceptance
from tests.decoder.conftest import random_tokens
from tests.decoder.test_dflash import block_head

NEW_TOKENS = 32
PROMPTS = [(random_tokens(300 + row, seed=row) % 8).tolist() for row in range(4)]
CHAIN = TreeSection(top_k=1, steps=2, nodes=3)
DEEP = TreeSection(top_k=1, steps=4, nodes=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(directory)
    device = torch.device("cpu")
    return DecoderModel.load(
        directory, (1, 3, 4), device=device, dtype=torch.float32, max_length=1000
    )


def _factory(model: DecoderModel, name: str, **settings: Any) -> DrafterFactory:
    target: Any = None
    head = block_head(model, proposed=torch.arange(8)) if name == "dflash" else None
    section = DrafterSection(name=name, **settings)
    factory = load_drafter(section, model, target, head)
    assert factory is not None
    return factory


def _chosen(factories: list[DrafterFactory], name: str) -> list[int]:
    return [factory.settings[name] for factory in factories]


@pytest.mark.parametrize("kv", ["streaming", "snapkv"])
def test_budgets_are_doubles_that_the_context_exceeds(model: DecoderModel, kv: str) -> None:
    factory = _factory(model, "self_spec", kv=kv, budget="auto")
    for context, budgets in ((90, [128]), (256, [128]), (257, [128, 256]), (999, [128, 256, 512])):
        assert _chosen(factory.variants(context), "budget") == budgets
    wide = _factory(model, "self_spec", kv=kv, budget="auto", recent=200)
    assert _chosen(wide.variants(999), "budget") == [256, 512], "recent ones fit into the budget"
    fixed = _factory(model, "self_spec", kv=kv, budget=300)
    assert fixed.variants(999) == [fixed] == [fixed.variant({"budget": 128})]


def test_blocks_are_the_trained_one_and_its_halves(model: DecoderModel) -> None:
    factory = _factory(model, "dflash")
    assert _chosen(factory.variants(9), "block_size") == [5], "two tokens are too few for a try"
    head = block_head(model, proposed=torch.arange(8))
    head.shape = head.shape.model_copy(update={"block_size": 8})
    target: Any = None
    whole = load_drafter(DrafterSection(name="dflash"), model, target, head)
    assert whole is not None
    assert [(each.settings["block_size"], each.depths) for each in whole.variants(9)] == [
        (4, (1, 2, 3)),
        (8, (1, 2, 3, 4, 5, 6, 7)),
    ]
    drafters = whole(CHAIN), whole.variant({"block_size": 4})(CHAIN)
    assert all(isinstance(each, DflashDrafter) for each in drafters)
    assert [each.lookahead for each in drafters] == [8, 4]


def _costs(by_budget: dict[int, float]) -> Callable[..., Costs]:
    """A token of plain decoding takes 1; a draft step what its drafter's budget says."""

    def costs(model: DecoderModel, drafter: Any, *_: Any, **__: Any) -> Costs:
        step = by_budget[drafter._window + 64]
        return Costs({1: 1.0, 64: 1.5}, {1: step, 8: step}, {1: step}, {2: 0.0})

    return costs


@pytest.mark.parametrize(
    ("steps", "budget"), [({128: 0.1, 256: 0.1}, 256), ({128: 0.01, 256: 0.4}, 128)]
)
def test_the_fastest_variant_is_picked(
    model: DecoderModel,
    monkeypatch: pytest.MonkeyPatch,
    steps: dict[int, float],
    budget: int,
) -> None:
    """A larger budget accepts more: it is picked unless its drafts cost too much."""
    for module in (tune, decode_plan):
        monkeypatch.setattr(module, "measure_costs", _costs(steps))
    factory = _factory(model, "self_spec", kv="streaming", budget="auto")
    choice = tune.tune(model, factory, PROMPTS, rows=(1,), new_tokens=NEW_TOKENS)[1]
    assert choice.settings == {"budget": budget}
    traced = decode_plan.trace_variants(model, factory, PROMPTS, NEW_TOKENS)
    assert _chosen([each for each, _ in traced], "budget") == [128, 256]
    less, more = (acceptance(traces, DEEP) for _, traces in traced)
    assert less < more, "else any choice would be right"
    cell = decode_plan.plan_cell(model, "self_spec", traced, 1, 300)
    assert cell.factory.settings == {"budget": budget}
    for other, traces in traced:
        alone = decode_plan.plan_cell(model, "self_spec", [(other, traces)], 1, 300)
        assert alone.speedup <= cell.speedup


@pytest.mark.parametrize("trained", [2, 3, 8])
def test_blocks_of_every_size_are_timed_and_one_is_picked(
    model: DecoderModel, trained: int
) -> None:
    """Also those that predict fewer tokens than a chain of the cost model has steps."""
    head = block_head(model, proposed=torch.arange(8))
    head.shape = head.shape.model_copy(update={"block_size": trained})
    target: Any = None
    factory = load_drafter(DrafterSection(name="dflash"), model, target, head)
    assert factory is not None
    prompts = [prompt[:20] for prompt in PROMPTS]
    choice = tune.tune(model, factory, prompts, rows=(1,), new_tokens=8)[1]
    assert choice.settings["block_size"] in {trained, trained // 2}
    assert choice.shape.steps < choice.settings["block_size"]
    traced = decode_plan.trace_variants(model, factory, prompts, 8)
    cell = decode_plan.plan_cell(model, "dflash", traced, 2, 20)
    assert cell.tree.steps < cell.factory.settings["block_size"] <= trained


def test_what_is_left_open_needs_an_automatic_tree(model: DecoderModel) -> None:
    auto = {"name": "self_spec", "budget": "auto"}
    with pytest.raises(ValidationError, match=r"budget=auto is picked .* set tree to auto, or"):
        EvalSection.model_validate({"drafter": auto})
    section = EvalSection.model_validate({"drafter": auto, "tree": "auto"})
    assert section.drafter.is_open
    sources = [{"source": "x.jsonl"}]
    with pytest.raises(ValidationError, match=r"drafter\.budget cannot be auto"):
        SynthSection.model_validate({"sources": sources, "drafter": auto})
    with pytest.raises(ConfigError, match="budget auto is picked together") as refused:
        _factory(model, "self_spec", budget="auto")(CHAIN)
    assert refused.value.where == "drafter.budget"
    with pytest.raises(ConfigError, match="6 is more than the 5 tokens") as refused:
        _factory(model, "dflash", block_size=6)
    assert refused.value.where == "drafter.block_size"
    with pytest.raises(ConfigError, match="4 is more than the 3 tokens that a block predicts"):
        deep = TreeSection(top_k=1, steps=4, nodes=5)
        _factory(model, "dflash", block_size=4)(deep)
