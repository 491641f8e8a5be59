"""Rotary positions from transformers' own initialisers, written once for training and decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RotaryTable:
    """cos and sin of every position, from transformers' initialisers (default, llama3, yarn, …).

    `config` is any transformers configuration with `rope_parameters`, head size and
    `max_position_embeddings`. Of `dynamic` and `longrope`, whose frequencies change with the length
    of a text, they are those of texts within the model's original length, however long the table.
    """

    def __init__(
        self, config: Any, length: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        rotary = LlamaRotaryEmbedding(config=config)
        angles = torch.arange(length)[:, None].float() * rotary.inv_freq  # [S, d/2]
        angles, scale = torch.cat((angles, angles), dim=-1), rotary.attention_scaling
        self.cos = (angles.cos() * scale).to(device, dtype)  # [S, d]
        self.sin = (angles.sin() * scale).to(device, dtype)  # [S, d]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [..., d] for integer positions [...]."""
        return self.cos[positions], self.sin[positions]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (RoFormer, eq. 34) in the half-split layout of Hugging Face.

    x [..., heads, d]; cos, sin [..., d].
    """
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)
