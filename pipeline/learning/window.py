"""The draft window: which earlier positions a head with a window attends to."""

from __future__ import annotations

from torch import Tensor

#: A window moves in steps of so many positions, and so many in front are always seen: pages of the
#: decoder's cache, which hides whole ones.
WINDOW_STEP = 64


def hidden_positions(lengths: Tensor, window: int) -> Tensor:
    """How many positions from WINDOW_STEP on a draft window hides, of each of `lengths` [..].

        position   0 … 63 │ 64 … 64+h-1 │ 64+h … L-1          h: a multiple of 64
                   sinks  │   hidden    │ `window` to window + 63 of them

    A query at position L-1, and all that is drafted behind it, sees the rest. Sinks keep softmax
    from moving its mass onto recent tokens (StreamingLLM, Xiao et al. 2023, arXiv:2309.17453).
    """
    return ((lengths - window) // WINDOW_STEP - 1).clamp(min=0) * WINDOW_STEP
