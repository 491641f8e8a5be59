"""Paged key/value memory: one pool of pages, one allocator, shared by the target and the drafter.

    row 0   block table [3 5]    page 3  p p p p p p p p │ page 5  p p n n n n . .
    row 1   block table [2 0]    page 2  p p p n n n n . │ page 0  nobody's: inert rows write here

    p: committed   n: nodes of the tree being verified (or beams being drafted)   .: never read

A page id names the same page in every plane: all layers of the target and the drafter's own layer.
Nodes that were not accepted need no freeing: the next tree is written over them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.decoder.ops.base import PAGE


class PageAllocator:
    """Which of `pages` pages are free. Page 0 is never handed out."""

    def __init__(self, pages: int, *, device: torch.device) -> None:
        self.pages, self.device = pages, device
        # Popped from the end, lowest first, so that memory in use stays together.
        self._free = list(range(pages - 1, 0, -1))

    def plane(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
        """Keys and values of `layers` layers on all pages: zeros [layers, 2, pages, G, PAGE, d]."""
        shape = layers, 2, self.pages, kv_heads, PAGE, head_dim
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Pages that can be handed out at all."""
        return self.pages - 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None when fewer are free."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def free(self, pages: list[int]) -> None:
        """Return pages; their content stays, and readers never look at what they did not write."""
        self._free.extend(reversed(pages))


def pages_for(entries: int) -> int:
    """Pages that hold `entries` cache entries."""
    return -(-entries // PAGE)
