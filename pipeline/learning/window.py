"""The draft window: which earlier positions a head with a window attends to.

block table          p0 p1 p2 p3 p4       window 128, length 300: 64 are hidden
seen                 p0 ·  p2 p3 p4       of 236 entries

Nothing is moved: keys keep the rotation of the positions that they have in the full cache, so what
is left is at its true distances (StreamingLLM, arXiv:2309.17453, numbers positions anew, for caches
that outgrow the model's; here verification reads all of them).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.decoder.ops.layer import PAGE


class Seen(NamedTuple):
    """What windows leave of the keys before rows [A]; None: all of them."""

    hidden: Tensor | None = None  # int64 [A], as of `hidden_positions`
    lowest: Tensor | None = None  # int64 [A], the first position that is seen


EVERYTHING = Seen()


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


def seen_pages(
    block_table: Tensor, lengths: Tensor, window: int, lookahead: int
) -> tuple[Tensor, Tensor]:
    """The pages [B, P] that hold what a window leaves of `lengths` [B] entries, and how many.

    `lookahead` entries behind them have pages as well.
    """
    assert PAGE == WINDOW_STEP, "a window hides whole pages"
    hidden = hidden_positions(lengths, window)
    most = -(-(window + 2 * PAGE + lookahead) // PAGE)
    page = torch.arange(min(most, block_table.shape[1]), device=block_table.device)
    visible = page + (page > 0) * (hidden // PAGE)[:, None]
    return block_table.gather(1, visible.clamp(max=block_table.shape[1] - 1)), lengths - hidden
