"""What the other trainers learn from: samples of a run in one file. Runs without this package.

token_ids, supervised    [T]       all samples, one after the other
offsets                  [n + 1]   sample s owns tokens [offsets[s], offsets[s + 1])
aux_states, final_states [T, L·H], [T, H]   the latter after the target's last norm; zeros where
                                            none is stored, which teaches nothing
embedding, lm_head       [V, H]    the target's
draft_ids                [Vd]      the draft vocabulary, ascending
__metadata__.layer                 the head's layer, as a Llama configuration
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor


class Sample(NamedTuple):
    """T tokens of one document."""

    token_ids: Tensor  # int64 [T]
    supervised: Tensor  # int64 [T], 1 where the target generated the token
    aux_states: Tensor  # [T, L·H]
    final_states: Tensor  # [T, H]


class Samples:
    """The file, which stays on disk but for what is read."""

    def __init__(self, path: Path) -> None:
        self._file: Any = safe_open(path, framework="pt")
        self.layer: dict[str, Any] = json.loads(self._file.metadata()["layer"])  # type: ignore[no-untyped-call]
        self.embedding, self.lm_head = self._tensor("embedding"), self._tensor("lm_head")
        self.draft_ids = self._tensor("draft_ids")
        self._offsets = self._tensor("offsets").tolist()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Sample:
        rows = slice(self._offsets[index], self._offsets[index + 1])
        return Sample(*(self._file.get_slice(name)[rows] for name in Sample._fields))

    def marks(self) -> tuple[Tensor, Tensor]:
        """t2d [V], true for tokens of the draft vocabulary, and d2t [Vd], what is to be added to a
        row's number."""
        t2d = torch.zeros(len(self.embedding), dtype=torch.bool)
        t2d[self.draft_ids] = True
        return t2d, self.draft_ids - torch.arange(len(self.draft_ids))

    def batches(self, tokens: int, *, seed: int) -> Iterator[list[int]]:
        """One pass in an order drawn with `seed`: as many samples as fit into `tokens`, or one."""
        order = list(range(len(self)))
        random.Random(seed).shuffle(order)
        batch: list[int] = []
        size = 0
        for index in order:
            length = self._offsets[index + 1] - self._offsets[index]
            if batch and size + length > tokens:
                yield batch
                batch, size = [], 0
            batch.append(index)
            size += length
        if batch:
            yield batch

    def _tensor(self, name: str) -> Tensor:
        return torch.as_tensor(self._file.get_slice(name)[:])
