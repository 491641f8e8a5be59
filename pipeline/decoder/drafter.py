"""What proposes draft trees, as the engine sees it.

A drafter keeps nothing of its own about a request, and owns no memory: the engine allocates the
planes and the state of each row that it declares, and hands them in with every call. So rows can be
joined, moved and dropped without its help, and one drafter can serve several engines.

    planes        on the pool's pages: an entry for each of the target's, and what is drafted
    drafter_kv    on `drafter_pages` pages of a second pool, which a row holds from its first token
                  to its last: `batch.drafter_block_table` names them
    state         one vector a row, in batch.drafter_state
    history       a row's tokens, which the drafter writes, in batch.history
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pipeline.config import BatchTrees, TreeSection
from pipeline.decoder.batch import DecodeBatch, RowMemory, RowState, TokenRows
from pipeline.decoder.kv import DrafterMemory, Planes, PlaneShape
from pipeline.decoder.ops.draft import Candidates

#: One shape for all batches, or one for each batch size.
Trees = TreeSection | BatchTrees


@dataclass(frozen=True, eq=False)
class ReadTokens:
    """T tokens that the target has just read, as the entries behind `batch.seq_lens`.

        entry        L    L+1   L+2
        tokens       x0   x1    x2       x0 is the root in a round
        next_tokens  x1   x2    x3       x3: the bonus, or the next token of a prompt
        aux          a0   a1    a2

    Of row b's tokens the first counts[b] ≥ 1 are valid; the rest is padding.
    """

    rows: TokenRows
    tokens: Tensor  # [T]
    next_tokens: Tensor  # [T] -1 where the target's logits were NaN
    aux: Tensor  # [T, L · H] aux states of `tokens`
    counts: Tensor  # [B]


class DraftWork(NamedTuple):
    """What drafting a tree reads and multiplies: the basis of a roofline.

    Matrices are pairs of (parameters, tokens of a row that pass through them).
    """

    step: Sequence[tuple[int, int]]  # one draft step, all its beams
    extension: Sequence[tuple[int, int]]  # taking in what a round has accepted
    beams: int  # tokens of a row in a step
    accepted: int  # tokens of a row in an extension
    entry: int  # numbers in the keys and values of one token
    queries: int  # numbers in its queries
    dtype: torch.dtype
    weight_bytes: float  # of a parameter, as it is held
    window: int = 0  # entries that queries see, about; 0: all


class Drafter(DrafterMemory, RowMemory, Protocol):
    """Proposes a tree below the last token of each row."""

    depth: int  # deepest node of any tree it proposes
    nodes: int  # nodes of its largest tree, root included
    lookahead: int  # entries behind the committed ones that drafting writes

    def shape_for(self, rows: int) -> TreeSection | None:
        """Which tree it drafts for a batch of this size; None: the round is a plain one."""

    def candidates(self, batch: DecodeBatch, planes: Planes, shape: TreeSection) -> Candidates:
        """All that such a draft proposes below the roots; the best of it become the tree."""

    def prefill(self, batch: DecodeBatch, planes: Planes, read: ReadTokens, ended: int) -> None:
        """Take in a chunk of each row's prompt; the prompts of the first `ended` rows end with it.

        Called before `batch.seq_lens` and `batch.roots` move on; what follows the last token of a
        prompt that ends is its first reply token.
        """

    def extend(self, batch: DecodeBatch, planes: Planes, read: ReadTokens) -> None:
        """Take in what a round has accepted; after plain rounds, too.

        The target's keys and values of `read` stand at their entries already.
        """

    def work(self, shape: TreeSection) -> DraftWork | None:
        """Of drafting such a tree; None: its floor is not known."""


class TreeShapes:
    """Which tree for which batch size, and what the engine has to keep free for them."""

    def __init__(self, trees: Trees, vocabulary: int) -> None:
        """`vocabulary` tokens can be proposed."""
        self._trees = {0: trees} if isinstance(trees, TreeSection) else dict(trees)
        self._vocabulary = vocabulary
        self.drafted = [shape for shape in self._trees.values() if shape is not None]
        self.depth = max((shape.steps for shape in self.drafted), default=0)
        self.nodes = max((self._nodes(shape) for shape in self.drafted), default=1)
        #: Entries that the beams of a draft take.
        self.beam_entries = max(
            ((shape.steps - 1) * self.beams(shape) for shape in self.drafted), default=0
        )

    def shape_for(self, rows: int) -> TreeSection | None:
        """See `Drafter`."""
        return self._trees[max(size for size in self._trees if size <= rows)]

    def beams(self, shape: TreeSection) -> int:
        """Beams a step: no more than there are tokens."""
        return min(shape.top_k, self._vocabulary)

    def _nodes(self, shape: TreeSection) -> int:
        """Nodes of a tree; a small draft may have fewer candidates than the budget."""
        beams = self.beams(shape)
        return min(shape.nodes, 1 + beams + (shape.steps - 1) * beams**2)


class TreeDrafter:
    """What most drafters have alike: shapes by batch size, and memory that they do not need."""

    state: RowState | None = None
    history: int = 0
    planes: tuple[PlaneShape, ...] = ()
    drafter_kv: tuple[PlaneShape, ...] = ()
    drafter_pages: int = 0

    def __init__(self, trees: Trees, vocabulary: int) -> None:
        self.shapes = TreeShapes(trees, vocabulary)
        self.depth, self.nodes = self.shapes.depth, self.shapes.nodes
        self.lookahead = max(self.shapes.beam_entries, 1)

    def shape_for(self, rows: int) -> TreeSection | None:
        """See `Drafter`."""
        return self.shapes.shape_for(rows)

    def work(self, shape: TreeSection) -> DraftWork | None:
        """See `Drafter`."""
        return None


def copy_weights(source: Drafter, into: Drafter) -> None:
    """Overwrite a drafter's weights with those of one of the same shape, which are held in the same
    types: graphs that were captured with it draft with them from then on. No request may be
    running."""
    pairs = zip(_tensors(vars(source)), _tensors(vars(into)), strict=True)
    with torch.no_grad():
        for theirs, ours in pairs:
            if theirs is not ours:  # the target's are shared
                ours.copy_(theirs)


def _tensors(value: object) -> Iterator[Tensor]:
    """All tensors of a drafter's attributes, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value):
        yield from _tensors([getattr(value, each.name) for each in fields(value)])


@dataclass(frozen=True)
class DrafterFactory:
    """Makes a drafter for any trees; all that it makes share their weights."""

    make: Callable[[Trees], Drafter]
    #: Depths of the trees that are worth a try, ascending: what a drafter can do, and where it may
    #: still pay.
    depths: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    #: Its every step is a forward of a whole model.
    costly: bool = False
    #: What was chosen where the configuration leaves it open, such as {"budget": 512}.
    settings: Mapping[str, int] = field(default_factory=dict)
    #: After so many tokens or fewer it does what a smaller choice does.
    from_context: int = 0
    #: The same drafter with other settings, the smallest first, to pick one from; none: itself.
    choices: tuple[DrafterFactory, ...] = ()
    #: The same drafter alone, where it looks up as well.
    without_lookup: DrafterFactory | None = None

    def __call__(self, trees: Trees) -> Drafter:
        return self.make(trees)

    def variants(self, context: int) -> list[DrafterFactory]:
        """Those that are worth a try after `context` tokens."""
        choices = self.choices or (self,)
        return [each for each in choices if each.from_context < context] or [choices[0]]

    def variant(self, settings: Mapping[str, int]) -> DrafterFactory:
        """The one with such settings; itself where it has no choices."""
        return next((each for each in self.choices if each.settings == settings), self)
