"""Memory for weights, side by side in huge pages where the kernel gives them.

A forward reads every weight once and nothing twice. With pages of 4 KiB that is a walk of the page
table for every 64 cache lines, with pages of 2 MiB one for every 32,768.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

_PAGE = 2 << 20
_LINE = 64  # bytes of a cache line
#: What is asked for at one time, for many weights; larger ones have memory of their own.
_CHUNK = 64 << 20
_MADV_HUGEPAGE = 14  # <sys/mman.h>
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class WeightMemory:
    """Hands out pieces of chunks; a chunk is freed with the last piece of it."""

    def __init__(self) -> None:
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def empty(self, size: int) -> Tensor:
        """`size` bytes, aligned to cache lines."""
        if size > _CHUNK // 4:
            return _huge_pages(size)[:size]
        if self._used + size > len(self._chunk):
            self._chunk, self._used = _huge_pages(_CHUNK), 0
        piece = self._chunk[self._used : self._used + size]
        self._used += -(-size // _LINE) * _LINE
        return piece


def _huge_pages(size: int) -> Tensor:
    """At least `size` bytes that begin and end with a huge page."""
    size = -(-size // _PAGE) * _PAGE
    memory = torch.empty(size + _PAGE, dtype=torch.uint8)
    first = -memory.data_ptr() % _PAGE
    # Where the kernel has no huge pages, small ones do.
    _madvise(memory.data_ptr() + first, size, _MADV_HUGEPAGE)
    return memory[first : first + size]
