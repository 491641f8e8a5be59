"""The engine's view of a drafter.

A drafter keeps nothing of its own about a request: what it must remember stands in its plane of the
page pool and in `batch.drafter_state`, so that rows can be joined, moved and dropped without its
help.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.kv import PageAllocator
from pipeline.decoder.tree import Tree


class Drafter(Protocol):
    """Proposes a tree below the last token of each row."""

    depth: int  # deepest node of any tree it proposes
    nodes: int  # nodes of its largest tree, root included
    lookahead: int  # entries behind the committed ones that drafting writes
    state_size: int  # values in a row of batch.drafter_state

    def make_plane(self, allocator: PageAllocator) -> None:
        """Make its plane of keys and values on the allocator's pages."""

    def shape_for(self, rows: int) -> TreeSection:
        """Which tree it drafts for a batch of this size."""

    def draft(self, batch: DecodeBatch, shape: TreeSection) -> Tree:
        """Trees below the roots."""

    def extend(self, batch: DecodeBatch, tokens: Tensor, aux: Tensor, counts: Tensor) -> None:
        """Read tokens [B, E], and the aux states [B, E, 3H] before each, behind `batch.seq_lens`.

        Row b has counts[b] valid entries; the rest is padding. Prompts come the same way, in
        chunks.
        """
