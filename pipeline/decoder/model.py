"""A dense Llama-family target: Llama, Mistral, Qwen2 (biases), Qwen3 (q/k norms), SmolLM2.

Weights are read from the target's safetensors and fused: q, k and v are one matrix, gate and up
are one. Every forward is over T tokens in ragged rows: the nodes of trees, or pieces of prompts,
which are chains; plain decoding verifies trees of one node.

Shapes: T tokens, H hidden size, V vocabulary, Q query heads, G key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.decoder.kv import PlaneShape
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.eager import EagerOps
from pipeline.decoder.ops.layer import AttentionMetadata, LayerStack, LayerWeights, Packed
from pipeline.decoder.ops.tree import HEADROOM
from pipeline.errors import UnsupportedModel
from pipeline.target.architecture import DECODED, read_architecture
from pipeline.target.rotary import RotaryTable
from pipeline.target.weights import TargetWeights

#: model_type of the configurations that the decoder runs.
SUPPORTED = DECODED


class Weights(Protocol):
    """Where the tensors come from: a target directory, or random ones for benchmarks."""

    def __contains__(self, name: str) -> bool: ...

    def embedding(self) -> Tensor: ...

    def lm_head(self) -> Tensor: ...

    def final_norm(self) -> Tensor: ...

    def layer(self, index: int) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Forward:
    """What one forward returns."""

    aux: Tensor  # [T, L · H] aux states; the capture layers' outputs, low to high
    final: Tensor  # [T, H] final states, after the last norm


class DecoderModel:
    """Weights, rotary table and the forward; key/value pages belong to the engine."""

    def __init__(
        self,
        config: Any,
        weights: Weights,
        capture_layers: tuple[int, ...],
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_length: int,
        ops: TorchOps,
    ) -> None:
        """`max_length` is the longest prompt + reply, `ops` the backend that computes."""
        self.config, self.max_length = config, max_length
        self.device, self.dtype, self.ops = device, dtype, ops
        self.num_heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads
        embedding = stored(weights.embedding(), device)
        tied = config.tie_word_embeddings or "lm_head.weight" not in weights
        lm_head = embedding if tied else stored(weights.lm_head(), device)
        self.lm_head = ops.pack(lm_head)
        self.embedding = embedding.to(dtype)  # [V, H]
        layers: list[LayerWeights] = []
        norms: list[Tensor] = []  # of each layer's input, and of the last one's output
        for index in range(config.num_hidden_layers):
            layer = weights.layer(index)
            norms.append(layer["input_layernorm.weight"].to(device, dtype))
            layers.append(fuse_layer(layer, ops, device))
        norms.append(weights.final_norm().to(device, dtype))
        self.input_norm = norms[0]
        eps = config.rms_norm_eps
        self.stack = LayerStack(tuple(layers), tuple(norms[1:]), eps, capture_layers)
        length = max_length + HEADROOM
        rotary = RotaryTable(config, length, device=device, dtype=dtype)
        if rotary.cos.shape[-1] != self.head_dim:
            turned = (
                f"rotary positions of {rotary.cos.shape[-1]} of a head's {self.head_dim} values"
            )
            fix = "use a model whose heads are turned as a whole (partial_rotary_factor=1)"
            raise UnsupportedModel(f"the decoder does not run {turned}", where="target", fix=fix)
        self.rotary = rotary.cos, rotary.sin

    @classmethod
    def load(
        cls,
        directory: Path,
        capture_layers: tuple[int, ...],
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_length: int,
        ops: TorchOps | None = None,
    ) -> DecoderModel:
        """Read a target directory. Raises UnsupportedModel for what the decoder does not run."""
        from transformers import AutoConfig

        config: Any = AutoConfig.from_pretrained(directory)
        check_supported(config, max_length, where=str(directory))
        architecture = read_architecture(config, str(directory), decoded=True)
        return cls(
            config,
            TargetWeights(directory, architecture),
            capture_layers,
            device=device,
            dtype=dtype,
            max_length=max_length,
            ops=ops or pick_ops(device, dtype),
        )

    @property
    def layers(self) -> tuple[LayerWeights, ...]:
        """Its decoder layers, in order."""
        return self.stack.layers

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return len(self.embedding)

    @property
    def plane_shape(self) -> PlaneShape:
        """What its keys and values take on every page."""
        return PlaneShape(len(self.layers), self.kv_heads, self.head_dim, self.dtype)

    def forward(self, tokens: Tensor, metadata: AttentionMetadata, plane: Tensor) -> Forward:
        """Run tokens [T]; their keys and values go to `plane`, the target's of a pool."""
        embedded = F.embedding(tokens, self.embedding)  # [T, H]
        normed, hidden = self.ops.add_rms_norm(embedded, None, self.input_norm, self.stack.eps)
        normed, _, aux = self.ops.layers(self.stack, metadata, hidden, normed, plane)
        return Forward(aux, normed)

    def working_bytes(self, rows: int, query_len: int, *, tokens: int, drawn: int) -> int:
        """Bytes that a forward of `tokens` tokens holds at most, beside weights, keys and values,
        with logits of `drawn` of them and draws from those; rows have up to `query_len` tokens."""
        config, item = self.config, self.dtype.itemsize
        # Residual streams and their norms; aux states, and the same side by side, gathered; the
        # widest part of a layer, twice.
        streams = (6 + 3 * len(self.stack.captured)) * config.hidden_size
        inner = max(3 * config.intermediate_size, 4 * self.head_dim * self.num_heads)
        scratch = self.ops.scratch_bytes(rows, query_len, self.num_heads, self.head_dim, drawn)
        return int(item * (tokens * (streams + inner) + drawn * self.vocabulary)) + scratch

    def logits(self, final: Tensor) -> Tensor:
        """Final states [T, H] → logits [T, V]."""
        return self.ops.linear(final, self.lm_head)


def fuse_layer(
    layer: Mapping[str, Tensor],
    ops: TorchOps,
    device: torch.device,
    pack: Callable[[Tensor], Packed] | None = None,
) -> LayerWeights:
    """A layer's tensors by their Hugging Face names → what `ops.layer` computes with, its matrices
    by `pack`, else by `ops.pack`."""
    pack = pack or ops.pack

    def fused(*names: str) -> Tensor:
        return stored(torch.cat([layer[name] for name in names]), device)

    def vector(*names: str) -> Tensor | None:
        return fused(*names).to(ops.dtype) if names[0] in layer else None

    qkv = tuple(f"self_attn.{name}_proj" for name in "qkv")
    query_norm, key_norm = (vector(f"self_attn.{name}_norm.weight") for name in "qk")
    return LayerWeights(
        qkv=pack(fused(*(f"{name}.weight" for name in qkv))),
        qkv_bias=vector(*(f"{name}.bias" for name in qkv)),
        head_norms=None if query_norm is None or key_norm is None else (query_norm, key_norm),
        output=pack(stored(layer["self_attn.o_proj.weight"], device)),
        output_bias=vector("self_attn.o_proj.bias"),
        post_norm=layer["post_attention_layernorm.weight"].to(device, ops.dtype),
        gate_up=pack(fused("mlp.gate_proj.weight", "mlp.up_proj.weight")),
        down=pack(stored(layer["mlp.down_proj.weight"], device)),
    )


def stored(weight: Tensor, device: torch.device) -> Tensor:
    """A weight as `pack` takes it: in the type it was stored in, float16 widened."""
    wide = weight.float() if weight.dtype is torch.float16 else weight
    return wide.to(device).contiguous()


def check_supported(config: Any, max_length: int, *, where: str) -> None:
    """Raise UnsupportedModel, with what is supported, rather than decode slightly wrong."""
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    positions = getattr(config, "max_position_embeddings", 0)
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    if config.model_type not in SUPPORTED:
        problem = f"the decoder does not run model_type {config.model_type!r}"
        fix = f"use one of {', '.join(SUPPORTED)}"
    elif getattr(config, "quantization_config", None):
        problem = "the decoder does not run quantised weights"
        fix = "use the checkpoint whose weights are stored in 16 bits"
    elif config.hidden_act != "silu":
        problem = f"the decoder does not run activation {config.hidden_act!r}"
        fix = "use a model with silu"
    elif getattr(config, "mlp_bias", False):
        problem, fix = "the decoder does not run biased MLPs", "use a model with mlp_bias=false"
    elif (sliding or config.model_type == "mistral") and window and max_length > window:
        problem = (
            f"sliding-window attention of {window} tokens is not implemented beyond the window"
        )
        fix = f"keep prompt + reply below {window} tokens"
    elif rope.get("rope_type") == "longrope" and original and max_length > original:
        problem = f"rotary frequencies that change after {original} tokens are not implemented"
        fix = f"keep prompt + reply below {original} tokens"
    elif max_length > positions:
        problem = (
            f"prompt + reply may take {max_length} tokens, the target has {positions} positions"
        )
        fix = "lower max_prompt_tokens or max_new_tokens"
    else:
        return
    raise UnsupportedModel(problem, where=f"target {where}", fix=fix)


def pick_ops(device: torch.device, dtype: torch.dtype) -> TorchOps:
    """The fastest backend for a device and a type; torch itself where there is no other."""
    if device.type == "cuda":
        from pipeline.decoder.ops.triton.ops import TritonOps

        return TritonOps(dtype)
    if device.type == "cpu":
        from pipeline.decoder.ops.cpu.ops import load

        return load(dtype) or EagerOps(dtype)
    return EagerOps(dtype)
