"""Which keys a query attends to while the head is unrolled, in memory linear in the tokens.

The head's keys and values of step k at position i are written (i,k); RoPE turns them by i+k. A
query of step k at position i attends to the causal past of step 0 and to its own chain:

    query (3,2), document of 5 positions            step 0   step 1   step 2
                                        position 0    ●
                                                 1    ●
                                                 2    ●
                                                 3    ●        ●        ●
                                                 4

which is what decoding does: the past was verified and holds aux states, everything after it was
drafted by the head itself. A mask over all steps would have (1+k)·T columns of which T+k are used,
so the scores are those against step 0 and k single columns beside them, under one softmax.
Documents never attend to each other.

Step 0 of a row that reads another token than its document's next one, `instead`: key and value are
the row's own, and of step 0 it attends to what is before its position.

    query (3,0) instead                 position 0    ●        │ own
                                                 1    ●        │
                                                 2    ●        │
                                                 3             │  ●

`blocked.py` takes the queries in blocks of rows; on CUDA torch's FlexAttention replaces it
(`flex.py`). With a draft window a row and its chain see the sinks and the window of the row's own
position alone (`hidden_positions`). A sliding window of W is another one: a query at position p
sees keys at p-W+1 … p, and step k's stands at i+k, so each step sees step-0 keys from i+k-W+1 on.

Shapes: N tokens of the batch, A rows that predict, Q query heads, G key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.learning import blocked, flex
from pipeline.learning.window import Seen, hidden_positions
from pipeline.target.rotary import RotaryTable, rotate

#: (query, keys, values, chain keys, chain values) → attention output, as in `blocked.attend`
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class KeyValue(NamedTuple):
    """Keys and values of one step, rotated: step 0 [N, G, d], later steps [A, G, d]."""

    key: Tensor
    value: Tensor


class UnrolledAttention:
    """Attention of one batch over one unroll: queries of `rows`, keys of step 0 of all N positions.

    It keeps no keys: those of the steps before come as arguments, so that a step can be computed
    again.
    """

    def __init__(
        self,
        lengths: tuple[int, ...],
        rows: Tensor,
        rotary: RotaryTable,
        window: int = 0,
        sliding: int = 0,
        *,
        instead: bool = False,
    ) -> None:
        """rows [A] ascending flat positions, of `instead` none at the start of a document; rotary
        covers the longest document plus the steps; window is the head's `draft_window`, sliding its
        `sliding_window`, longer than the unroll.
        """
        device, self.rows, self._rotary = rows.device, rows, rotary
        # [N] position in its document
        every = torch.cat([torch.arange(length, device=device) for length in lengths])
        self._positions = every, every[rows]  # of step 0's keys, and of all else
        self._lengths, self._window, self._sliding = lengths, window, sliding
        self._instead = int(instead)
        self._kernel = self._kernel_of(0)
        self._moved: dict[int, Kernel] = {}  # of later steps, with which a sliding window moves on

    def attend(
        self, k: int, query: Tensor, key: Tensor, value: Tensor, past: list[KeyValue]
    ) -> tuple[Tensor, KeyValue]:
        """Step k: → attention output [A, Q, d], and its keys and values for later steps.

        query [A, Q, d], key and value [A, G, d], at step 0 [N, G, d], before rotary embedding; past
        holds steps 0…k-1, and step 0 of the documents where a row's own is `instead`.
        """
        assert len(past) == k + self._instead, "a step attends to every step before it"
        every, of_rows = self._positions
        turns = self._rotary.at(of_rows + k)
        query = rotate(query, *turns) * query.shape[-1] ** -0.5
        own = KeyValue(rotate(key, *(turns if past else self._rotary.at(every))), value)
        first, *chain = [*past, own]
        if chain:  # [A, G, k, d]
            chain_keys = torch.stack([step.key for step in chain], dim=2)
            chain_values = torch.stack([step.value for step in chain], dim=2)
        else:
            chain_keys = chain_values = key.new_empty(len(query), key.shape[1], 0, key.shape[2])
        kernel = self._kernel
        if k and self._sliding:
            kernel = self._moved[k] = self._moved.get(k) or self._kernel_of(k)
        return kernel(query, first.key, first.value, chain_keys, chain_values), own

    def _kernel_of(self, k: int) -> Kernel:
        """Of step k's queries."""
        _, positions = self._positions
        hidden = hidden_positions(positions + 1, self._window) if self._window else None
        lowest = (positions + (k + 1 - self._sliding)).clamp(min=0) if self._sliding else None
        seen, rows, at = Seen(hidden, lowest), self.rows - self._instead, positions - self._instead
        return _kernel(self._lengths, rows, at, seen, self._rotary.cos)


def _kernel(
    lengths: tuple[int, ...], rows: Tensor, positions: Tensor, seen: Seen, like: Tensor
) -> Kernel:
    """The fastest way to attend for rows [A] at `positions` [A] of their documents.

    `like` [.., d] has their type and device.
    """
    if flex.has_kernel(like.device, like.shape[-1]) and len(rows):
        mask = flex.block_mask(rows, positions, sum(lengths), seen)
        return partial(flex.attend, mask=mask)
    starts = [0, *accumulate(lengths)]  # of the documents, and N
    # Rows before each of them.
    bounds = torch.searchsorted(rows, torch.tensor(starts, device=rows.device)).tolist()
    blocks = blocked.cut_blocks(positions, bounds, starts, like.dtype, seen)
    return partial(blocked.attend, blocks=blocks)
