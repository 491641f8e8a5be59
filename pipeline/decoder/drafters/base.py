"""What proposes draft trees, as the engine sees it.

A drafter keeps nothing of its own about a request, and owns no memory: the engine allocates the
planes and the state of each row that it declares, and hands them in with every call. So rows can be
joined, moved and dropped without its help, and one drafter can serve several engines.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch, RowState, TokenRows
from pipeline.decoder.kv import Planes, PlaneShape
from pipeline.decoder.tree import Tree


class Drafter(Protocol):
    """Proposes a tree below the last token of each row."""

    depth: int  # deepest node of any tree it proposes
    nodes: int  # nodes of its largest tree, root included
    lookahead: int  # entries behind the committed ones that drafting writes
    state: RowState | None  # what it keeps of each row, in batch.drafter_state
    planes: tuple[PlaneShape, ...]  # key/value memory on the pool's pages, in Planes.drafter

    def shape_for(self, rows: int) -> TreeSection | None:
        """Which tree it drafts for a batch of this size; None: the round is a plain one."""

    def draft(self, batch: DecodeBatch, planes: Planes, shape: TreeSection) -> Tree:
        """Trees below the roots."""

    def extend(
        self,
        batch: DecodeBatch,
        planes: Planes,
        rows: TokenRows,
        tokens: Tensor,
        aux: Tensor,
        counts: Tensor,
    ) -> None:
        """Read tokens [T], and the aux states [T, 3H] before each, behind `batch.seq_lens`.

        Of row b's tokens the first counts[b] ≥ 1 are valid; the rest is padding. Prompts come the
        same way, in chunks, several in one call; so do the tokens of plain rounds.
        """
