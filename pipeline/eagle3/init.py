"""How a head begins: its shape, its draft vocabulary, and its weights, copied from the target.

A head whose layer starts as the target's last layer, reading the hidden half of its 2H-wide input,
begins with weights that know this residual stream. docs/log.md compares the starts of `fc`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.eagle3.head import Eagle3Head, HeadShape

#: Standard deviation of randomly started matrices, as in the Llama family.
_INIT_STD = 0.02


def shape_for(
    target_config: Any,  # transformers configuration
    *,
    draft_vocab_size: int,
    intermediate_size: int | None,
    num_attention_heads: int | None,
    num_key_value_heads: int | None,
    fc_norm: bool = False,
    norm_output: bool = False,
) -> HeadShape:
    """A head for a transformers target configuration; None takes the target's own value."""
    hidden = int(target_config.hidden_size)
    heads = int(target_config.num_attention_heads)
    return HeadShape(
        hidden_size=hidden,
        intermediate_size=intermediate_size or int(target_config.intermediate_size),
        num_attention_heads=num_attention_heads or heads,
        num_key_value_heads=num_key_value_heads
        or int(getattr(target_config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(target_config, "head_dim", None) or hidden // heads),
        vocab_size=int(target_config.vocab_size),
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=float(target_config.rms_norm_eps),
        rope_parameters=dict(getattr(target_config, "rope_parameters", None) or {}),
        max_position_embeddings=int(target_config.max_position_embeddings),
        fc_norm=fc_norm,
        norm_output=norm_output,
    )


@dataclass(frozen=True)
class DraftVocabulary:
    """The most frequent supervised tokens of the training data."""

    target_ids: Tensor  # [Vd] int64, ascending
    coverage: float  # share of supervised tokens that it contains

    @property
    def size(self) -> int:
        return len(self.target_ids)


def choose_vocabulary(counts: Tensor, size: int) -> DraftVocabulary:
    """The `size` most frequent tokens of `counts` [V]; ties go to the lower id.

    When fewer distinct tokens were seen, the lowest unseen ids fill up.
    """
    size = min(size, len(counts))
    by_frequency = torch.sort(counts, descending=True, stable=True).indices
    chosen = by_frequency[:size].sort().values
    total = int(counts.sum())
    return DraftVocabulary(chosen, float(counts[chosen].sum()) / total if total else 0.0)


def random_init(head: Eagle3Head, seed: int) -> None:
    """Normal(0, 0.02) matrices, unit norms; the same weights for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                start = torch.empty(parameter.shape)
                parameter.copy_(start.normal_(0, _INIT_STD, generator=generator))
            else:
                parameter.fill_(1.0)


def start_fc_from_high_layer(head: Eagle3Head) -> None:
    """fc starts near the identity on the high aux state, the closest to the target's output."""
    size = head.shape.hidden_size
    with torch.no_grad():
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, 2 * size :] += torch.eye(size)


def start_lm_head(head: Eagle3Head, target_lm_head: Tensor, target_final_norm: Tensor) -> None:
    """lm_head rows and final norm are the target's own, for the tokens of the draft vocabulary.

    target_lm_head [V, H], target_final_norm [H].
    """
    with torch.no_grad():
        head.lm_head.weight.copy_(target_lm_head[head.target_ids()])
        head.norm.weight.copy_(target_final_norm)


def start_layer(head: Eagle3Head, layer: Mapping[str, Tensor]) -> list[str]:
    """Copy a target layer's weights, named relative to it, into the head's; returns what it copied.

    Projections that read [embedding ; hidden] take the target's matrix for the hidden half and keep
    a small random embedding half. A narrower MLP takes the neurons with the largest output norm.
    """
    copied = []
    own, size, width = head.midlayer, head.shape.hidden_size, head.shape.intermediate_size
    down, up = layer["mlp.down_proj.weight"], layer["mlp.up_proj.weight"]  # [H, I] and [I, H]
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            source, weight = layer[f"self_attn.{name}.weight"], getattr(own.self_attn, name).weight
            if source.shape[0] == weight.shape[0]:
                weight[:, size:].copy_(source)
                copied.append(name)
        if layer["self_attn.o_proj.weight"].shape == own.self_attn.o_proj.weight.shape:
            own.self_attn.o_proj.weight.copy_(layer["self_attn.o_proj.weight"])
            copied.append("o_proj")
        if down.shape[1] >= width:
            output_norm = down.float().norm(dim=0) * up.float().norm(dim=1)  # [I]
            kept = output_norm.topk(width).indices.sort().values
            own.mlp.gate_proj.weight.copy_(layer["mlp.gate_proj.weight"][kept])
            own.mlp.up_proj.weight.copy_(up[kept])
            own.mlp.down_proj.weight.copy_(down[:, kept])
            copied.append(f"mlp[{width} of {down.shape[1]} neurons]")
        own.hidden_norm.weight.copy_(layer["input_layernorm.weight"])
        own.post_attention_layernorm.weight.copy_(layer["post_attention_layernorm.weight"])
        copied.append("norms")
    return copied
