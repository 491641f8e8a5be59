"""A dense Llama-family target: Llama, Mistral, Qwen2 (biases), Qwen3 (q/k norms), SmolLM2.

Weights are read from the target's safetensors and fused: q, k and v are one matrix, gate and up
are one. Every forward is a *tree* forward; a prompt is a tree that is a chain, and plain decoding
verifies a tree of one node.

Shapes: B rows, N tokens a row, T = B·N, H hidden size, Q query heads, G key/value heads, d head
size, P pages a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.decoder.kv import PageAllocator
from pipeline.decoder.ops import pick_ops
from pipeline.decoder.ops.base import TorchOps, entry_slots
from pipeline.decoder.ops.layer import AttentionMetadata, LayerWeights
from pipeline.decoder.tree import WINDOW
from pipeline.eagle3.layers import RotaryTable
from pipeline.errors import UnsupportedModel
from pipeline.target.weights import TargetWeights

#: model_type of the configurations that the decoder runs.
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")


class Weights(Protocol):
    """Where the tensors come from: a target directory, or random ones for benchmarks."""

    def __contains__(self, name: str) -> bool: ...

    def embedding(self) -> Tensor: ...

    def lm_head(self) -> Tensor: ...

    def final_norm(self) -> Tensor: ...

    def layer(self, index: int) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Forward:
    """What one forward leaves behind."""

    aux: Tensor  # [B, N, 3H] aux states; the capture layers' outputs, low to high
    final: Tensor  # [B, N, H] final states, after the last norm


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
        self.config, self.capture_layers, self.max_length = config, capture_layers, max_length
        self.device, self.dtype, self.ops = device, dtype, ops
        self.num_heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads
        self.eps = config.rms_norm_eps
        self.embedding = self._put(weights.embedding())  # [V, H]
        tied = config.tie_word_embeddings or "lm_head.weight" not in weights
        self._lm_head = self.ops.pack(self.embedding if tied else self._put(weights.lm_head()))
        self.final_norm = self._put(weights.final_norm())
        layers = map(weights.layer, range(config.num_hidden_layers))
        self.layers = [self._fuse(layer) for layer in layers]
        self._following = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        # Nodes of the last tree may stand behind the longest reply.
        rotary = RotaryTable(config, max_length + WINDOW, device=device, dtype=dtype)
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
        return cls(
            config,
            TargetWeights(directory),
            capture_layers,
            device=device,
            dtype=dtype,
            max_length=max_length,
            ops=ops or pick_ops(device, dtype),
        )

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return len(self.embedding)

    def plane(self, allocator: PageAllocator) -> Tensor:
        """This model's keys and values on the allocator's pages: [layers, 2, pages, G, PAGE, d]."""
        return allocator.plane(len(self.layers), self.kv_heads, self.head_dim, self.dtype)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        visible: Tensor | None,
        plane: Tensor,
    ) -> Forward:
        """Run tokens [B, N] at `positions` [B, N]; token n of row b is cache entry seq_lens[b] + n.

        Pages come from `block_table` [B, P]. Every token sees the entries below `seq_lens` [B], and
        behind them what the bits of `visible` [B, N] name; without it the tokens are a chain.
        """
        ops, (rows, count) = self.ops, tokens.shape
        entries = seq_lens[:, None] + torch.arange(count, device=tokens.device)  # [B, N]
        slots = entry_slots(block_table, entries).view(-1)  # [T]
        metadata = AttentionMetadata(
            rows, self.rotary, positions.reshape(-1), slots, block_table, seq_lens, visible
        )
        embedded = F.embedding(tokens.reshape(-1), self.embedding)  # [T, H]
        normed, hidden = ops.add_rms_norm(embedded, None, self.layers[0].input_norm, self.eps)
        captured = []
        for index, (layer, following) in enumerate(zip(self.layers, self._following, strict=True)):
            keys, values = plane[index]
            normed, hidden = ops.layer(
                layer, following, self.eps, metadata, hidden, normed, keys, values
            )
            if index in self.capture_layers:
                captured.append(hidden)
        shape = rows, count, -1
        return Forward(torch.cat(captured, dim=-1).view(shape), normed.view(shape))

    def logits(self, final: Tensor) -> Tensor:
        """Final states [T, H] → logits [T, V]."""
        return self.ops.linear(final, self._lm_head)

    def _fuse(self, layer: dict[str, Tensor]) -> LayerWeights:
        def fused(*names: str) -> Tensor:
            parts = [layer[name] for name in names]
            return self._put(torch.cat(parts) if len(parts) > 1 else parts[0])

        def optional(*names: str) -> Tensor | None:
            return fused(*names) if names[0] in layer else None

        qkv = tuple(f"self_attn.{name}_proj" for name in "qkv")
        query_norm, key_norm = (optional(f"self_attn.{name}_norm.weight") for name in "qk")
        return LayerWeights(
            input_norm=fused("input_layernorm.weight"),
            qkv=self.ops.pack(fused(*(f"{name}.weight" for name in qkv))),
            qkv_bias=optional(*(f"{name}.bias" for name in qkv)),
            head_norms=None if query_norm is None or key_norm is None else (query_norm, key_norm),
            output=self.ops.pack(fused("self_attn.o_proj.weight")),
            output_bias=optional("self_attn.o_proj.bias"),
            post_norm=fused("post_attention_layernorm.weight"),
            gate_up=self.ops.pack(fused("mlp.gate_proj.weight", "mlp.up_proj.weight")),
            down=self.ops.pack(fused("mlp.down_proj.weight")),
        )

    def _put(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype).contiguous()


def check_supported(config: Any, max_length: int, *, where: str) -> None:
    """Raise UnsupportedModel, with what is supported, rather than decode slightly wrong."""
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    positions = config.max_position_embeddings
    if config.model_type not in SUPPORTED:
        problem = f"the decoder does not run model_type {config.model_type!r}"
        fix = f"use one of {', '.join(SUPPORTED)}"
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
    elif max_length > positions:
        problem = (
            f"prompt + reply may take {max_length} tokens, the target has {positions} positions"
        )
        fix = "lower max_prompt_tokens or max_new_tokens"
    else:
        return
    raise UnsupportedModel(problem, where=f"target {where}", fix=fix)
