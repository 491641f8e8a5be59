"""Every family of the bundled decoder against transformers: replies longer than its windows, from
trees whose branches are accepted, over every backend of a CPU; and what these tests would see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from pipeline.config import TreeSection
from pipeline.decoder import model as decoder_model
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel, LayerKind, check_supported, two_kinds
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.eager import EagerOps
from pipeline.decoder.request import Request
from pipeline.drafters.self_spec import SnapKvDrafter, StreamingDrafter
from pipeline.drafters.standalone import StandaloneDrafter
from pipeline.errors import ConfigError, UnsupportedModel
from tests.decoder.conftest import FAMILIES, load_model, random_tokens, states_of
from tests.decoder.drafting import requests_of
from tests.decoder.test_engine import OracleDrafter
from tests.target.families import tiny_config

Make = Callable[[str], Path]
#: By prompt.
Replies = dict[tuple[int, ...], tuple[int, ...]]
#: On both sides of the windows of 64 and 70 positions and of page borders.
LENGTHS = 5, 62, 90, 130
#: What Llama has not.
OTHERS = (
    *("mistral-sliding", "qwen2-sliding", "phi3", "phi3-partial"),
    *("smollm3", "gemma", "gemma3"),
)


BFLOAT16 = (
    decoder_model.pick_ops(torch.device("cpu"), torch.bfloat16),
    TorchOps(torch.bfloat16),
    EagerOps(torch.bfloat16),
)


@pytest.fixture(scope="module")
def generated(make_target: Make) -> Callable[[str], Replies]:
    """Prompts of `requests()` → what transformers' own `generate` answers, by family."""
    known: dict[str, Replies] = {}

    def answer(family: str) -> dict[tuple[int, ...], tuple[int, ...]]:
        if family not in known:
            hf: Any = AutoModelForCausalLM.from_pretrained(make_target(family))
            known[family] = {
                each.prompt_ids: _generate(hf, each.prompt_ids, each.max_new_tokens)
                for each in requests()
            }
        return known[family]

    return answer


@torch.inference_mode()
def _generate(hf: Any, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    whole = hf.generate(ids, attention_mask=mask, max_new_tokens=count, **settings)
    return tuple(whole[0, len(prompt) :].tolist())


def requests() -> list[Request]:
    return [replace(each, stop_ids=()) for each in requests_of(LENGTHS, new_tokens=20)]


def replies(engine: Engine) -> Replies:
    prompts = {each.request_id: each.prompt_ids for each in requests()}
    done = list(engine.generate(requests()))
    assert all(each.error is None for each in done)
    return {prompts[each.request_id]: each.token_ids for each in done}


@pytest.mark.parametrize(
    ("backend", "family"),
    # Other tests run Llama's own parts over all of them.
    [
        *(("picked", family) for family in FAMILIES),
        *((backend, family) for backend in ("eager", "definition") for family in OTHERS),
    ],
)
@torch.inference_mode()
def test_trees_give_what_transformers_generates(
    make_target: Make,
    generated: Callable[[str], Replies],
    backend: str,
    family: str,
) -> None:
    ops = {"picked": None, "eager": EagerOps(), "definition": TorchOps()}[backend]
    model = load_model(make_target(family), ops=ops)
    wanted = generated(family)
    assert replies(Engine(model, slots=3, prefill_tokens=50)) == wanted
    engine = Engine(model, drafter=OracleDrafter(wanted, 3), slots=2, prefill_tokens=50)
    assert replies(engine) == wanted


def _no_window(kinds: list[LayerKind]) -> list[LayerKind]:
    return [each._replace(window=0) for each in kinds]


def _one_more(kinds: list[LayerKind]) -> list[LayerKind]:
    return [each._replace(window=each.window + 1 if each.window else 0) for each in kinds]


def _all_turned(kinds: list[LayerKind]) -> list[LayerKind]:
    return [each._replace(rope=each.rope or "all") for each in kinds]


def _one_rope(kinds: list[LayerKind]) -> list[LayerKind]:
    return [each._replace(rope="full_attention") for each in kinds]


#: Family, and what becomes of its layers' kinds.
KINDS = [
    ("mistral-sliding", _no_window),
    ("mistral-sliding", _one_more),
    ("qwen2-sliding", _one_more),
    ("gemma3", _one_more),
    ("gemma3", _one_rope),
    ("smollm3", _all_turned),
]
LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("gemma", {"gelu": False}),
    ("gemma3", {"update_norms": None}),
    ("gemma3", {"local": False}),
]


@pytest.mark.parametrize(("family", "fault"), KINDS)
@torch.inference_mode()
def test_layers_of_another_kind_are_seen(
    make_target: Make,
    generated: Callable[[str], Replies],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    fault: Callable[[list[LayerKind]], list[LayerKind]],
) -> None:
    right = decoder_model.layer_kinds
    monkeypatch.setattr(decoder_model, "layer_kinds", lambda *given: fault(right(*given)))
    assert replies(Engine(load_model(make_target(family)))) != generated(family)


@pytest.mark.parametrize(("family", "fields"), LAYERS)
@torch.inference_mode()
def test_faults_of_layers_are_seen(
    make_target: Make,
    generated: Callable[[str], Replies],
    family: str,
    fields: dict[str, Any],
) -> None:
    model = load_model(make_target(family))
    layers = tuple(replace(layer, **fields) for layer in model.layers)
    model.stack = replace(model.stack, layers=layers)
    assert replies(Engine(model)) != generated(family)


@pytest.mark.parametrize("family", ["gemma", "gemma3"])
@torch.inference_mode()
def test_embeddings_that_are_not_scaled_are_seen(
    make_target: Make,
    generated: Callable[[str], Replies],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    monkeypatch.setattr(DecoderModel, "embed", lambda model, tokens: model.embedding[tokens])
    assert replies(Engine(load_model(make_target(family)))) != generated(family)


@pytest.mark.parametrize("family", OTHERS)
@torch.inference_mode()
def test_states_in_bfloat16_are_as_near_to_float32_as_transformers_are(
    make_target: Make, family: str
) -> None:
    directory, ids = make_target(family), random_tokens(120, seed=5)
    hf: Any = AutoModelForCausalLM
    exact, theirs = (
        hf.from_pretrained(directory, dtype=dtype)(ids[None]).logits[0].float()
        for dtype in (torch.float32, torch.bfloat16)
    )
    for ops in BFLOAT16:
        ours = _logits(load_model(directory, ops=ops), ids).float()
        assert (ours - exact).abs().mean() <= 1.15 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("rounded", [False, True])
@torch.inference_mode()
def test_norms_in_bfloat16_multiply_by_one_plus_a_weight_unrounded(
    make_target: Make, rounded: bool
) -> None:
    """Of Gemma. A sum that was rounded first gives other numbers."""
    directory, x = make_target("gemma3"), torch.randn(500, 48).bfloat16()
    hf: Any = AutoModelForCausalLM.from_pretrained(directory)
    wanted = hf.model.layers[0].input_layernorm(x)  # bfloat16, as x
    for ops in BFLOAT16:
        model = load_model(directory, ops=ops)
        weight = model.input_norm.bfloat16().float() if rounded else model.input_norm
        normed, _ = model.ops.add_rms_norm(x, None, weight, model.stack.eps)
        assert ((normed == wanted).float().mean() > 0.99) != rounded


def _logits(model: DecoderModel, ids: Tensor) -> Tensor:
    return model.logits(states_of(model, ids).final)


@pytest.mark.parametrize(
    ("family", "fields", "problem"),
    [
        ("gemma3", {"hidden_activation": "silu"}, "activation 'silu'"),
        ("gemma", {"use_bidirectional_attention": True}, "attention to later tokens"),
        ("gemma3", {"attn_logit_softcapping": 30.0}, "soft-capped attention"),
        ("gemma3", {"sliding_window": 63}, "sliding window of 63 tokens"),
        ("llama", {"hidden_act": "gelu"}, "activation 'gelu'"),
    ],
)
def test_what_the_decoder_would_get_wrong_is_refused(
    make_target: Make, family: str, fields: dict[str, Any], problem: str
) -> None:
    config: Any = AutoConfig.from_pretrained(make_target(family))
    check_supported(config, 200, where="x")
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModel, match=problem):
        check_supported(config, 200, where="x")


def test_three_kinds_of_layers_are_refused() -> None:
    kinds = [LayerKind(0, "all"), LayerKind(0, None), LayerKind(64, "all")]
    with pytest.raises(UnsupportedModel, match="layers of 3 kinds"):
        two_kinds(kinds)


def test_drafts_over_a_part_of_the_cache_are_refused_beside_windows(make_target: Make) -> None:
    model = load_model(make_target("gemma3"))
    tree = TreeSection(top_k=2, steps=2, nodes=4)
    with pytest.raises(ConfigError, match="see 64 positions"):
        StreamingDrafter(model, tree, budget=128)
    with pytest.raises(ConfigError, match="see 64 positions"):
        SnapKvDrafter(model, tree, budget=128, recent=64, window=8, pool=5)
    # Texts that a window has room for are read as without one.
    StreamingDrafter(load_model(make_target("gemma3"), max_length=64), tree, budget=128)


@pytest.mark.parametrize("family", ["gemma3", "mistral3"])
@torch.inference_mode()
def test_the_language_model_of_one_that_reads_images(tmp_path: Path, family: str) -> None:
    config = tiny_config(family, sliding_window=64)
    torch.manual_seed(0)
    hf: Any = AutoModelForImageTextToText.from_config(config)  # type: ignore[no-untyped-call]
    for name, parameter in hf.named_parameters():
        if "norm" in name:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    hf.save_pretrained(tmp_path)
    ids = torch.randint(96, (110,), generator=torch.Generator().manual_seed(0))
    ours = _logits(load_model(tmp_path), ids)
    theirs = hf.eval()(input_ids=ids[None]).logits[0]
    assert (ours - theirs).abs().max() <= 2e-5 * float(theirs.abs().max())


@pytest.mark.parametrize("family", ["mistral-sliding", "gemma3", "smollm3"])
@torch.inference_mode()
def test_a_target_that_drafts_for_itself_is_right(make_target: Make, family: str) -> None:
    """Beams see what the target sees behind its window: all of them are accepted."""
    target, draft = (load_model(make_target(family)) for _ in range(2))
    drafter = StandaloneDrafter(target, draft, TreeSection(top_k=1, steps=3, nodes=4))
    for done in Engine(target, drafter=drafter, slots=2).generate(requests()):
        statistics = done.statistics
        assert statistics.rounds <= -(-statistics.round_tokens // 4) + 1
