"""Which keys a query sees while the head is unrolled, and the mixing in memory linear in the tokens.

The head's keys and values of step k at position i are written (i,k); RoPE turns them by i+k. A
query of step k at position i sees the causal past of step 0 and its own chain:

    query (3,2), document of 5 positions            step 0   step 1   step 2
                                        position 0    ●
                                                 1    ●
                                                 2    ●
                                                 3    ●        ●        ●
                                                 4

which is what decoding does: the past was verified and holds aux states, everything after it was
drafted by the head itself. A mask over all steps would have (1+k)·T columns of which T+k are used,
so the scores are those against step 0 and k single columns beside them, under one softmax.
Documents never see each other.

Queries are taken in blocks of a document, each with the keys up to its last row:

    keys      0 1 2 3 4 5 6 7                       chain
    block 0   ● ·                 ● all rows see    k columns
              ● ●                 · masked          of each row's own
    block 1   ● ● ● ·
              ● ● ● ●

Only columns behind a block's first row need a mask, and columns that no row sees are not computed.
On CUDA torch's flash kernels take the place of the blocks (`flash.py`).

Shapes: N tokens of the batch, A rows that continue after step 0, B rows of a block and T keys of it,
Q query heads, G key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.eagle3.layers import RotaryTable, rotate
from pipeline.train.ttt import flash, mixing
from pipeline.train.ttt.mixing import Block

#: Rows of a block: few enough for its scores to stay in a core's cache, enough for a fast matrix product.
_MOST_ROWS, _FEWEST_ROWS = 128, 32
#: Query-key pairs of a block, per query head.
_PAIRS = 1 << 17


#: (query, keys, values, own keys, own values) → mixed values, as in `mixing.mix`
Mixer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Seen(NamedTuple):
    """Keys and values of one step, rotated: step 0 [N, G, d], later steps [A, G, d]."""

    key: Tensor
    value: Tensor


class UnrolledAttention:
    """Attention of one batch over one unroll: step 0 takes all N positions, later steps only `rows`.

    It keeps no keys: those of the steps before come as arguments, so that a step can be computed again.
    """

    def __init__(self, lengths: tuple[int, ...], rows: Tensor, rotary: RotaryTable) -> None:
        """rows [A] ascending flat positions; rotary covers the longest document plus the steps."""
        device, self._rotary = rows.device, rotary
        every = torch.cat(
            [torch.arange(length, device=device) for length in lengths]
        )  # [N] position in its document
        self._positions = every, every[rows]
        starts = [0, *accumulate(lengths)]  # of the documents, and N
        ends = torch.searchsorted(
            rows, torch.tensor(starts, device=device)
        ).tolist()  # rows before each of them
        self._mixers = (
            _mixer(every, starts, starts, rotary.cos),
            _mixer(every[rows], ends, starts, rotary.cos),
        )

    def mix(
        self, k: int, query: Tensor, key: Tensor, value: Tensor, past: list[Seen]
    ) -> tuple[Tensor, Seen]:
        """Step k's attention: → mixed values [N or A, Q, d], and what later steps see of this one.

        query [N or A, Q, d], key and value [N or A, G, d] before rotary embedding; past holds steps 0…k-1.
        """
        assert len(past) == k, "a step sees every step before it"
        cos, sin = self._rotary.at(self._positions[k > 0] + k)
        query, own = (
            rotate(query, cos, sin) * query.shape[-1] ** -0.5,
            Seen(rotate(key, cos, sin), value),
        )
        first, *chain = [*past, own]
        none = key.new_empty(*key.shape[:2], 0, key.shape[2])  # step 0 has no chain
        own_keys = (
            torch.stack([seen.key for seen in chain], dim=2) if chain else none
        )  # [A, G, k, d]
        own_values = torch.stack([seen.value for seen in chain], dim=2) if chain else none
        return self._mixers[k > 0](query, first.key, first.value, own_keys, own_values), own


def _mixer(positions: Tensor, bounds: list[int], starts: list[int], like: Tensor) -> Mixer:
    """The fastest way to attend for rows at `positions`; `like` [.., d] has their type and device."""
    runs = flash.find_runs(positions.tolist(), bounds, starts)
    if flash.serves(like.device, like.dtype, like.shape[-1]) and len(
        positions
    ) >= flash.WORTHWHILE_RUN * len(runs):
        return partial(flash.mix, runs=runs)
    return partial(mixing.mix, blocks=cut_blocks(positions, bounds, starts, like.dtype))


def cut_blocks(
    positions: Tensor, bounds: list[int], starts: list[int], dtype: torch.dtype
) -> list[Block]:
    """Blocks of rows at `positions`; document i has rows bounds[i]…bounds[i+1] and keys from starts[i]."""
    places = positions.tolist()
    made = []
    for document, offset in enumerate(starts[:-1]):
        row, end = bounds[document], bounds[document + 1]
        while row < end:
            size = min(_MOST_ROWS, max(_FEWEST_ROWS, _PAIRS // (places[row] + 1)))
            stop = min(row + size, end)
            first, last = places[row], places[stop - 1]
            columns = torch.arange(first + 1, last + 1, device=positions.device)
            hidden = columns > positions[row:stop, None]  # [B, columns behind the first row]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
                hidden, torch.finfo(dtype).min
            )
            made.append(Block(slice(row, stop), slice(offset, offset + last + 1), mask))
            row = stop
    return made
