"""Blocked attention over step-0 keys and a row's own chain, whose backward pass recomputes.

Queries are taken in blocks of a document, each with the keys up to its last row:

    keys      0 1 2 3 4 5 6 7                       chain
    block 0   ● ·                 ● for all rows    k columns
              ● ●                 · masked          of each row's own
    block 1   ● ● ● ·
              ● ● ● ●

Only columns behind a block's first row need a mask, and columns that no row attends to are not
computed. The scores of a block stand beside those of its rows' chain keys, under one softmax:

    [G, s·B, T + k]     T step-0 keys | k chain keys

Of the softmax only the first blocks' is kept for the backward pass, up to a fixed number of
elements; the others' is computed again from queries and keys, to the same bits. So memory is linear
in the tokens.

Shapes: N keys of step 0, A rows, B rows of a block, T keys of it, k chain keys of a row, Q query
heads, G key/value heads, s = Q/G, d head size. The s query heads of a key head are stacked into
rows [G, s·B, ..], so that no key is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.learning.window import EVERYTHING, WINDOW_STEP, Seen

#: Rows of a block: few enough for its scores to stay in a core's cache, enough for a fast matrix
#: product.
_MOST_ROWS, _FEWEST_ROWS = 128, 32


#: Query-key pairs of a block, per query head.
_PAIRS = 1 << 17


#: Softmax elements that one call keeps: all of a batch of short documents', which saves a fifth of
#: attention's time.
_STORED_WEIGHTS = 4 << 20


class Block(NamedTuple):
    """Consecutive rows of one document and the step-0 keys that they attend to."""

    rows: slice
    keys: slice | Tensor  # or int64 [T], distinct
    width: int  # T
    mask: Tensor  # [B, m], added to the scores of the last m keys


def cut_blocks(
    positions: Tensor,
    bounds: list[int],
    starts: list[int],
    dtype: torch.dtype,
    seen: Seen = EVERYTHING,
) -> list[Block]:
    """Blocks of rows at `positions`.

    Document i has rows bounds[i]…bounds[i+1] and keys from starts[i]. Behind its sinks a row does
    not see its `hidden` keys; a block's rows have the same number of them. Below its `lowest` key
    it sees none; a block has the keys from its first row's on, and a mask of them all.
    """
    at, none = positions.tolist(), [0] * len(positions)
    unseen = none if seen.hidden is None else seen.hidden.tolist()
    lowest = none if seen.lowest is None else seen.lowest.tolist()
    blocks = []
    for document, offset in enumerate(starts[:-1]):
        row, end = bounds[document], bounds[document + 1]
        while row < end:
            size = min(_MOST_ROWS, max(_FEWEST_ROWS, _PAIRS // (at[row] + 1)))
            stop = min(row + size, end)
            stop = next((other for other in range(row, stop) if unseen[other] != unseen[row]), stop)
            first, last = at[row], at[stop - 1]
            width = last + 1 - lowest[row]
            begin = first + 1 if seen.lowest is None else lowest[row]
            columns = torch.arange(begin, last + 1, device=positions.device)
            masked = columns > positions[row:stop, None]  # [B, columns behind the first row]
            if seen.lowest is not None:  # or all
                masked = masked | (columns < seen.lowest[row:stop, None])
            mask = torch.zeros(masked.shape, dtype=dtype, device=masked.device)
            mask.masked_fill_(masked, torch.finfo(dtype).min)
            keys = _seen_keys(offset + lowest[row], width, unseen[row], positions.device)
            blocks.append(Block(slice(row, stop), keys, width - unseen[row], mask))
            row = stop
    return blocks


def _seen_keys(offset: int, length: int, hidden: int, device: torch.device) -> slice | Tensor:
    """Of the `length` keys from `offset` on, all but `hidden` ones behind the sinks."""
    if not hidden:
        return slice(offset, offset + length)
    index = torch.arange(offset, offset + length, device=device)
    return torch.cat((index[:WINDOW_STEP], index[WINDOW_STEP + hidden :]))


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    chain_keys: Tensor,
    chain_values: Tensor,
    blocks: Sequence[Block],
) -> Tensor:
    """Attention output [A, Q, d].

    query [A, Q, d] is scaled; keys and values [N, G, d], those of the chain [A, G, k, d].
    Blocks cover every row once; k may be 0.
    """
    inputs = query, keys, values, chain_keys, chain_values, blocks
    return torch.as_tensor(_BlockedAttention.apply(*inputs))  # type: ignore[no-untyped-call]


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        chain_keys: Tensor,
        chain_values: Tensor,
        blocks: Sequence[Block],
    ) -> Tensor:
        split = _split(query, keys)  # [A, G, s, d]
        chain_scores = split @ chain_keys.transpose(-1, -2)  # [A, G, s, k]
        chain_weights, output = torch.empty_like(chain_scores), torch.empty_like(split)
        stored_weights: list[Tensor | None] = []
        budget = _STORED_WEIGHTS if any(ctx.needs_input_grad) else 0
        for block in blocks:
            weights = _weights(split, keys, chain_scores, block)
            attended = torch.bmm(weights[..., : block.width], values[block.keys].transpose(0, 1))
            output[block.rows] = _unstack(attended, split)
            chain_weights[block.rows] = _unstack(weights[..., block.width :], split)
            budget -= weights.numel()
            stored_weights.append(weights if budget >= 0 else None)
        output += chain_weights @ chain_values
        output = output.view_as(query)
        ctx.blocks, ctx.stored_weights = blocks, stored_weights
        inputs = query, keys, values, chain_keys, chain_values
        ctx.save_for_backward(*inputs, chain_weights, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Softmax's own rule block by block: of weights p with slope s, p · (s - Σ p s).

        The sum over all keys is that of output and its gradient over d (Dao et al. 2022,
        arXiv:2205.14135, appendix B.2). Gradients of keys and values add up in float32 or wider.
        """
        query, keys, values, chain_keys, chain_values, chain_weights, output = ctx.saved_tensors
        split = _split(query, keys)  # [A, G, s, d]
        grad = grads[0].reshape(split.shape)
        minus_mean = -(grad * output.view_as(split)).sum(-1, keepdim=True)  # [A, G, s, 1]
        chain_scores = chain_weights  # [A, G, s, k]
        if None in ctx.stored_weights:
            chain_scores = split @ chain_keys.transpose(-1, -2)
        # [A, G, s, k], of the weights, then of the scores
        chain_slope = grad @ chain_values.transpose(-1, -2) + minus_mean
        chain_values_grad = chain_weights.transpose(-1, -2) @ grad
        query_grad = torch.empty_like(split)
        keys_grad, values_grad = (_zeros_for_sums(keys).transpose(0, 1) for _ in range(2))
        for block, weights in zip(ctx.blocks, ctx.stored_weights, strict=True):
            if weights is None:
                weights = _weights(split, keys, chain_scores, block)
            past, chain = slice(0, block.width), slice(block.width, None)
            rows_grad = _stack(grad, block)  # [G, s·B, d]
            slope = torch.empty_like(weights)  # [G, s·B, T + k]
            keys_values = values[block.keys].permute(1, 2, 0)  # [G, d, T]
            torch.baddbmm(_stack(minus_mean, block), rows_grad, keys_values, out=slope[..., past])
            slope[..., chain] = _stack(chain_slope, block)
            slope.mul_(weights)
            chain_slope[block.rows] = _unstack(slope[..., chain], split)
            slope = slope[..., past]
            rows_query_grad = torch.bmm(slope, keys[block.keys].transpose(0, 1))
            query_grad[block.rows] = _unstack(rows_query_grad, split)
            keys_grad[:, block.keys] += torch.bmm(slope.transpose(1, 2), _stack(split, block))
            values_grad[:, block.keys] += torch.bmm(weights[..., past].transpose(1, 2), rows_grad)
        query_grad += chain_slope @ chain_keys
        chain_keys_grad = chain_slope.transpose(-1, -2) @ split
        shared = (part.transpose(0, 1).to(keys.dtype) for part in (keys_grad, values_grad))
        return query_grad.view_as(query), *shared, chain_keys_grad, chain_values_grad, None


def _weights(split: Tensor, keys: Tensor, chain_scores: Tensor, block: Block) -> Tensor:
    """Softmax [G, s·B, T + k] of one block.

    split [A, G, s, d], keys [N, G, d], chain scores [A, G, s, k].
    """
    stacked = _stack(split, block)
    scores = stacked.new_empty(*stacked.shape[:2], block.width + chain_scores.shape[-1])
    past = scores[..., : block.width]
    torch.bmm(stacked, keys[block.keys].permute(1, 2, 0), out=past)
    rows, masked = block.mask.shape
    past.view(len(past), -1, rows, block.width)[..., block.width - masked :] += block.mask
    scores[..., block.width :] = _stack(chain_scores, block)
    return torch.softmax(scores, dim=-1)


def _zeros_for_sums(like: Tensor) -> Tensor:
    """Zeros of the same shape, in float32 or wider."""
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros(like.shape, dtype=wide, device=like.device)


def _split(query: Tensor, keys: Tensor) -> Tensor:
    """Query [A, Q, d] as [A, G, s, d]."""
    rows, heads, size = query.shape
    return query.view(rows, keys.shape[1], heads // keys.shape[1], size)


def _stack(split: Tensor, block: Block) -> Tensor:
    """A block's rows of [A, G, s, x] as [G, s·B, x]."""
    return split[block.rows].permute(1, 2, 0, 3).flatten(1, 2)


def _unstack(stacked: Tensor, like: Tensor) -> Tensor:
    """[G, s·B, x] → [B, G, s, x], for `like` [A, G, s, ..]."""
    groups, shared = len(stacked), like.shape[2]
    split = stacked.view(groups, shared, stacked.shape[1] // shared, stacked.shape[2])
    return split.permute(2, 0, 1, 3)
