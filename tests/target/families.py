"""A tiny random target of every family that docs/targets.md says can be trained for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

_SIZE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL = {**_EXPERTS, "num_local_experts": 4}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 8}
#: What makes each family itself, small enough that documents of twenty tokens reach it.
_OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4},
    "mixtral": _LOCAL,
    "gpt_oss": {**_LOCAL, **_SLIDING},
    "llama4": {
        **_LOCAL,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 8,
        "floor_scale": 16,
        "layer_types": [*["chunked_attention"] * 3, "full_attention"] * 2,
        "no_rope_layers": [1, 1, 1, 0] * 2,
    },
    "deepseek_v3": {
        **_EXPERTS,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
    },
    "glm4_moe": {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "gemma2": {**_SLIDING, "final_logit_softcapping": None, "attn_logit_softcapping": 2.0},
    "gemma3": {**_SLIDING, "query_pre_attn_scalar": 32},
    "gemma3_text": {**_SLIDING, "query_pre_attn_scalar": 32},
    "granite": {
        "logits_scaling": 8.0,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.1,
    },
    "cohere": {"logit_scale": 0.0625, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.25, **_SLIDING},
    "mistral3": {"sliding_window": 8},
    "qwen3_vl": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
    "qwen3_next": {
        **_EXPERTS,
        "num_experts": 2,
        "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
_VISION: dict[str, dict[str, Any]] = {
    "gemma3": {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16},
    "mistral3": {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16},
    "qwen3_vl": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 32},
    "llama4": {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16},
}


def tiny_config(model_type: str, **fields: Any) -> Any:
    """Its configuration, with other `fields`."""
    from transformers import CONFIG_MAPPING

    make: Any = CONFIG_MAPPING[model_type]
    sizes = {**_SIZE, **_OWN.get(model_type, {}), **fields}
    if model_type not in _VISION:
        return make(**sizes)
    vision = {"num_attention_heads": 2, "num_heads": 2, **_VISION[model_type]}
    text = {"model_type": make().text_config.model_type, **sizes}
    return make(text_config=text, vision_config=vision)


def save_family(model_type: str, directory: Path, tiny_target: Path, **fields: Any) -> Path:
    """A random model of it, with norms that are no ones, and the tokenizer of the tiny target;
    `fields` are its configuration's."""
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    names = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    torch.manual_seed(0)
    model = getattr(transformers, names[model_type])(tiny_config(model_type, **fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "sinks" in name:
                nn.init.normal_(parameter, 0.5, 0.2)
            if name.endswith("q_proj.weight"):  # what a norm of queries has to take out
                parameter *= 3
    model.save_pretrained(directory)
    for path in (*tiny_target.glob("token*"), tiny_target / "chat_template.jinja"):
        (directory / path.name).write_bytes(path.read_bytes())
    return directory
