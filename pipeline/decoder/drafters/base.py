"""The engine's view of a drafter. Rows are the engine's active slots, always the first ones."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pipeline.decoder.tree import Tree


class Drafter(Protocol):
    """Proposes a tree below the last token of each row."""

    depth: int  # deepest node it proposes
    nodes: int  # nodes of its trees, root included

    def allocate(self, slots: int, length: int) -> None:
        """Room for `slots` rows of `length` tokens."""

    def prefill(self, row: int, tokens: Tensor, aux: Tensor) -> None:
        """Read a prompt: tokens [T + 1] (the last is the first generated one) and aux states [T, 3H]."""

    def draft(self, roots: Tensor) -> Tree:
        """Trees below `roots` [B], the last token of each row."""

    def extend(self, tokens: Tensor, aux: Tensor, counts: Tensor) -> None:
        """Read what a round emitted: tokens [B, E] and the aux states [B, E, 3H] that led to each.

        Row b has counts[b] valid entries; the rest is padding.
        """

    def move(self, source: int, target: int) -> None:
        """Row `source` takes the place of row `target`."""
