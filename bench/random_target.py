"""Targets and heads with random weights: their speed is that of real ones of the same shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.decoder.model import DecoderModel, pick_ops
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.parallel import TensorGroup
from pipeline.heads.eagle3.shape import Eagle3Head, HeadShape
from pipeline.heads.init import random_init, shape_for

#: Published configuration of Llama-3.1-8B (meta-llama/Llama-3.1-8B, config.json).
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


class RandomWeights:
    """Tensors of a Llama configuration, drawn where they will be used."""

    def __init__(
        self, config: Any, *, device: torch.device, dtype: torch.dtype, scale: float = 0.02
    ) -> None:
        self._config, self._device, self._dtype, self._scale = config, device, dtype, scale
        self._generator = torch.Generator(device).manual_seed(0)

    def __contains__(self, name: str) -> bool:
        return name == "lm_head.weight" and not self._config.tie_word_embeddings

    def embedding(self) -> Tensor:
        return self._matrix(self._config.vocab_size, self._config.hidden_size)

    def lm_head(self) -> Tensor:
        return self._matrix(self._config.vocab_size, self._config.hidden_size)

    def final_norm(self) -> Tensor:
        return torch.ones(self._config.hidden_size, device=self._device, dtype=self._dtype)

    def layer(self, index: int) -> dict[str, Tensor]:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        size = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        return {
            "input_layernorm.weight": self.final_norm(),
            "post_attention_layernorm.weight": self.final_norm(),
            "self_attn.q_proj.weight": self._matrix(queries, hidden),
            "self_attn.k_proj.weight": self._matrix(keys, hidden),
            "self_attn.v_proj.weight": self._matrix(keys, hidden),
            "self_attn.o_proj.weight": self._matrix(hidden, queries),
            "mlp.gate_proj.weight": self._matrix(inner, hidden),
            "mlp.up_proj.weight": self._matrix(inner, hidden),
            "mlp.down_proj.weight": self._matrix(hidden, inner),
        }

    def _matrix(self, rows: int, columns: int) -> Tensor:
        drawn = torch.empty(rows, columns, device=self._device, dtype=self._dtype)
        return drawn.normal_(0, self._scale, generator=self._generator)


def random_model(
    config: Any,
    capture_layers: tuple[int, ...],
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_length: int,
    scale: float = 0.02,
    ops: TorchOps | None = None,
    group: TensorGroup | None = None,
) -> DecoderModel:
    """A target of this configuration; the same weights for every `ops`, and for every rank."""
    return DecoderModel(
        config,
        RandomWeights(config, device=device, dtype=dtype, scale=scale),
        capture_layers,
        device=device,
        dtype=dtype,
        max_length=max_length,
        ops=ops or pick_ops(device, dtype),
        group=group,
    )


@torch.no_grad()
def random_hf(config: Any, *, device: torch.device, dtype: torch.dtype, scale: float = 0.02) -> Any:
    """The same target as `random_model`, as transformers' model: tensors are drawn in one order."""
    from transformers import AutoModelForCausalLM

    weights = RandomWeights(config, device=device, dtype=dtype, scale=scale)
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    model.model.embed_tokens.weight.copy_(weights.embedding())
    if "lm_head.weight" in weights:
        model.lm_head.weight.copy_(weights.lm_head())
    for index, layer in enumerate(model.model.layers):
        layer.load_state_dict(weights.layer(index))
    return model.eval()


def random_head(
    config: Any,
    target_ids: Tensor,
    *,
    intermediate_size: int | None = None,
    heads: int | None = None,
    aux_layers: int = 3,
    seed: int = 0,
    scale: float = 1.0,
) -> Eagle3Head:
    """A head for such a target that proposes `target_ids`; its matrices are scaled."""
    shape = shape_for(
        HeadShape,
        config,
        draft_vocab_size=len(target_ids),
        intermediate_size=intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        aux_layers=aux_layers,
    )
    head = Eagle3Head(shape)
    random_init(head, seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(scale if parameter.dim() > 1 else 1)
    head.set_vocabulary(target_ids)
    return head
