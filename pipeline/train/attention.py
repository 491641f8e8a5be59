"""Which keys a query sees while the head is unrolled.

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
so the scores are [T, T] against step 0 and k single columns beside them, under one softmax.
Documents never see each other.

Shapes: N tokens of the batch, A rows that continue after step 0, T tokens of one document,
Q query heads, G key/value heads, d head size.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from pipeline.eagle3.head import Attend
from pipeline.eagle3.layers import RotaryTable, rotate


class UnrolledAttention:
    """Attention of one batch over one unroll: step 0 takes all N positions, later steps only `rows`."""

    def __init__(self, lengths: tuple[int, ...], rows: Tensor, rotary: RotaryTable) -> None:
        """rows [A] ascending flat positions; rotary covers the longest document plus the steps."""
        device, dtype = rows.device, rotary.cos.dtype
        self._lengths, self._rotary = list(lengths), rotary
        self._positions = torch.cat([torch.arange(length, device=device) for length in lengths])  # [N]
        self._rows = rows
        ends = torch.tensor(lengths, device=device).cumsum(0)
        bounds = [0, *torch.searchsorted(rows, ends).tolist()]
        self._counts = [stop - start for start, stop in pairwise(bounds)]  # rows of each document
        every = [torch.arange(length, device=device) for length in lengths]
        mine = self._positions[rows].split_with_sizes(self._counts)
        self._causal = [_causal(own, length, dtype) for own, length in zip(every, self._lengths, strict=True)]
        self._causal_rows = [_causal(own, length, dtype) for own, length in zip(mine, self._lengths, strict=True)]
        self._past: list[tuple[Tensor, Tensor]] = []  # step 0's keys and values of each document, [T, G, d]
        self._own_keys: list[Tensor] = []  # steps 1…k, each [A, G, d]
        self._own_values: list[Tensor] = []

    def step(self, k: int) -> Attend:
        """The attention to pass to `Eagle3Head.step` at step k; steps must be taken in order."""

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            """query [N or A, Q, d], key and value [N or A, G, d], before rotary embedding."""
            positions = self._positions if k == 0 else self._positions[self._rows]
            cos, sin = self._rotary.at(positions + k)
            query, key = rotate(query, cos, sin) * query.shape[-1] ** -0.5, rotate(key, cos, sin)
            return self._first(query, key, value) if k == 0 else self._later(query, key, value)

        assert k == len(self._own_keys) + bool(self._past), "steps are taken in order, each once"
        return attend

    def _first(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._past = list(zip(key.split_with_sizes(self._lengths), value.split_with_sizes(self._lengths), strict=True))
        documents = zip(query.split_with_sizes(self._lengths), self._past, self._causal, strict=True)
        return torch.cat([_mix(q, keys, values, mask, None, None) for q, (keys, values), mask in documents])

    def _later(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._own_keys.append(key)
        self._own_values.append(value)
        own_keys = torch.stack(self._own_keys, dim=1).split_with_sizes(self._counts)  # each [A, k, G, d]
        own_values = torch.stack(self._own_values, dim=1).split_with_sizes(self._counts)
        documents = zip(query.split_with_sizes(self._counts), self._past, self._causal_rows, own_keys, own_values, strict=True)
        return torch.cat([_mix(q, keys, values, mask, ks, vs) for q, (keys, values), mask, ks, vs in documents])


def _causal(positions: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [A, T]: a row at position p sees step-0 keys 0…p."""
    hidden = torch.arange(length, device=positions.device) > positions[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, torch.finfo(dtype).min)


def _mix(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, own_keys: Tensor | None, own_values: Tensor | None) -> Tensor:
    """One document: query [A, Q, d] (scaled), keys and values [T, G, d], mask [A, T], own [A, k, G, d] → [A, Q, d].

    The query heads of one key head are stacked into rows, so that no key is repeated.
    """
    rows, (length, groups, size) = len(query), keys.shape
    grouped = query.view(rows, groups, -1, size).permute(1, 2, 0, 3)  # [G, Q/G, A, d]
    shared = grouped.shape[1]
    stacked = grouped.reshape(groups, shared * rows, size)
    scores = torch.baddbmm(mask.repeat(shared, 1).expand(groups, -1, -1), stacked, keys.permute(1, 2, 0))
    if own_keys is not None and own_values is not None:
        own = torch.einsum("gsad,akgd->gsak", grouped, own_keys)
        scores = torch.cat((scores, own.reshape(groups, shared * rows, -1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)
    mixed = torch.bmm(weights[..., :length], values.transpose(0, 1)).view(groups, shared, rows, size)
    if own_keys is not None and own_values is not None:
        mixed = mixed + torch.einsum("gsak,akgd->gsad", weights[..., length:].view(groups, shared, rows, -1), own_values)
    return mixed.permute(2, 0, 1, 3).reshape(rows, groups * shared, size)
