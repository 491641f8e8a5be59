"""The engine's view of a drafter.

A drafter keeps nothing of its own about a request: what it must remember stands in its plane of the
page pool and in `batch.memory`, so that rows can be joined, moved and dropped without its help.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.kv import PagedPool
from pipeline.decoder.tree import Tree


class Drafter(Protocol):
    """Proposes a tree below the last token of each row."""

    depth: int  # deepest node of any tree it proposes
    nodes: int  # nodes of its largest tree, root included
    lookahead: int  # entries behind the committed ones that drafting writes
    memory: int  # values in a row of batch.memory

    def allocate(self, pool: PagedPool) -> None:
        """Make its plane of the pool."""

    def shape_for(self, rows: int) -> TreeSection:
        """Which tree it drafts for a batch of this size."""

    def draft(self, batch: DecodeBatch, shape: TreeSection) -> Tree:
        """Trees below the roots."""

    def extend(self, batch: DecodeBatch, tokens: Tensor, aux: Tensor, counts: Tensor) -> None:
        """Read tokens [B, E] and the aux states [B, E, 3H] that led to each; `batch.starts` is where they begin.

        Row b has counts[b] valid entries; the rest is padding. Prompts come the same way, in chunks.
        """
