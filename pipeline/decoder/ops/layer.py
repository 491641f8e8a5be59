"""What `ops.layer` reads beside hidden states: a layer's weights, a forward's metadata."""

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
    """Where the T = B·N tokens of one forward stand, and which entries each of them sees.

    Made once a forward and passed to every layer. A token has a position, which rotates its query
    and key, and a slot of the paged cache, which its key and value go to; it attends over the
    pages of its row: to the entries below the row's `seq_lens`, and behind them as `mask` says.
    """

    rows: int  # B
    rotary: tuple[Tensor, Tensor]  # cos, sin [S, d]
    positions: Tensor  # [T]
    slots: Tensor  # [T] page · PAGE + offset
    block_table: Tensor  # [B, P] page ids
    seq_lens: Tensor  # [B] committed entries
    mask: Tensor | None  # [B, N] bits over the entries behind; None: a chain
