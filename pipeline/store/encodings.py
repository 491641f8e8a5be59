"""How states become bytes, and how they come back.

A row is one token's states of L layers, each H wide: one for each aux layer in aux states, 3 for
most heads; L = 1 in final states, one for each alternative in those of alternatives.

    bf16   2·L·H bytes   the values
    fp8      L·H + L     the values as e4m3, then one scale code a layer
    int8     L·H + L     the values, then one scale code a layer

    state[layer, h] = value[layer, h] · 2^(code[layer] / 4) · channel[layer, h]   channel: int8 only

A scale code is a signed byte: steps of 19 % over 64 octaves, rounded up so that no value is
clipped. That coarsens the int8 steps by 9 % on average, and takes half the bytes of a float16
scale.

`channel` is what int8 needs: some channels of a residual stream are a hundred times larger than
the rest, and a scale a token alone would leave the others three or four bits. Each channel is
divided by the 99th percentile of its magnitudes over the shard (of fewer than eight rows, by the
largest), a few numbers stored once. Measured over 16,433 tokens of SmolLM2-135M, relative error of
the median token without its eight largest channels (low, middle, high layer, final state; in
brackets without `channel`):

    fp8    2.6 %  2.6 %  2.6 %  2.6 %
    int8   0.9 %  0.8 %  0.8 %  0.8 %      (4.1 %  4.3 %  6.1 %  3.3 %)

The percentile and not the largest magnitude: the first tokens of a document hold values a thousand
times above all others, and a channel scaled by those loses its resolution everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Encoding = Literal["bf16", "fp8", "int8"]
#: Storage type of a row's bytes.
ROW_TYPES: dict[Encoding, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp8": torch.uint8,
    "int8": torch.int8,
}
_LARGEST: dict[Encoding, float] = {"fp8": 448.0, "int8": 127.0}
_STEPS_PER_OCTAVE = 4
_CODES = (-128, 127)
#: Rows that are worked on at a time: their float32 copies stay in the cache.
_BLOCK = 256
#: Rows that the percentile is taken over, spread evenly over the shard.
_CALIBRATION_ROWS = 2048
_PERCENTILE = 0.99


class OutOfRange(ValueError):
    """A row's largest value has no scale code; `row` is its number."""

    def __init__(self, row: int) -> None:
        self.row = row
        super().__init__(f"row {row} is out of range")


@dataclass(frozen=True)
class Codec:
    """All that is needed to read rows of one shard."""

    encoding: Encoding
    channels: Tensor | None = None  # bf16 [L + 1, H], the aux layers and final; int8 only
    aux_layers: int = 3  # L of an aux row

    def is_like(self, other: Codec) -> bool:
        """Whether both read rows of the same shard, or of shards without scales of their own."""
        same = self.encoding == other.encoding and self.aux_layers == other.aux_layers
        return same and self.channels is other.channels

    def encode_aux(self, states: Tensor) -> Tensor:
        """bf16 [T, L · H] → rows. Raises OutOfRange."""
        return self._encode(states, self.aux_layers, self._channels(slice(None, -1), states))

    def encode_final(self, states: Tensor, count: int = 1) -> Tensor:
        """bf16 [S, K · H] → rows of K = `count` final states. Raises OutOfRange."""
        return self._encode(states, count, self._channels(slice(-1, None), states))

    def decode_aux(self, rows: Tensor) -> Tensor:
        """Rows → bf16 [T, L · H], on the rows' device."""
        return self._decode(rows, self.aux_layers, self._channels(slice(None, -1), rows))

    def decode_final(self, rows: Tensor, count: int = 1) -> Tensor:
        """Rows → bf16 [S, K · H], on the rows' device."""
        return self._decode(rows, count, self._channels(slice(-1, None), rows))

    def _encode(self, states: Tensor, layers: int, channels: Tensor | None) -> Tensor:
        hidden = states.shape[1] // layers
        shape = (len(states), row_width(self.encoding, hidden, layers))
        rows = torch.empty(shape, dtype=ROW_TYPES[self.encoding], device=states.device)
        if self.encoding == "bf16":
            return rows.copy_(states)
        for block in _blocks(len(states)):
            values = states[block].float().view(-1, layers, hidden)  # [n, L, H]
            if channels is not None:
                values /= channels
            codes = self._codes(values, block.start)  # [n, L]
            values *= torch.exp2(codes.float() / -_STEPS_PER_OCTAVE)[:, :, None]
            rows[block, : states.shape[1]] = self._round(values).flatten(1)
            rows[block, states.shape[1] :] = codes.view(rows.dtype)
        return rows

    def _decode(self, rows: Tensor, layers: int, channels: Tensor | None) -> Tensor:
        if self.encoding == "bf16":
            return rows
        width = rows.shape[1] - layers
        states = torch.empty(len(rows), width, dtype=torch.bfloat16, device=rows.device)
        # On the CPU block by block for the cache's sake; a GPU takes all rows at once.
        for block in _blocks(len(rows), _BLOCK if rows.device.type == "cpu" else max(1, len(rows))):
            values, codes = rows[block, :width], rows[block, width:].contiguous().view(torch.int8)
            values = values.view(torch.float8_e4m3fn) if self.encoding == "fp8" else values
            scales = torch.exp2(codes.float() / _STEPS_PER_OCTAVE)[:, :, None]  # [n, L, 1]
            decoded = values.float().view(-1, layers, width // layers) * scales  # [n, L, H]
            states[block] = (decoded if channels is None else decoded.mul_(channels)).flatten(1)
        return states

    def _channels(self, layers: slice, like: Tensor) -> Tensor | None:
        """float32 [L, H], where `like` is."""
        return None if self.channels is None else self.channels[layers].to(like.device).float()

    def _codes(self, values: Tensor, first: int) -> Tensor:
        """The smallest scale of each row and layer that clips nothing; [n, L, H] → int8 [n, L]."""
        scales = values.abs().amax(2) / _LARGEST[self.encoding]
        codes = scales.log2().mul_(_STEPS_PER_OCTAVE).ceil()
        beyond = (codes > _CODES[1]).any(1)
        if bool(beyond.any()):
            raise OutOfRange(first + int(beyond.nonzero()[0]))
        return codes.clamp_min_(_CODES[0]).to(torch.int8)

    def _round(self, values: Tensor) -> Tensor:
        """Scaled values, a byte each. The clamp undoes at most one rounding error of the scale."""
        largest = _LARGEST[self.encoding]
        if self.encoding == "int8":
            return values.round_().clamp_(-largest, largest).to(torch.int8)
        return values.clamp_(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8)


def row_width(encoding: Encoding, hidden: int, layers: int) -> int:
    """Elements of one stored row."""
    return layers * hidden + (0 if encoding == "bf16" else layers)


def calibrate(encoding: Encoding, aux: Tensor, final: Tensor) -> Codec:
    """The codec of a shard whose states are aux [T, L · H] and final [S, H]; depends on them
    alone."""
    layers = aux.shape[1] // final.shape[1]
    if encoding != "int8":
        return Codec(encoding, aux_layers=layers)
    channels = torch.cat([_percentiles(aux), _percentiles(final)]).view(-1, final.shape[1])
    return Codec(encoding, channels.to("cpu", torch.bfloat16), layers)


def _percentiles(states: Tensor) -> Tensor:
    """Of each column's magnitudes, float32; columns of zeros get the smallest value above, or 1."""
    if not len(states):
        return torch.ones(states.shape[1], device=states.device)
    count = min(len(states), _CALIBRATION_ROWS)
    spread = torch.linspace(0, len(states) - 1, count, device=states.device).long()
    # Of fewer than eight rows the largest: the lesser of two would rule a row's scale.
    above = min(count - max(1, int(_PERCENTILE * count)), count // 8)
    # The percentile lies near the end: a short list of the largest holds it.
    percentiles = states[spread].float().abs().topk(above + 1, dim=0).values[-1]
    # A column far below all others would need scale codes of its own.
    floor = percentiles.median() / 1024
    if floor > 0:
        return percentiles.clamp_min(floor)
    return torch.where(percentiles > 0, percentiles, torch.ones_like(percentiles))


def _blocks(rows: int, size: int = _BLOCK) -> Iterator[slice]:
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))
