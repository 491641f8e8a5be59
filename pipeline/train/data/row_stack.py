"""Rows of many samples, written once to where they stay."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pipeline.store.states.layout import as_bytes


class RowStack:
    """Rows under one another in one piece of memory, at most `capacity` of them.

        ▓▓▓▓▓▓▓▓▓▓░░░░░·············
        kept      room              capacity

    A reader fills the room; `keep` then makes it part of the stack without another copy. Copies are numpy's,
    with one thread: torch would start a team of threads for each thread that reads batches, and they would
    take the cores from training.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._kept = capacity, 0
        self._whole: Tensor | None = None

    def room(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Memory [rows, width] after what is kept; asked for again, the same. Apart from the stack when it is full."""
        if self._whole is None:
            # numpy asks for huge pages: a fault for each 4 KB would cost as much as reading them.
            memory = np.empty(self._capacity * width * dtype.itemsize, dtype=np.uint8)
            self._whole = torch.from_numpy(memory).view(dtype).view(self._capacity, width)
        if self._kept + rows > self._capacity:
            return torch.empty(rows, width, dtype=dtype)
        return self._whole[self._kept : self._kept + rows]

    def keep(self, rows: Tensor) -> None:
        """`rows` come next. They are copied unless they lie at the beginning of the room."""
        assert self._kept + len(rows) <= self._capacity, "the stack is full"
        target = self.room(rows.shape[0], rows.shape[1], rows.dtype)
        if target.data_ptr() != rows.data_ptr():
            as_bytes(target)[:] = as_bytes(rows.contiguous())
        self._kept += len(rows)

    def rows(self) -> Tensor:
        """All that is kept."""
        assert self._whole is not None, "nothing was kept"
        return self._whole[: self._kept]
