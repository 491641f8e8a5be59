"""A block drafter's directory: the layout of DFlashDraftModel, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.exchange.inspect import inspect_head
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.dflash.init import copy_layers, dflash_shape_for
from pipeline.heads.dflash.shape import DflashHead, DflashShape
from pipeline.heads.init import random_init
from pipeline.heads.registry import save_head
from tests.heads.test_checkpoint import CONTRACT

H, V, VD = 16, CONTRACT.vocab_size, 10


def shape_of(**changes: Any) -> DflashShape:
    shape = DflashShape(
        hidden_size=H,
        intermediate_size=20,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        vocab_size=V,
        draft_vocab_size=VD,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        max_position_embeddings=128,
        num_hidden_layers=2,
        block_size=6,
        mask_token_id=1,
    )
    return shape.model_copy(update=changes)


@pytest.fixture
def head() -> DflashHead:
    made = DflashHead(shape_of())
    random_init(made, 3)
    made.set_vocabulary(torch.arange(3, 3 + 2 * VD, 2))
    return made


@pytest.fixture
def directory(tmp_path: Path, head: DflashHead) -> Path:
    save_head(tmp_path / "head", head, HeadCard(CONTRACT, {}, {"coverage": 0.9}))
    return tmp_path / "head"


def test_the_layout_is_that_of_dflash_draft_model(directory: Path) -> None:
    layer = {
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
        "self_attn.q_proj.weight": (16, H),
        "self_attn.k_proj.weight": (8, H),
        "self_attn.v_proj.weight": (8, H),
        "self_attn.o_proj.weight": (H, 16),
        "self_attn.q_norm.weight": (4,),
        "self_attn.k_norm.weight": (4,),
        "mlp.gate_proj.weight": (20, H),
        "mlp.up_proj.weight": (20, H),
        "mlp.down_proj.weight": (H, 20),
    }
    expected = {
        **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()},
        **{"fc.weight": (H, 3 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)},
        **{"lm_head.weight": (VD, H), "d2t": (VD,), "t2d": (V,)},
    }
    tensors = load_file(directory / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert tensors["d2t"].tolist() == [3 + index for index in range(VD)], "an offset, not an id"
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["layer_types"] == ["full_attention"] * 2 and config["num_hidden_layers"] == 2
    assert config["block_size"] == 6 and config["draft_vocab_size"] == VD
    assert config["num_target_layers"] == CONTRACT.num_layers
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5000.0
    settings = config["dflash_config"]
    assert settings["mask_token_id"] == 1 and settings["block_size"] == 6
    assert settings["target_layer_ids"] == list(CONTRACT.capture_layers), "output indices"


def test_transformers_reads_the_config_as_qwen3(directory: Path) -> None:
    from transformers import AutoConfig

    read: Any = AutoConfig.from_pretrained(directory)
    assert type(read).__name__ == "Qwen3Config"
    assert (read.hidden_size, read.num_hidden_layers, read.head_dim) == (H, 2, 4)
    assert read.dflash_config["mask_token_id"] == 1
    assert read.rope_parameters["rope_theta"] == 5000.0


def test_it_is_inspected(directory: Path) -> None:
    shown = inspect_head(str(directory))
    assert shown.parameters == DflashHead(shape_of()).count_parameters()
    assert shown.shape["block_size"] == 6


TARGET: dict[str, Any] = {
    "hidden_size": H,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": V,
    "num_hidden_layers": 3,
}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_layers_begin_as_the_target_s(family: str) -> None:
    """And scores and outputs of a Llama layer's head keep their size behind the new norms."""
    from transformers import AutoConfig, AutoModelForCausalLM

    head_dim = {"head_dim": 4} if family != "llama" else {}
    config: Any = AutoConfig.for_model(family, **TARGET, **head_dim)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    layers = [{**layer.state_dict()} for layer in model.model.layers]
    for layer in layers:
        for name, tensor in layer.items():
            layer[name] = torch.rand_like(tensor) + 0.5 if "norm" in name else tensor
    shape = dflash_shape_for(
        config,
        layers=2,
        block_size=4,
        mask_token_id=None,
        draft_vocab_size=VD,
        intermediate_size=20,
        num_attention_heads=None,
        num_key_value_heads=None,
    )
    head = DflashHead(shape)
    random_init(head, 0)
    copied = copy_layers(head, layers[1:])
    assert {f"layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "qkvo"} <= set(copied)
    assert torch.equal(head.hidden_norm.weight, layers[1]["input_layernorm.weight"])
    own: Any = head.layers[1]
    assert torch.equal(own.self_attn.v_proj.weight, layers[2]["self_attn.v_proj.weight"])
    before = "pre_feedforward" if family == "gemma2" else "post_attention"
    expected = layers[2][f"{before}_layernorm.weight"]
    assert torch.equal(own.post_attention_layernorm.weight, expected)
    if family == "qwen3":
        assert torch.equal(own.self_attn.q_norm.weight, layers[2]["self_attn.q_norm.weight"])
        return
    hidden = torch.randn(500, H)
    normed = own.input_layernorm(hidden)
    query = own.self_attn.project_query(normed)
    theirs = normed @ layers[2]["self_attn.q_proj.weight"].T
    ratio = query.square().mean().sqrt() / theirs.square().mean().sqrt()
    assert abs(float(ratio.detach()) - 1) < 0.1
