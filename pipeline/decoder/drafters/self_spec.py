"""The target drafts for itself over a compressed cache (MagicDec, arXiv:2408.11049).

Behind a long context a forward is bound by reading keys and values; one that reads `budget` of them
costs a fraction, and says nearly the same. Verification reads all.

    streaming   the first page and recent whole pages of the target's own cache (`window.py`): no
                memory, and nothing to do when tokens are accepted
    snapkv      recent entries, and those that the end of the prompt attends to, by layer and head,
                on pages of the drafter's own (`snapkv.py`)

A draft reads the root first, then its beams; what it writes to the target's cache stands behind the
committed entries, where verification overwrites it.
"""

from __future__ import annotations

from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.drafters.base import ReadTokens, TreeDrafter, Trees
from pipeline.decoder.drafters.whole_model import draft_from_roots, forward_roots
from pipeline.decoder.drafters.window import seen_pages
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.draft import Candidates
from pipeline.decoder.ops.layer import PAGE


class StreamingDrafter(TreeDrafter):
    """Sinks and recent pages of the target's own cache."""

    def __init__(self, model: DecoderModel, trees: Trees, *, budget: int) -> None:
        """Drafts attend to `budget` entries, up to whole pages; one page of them are sinks."""
        super().__init__(trees, model.vocabulary)
        self._model, self._window = model, budget - PAGE
        self.lookahead = 1 + self.shapes.beam_entries

    def prefill(self, batch: DecodeBatch, planes: Planes, read: ReadTokens, ended: int) -> None:
        """Nothing: the target's cache is its own."""

    def extend(self, batch: DecodeBatch, planes: Planes, read: ReadTokens) -> None:
        """Nothing: the target's cache is its own."""

    def candidates(self, batch: DecodeBatch, planes: Planes, shape: TreeSection) -> Candidates:
        table, seen = seen_pages(
            batch.block_table, batch.seq_lens, self._window, 1 + self.shapes.beam_entries
        )
        model, plane, lengths = self._model, planes.target, batch.seq_lens
        final = forward_roots(model, plane, batch.roots, table, seen, lengths)
        place = table, seen + 1, lengths + 1
        beams = self.shapes.beams(shape)
        return draft_from_roots(model, plane, final, *place, shape.steps, beams, None)
