"""Heads as their configurations define them, in float32 and without a line of the package.

Written from vLLM's classes (llama_eagle3, qwen3_eagle3, qwen3_dflash, qwen3_dspark): what a
`config.json` says is looked up where it is needed, attention is one dense mask a query. Slow, and
for one document.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]


class Config:
    """Fields of a config.json in either dialect, and its layer's."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.speculators = "transformer_layer_config" in body
        self._inside = body.get("eagle_config", {}) | body.get("dflash_config", {})
        self._body = body.get("transformer_layer_config", {}) | {
            name: value for name, value in body.items() if value is not None
        }

    def __call__(self, name: str, default: Any = None) -> Any:
        value = self._inside.get(name, self._body.get(name))
        return default if value is None else value

    @property
    def layers(self) -> int:
        return int(self("num_hidden_layers"))

    @property
    def head_dim(self) -> int:
        return int(self("head_dim", self("hidden_size") // self("num_attention_heads")))

    @property
    def head_norms(self) -> bool:
        layer = self._body.get("model_type") == "qwen3" if self.speculators else False
        return layer or "dflash_config" in self._body

    def sees(self, layer: int, query: int, key: int) -> bool:
        """Of positions, by the layer's window."""
        kinds = self("layer_types")
        sliding = kinds is not None and kinds[layer] == "sliding_attention"
        return not sliding or query - key < self("sliding_window")


def random_tensors(config: Config, states: int) -> Tensors:
    """All tensors of a head that reads `states` aux states, under its dialect's names."""
    generator = torch.Generator().manual_seed(11)
    tensors: Tensors = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) * 0.3

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = torch.rand(size, generator=generator) + 0.5

    size, inner, d = config("hidden_size"), config("intermediate_size"), config.head_dim
    queries = config("num_attention_heads") * d
    keys = config("num_key_value_heads", config("num_attention_heads")) * d
    block = config("block_size") is not None
    if config("norm_before_fc"):
        norm("input_norm", states * size)
    if config("fc_norm"):
        for index in range(states):
            norm(f"fc_norm.{index}", size)
    matrix("fc", size, states * size)
    if block:
        norm("hidden_norm", size)
    if rank := config("markov_rank"):
        matrix("markov_head.markov_w1", config("vocab_size"), rank)
        matrix("markov_head.markov_w2", config("draft_vocab_size", config("vocab_size")), rank)
        matrix("confidence_head.proj", 1, size + rank)
        tensors["confidence_head.proj.bias"] = torch.ones(1)
    for layer in range(config.layers):
        plain = config.speculators or block or layer > 0
        name = f"layers.{layer}" if plain else "midlayer"
        width = size if block or layer else 2 * size
        norm(f"{name}.input_layernorm", size)
        if width > size:
            norm(f"{name}.hidden_norm", size)
        shapes = {"q": (queries, width), "k": (keys, width), "v": (keys, width)}
        for each, (rows, columns) in {**shapes, "o": (size, queries)}.items():
            matrix(f"{name}.self_attn.{each}_proj", rows, columns)
        if config.head_norms:
            norm(f"{name}.self_attn.q_norm", d)
            norm(f"{name}.self_attn.k_norm", d)
        norm(f"{name}.post_attention_layernorm", size)
        for each, shape in {
            "gate": (inner, size),
            "up": (inner, size),
            "down": (size, inner),
        }.items():
            matrix(f"{name}.mlp.{each}_proj", *shape)
    norm("norm", size)
    if not block:
        matrix("lm_head", config("draft_vocab_size"), size)
    # What files hold.
    return {name: tensor.bfloat16().float() for name, tensor in tensors.items()}


class Layers:
    """The layers of a head, with keys and values of all that was computed."""

    def __init__(self, config: Config, tensors: Tensors, rotary: tuple[Tensor, Tensor]) -> None:
        self.config, self.tensors, self._rotary = config, tensors, rotary
        self._heads, d = config("num_attention_heads"), config.head_dim
        self._shape = (-1, config("num_key_value_heads", self._heads), d)

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config("rms_norm_eps"))
        return x * scale * self.tensors[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def turned(self, name: str, x: Tensor, heads: int, positions: Tensor) -> Tensor:
        """Projected, normed where heads are, rotated [n, heads, d]."""
        projected = self.linear(f"{name}_proj", x).view(len(x), heads, -1)
        if self.config.head_norms:
            projected = self.norm(f"{name}_norm", projected)
        cos, sin = (table[positions][:, None] for table in self._rotary)
        first, second = projected.chunk(2, -1)
        return projected * cos + torch.cat((-second, first), -1) * sin

    def keys(self, layer: str, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        key = self.turned(f"{layer}.self_attn.k", x, self._shape[1], positions)
        return key, self.linear(f"{layer}.self_attn.v_proj", x).view(self._shape)

    def attend(
        self, layer: str, x: Tensor, positions: Tensor, keys: Tensor, values: Tensor, seen: Tensor
    ) -> Tensor:
        """x [n, ..] over keys [m, G, d] that `seen` [n, m] marks, through the output projection."""
        query = self.turned(f"{layer}.self_attn.q", x, self._heads, positions)
        repeated = self._heads // keys.shape[1]
        keys, values = (part.repeat_interleave(repeated, 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) / query.shape[-1] ** 0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
        return self.linear(f"{layer}.self_attn.o_proj", mixed)

    def mlp(self, layer: str, residual: Tensor) -> Tensor:
        x = self.norm(f"{layer}.post_attention_layernorm", residual)
        gate = F.silu(self.linear(f"{layer}.mlp.gate_proj", x))
        return residual + self.linear(
            f"{layer}.mlp.down_proj", gate * self.linear(f"{layer}.mlp.up_proj", x)
        )


def eagle3_logits(
    layers: Layers, embedding: Tensor, tokens: Tensor, aux: Tensor, steps: int
) -> list[Tensor]:
    """Of every step [T - 1 - k, Vd], as `tests.heads.conftest.logits_of` gives them."""
    config, count = layers.config, len(tokens) - 1
    states = aux[:count]
    if config("norm_before_fc"):
        states = layers.norm("input_norm", states)
    if config("fc_norm"):
        parts = states.chunk(states.shape[1] // config("hidden_size"), -1)
        states = torch.cat(
            [layers.norm(f"fc_norm.{index}", part) for index, part in enumerate(parts)], -1
        )
    hidden, logits = layers.linear("fc", states), list[Tensor]()
    caches: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(config.layers)]
    row = torch.arange(count)
    for step in range(steps):
        positions, read = row + step, torch.cat((tokens[step + 1 :], tokens.new_zeros(step)))
        for number in range(config.layers):
            first = f"layers.{number}" if config.speculators or number else "midlayer"
            if number == 0:
                normed = layers.norm(f"{first}.hidden_norm", hidden)
                residual = normed if config("norm_before_residual") else hidden
                token = layers.norm(f"{first}.input_layernorm", embedding[read])
                x = torch.cat((token, normed), -1)
            else:
                residual, x = hidden, layers.norm(f"{first}.input_layernorm", hidden)
            caches[number].append(layers.keys(first, x, positions))
            keys, values = (torch.cat(part) for part in zip(*caches[number], strict=True))
            seen = torch.zeros(count, len(keys), dtype=torch.bool)
            for query in range(count):
                for key in range(query + 1):
                    seen[query, key] = config.sees(number, query + step, key)
                for later in range(1, step + 1):
                    seen[query, later * count + query] = True
            residual = residual + layers.attend(first, x, positions, keys, values, seen)
            hidden = layers.mlp(first, residual)
        normed = layers.norm("norm", hidden)
        logits.append(layers.linear("lm_head", normed)[: count - step])
        hidden = normed if config("norm_output") else hidden
    return logits


def dflash_logits(
    layers: Layers, embedding: Tensor, lm_head: Tensor, tokens: Tensor, aux: Tensor, anchor: int
) -> Tensor:
    """What a block behind token `anchor` proposes [b - 1, V]; with a Markov head [b, V], after the
    text's own tokens."""
    config, size = layers.config, layers.config("block_size")
    context = layers.norm("hidden_norm", layers.linear("fc", aux[:anchor]))
    masks = tokens.new_full((size - 1,), config("mask_token_id"))
    hidden = embedding[torch.cat((tokens[anchor : anchor + 1], masks))]
    before, inside = torch.arange(anchor), anchor + torch.arange(size)
    positions = torch.cat((before, inside))
    for number in range(config.layers):
        name = f"layers.{number}"
        x = layers.norm(f"{name}.input_layernorm", hidden)
        pairs = layers.keys(name, context, before), layers.keys(name, x, inside)
        keys, values = (torch.cat(part) for part in zip(*pairs, strict=True))
        kinds = config("layer_types")
        causal = kinds is not None and kinds[number] == "sliding_attention"
        seen = torch.tensor(
            [
                [
                    config.sees(number, query, key) and not (causal and key > query)
                    for key in positions.tolist()
                ]
                for query in inside.tolist()
            ]
        )
        hidden = hidden + layers.attend(name, x, inside, keys, values, seen)
        hidden = layers.mlp(name, hidden)
    states = layers.norm("norm", hidden)
    if not config("markov_rank"):
        return states[1:] @ lm_head.T
    latent = layers.tensors["markov_head.markov_w1.weight"][tokens[anchor : anchor + size]]
    return states @ lm_head.T + layers.linear("markov_head.markov_w2", latent)
