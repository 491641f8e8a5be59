"""What a decoder layer is made of, and where its tokens stand: the arguments of `ops.layer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

#: A weight as a backend wants it; only that backend's `linear` looks inside.
Packed: TypeAlias = Any


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One decoder layer of the Llama family. Q query heads, G key/value heads, head size d."""

    input_norm: Tensor  # [H]
    qkv: Packed  # [(Q + 2G) d, H]
    qkv_bias: Tensor | None  # [(Q + 2G) d]
    head_norms: tuple[Tensor, Tensor] | None  # of every query and key head, each [d]
    output: Packed  # [H, Q d]
    output_bias: Tensor | None  # [H]
    post_norm: Tensor  # [H]
    gate_up: Packed  # [2I, H]
    down: Packed  # [H, I]


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Where the T = B·N tokens of a forward stand; the same for all layers."""

    rows: int  # B
    rotary: tuple[Tensor, Tensor]  # cos, sin [S, d]
    positions: Tensor  # [T]
    slots: Tensor  # [T]
    table: Tensor  # [B, P]
    starts: Tensor  # [B]
    visible: Tensor | None  # [B, N] bits; None: a chain
