"""Static key/value cache: every slot owns `length` consecutive entries in every layer.

Active slots are always the first rows, so that a batch is a view and never a gather.

    row 0   p p p p p p n n n n . . .     p: prefix (committed)   n: nodes of the tree being verified
    row 1   p p p n n n n . . . . . .     .: never read
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of all layers: [layers, 2, slots, kv_heads, length, d].

    A head's entries are contiguous: attention streams them, and that is most of what a batch reads."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.slots, self.length = data.shape[2], data.shape[4]

    @classmethod
    def zeros(cls, layers: int, slots: int, length: int, kv_heads: int, head_dim: int, *, device: torch.device, dtype: torch.dtype) -> KVCache:
        """An empty cache."""
        return cls(torch.zeros(layers, 2, slots, kv_heads, length, head_dim, device=device, dtype=dtype))

    def row(self, index: int) -> KVCache:
        """A view of one row as a cache of its own."""
        return KVCache(self.data[:, :, index : index + 1])

    def write(self, layer: int, keys: Tensor, values: Tensor, columns: Tensor) -> None:
        """Store keys and values [B, N, kv_heads, d] of the first B rows at `columns` [B, N]."""
        rows = torch.arange(len(columns), device=columns.device)[:, None]  # [B, 1]
        self.data[layer, 0][rows, :, columns] = keys
        self.data[layer, 1][rows, :, columns] = values

    def read(self, layer: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Views (keys, values) [rows, kv_heads, length, d] of the first `rows` rows."""
        return self.data[layer, 0, :rows, :, :length], self.data[layer, 1, :rows, :, :length]

    def compact(self, source: Tensor, target: Tensor) -> None:
        """Copy entries at columns `source` [B, E] to columns `target` [B, E] in the first B rows."""
        rows = torch.arange(len(source), device=source.device)[:, None]
        self.data[:, :, rows, :, target] = self.data[:, :, rows, :, source]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` entries of row `source` over row `target`."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]
