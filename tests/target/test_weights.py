"""What the decoder reads of a checkpoint is transformers' model, or it is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.config import TargetSection
from pipeline.decoder.model import DecoderModel, pick_ops
from pipeline.errors import TargetError, UnsupportedModel
from pipeline.target.forward import load_model
from pipeline.target.open import open_target
from tests.decoder.conftest import states_of

Tensors = dict[str, Tensor]


def _change(directory: Path, change: Callable[[Tensors], Any], **config: Any) -> None:
    path, settings = directory / "model.safetensors", directory / "config.json"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    settings.write_text(json.dumps(json.loads(settings.read_text()) | config))


def _copied(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


_REFUSED: dict[str, tuple[Callable[[Tensors], Any], dict[str, Any], str]] = {
    "tied with another lm_head": (
        lambda _: None,
        {"tie_word_embeddings": True},
        r"lm_head\.weight: differs from model\.embed_tokens\.weight, but config\.json says "
        r"tie_word_embeddings=true \(fix: set tie_word_embeddings to false .* or remove",
    ),
    "tied with a longer lm_head": (
        lambda t: t.update({"lm_head.weight": torch.cat((t["model.embed_tokens.weight"],) * 2)}),
        {"tie_word_embeddings": True},
        r"lm_head\.weight: differs",
    ),
    "tied with a packed lm_head": (
        lambda t: (t.pop("lm_head.weight"), t.update({"lm_head.qweight": torch.zeros(4, 4)})),
        {"tie_word_embeddings": True},
        r"lm_head\.qweight: differs",
    ),
    "untied without lm_head": (
        lambda t: t.pop("lm_head.weight"),
        {},
        r"no lm_head\.weight, and config\.json says tie_word_embeddings=false",
    ),
    "a bias that is not stored": (
        lambda _: None,
        {"attention_bias": True},
        r"has no tensor 'model\.layers\.0\.self_attn\.q_proj\.bias'",
    ),
    "a layer that is not stored": (
        lambda _: None,
        {"num_hidden_layers": 9},
        r"has no tensor 'model\.layers\.8\.",
    ),
    "another width": (
        lambda _: None,
        {"intermediate_size": 40},
        r"mlp\.gate_proj\.weight has shape \[48, 32\], by config\.json it has \[40, 32\]",
    ),
    "a padded vocabulary": (
        lambda _: None,
        {"vocab_size": 999},
        r"embed_tokens\.weight has shape .* by config\.json it has \[999, 32\]",
    ),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_weights_that_are_not_the_configuration_s_are_refused(name: str, target_copy: Path) -> None:
    change, config, message = _REFUSED[name]
    _change(target_copy, change, **config)
    with pytest.raises(TargetError, match=message):
        open_target(TargetSection(source=str(target_copy)))


def _biases(tensors: Tensors) -> None:
    for index in range(8):
        for part, size in (("q", 32), ("k", 16), ("v", 16)):
            tensors[f"model.layers.{index}.self_attn.{part}_proj.bias"] = torch.ones(size)


def _head_norms(tensors: Tensors) -> None:
    for index in range(8):
        for part in "qk":
            tensors[f"model.layers.{index}.self_attn.{part}_norm.weight"] = torch.full((8,), 3.0)


def _old_rotary(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


_SURPLUS: dict[str, tuple[Callable[[Tensors], Any], dict[str, Any]]] = {
    "an equal copy": (_copied, {"tie_word_embeddings": True}),
    "biases": (_biases, {}),
    "norms of heads": (_head_norms, {}),
    "more layers": (lambda _: None, {"num_hidden_layers": 6}),
    "rotary buffers": (_old_rotary, {}),
}


@pytest.mark.parametrize("name", _SURPLUS)
def test_surplus_tensors_are_not_read(
    name: str, capsys: pytest.CaptureFixture[str], target_copy: Path
) -> None:
    change, config = _SURPLUS[name]
    _change(target_copy, change, **config)
    section = TargetSection(source=str(target_copy), capture_layers=(1, 2, 3))
    contract = open_target(section).contract
    named = name not in ("rotary buffers", "an equal copy")
    assert ("are not read" in capsys.readouterr().out) == named
    _assert_equal_logits(target_copy)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target_copy)
    assert contract.parameters == sum(each.numel() for each in model.parameters())


def test_a_model_that_transformers_would_complete_at_random_is_not_loaded(
    target_copy: Path,
) -> None:
    contract = open_target(TargetSection(source=str(target_copy))).contract
    _change(target_copy, lambda tensors: tensors.pop("model.layers.3.mlp.up_proj.weight"))
    with pytest.raises(TargetError, match=r"no tensor 'model\.layers\.3\.mlp\.up_proj\.weight'"):
        load_model(TargetSection(source=str(target_copy), device="cpu"), target_copy, contract)


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "llama3": _LLAMA3,
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn with its own factors": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 0.7,
    },
    "proportional": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "partial": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
_PLAIN = {"theta", "partial"}
#: family → what its class reads that changes the maths, and an older spelling of the same.
_COMMON: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads of another size": {"head_dim": 24},
    "one key for all": {"num_key_value_heads": 1},
    "as many keys as queries": {"num_key_value_heads": 4},
    "eps": {"rms_norm_eps": 0.3},
    "tied": {"tie_word_embeddings": True},
    "padded vocabulary": {"vocab_size": 96},
    "gelu": {"hidden_act": "gelu"},
    "sliding window": {"sliding_window": 16},
    "wide sliding window": {"sliding_window": 512},
    **{f"rope {name}": {"rope_parameters": rope} for name, rope in _ROPES.items()},
}
_OWN: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "biases": {"attention_bias": True},
        "biased MLPs": {"mlp_bias": True},
        "pretraining_tp": {"pretraining_tp": 2},
    },
    "mistral": {"no window": {"sliding_window": None}},
    "qwen2": {
        "used window": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
    },
    "qwen3": {
        "biases": {"attention_bias": True},
        "used window": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    },
    "phi3": {
        "no window": {"sliding_window": None},
        "dropout": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attention_dropout": 0.5},
        "longrope": {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.5, 2.0],
                "long_factor": [3.0, 4.0],
                "original_max_position_embeddings": 64,
            },
        },
    },
    "smollm3": {
        "biases": {"attention_bias": True},
        "biased MLPs": {"mlp_bias": True},
        "positions everywhere": {"no_rope_layers": [1, 1, 1, 1]},
        "positions nowhere": {"no_rope_layers": [0, 0, 0, 0]},
        "positions in the last layer": {
            "no_rope_layer_interval": 2,
            "no_rope_layers": [0, 0, 0, 1],
        },
        "used window": {"use_sliding_window": True, "sliding_window": 16},
    },
    "gemma": {
        "biases": {"attention_bias": True},
        "an older name": {"hidden_activation": "gelu"},
        "later tokens": {"use_bidirectional_attention": True},
        "pytorch gelu": {"hidden_act": "gelu_pytorch_tanh"},
    },
    "gemma3_text": {
        "biases": {"attention_bias": True},
        "another scale of scores": {"query_pre_attn_scalar": 20},
        "later tokens": {"use_bidirectional_attention": True},
        "capped scores": {"attn_logit_softcapping": 2.0},
        "capped logits": {"final_logit_softcapping": 2.0},
        "another activation": {"hidden_activation": "silu"},
        "all layers full": {"layer_types": ["full_attention"] * 4},
        "all layers local": {"layer_types": ["sliding_attention"] * 4},
        "a pattern": {"sliding_window_pattern": 2},
        "local angles": {"rope_local_base_freq": 500.0, "rope_theta": 1e5},
        "scaled": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        "yarn of each kind": {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                "full_attention": _ROPES["yarn"],
            },
        },
    },
}
_VARIANTS = [
    (family, name)
    for family, own in _OWN.items()
    for name in sorted(_COMMON.keys() | own.keys())
    # Phi-3's class knows the plain angles and its own.
    if family != "phi3" or name not in {f"rope {other}" for other in _ROPES.keys() - _PLAIN}
]
#: What the decoder says that it does not run; any other variant has to be transformers' equal.
_NOT_RUN = (
    "activation|biased MLPs|sliding window of|rotary positions of|cannot build it|later tokens"
    "|soft-capped"
)


@pytest.mark.parametrize(("family", "name"), _VARIANTS)
def test_every_field_that_changes_the_maths_is_applied_or_refused(
    tmp_path: Path, family: str, name: str
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = deepcopy({**_COMMON, **_OWN[family]}[name])  # Phi-3's class renames what it is given
    torch.manual_seed(0)
    config: Any = AutoConfig.for_model(
        family,
        **{
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        }
        | fields,
    )
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    try:
        _assert_equal_logits(tmp_path)
    except UnsupportedModel as error:
        assert re.search(_NOT_RUN, str(error)), error


def _assert_equal_logits(directory: Path) -> None:
    """The decoder's logits of 60 tokens are those of transformers, in fp32."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = torch.randint(0, 60, (60,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=tokens[None]).logits[0]
    cpu, count = torch.device("cpu"), len(tokens)
    decoder = DecoderModel.load(
        directory,
        (0,),
        device=cpu,
        dtype=torch.float32,
        max_length=count,
        ops=pick_ops(cpu, torch.float32),
    )
    logits = decoder.logits(states_of(decoder, tokens).final)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
