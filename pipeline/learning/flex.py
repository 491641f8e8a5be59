"""The same attention by torch's FlexAttention, joined with the chain's part by its log-sum-exp.

Row r of the batch sees the step-0 keys of its document up to its own position, without those that a
draft window hides. In blocks of 128 rows and keys:

    keys             document a    │ document b           ■ seen whole: no mask
    rows 0 … 127     ◪  ·  ·  ·    │ ·  ·  ·  ·           ◪ masked by element
    rows 128 … 255   ■  ◪  ◪  ·    │ ·  ·  ·  ·           · not computed
    rows 256 … 383   ·  ·  ·  ·    │ ■  ■  ◪  ·

With l the log-sum-exp of those scores, c that of the row's chain and t that of all, the output is
exp(l - t) · attention over step 0 + exp(c - t) · attention over the chain (as Ring Attention, Liu
et al. 2023, arXiv:2310.01889, joins devices); autograd goes through both, l included.

Used on CUDA, where it is compiled to Triton. Elsewhere it holds all scores; the tests use that.

Shapes: N keys of step 0, A rows, k chain keys of a row, Q query heads, G key/value heads, s = Q/G,
d head size.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from pipeline.learning.window import WINDOW_STEP, Seen

#: Rows and keys of a block of the mask: FlexAttention's own default.
_BLOCK = 128


def has_kernel(device: torch.device, size: int) -> bool:
    """Whether FlexAttention is compiled here: CUDA from Ampere on, head sizes of powers of two."""
    if device.type != "cuda" or size not in (16, 32, 64, 128, 256):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def block_mask(rows: Tensor, positions: Tensor, keys: int, visible: Seen) -> BlockMask:
    """Which of `keys` keys each row sees, and which blocks need a look at the elements.

    rows [A] ascending flat positions, of those `positions` in their documents.
    """
    first, hidden = rows - positions, visible.hidden  # [A] a row sees keys begin … rows
    begin = first if visible.lowest is None else first + visible.lowest  # ascending as well

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        seen = (key >= begin[row]) & (key <= rows[row])
        if hidden is None:
            return seen
        offset = key - first[row]
        return seen & ((offset < WINDOW_STEP) | (offset >= WINDOW_STEP + hidden[row]))

    top, bottom = slice(0, None, _BLOCK), _last_rows(rows)  # of the blocks of rows
    block = torch.arange(-(-keys // _BLOCK), device=rows.device)
    touched = (block >= begin[top, None] // _BLOCK) & (block <= rows[bottom, None] // _BLOCK)
    whole = (block * _BLOCK >= begin[bottom, None]) & ((block + 1) * _BLOCK <= rows[top, None] + 1)
    if hidden is not None:
        whole = torch.zeros_like(whole)
    return BlockMask.from_kv_blocks(
        *_listed(touched & ~whole),
        *_listed(touched & whole),
        BLOCK_SIZE=_BLOCK,
        mask_mod=sees,
        seq_lengths=(len(rows), keys),
    )


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    chain_keys: Tensor,
    chain_values: Tensor,
    mask: BlockMask,
) -> Tensor:
    """`blocked.attend`, with a block mask instead of blocks."""
    rows, heads, size = query.shape
    whole = (part.transpose(0, 1)[None] for part in (query, keys, values))  # [1, heads, .., d]
    attended, aux = _kernel(query.device.type)(
        *whole,
        block_mask=mask,
        scale=1.0,
        enable_gqa=heads != keys.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    over_past = attended[0].transpose(0, 1)  # [A, Q, d]
    if not chain_keys.shape[2]:
        return torch.as_tensor(over_past)
    by_group = query.view(rows, keys.shape[1], -1, size)  # [A, G, s, d]
    scores = by_group @ chain_keys.transpose(-1, -2)  # [A, G, s, k]
    wide = scores.to(aux.lse.dtype).view(rows, heads, -1)  # [A, Q, k]
    past = aux.lse[0].T  # l [A, Q]
    total = torch.logaddexp(past, wide.logsumexp(-1))  # t [A, Q]
    weights = (wide - total[..., None]).exp().to(query.dtype).view_as(scores)
    over_chain = (weights @ chain_values).view(rows, heads, size)
    share = (past - total).exp()[..., None].to(query.dtype)
    return torch.as_tensor(over_past * share + over_chain)


@cache
def _kernel(device: str) -> Any:
    """FlexAttention, compiled once for all numbers of rows and keys where there is a GPU.

    After too many compilations torch would go on with its dense products: that is an error.
    """
    if device != "cuda":
        return flex_attention
    limited = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
    return limited(torch.compile(flex_attention, dynamic=True))


def _last_rows(rows: Tensor) -> Tensor:
    """Index of the last row of each block."""
    ends = torch.arange(_BLOCK - 1, len(rows) + _BLOCK - 1, _BLOCK, device=rows.device)
    return ends.clamp(max=len(rows) - 1)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of the marked blocks [rows, keys]: how many in each row, and which, those first."""
    counts = blocks.sum(-1, dtype=torch.int32)
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return counts[None, None], order.to(torch.int32)[None, None]
