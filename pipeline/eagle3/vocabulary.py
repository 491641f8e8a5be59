"""Which target tokens the head can propose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftVocabulary:
    """The most frequent supervised tokens of the training data."""

    target_ids: Tensor  # [Vd] int64, ascending
    coverage: float  # share of supervised tokens that it contains

    @property
    def size(self) -> int:
        return len(self.target_ids)


def choose_vocabulary(counts: Tensor, size: int) -> DraftVocabulary:
    """The `size` most frequent tokens of `counts` [V]; ties go to the lower id.

    When fewer distinct tokens were seen, the lowest unseen ids fill up.
    """
    size = min(size, len(counts))
    by_frequency = torch.sort(counts, descending=True, stable=True).indices
    chosen = by_frequency[:size].sort().values
    total = int(counts.sum())
    return DraftVocabulary(chosen, float(counts[chosen].sum()) / total if total else 0.0)
