"""How a block drafter begins: its shape, and its layers, which start as the target's last ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.eagle3.dflash.head import BlockLayer, DflashHead, DflashShape
from pipeline.eagle3.head import DraftShape
from pipeline.eagle3.init import copy_plain_layer, shape_for


def dflash_shape_for(
    target_config: Any,  # transformers configuration
    *,
    layers: int,
    block_size: int,
    mask_token_id: int | None,
    draft_vocab_size: int,
    intermediate_size: int | None,
    num_attention_heads: int | None,
    num_key_value_heads: int | None,
    target_lm_head: bool = False,
) -> DflashShape:
    """A drafter for a transformers target configuration; None takes the target's own value.

    With the target's own rows it proposes the whole vocabulary, whatever `draft_vocab_size` is.
    """
    if target_lm_head:
        draft_vocab_size = int(target_config.vocab_size)
    common = shape_for(
        target_config,
        draft_vocab_size=draft_vocab_size,
        intermediate_size=intermediate_size,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
    )
    return DflashShape(
        **common.model_dump(include=set(DraftShape.model_fields)),
        num_hidden_layers=layers,
        block_size=block_size,
        target_lm_head=target_lm_head,
        mask_token_id=_unused_token(target_config) if mask_token_id is None else mask_token_id,
    )


def _unused_token(target_config: Any) -> int:
    """A token that no reply holds: what pads, or begins, a text."""
    names = ("pad_token_id", "bos_token_id")
    ids = (getattr(target_config, name, None) for name in names)
    return int(next((token for token in ids if isinstance(token, int) and token >= 0), 0))


def start_block_layers(head: DflashHead, sources: Sequence[Mapping[str, Tensor]]) -> list[str]:
    """Copy what fits of target layers, named relative to them, into the head's; what did.

    Context reads the projections behind `hidden_norm` as the first layer's input does behind its
    own, so that norm starts there. Where the target norms no queries and keys, their norms get the
    size that those have. What is not there or has another shape stays as it is.
    """
    copied: list[str] = []
    with torch.no_grad():
        for number, (layer, source) in enumerate(zip(head.layers, sources, strict=True)):
            assert isinstance(layer, BlockLayer)
            copied += [f"layers.{number}.{name}" for name in _copy_layer(layer, source)]
        first = sources[0].get("input_layernorm.weight")
        if first is not None:
            head.hidden_norm.weight.copy_(first)
            copied.append("hidden_norm")
    return copied


def _copy_layer(own: BlockLayer, source: Mapping[str, Tensor]) -> list[str]:
    copied = copy_plain_layer(own, source)
    for name in ("q", "k"):
        norm, wanted = source.get(f"self_attn.{name}_norm.weight"), own.self_attn.head_dim
        weight = getattr(own.self_attn, f"{name}_norm").weight
        if norm is not None and norm.shape == (wanted,):
            weight.copy_(norm)
        elif norm is None:
            projection = getattr(own.self_attn, f"{name}_proj").weight
            weight.fill_(_typical(projection, own.input_layernorm.weight))
    return copied


def _typical(weight: Tensor, read: Tensor) -> float:
    """Root mean square of what a projection [heads·d, H] gives behind a norm of weight [H]."""
    return float((weight.float() * read.float()).square().sum(1).mean().sqrt())
