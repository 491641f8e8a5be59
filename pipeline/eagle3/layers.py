"""Normalisation and rotary positions, written once for training and decoding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in x's type."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class RotaryTable:
    """cos and sin of every position, from transformers' own initialisers (default, llama3, yarn, linear, …).

    `config` is any transformers configuration with `rope_parameters`, head size and
    `max_position_embeddings`.
    """

    def __init__(
        self, config: Any, length: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        rotary = LlamaRotaryEmbedding(config=config)
        positions = torch.arange(length)[None]  # [1, S]
        cos, sin = rotary(torch.zeros(1, dtype=torch.float32), positions)  # each [1, S, d]
        self.cos = cos[0].to(device, dtype)  # [S, d]
        self.sin = sin[0].to(device, dtype)  # [S, d]

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
