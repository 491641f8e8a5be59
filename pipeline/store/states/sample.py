"""One sample's states: what capture makes and training reads.

The final state at position p is the teacher for token p+1, so a sample keeps those at j-1 for every
supervised token j, or with `features.supervise: all` for every token:

    position         0  1  2  3  4  5      tokens 3, 4, 5 were generated
    supervised_mask  0  0  0  1  1  1
    final state            ●  ●  ●         positions 2, 3, 4
    with `all`       ●  ●  ●  ●  ●         positions 0 … 4
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pipeline.store.states.encodings import Codec


@dataclass(frozen=True)
class StatesSample:
    """T tokens and S final states of one sample; written by features, read by train.

    With a codec, states are rows as they are stored; without one they are bf16.
    """

    sample_id: str
    source: str
    token_ids: Tensor  # int32 [T]
    supervised_mask: Tensor  # uint8 [T], 1 where the target generated the token
    aux_states: Tensor  # [T, 3H], low, middle and high layer
    final_states: Tensor  # [S, H], after the target's last norm
    final_positions: Tensor  # int32 [S], ascending: the position of each final state
    codec: Codec | None = None

    def decode(self) -> StatesSample:
        """The same sample with bf16 states."""
        if self.codec is None:
            return self
        aux_states = self.codec.decode_aux(self.aux_states)
        final_states = self.codec.decode_final(self.final_states)
        return replace(self, aux_states=aux_states, final_states=final_states, codec=None)


def teacher_positions(supervised_mask: Tensor, finals: int | None = None) -> Tensor:
    """Positions whose final state teaches a token: j-1 for each supervised j. int32 [S].

    A sample with T - 1 `finals` has those of all its tokens.
    """
    if finals == len(supervised_mask) - 1:
        return torch.arange(finals, dtype=torch.int32)
    return supervised_mask[1:].nonzero().flatten().to(torch.int32)


def sample_checksum(sample: StatesSample, channels_checksum: int) -> int:
    """CRC-32 over id, source, ids as int32, mask as a byte each, and both kinds of rows as stored.

    It continues from the CRC-32 of the shard's channel scales, 0 without any.
    """
    named = f"{sample.sample_id}\n{sample.source}\n".encode()
    checksum = zlib.crc32(named, channels_checksum)
    for tensor in (
        sample.token_ids,
        sample.supervised_mask,
        sample.aux_states,
        sample.final_states,
    ):
        checksum = crc32(tensor, checksum)
    return checksum


def crc32(tensor: Tensor | None, start: int = 0) -> int:
    """CRC-32 of a contiguous CPU tensor's bytes, continued from `start`."""
    return (
        start if tensor is None or not tensor.numel() else zlib.crc32(as_bytes(tensor).data, start)
    )


def as_bytes(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The same memory as rows of bytes, for a contiguous CPU tensor; numpy has no bfloat16."""
    return tensor.view(torch.uint8).numpy()
