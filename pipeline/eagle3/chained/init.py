"""How chained heads begin: their shape, and layers that all start as the target's last one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from pipeline.eagle3.chained.head import ChainedHead, ChainedLayer, ChainedShape
from pipeline.eagle3.head import DraftShape
from pipeline.eagle3.init import behind_norm, copy_plain_layer, inverse_norm, shape_for

#: What the layer of a head keeps of its first output: input_proj alone begins as an identity.
_KEPT = 0.1


def chained_shape_for(
    target_config: Any,  # transformers configuration
    *,
    heads: int,
    chain_input: Literal["aux", "final"],
    draft_vocab_size: int,
    intermediate_size: int | None,
    num_attention_heads: int | None,
    num_key_value_heads: int | None,
) -> ChainedShape:
    """Heads for a transformers target configuration; None takes the target's own value."""
    common = shape_for(
        target_config,
        draft_vocab_size=draft_vocab_size,
        intermediate_size=intermediate_size,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
    )
    fields = common.model_dump(include=set(DraftShape.model_fields))
    return ChainedShape(**fields, heads=heads, chain_input=chain_input)


def start_chain(
    head: ChainedHead, target_lm_head: Tensor | None, target_final_norm: Tensor
) -> list[str]:
    """Every head passes on what it reads: input_proj is near the identity on the hidden half.

    fc starts near the identity on the high aux state. target_lm_head [V, H], whose rows lm_head
    takes; target_final_norm [H]. Returns what begins so.
    """
    size, begun = head.shape.hidden_size, ["input_proj: identity on the hidden state"]
    with torch.no_grad():
        if head.shape.chain_input == "aux":
            head.fc.weight.mul_(0.1)
            head.fc.weight[:, 2 * size :] += torch.eye(size)
            begun.append("fc: identity on the high layer")
        else:
            head.target_norm.copy_(target_final_norm)
        for number, layer in enumerate(head.layers):
            layer.input_proj.weight.mul_(0.1)
            layer.input_proj.weight[:, :size] += torch.eye(size)
            if target_lm_head is not None:
                layer.final_layernorm.weight.copy_(target_final_norm)
            if head.shape.chain_input == "final" or (number and target_lm_head is not None):
                layer.hidden_layernorm.weight.copy_(inverse_norm(target_final_norm))
        if target_lm_head is not None:
            head.lm_head.weight.copy_(target_lm_head[head.target_ids()])
            begun.append("lm_head and norms")
    return begun


def start_chained_layers(head: ChainedHead, source: Mapping[str, Tensor]) -> list[str]:
    """Copy what fits of a target layer, named relative to it, into every head; what did.

    What its attention and its MLP write begins small: the residual stream is a guess already.
    """
    copied: list[str] = []
    with torch.no_grad():
        for layer in head.layers:
            copied = copy_plain_layer(layer, _without_head_norms(layer, source))
            layer.self_attn.o_proj.weight.mul_(_KEPT)
            layer.mlp.down_proj.weight.mul_(_KEPT)
    return copied


def _without_head_norms(own: ChainedLayer, source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The layer with its norms of queries and keys inside their projections: a head has none."""
    folded = dict(source)
    read = source.get("input_layernorm.weight", own.input_layernorm.weight)
    for name in ("q", "k"):
        projection = f"self_attn.{name}_proj.weight"
        norm = source.get(f"self_attn.{name}_norm.weight")
        if norm is not None and projection in source and source[projection].shape[1] == len(read):
            folded[projection] = behind_norm(source[projection], norm, read, own.self_attn.head_dim)
    return folded
