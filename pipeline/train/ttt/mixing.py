"""Blocked attention over step-0 keys and a row's own chain, whose backward pass recomputes.

The scores of a block stand beside those of its rows' own keys, under one softmax:

    [G, s·B, T + k]     T step-0 keys | k own keys

Of the softmax only the first blocks' is kept for the backward pass, up to a fixed number of elements;
the others' is computed again from queries and keys, to the same bits. So memory is linear in the tokens.

Shapes: N keys of step 0, A rows, B rows of a block, T keys of it, k own keys of a row, Q query heads,
G key/value heads, s = Q/G, d head size. The s query heads of a key head are stacked into rows
[G, s·B, ..], so that no key is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Softmax elements that one call keeps: all of a batch of short documents', which saves a fifth of attention's time.
_KEPT = 4 << 20


class Block(NamedTuple):
    """Consecutive rows of one document and the step-0 keys that they see."""

    rows: slice
    keys: slice
    mask: Tensor  # [B, m], added to the scores of the last m keys

    @property
    def width(self) -> int:
        return int(self.keys.stop - self.keys.start)


def mix(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    blocks: Sequence[Block],
) -> Tensor:
    """Attend: query [A, Q, d] (scaled), keys and values [N, G, d], own keys and values [A, G, k, d] → [A, Q, d].

    Blocks cover every row once. k may be 0.
    """
    return torch.as_tensor(_Mix.apply(query, keys, values, own_keys, own_values, blocks))  # type: ignore[no-untyped-call]


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        blocks: Sequence[Block],
    ) -> Tensor:
        split = _split(query, keys)  # [A, G, s, d]
        own_scores = split @ own_keys.transpose(-1, -2)  # [A, G, s, k]
        own_weights, mixed = torch.empty_like(own_scores), torch.empty_like(split)
        kept: list[Tensor | None] = []
        budget = _KEPT if any(ctx.needs_input_grad) else 0
        for block in blocks:
            weights = _weights(split, keys, own_scores, block)
            mixed[block.rows] = _unstack(
                torch.bmm(weights[..., : block.width], values[block.keys].transpose(0, 1)), split
            )
            own_weights[block.rows] = _unstack(weights[..., block.width :], split)
            budget -= weights.numel()
            kept.append(weights if budget >= 0 else None)
        mixed += own_weights @ own_values
        ctx.blocks, ctx.kept = blocks, kept
        ctx.save_for_backward(query, keys, values, own_keys, own_values, own_weights)
        return mixed.view_as(query)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Softmax's own rule block by block; gradients of keys and values add up in float32 or wider."""
        query, keys, values, own_keys, own_values, own_weights = ctx.saved_tensors
        split = _split(query, keys)  # [A, G, s, d]
        grad = grads[0].reshape(split.shape)
        own_scores = (
            split @ own_keys.transpose(-1, -2) if None in ctx.kept else own_weights
        )  # [A, G, s, k]
        own_slope = grad @ own_values.transpose(
            -1, -2
        )  # [A, G, s, k], of the weights, then of the scores
        own_values_grad = own_weights.transpose(-1, -2) @ grad
        query_grad = torch.empty_like(split)
        wide = torch.promote_types(keys.dtype, torch.float32)
        keys_grad, values_grad = (
            torch.zeros(keys.shape, dtype=wide, device=keys.device).transpose(0, 1)
            for _ in range(2)
        )  # [G, N, d]
        for block, weights in zip(ctx.blocks, ctx.kept, strict=True):
            if weights is None:
                weights = _weights(split, keys, own_scores, block)
            upper = _stack(grad, block)  # [G, s·B, d]
            slope = torch.empty_like(weights)  # [G, s·B, T + k]
            torch.bmm(upper, values[block.keys].permute(1, 2, 0), out=slope[..., : block.width])
            slope[..., block.width :] = _stack(own_slope, block)
            slope = torch.ops.aten._softmax_backward_data(slope, weights, -1, weights.dtype)
            own_slope[block.rows] = _unstack(slope[..., block.width :], split)
            slope = slope[..., : block.width]
            query_grad[block.rows] = _unstack(
                torch.bmm(slope, keys[block.keys].transpose(0, 1)), split
            )
            keys_grad[:, block.keys] += torch.bmm(slope.transpose(1, 2), _stack(split, block))
            values_grad[:, block.keys] += torch.bmm(
                weights[..., : block.width].transpose(1, 2), upper
            )
        query_grad += own_slope @ own_keys
        own_keys_grad = own_slope.transpose(-1, -2) @ split
        shared = (part.transpose(0, 1).to(keys.dtype) for part in (keys_grad, values_grad))
        return query_grad.view_as(query), *shared, own_keys_grad, own_values_grad, None


def _weights(split: Tensor, keys: Tensor, own_scores: Tensor, block: Block) -> Tensor:
    """Softmax [G, s·B, T + k] of one block; split [A, G, s, d], keys [N, G, d], own scores [A, G, s, k]."""
    stacked = _stack(split, block)
    scores = stacked.new_empty(*stacked.shape[:2], block.width + own_scores.shape[-1])
    past = scores[..., : block.width]
    torch.bmm(stacked, keys[block.keys].permute(1, 2, 0), out=past)
    rows, hidden = block.mask.shape
    past.view(len(past), -1, rows, block.width)[..., block.width - hidden :] += block.mask
    scores[..., block.width :] = _stack(own_scores, block)
    return torch.softmax(scores, dim=-1)


def _split(query: Tensor, keys: Tensor) -> Tensor:
    """Query [A, Q, d] as [A, G, s, d]."""
    rows, heads, size = query.shape
    return query.view(rows, keys.shape[1], heads // keys.shape[1], size)


def _stack(split: Tensor, block: Block) -> Tensor:
    """A block's rows of [A, G, s, x] as [G, s·B, x]."""
    return split[block.rows].permute(1, 2, 0, 3).flatten(1, 2)


def _unstack(stacked: Tensor, like: Tensor) -> Tensor:
    """[G, s·B, x] → [B, G, s, x], for `like` [A, G, s, ..]."""
    shared = like.shape[2]
    return stacked.view(len(stacked), shared, stacked.shape[1] // shared, stacked.shape[2]).permute(
        2, 0, 1, 3
    )
