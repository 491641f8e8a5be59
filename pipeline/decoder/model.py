"""A dense target of the Llama family, as its configuration has it:

    Llama, SmolLM2, Mistral, Qwen2 (biases), Qwen3 (q/k norms)
    Phi-3, Phi-4      q, k, v and gate, up stored as one; a part of each head turned by positions
    SmolLM3           layers that no position turns
    Gemma, Gemma 3    scaled embeddings, GELU; norms of what attention and MLP add, q/k norms,
                      layers with a sliding window and other angles

Weights are read from the target's safetensors and fused: q, k and v are one matrix, gate and up
are one. Every forward is over T tokens in ragged rows: the nodes of trees, or pieces of prompts,
which are chains; plain decoding verifies trees of one node.

Shapes: T tokens, H hidden size, V vocabulary, Q query heads, G key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.decoder.kv import PlaneShape
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.eager import EagerOps
from pipeline.decoder.ops.layer import AttentionMetadata, LayerStack, LayerWeights, Packed
from pipeline.decoder.ops.parallel import (
    LayerDivision,
    LayerSizes,
    TensorGroup,
    VocabularySlice,
    vocabulary_rows,
)
from pipeline.decoder.ops.tree import HEADROOM, WINDOW
from pipeline.errors import UnsupportedModel
from pipeline.target.architecture import DECODED, read_architecture
from pipeline.target.rotary import RotaryTable
from pipeline.target.weights import TargetWeights

#: model_type of the configurations that the decoder runs.
SUPPORTED = DECODED
#: Of those: with Gemma's embedding and MLP; whose layers say each what they see; whose layers all
#: have the window, if there is one; of which positions turn a part of each head.
_GEMMA = {"gemma", "gemma3_text"}
_BY_TYPE = {"qwen2", "qwen3", "smollm3", "gemma3_text"}
_SLIDING = {"mistral", "phi3"}
_PARTIAL = {"phi3"}
_SERVERS = "let servers answer and draft (docs/targets.md)"


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
        group: TensorGroup | None = None,
    ) -> None:
        """`max_length` is the longest prompt + reply, `ops` the backend that computes; the layers
        are divided among the processes of a `group`.

        Raises UnsupportedModel where they cannot be.
        """
        self.config, self.max_length = config, max_length
        self.device, self.dtype, self.ops = device, dtype, ops
        self.group, queries = group, config.num_attention_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // queries
        inner = config.intermediate_size
        sizes = LayerSizes(queries, config.num_key_value_heads, self.head_dim, inner)
        division = LayerDivision(sizes, group)
        division.check(where="target")
        #: Of this process.
        self.num_heads, self.kv_heads, _, self.inner = division.part
        self._order = turned_first(config, self.head_dim)
        embedding = stored(weights.embedding(), device)
        tied = config.tie_word_embeddings or "lm_head.weight" not in weights
        lm_head = embedding if tied else stored(weights.lm_head(), device)
        self.lm_head = pack_lm_head(lm_head, ops.pack, group)
        self.embedding = embedding.to(dtype)  # [V, H]
        is_gemma = config.model_type in _GEMMA
        scale = config.hidden_size**0.5 if is_gemma else 1.0
        # Rounded as transformers rounds it.
        self._embedding_scale = float(torch.tensor(scale, dtype=dtype, device="cpu"))
        kinds = layer_kinds(config, max_length)
        plain, local = two_kinds(kinds)
        #: Positions that each layer sees; 0: all of them.
        self.windows = [kind.window for kind in kinds]
        self.sliding_window = max(self.windows)
        self.rotary = self._rotary_of(plain)
        self._local = None if local is None else (self._rotary_of(local), local.window)
        layers: list[LayerWeights] = []
        norms: list[Tensor] = []  # of each layer's input, and of the last one's output
        for index, kind in enumerate(kinds):
            layer = weights.layer(index)
            norms.append(layer["input_layernorm.weight"].to(device, torch.float32))
            packing = ops, device, ops.pack_layer
            fused = fuse_layer(layer, *packing, order=self._order, division=division)
            layers.append(replace(fused, gelu=is_gemma, local=kind == local))
        norms.append(weights.final_norm().to(device, torch.float32))
        self.input_norm = norms[0]
        eps = config.rms_norm_eps
        self.stack = LayerStack(tuple(layers), tuple(norms[1:]), eps, capture_layers)

    def _rotary_of(self, kind: LayerKind) -> tuple[Tensor, Tensor]:
        """cos and sin [S, d] of the layers of a kind, in the order of `turned_first`."""
        length, size = self.max_length + HEADROOM, self.head_dim
        cos = torch.ones(length, size, device=self.device, dtype=self.dtype)
        sin = torch.zeros_like(cos)
        if kind.rope is not None:
            rope = _rope_config(self.config, kind.rope, size)
            table = RotaryTable(rope, length, device=self.device, dtype=self.dtype)
            turned = table.cos.shape[-1]
            if turned != size and self._order is None:
                problem = f"the decoder does not run rotary positions of {turned} of a head's "
                fix = "use a model whose heads are turned as a whole (partial_rotary_factor=1)"
                raise UnsupportedModel(f"{problem}{size} values", where="target", fix=fix)
            for each, part in ((cos, table.cos), (sin, table.sin)):
                halves = part.view(length, 2, turned // 2)
                each.view(length, 2, size // 2)[..., : turned // 2] = halves
        return cos, sin

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
        group: TensorGroup | None = None,
    ) -> DecoderModel:
        """Read a target directory. Raises UnsupportedModel for what the decoder does not run."""
        from transformers import AutoConfig

        whole: Any = AutoConfig.from_pretrained(directory)
        config: Any = copy(whole.get_text_config())  # of a model that reads images, too
        check_supported(config, max_length, where=str(directory))
        architecture = read_architecture(whole, str(directory), decoded=True)
        config.tie_word_embeddings = architecture.tied
        return cls(
            config,
            TargetWeights(directory, architecture),
            capture_layers,
            device=device,
            dtype=dtype,
            max_length=max_length,
            ops=ops or pick_ops(device, dtype),
            group=group,
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
        embedded = self.embed(tokens)  # [T, H]
        normed, hidden = self.ops.add_rms_norm(embedded, None, self.input_norm, self.stack.eps)
        metadata = self.with_local(metadata)
        normed, _, aux = self.ops.layers(self.stack, metadata, hidden, normed, plane)
        return Forward(aux, normed)

    def embed(self, tokens: Tensor) -> Tensor:
        """What the first layer adds to, of tokens [T]: [T, H]."""
        embedded = F.embedding(tokens, self.embedding)
        return embedded if self._embedding_scale == 1 else embedded * self._embedding_scale

    def with_local(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """The same, with what layers of the other kind read. Entries are positions."""
        if self._local is None:
            return metadata
        rotary, window = self._local
        first_seen = (metadata.positions + (1 - window)).clamp(min=0) if window else None
        return replace(metadata, local=replace(metadata, rotary=rotary, first_seen=first_seen))

    def working_bytes(self, rows: int, query_len: int, *, tokens: int, drawn: int) -> int:
        """Bytes that a forward of `tokens` tokens holds at most, beside weights, keys and values,
        with logits of `drawn` of them and draws from those; rows have up to `query_len` tokens."""
        config, item = self.config, self.dtype.itemsize
        # Residual streams and their norms; aux states, and the same side by side, gathered; the
        # widest part of a layer, twice.
        streams = (6 + 3 * len(self.stack.captured)) * config.hidden_size
        inner = max(3 * self.inner, 4 * self.head_dim * self.num_heads)
        scratch = self.ops.scratch_bytes(rows, query_len, self.num_heads, self.head_dim, drawn)
        return int(item * (tokens * (streams + inner) + drawn * self.vocabulary)) + scratch

    def logits(self, final: Tensor) -> Tensor:
        """Final states [T, H] → logits [T, V]."""
        return self.ops.logits(final, self.lm_head)


class LayerKind(NamedTuple):
    """What tells layers of one model apart."""

    window: int  # positions that a token sees, its own included; 0: all before it
    rope: str | None  # whose `rope_parameters` turn positions, of a layer type; None: nothing does


def layer_kinds(config: Any, max_length: int) -> list[LayerKind]:
    """Of each layer, for texts of `max_length` tokens, which a window may have room for."""
    count, name = config.num_hidden_layers, config.model_type
    window = getattr(config, "sliding_window", None) or 0
    types = getattr(config, "layer_types", None) if name in _BY_TYPE else None
    types = types or ["sliding_attention" if name in _SLIDING else "full_attention"] * count
    turned = config.no_rope_layers if name == "smollm3" else [1] * count  # one where they are
    ropes = getattr(config, "rope_parameters", None) or {}
    if max_length <= window or not getattr(config, "use_sliding_window", True):
        window = 0
    return [
        LayerKind(
            window if each == "sliding_attention" else 0,
            (each if each in ropes else "all") if turned[index] else None,
        )
        for index, each in enumerate(types)
    ]


def two_kinds(kinds: list[LayerKind]) -> tuple[LayerKind, LayerKind | None]:
    """The kind that a forward's metadata describe, and the one that their `local` does.

    Raises UnsupportedModel for layers of more kinds.
    """
    plain = next((kind for kind in kinds if kind.rope and not kind.window), kinds[0])
    others = sorted(set(kinds) - {plain}, key=str)
    if len(others) > 1:
        problem = f"the decoder does not run layers of {1 + len(others)} kinds"
        raise UnsupportedModel(problem, where="target", fix=_SERVERS)
    return plain, others[0] if others else plain if plain.window else None


def turned_first(config: Any, size: int) -> Tensor | None:
    """Where numbers of a head [d] go so that a rotation of its first r, half-split, becomes one of
    all d, of which some turn by nothing; None: all are turned.

        stored     a0 a1 | b0 b1 | x y u v        r = 4: (a, b) are turned
        computed   a0 a1 x y | b0 b1 u v          (x, u) and (y, v) by zero
    """
    factor = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor") or 1.0
    turned = int(size * factor)
    if config.model_type not in _PARTIAL or turned == size:
        return None
    first, second = torch.arange(turned).chunk(2)
    low, high = torch.arange(turned, size).chunk(2)
    return torch.cat((first, low, second, high))


def _rope_config(config: Any, rope: str, size: int) -> Any:
    """A configuration as Llama's rotary embedding reads it, for layers of one type."""
    parameters = dict(config.rope_parameters)
    parameters = dict(parameters.get(rope) or parameters)
    copied = copy(config)
    copied.rope_parameters = parameters
    if config.model_type in _PARTIAL and parameters.get("rope_type") == "default":
        copied.head_dim = int(size * parameters.get("partial_rotary_factor", 1.0))
    return copied


def fuse_layer(
    layer: Mapping[str, Tensor],
    ops: TorchOps,
    device: torch.device,
    pack: Callable[[Tensor], Packed] | None = None,
    order: Tensor | None = None,
    division: LayerDivision | None = None,
) -> LayerWeights:
    """A layer's tensors by their Hugging Face names → what `ops.layer` computes with, of a
    `division` a rank's slice: its matrices by `pack`, else by `ops.pack`; with queries and keys in
    the `order` of `turned_first`."""
    pack, layer = pack or ops.pack, division.slice(layer) if division else layer

    def fused(*names: str) -> Tensor:
        return stored(torch.cat([layer[name] for name in names]), device)

    def vector(*names: str) -> Tensor | None:
        return fused(*names).to(ops.dtype) if names[0] in layer else None

    def norm(name: str) -> Tensor | None:
        held = layer.get(f"{name}.weight")
        return None if held is None else held.to(device, torch.float32)

    def pair(first: Tensor | None, second: Tensor | None) -> tuple[Tensor, Tensor] | None:
        return None if first is None or second is None else (first, second)

    if "self_attn.qkv_proj.weight" in layer:  # Phi-3
        qkv, gate_up = fused("self_attn.qkv_proj.weight"), fused("mlp.gate_up_proj.weight")
        if order is not None:
            heads = qkv.view(-1, len(order), qkv.shape[1])  # [Q + 2G, d, In]
            groups = (len(heads) - layer["self_attn.o_proj.weight"].shape[1] // len(order)) // 2
            turned, values = heads[:-groups], heads[-groups:]
            qkv = torch.cat((turned[:, order.to(device)], values)).flatten(0, 1)
    else:
        qkv = fused(*(f"self_attn.{name}_proj.weight" for name in "qkv"))
        gate_up = fused("mlp.gate_proj.weight", "mlp.up_proj.weight")
    post_norm, attended = norm("post_attention_layernorm"), None
    if "pre_feedforward_layernorm.weight" in layer:  # Gemma 3
        post_norm, attended = norm("pre_feedforward_layernorm"), post_norm
    assert post_norm is not None
    return LayerWeights(
        qkv=pack(qkv),
        qkv_bias=vector(*(f"self_attn.{name}_proj.bias" for name in "qkv")),
        head_norms=pair(norm("self_attn.q_norm"), norm("self_attn.k_norm")),
        output=pack(stored(layer["self_attn.o_proj.weight"], device)),
        output_bias=vector("self_attn.o_proj.bias"),
        post_norm=post_norm,
        gate_up=pack(gate_up),
        down=pack(stored(layer["mlp.down_proj.weight"], device)),
        update_norms=pair(attended, norm("post_feedforward_layernorm")),
        group=division.group if division else None,
    )


def pack_lm_head(
    weight: Tensor, pack: Callable[[Tensor], Packed], group: TensorGroup | None
) -> Packed:
    """lm_head [V, H] as `ops.logits` reads it: of a group a `VocabularySlice`."""
    if group is None:
        return pack(weight)
    return VocabularySlice(pack(vocabulary_rows(weight, group)), len(weight), group)


def stored(weight: Tensor, device: torch.device) -> Tensor:
    """A weight as `pack` takes it: in the type it was stored in, float16 widened."""
    wide = weight.float() if weight.dtype is torch.float16 else weight
    return wide.to(device).contiguous()


def check_supported(config: Any, max_length: int, *, where: str) -> None:
    """Raise UnsupportedModel, with what is supported, rather than decode slightly wrong."""
    positions = getattr(config, "max_position_embeddings", 0)
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    expected = "gelu_pytorch_tanh" if config.model_type in _GEMMA else "silu"
    read = "hidden_activation" if config.model_type == "gemma3_text" else "hidden_act"
    activation = getattr(config, read, None)
    if config.model_type not in SUPPORTED:
        problem = f"the decoder does not run model_type {config.model_type!r}"
        fix = f"use one of {', '.join(SUPPORTED)}"
    elif getattr(config, "quantization_config", None):
        problem = "the decoder does not run quantised weights"
        fix = "use the checkpoint whose weights are stored in 16 bits"
    elif activation != expected:
        problem = f"the decoder does not run activation {activation!r} in {config.model_type!r}"
        fix = f"use a model with {expected}"
    elif getattr(config, "use_bidirectional_attention", False):
        problem = "the decoder does not run attention to later tokens"
        fix = "use a model with use_bidirectional_attention=false"
    elif getattr(config, "attn_logit_softcapping", None):
        problem = "the decoder does not run soft-capped attention"
        fix = "use a model without attn_logit_softcapping"
    elif getattr(config, "mlp_bias", False):
        problem, fix = "the decoder does not run biased MLPs", "use a model with mlp_bias=false"
    elif 0 < (window := max(kind.window for kind in layer_kinds(config, max_length))) < WINDOW:
        problem = f"the decoder does not run a sliding window of {window} tokens beyond the window"
        fix = f"use a model with {WINDOW} or more, or keep prompt + reply within {window} tokens"
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
