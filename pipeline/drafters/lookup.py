"""Looking up beside a drafter: one tree of what it proposes and of what stood in the text before.

A head knows what is likely and remembers nothing; a lookup remembers and knows nothing. Both say
with which probability the target goes on so, and the nodes of both compete for the tree:

    drafted            looked up          one tree
    r ┬ a ┬ b          r ─ a ─ c ─ d      r ┬ a ┬ b
      │   └ c                               │   ├ c ─ d      d: looked up, below a drafted node
      └ e                                   └ e

A node of both is one node, with the larger of the two probabilities: its children are those of
both. SuffixDecoding (arXiv:2411.04975) drafts a round with one or the other.

Candidates of the lookup stand behind the drafter's, so that parents still come first.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.config import NgramSection, TreeSection
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.drafter import Drafter, DrafterFactory, DraftWork, ReadTokens, Trees
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.draft import Candidates
from pipeline.drafters.ngram import CorpusIndex, NgramDrafter


class LookupDrafter:
    """What a drafter proposes and what an n-gram drafter does, in one tree."""

    def __init__(self, drafter: Drafter, lookup: NgramDrafter) -> None:
        """Both for the same trees. Memory and state are the drafter's, the history the lookup's."""
        self.drafter, self.lookup = drafter, lookup
        self.depth, self.lookahead = drafter.depth, drafter.lookahead
        most = max((shape.nodes for shape in lookup.shapes.drafted), default=1)
        self.nodes = min(most, drafter.nodes + lookup.nodes - 1)
        self.planes, self.drafter_kv = drafter.planes, drafter.drafter_kv
        self.drafter_pages, self.state = drafter.drafter_pages, drafter.state
        self.history = max(drafter.history, lookup.history)

    def shape_for(self, rows: int) -> TreeSection | None:
        """See `Drafter`."""
        return self.drafter.shape_for(rows)

    def candidates(self, batch: DecodeBatch, planes: Planes, shape: TreeSection) -> Candidates:
        """See `Drafter`."""
        drafted = self.drafter.candidates(batch, planes, shape)
        looked_up = self.lookup.candidates(batch, planes, shape)
        return self.lookup.ops.merge_candidates(drafted, looked_up, shape.steps)

    def prefill(self, batch: DecodeBatch, planes: Planes, read: ReadTokens, ended: int) -> None:
        """See `Drafter`."""
        self.drafter.prefill(batch, planes, read, ended)
        self.lookup.prefill(batch, planes, read, ended)

    def extend(self, batch: DecodeBatch, planes: Planes, read: ReadTokens) -> None:
        """See `Drafter`."""
        self.drafter.extend(batch, planes, read)
        self.lookup.extend(batch, planes, read)

    def work(self, shape: TreeSection) -> DraftWork | None:
        """See `Drafter`; comparing tokens is nothing beside reading weights."""
        return self.drafter.work(shape)


def with_lookup(
    factory: DrafterFactory, model: DecoderModel, section: NgramSection, corpus: CorpusIndex | None
) -> DrafterFactory:
    """The same drafters, each with a lookup beside it."""

    def make(trees: Trees) -> Drafter:
        return LookupDrafter(factory.make(trees), NgramDrafter(model, trees, section, corpus))

    choices = tuple(with_lookup(each, model, section, corpus) for each in factory.choices)
    return replace(factory, make=make, choices=choices, without_lookup=factory)
