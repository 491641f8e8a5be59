"""Reading fewer pages: block tables that leave the middle of a long context out.

block table          p0 p1 p2 p3 p4       window 128, length 300: 64 are hidden
seen                 p0 ·  p2 p3 p4       of 236 entries

Nothing is moved: keys keep the rotation of the positions that they have in the full cache, so what
is left is at its true distances (StreamingLLM, arXiv:2309.17453, numbers positions anew, for caches
that outgrow the model's; here verification reads all of them).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.decoder.ops.layer import PAGE
from pipeline.eagle3.head import WINDOW_STEP, hidden_positions


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
    behind = page + (page > 0) * (hidden // PAGE)[:, None]
    return block_table.gather(1, behind.clamp(max=block_table.shape[1] - 1)), lengths - hidden
