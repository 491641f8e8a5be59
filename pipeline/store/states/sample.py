"""One sample's states: what capture makes and training reads.

The final state at position p is the teacher for token p+1, so a sample keeps those at j-1 for every
supervised token j:

    position     0  1  2  3  4  5          tokens 3, 4, 5 were generated
    supervised_mask    0  0  0  1  1  1
    final state        ●  ●  ●             positions 2, 3, 4
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.store.states.encodings import Codec


@dataclass(frozen=True)
class StatesSample:
    """T tokens and S final states of one sample; written by features, read by train."""

    sample_id: str
    source: str
    token_ids: Tensor  # int32 [T]
    supervised_mask: Tensor  # uint8 [T], 1 where the target generated the token
    aux_states: (
        Tensor  # bf16 [T, 3H], low, middle and high layer; rows as stored while there is a codec
    )
    final_states: Tensor  # bf16 [S, H], after the target's last norm; likewise
    final_positions: Tensor  # int32 [S], ascending: the position of each final state
    codec: Codec | None = None  # None: states are bf16

    def decode(self, device: torch.device | str | None = None) -> StatesSample:
        """The same sample with bf16 states on `device`; encoded ones travel there as they are."""
        if self.codec is None:
            return replace(
                self,
                aux_states=self.aux_states.to(device),
                final_states=self.final_states.to(device),
            )
        aux, final = (
            self.codec.decode_aux(self.aux_states, device),
            self.codec.decode_final(self.final_states, device),
        )
        return replace(self, aux_states=aux, final_states=final, codec=None)


def teacher_positions(supervised_mask: Tensor) -> Tensor:
    """Positions whose final state teaches a supervised token: j-1 for each j with supervised_mask[j]. int32 [S]."""
    return supervised_mask[1:].nonzero().flatten().to(torch.int32)
