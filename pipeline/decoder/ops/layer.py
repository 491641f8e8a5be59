"""What `ops.layers` reads beside hidden states: a layer's weights, a forward's metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipeline.decoder.ops.parallel import TensorGroup

#: Cache entries in a page. One page of one head is the block that an attention kernel loads at
#: once.
PAGE = 64

#: A weight as a backend wants it; only that backend's `linear` looks inside.
Packed: TypeAlias = Any


def packed_bytes(weight: Packed) -> int:
    """What `linear` reads of a matrix."""
    held = weight.values if isinstance(weight, Float8Rows) else weight.data
    return int(held.nbytes)


@dataclass(frozen=True, eq=False)
class Float8Rows:
    """A weight [out, in] in float8 (e4m3), each row times its scale.

    Scales are powers of two, so that bfloat16 holds what it holds exactly, whatever computes.
    """

    values: Tensor  # [out, in] uint8, the bytes of float8_e4m3fn
    scales: Tensor  # [out] float32

    @classmethod
    def of(cls, weight: Tensor) -> Float8Rows:
        """Each row's largest number becomes one of float8's largest, by the smallest such scale."""
        wide = weight.float()
        most = torch.finfo(torch.float8_e4m3fn).max
        exponents = torch.frexp(wide.abs().amax(1) / most).exponent.clamp(min=-100)
        scales = torch.exp2(exponents.float())
        values = (wide / scales[:, None]).to(torch.float8_e4m3fn)
        return cls(values.view(torch.uint8), scales)

    @classmethod
    def exactly(cls, weight: Tensor) -> Float8Rows | None:
        """The same where nothing is lost by it, else None."""
        for part in (weight[:8], weight):  # the first rows tell most
            rows = cls.of(part)
            if not torch.equal(rows.widened().to(weight.dtype), part):
                return None
        return rows

    def __len__(self) -> int:
        return len(self.values)

    def widened(self) -> Tensor:
        """[out, in] bfloat16: what it holds."""
        wide = self.values.view(torch.float8_e4m3fn).bfloat16()
        return wide.mul_(self.scales[:, None].bfloat16())


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One decoder layer of the Llama family. Q query heads, G key/value heads, head size d.

    The norm of its input is not among them: whoever made the input has normed it already. Weights
    of norms are float32, whatever activations are.
    """

    qkv: Packed  # [(Q + 2G) d, In]; In is H, or 2H in a draft head
    qkv_bias: Tensor | None  # [(Q + 2G) d]
    head_norms: tuple[Tensor, Tensor] | None  # of every query and key head, each [d]
    output: Packed  # [H, Q d]
    output_bias: Tensor | None  # [H]
    post_norm: Tensor  # [H]
    gate_up: Packed  # [2I, H]
    down: Packed  # [H, I]
    #: Of what attention and the MLP add, before they add it, each [H] (Gemma 3).
    update_norms: tuple[Tensor, Tensor] | None = None
    gelu: bool = False  # the MLP's gate is GELU's tanh approximation, not SiLU
    local: bool = False  # reads `AttentionMetadata.local`
    group: TensorGroup | None = None  # among whose ranks the matrices are divided


@dataclass(frozen=True, eq=False)
class LayerStack:
    """Decoder layers one after the other."""

    layers: tuple[LayerWeights, ...]
    norms: tuple[Tensor, ...]  # of each layer's output [H]: the next one's input, or the last norm
    eps: float
    captured: tuple[int, ...]  # ascending: layers whose outputs are kept

    @property
    def divided(self) -> bool:
        """Whether a rank has slices of the layers: of all, or of none."""
        return self.layers[0].group is not None


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Where the T tokens of one forward stand, and which entries each of them sees.

    Made once a forward and passed to every layer. Tokens stand in B ragged rows, one after the
    other:

        cu_seqlens_q   0         3   4           7      row 0 has three tokens, row 1 one, row 2
        tokens         a0 a1 a2  b0  c0  c1  c2         three; a row may have none

    A token has a position, which rotates its query and key, and a slot of the paged cache, which
    its key and value go to. It attends over the pages of its row: to the entries below the row's
    `seq_lens`, and after them as its mask says; never to those below its own `first_seen`, of which
    a row's first token has the lowest.
    """

    rotary: tuple[Tensor, Tensor]  # cos, sin [S, d]
    positions: Tensor  # [T], below S
    slot_mapping: Tensor  # [T] page · PAGE + offset
    block_table: Tensor  # [B, P] page ids
    seq_lens: Tensor  # [B] committed entries
    cu_seqlens_q: Tensor  # [B + 1] row b has tokens cu_seqlens_q[b] … cu_seqlens_q[b + 1] - 1
    max_query_len: int  # most tokens of a row, or more: what the host knows of cu_seqlens_q
    mask: Tensor | None  # [T] bits over the entries after seq_lens; None: each row is a chain
    first_seen: Tensor | None = None  # [T] entries before it are hidden (sliding windows); None: 0
    #: The same tokens as layers with `local` see them: in a window, or turned by other angles.
    local: AttentionMetadata | None = None

    def of(self, layer: LayerWeights) -> AttentionMetadata:
        """What a layer reads."""
        if not layer.local:
            return self
        assert self.local is not None, "a forward of layers with other angles or a window"
        return self.local

    @property
    def rows(self) -> int:
        """B."""
        return len(self.seq_lens)


def entry_slots(block_table: Tensor, entries: Tensor) -> Tensor:
    """Slots of entries [B, E] of each row."""
    return block_table.gather(1, entries // PAGE) * PAGE + entries % PAGE
