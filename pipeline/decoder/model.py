"""A dense Llama-family target: Llama, Mistral, Qwen2 (biases), Qwen3 (q/k norms), SmolLM2.

Weights are read from the target's safetensors and fused: q, k and v are one matrix, gate and up
are one. Every forward is a *tree* forward; a prompt is a tree that is a chain, and plain decoding
verifies a tree of one node.

Shapes: B rows, N tokens a row, H hidden size, Q query heads, G key/value heads, d head size,
R = Q / G queries that share a key, S cache entries that may be seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.decoder.kv import KVCache
from pipeline.decoder.ops import fold_mask, tree_attention
from pipeline.eagle3.layers import RotaryTable, rms_norm, rotate
from pipeline.errors import UnsupportedModel
from pipeline.target.weights import TargetWeights

#: model_type of the configurations that the decoder runs.
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor  # [H]
    qkv: Tensor  # [(Q + 2G) d, H]
    qkv_bias: Tensor | None  # [(Q + 2G) d]
    query_norm: Tensor | None  # [d]
    key_norm: Tensor | None  # [d]
    output: Tensor  # [H, Q d]
    output_bias: Tensor | None  # [H]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2I, H]
    down: Tensor  # [H, I]


@dataclass(frozen=True)
class Forward:
    """What one forward leaves behind."""

    aux: Tensor  # [B, N, 3H] aux states; the capture layers' outputs, low to high
    final: Tensor  # [B, N, H] final states, after the last norm


class DecoderModel:
    """Weights, rotary table and the forward; caches belong to the engine."""

    def __init__(self, directory: Path, capture_layers: tuple[int, ...], *, device: torch.device, dtype: torch.dtype, max_length: int) -> None:
        from transformers import AutoConfig

        config: Any = AutoConfig.from_pretrained(directory)
        _check_supported(config, max_length, where=str(directory))
        self.config, self.device, self.dtype, self.max_length = config, device, dtype, max_length
        self.capture_layers = capture_layers
        self.num_heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.eps = config.rms_norm_eps
        weights = TargetWeights(directory)
        self.embedding = self._put(weights.embedding())  # [V, H]
        self.lm_head = self._put(weights.lm_head()) if "lm_head.weight" in weights and not config.tie_word_embeddings else self.embedding
        self.final_norm = self._put(weights.final_norm())
        self.layers = [self._fuse(weights.layer(index)) for index in range(config.num_hidden_layers)]
        self.rotary = RotaryTable(config, max_length, device=device, dtype=dtype)

    def new_cache(self, slots: int) -> KVCache:
        """A cache of `max_length` entries for each of `slots` rows."""
        return KVCache.zeros(len(self.layers), slots, self.max_length, self.kv_heads, self.head_dim, device=self.device, dtype=self.dtype)

    def forward(self, tokens: Tensor, positions: Tensor, columns: Tensor, mask: Tensor, cache: KVCache) -> Forward:
        """Run tokens [B, N] at `positions` [B, N], storing keys and values at cache `columns` [B, N].

        mask [B, N, S] is added to the attention scores: 0 where a token may look, -inf elsewhere.
        """
        cos, sin = self.rotary.at(positions)  # [B, N, d]
        mask = fold_mask(mask, self.num_heads // self.kv_heads)  # [B, 1, R N, S]
        hidden = F.embedding(tokens, self.embedding)  # [B, N, H]
        captured = []
        for index, layer in enumerate(self.layers):
            hidden = hidden + self._attention(index, layer, rms_norm(hidden, layer.input_norm, self.eps), cos, sin, columns, mask, cache)
            gate, up = F.linear(rms_norm(hidden, layer.post_norm, self.eps), layer.gate_up).chunk(2, dim=-1)  # [B, N, I]
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
            if index in self.capture_layers:
                captured.append(hidden)
        return Forward(torch.cat(captured, dim=-1), rms_norm(hidden, self.final_norm, self.eps))

    def logits(self, final: Tensor) -> Tensor:
        """Final states [.., H] → logits [.., V]."""
        return F.linear(final, self.lm_head)

    def _attention(self, index: int, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, columns: Tensor, mask: Tensor, cache: KVCache) -> Tensor:
        rows, count = x.shape[:2]
        fused = F.linear(x, layer.qkv, layer.qkv_bias).view(rows, count, -1, self.head_dim)  # [B, N, Q + 2G, d]
        query, key, value = torch.split(fused, [self.num_heads, self.kv_heads, self.kv_heads], dim=2)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = rms_norm(query, layer.query_norm, self.eps), rms_norm(key, layer.key_norm, self.eps)
        cache.write(index, rotate(key, cos, sin), value, columns)
        keys, values = cache.read(index, rows, mask.shape[-1])  # [B, G, S, d]
        mixed = tree_attention(rotate(query, cos, sin), keys, values, mask).flatten(2)  # [B, N, Q d]
        return F.linear(mixed, layer.output, layer.output_bias)

    def _fuse(self, layer: dict[str, Tensor]) -> _Layer:
        def joined(*names: str) -> Tensor:
            return self._put(torch.cat([layer[name] for name in names]))

        def optional(name: str) -> Tensor | None:
            return self._put(layer[name]) if name in layer else None

        qkv = tuple(f"self_attn.{name}_proj" for name in "qkv")
        return _Layer(
            input_norm=self._put(layer["input_layernorm.weight"]),
            qkv=joined(*(f"{name}.weight" for name in qkv)),
            qkv_bias=joined(*(f"{name}.bias" for name in qkv)) if f"{qkv[0]}.bias" in layer else None,
            query_norm=optional("self_attn.q_norm.weight"),
            key_norm=optional("self_attn.k_norm.weight"),
            output=self._put(layer["self_attn.o_proj.weight"]),
            output_bias=optional("self_attn.o_proj.bias"),
            post_norm=self._put(layer["post_attention_layernorm.weight"]),
            gate_up=joined("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            down=self._put(layer["mlp.down_proj.weight"]),
        )

    def _put(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype).contiguous()


def _check_supported(config: Any, max_length: int, *, where: str) -> None:
    """Raise UnsupportedModel with what is supported, rather than decode something slightly wrong."""

    def refuse(problem: str, fix: str) -> UnsupportedModel:
        return UnsupportedModel(problem, where=f"target {where}", fix=fix)

    if config.model_type not in SUPPORTED:
        raise refuse(f"the decoder does not run model_type {config.model_type!r}", f"use one of {', '.join(SUPPORTED)}")
    if config.hidden_act != "silu":
        raise refuse(f"the decoder does not run activation {config.hidden_act!r}", "use a model with silu")
    if getattr(config, "mlp_bias", False):
        raise refuse("the decoder does not run biased MLPs", "use a model with mlp_bias=false")
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ()) or (config.model_type == "mistral" and window)
    if slides and window and max_length > window:
        raise refuse(f"sliding-window attention of {window} tokens is not implemented beyond the window", f"keep prompt + response below {window} tokens")
    if max_length > config.max_position_embeddings:
        raise refuse(
            f"prompt + response may take {max_length} tokens, the target has {config.max_position_embeddings} positions",
            "lower max_prompt_tokens or max_new_tokens",
        )
