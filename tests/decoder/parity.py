"""Drafts from caches beside the trainer's unroll over the whole sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.config import TreeSection
from pipeline.decoder.batch import TokenRows
from pipeline.decoder.drafter import ReadTokens
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.layer import PAGE
from pipeline.decoder.ops.tree import Tree
from pipeline.decoder.round import draft_tree
from pipeline.heads.dflash.blocks import BlockObjective, DflashModel, cut_blocks
from pipeline.heads.dflash.drafter import DflashDrafter
from pipeline.heads.dflash.shape import DflashHead
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.eagle3.ttt import unroll
from pipeline.learning.batches import TrainBatch
from pipeline.target.rotary import RotaryTable
from tests.decoder.conftest import open_rows, poisoned_planes, random_tokens, states_of

STEPS = 5
PREFIX = 17


@torch.no_grad()
def aux_of(model: DecoderModel, tokens: Tensor) -> Tensor:
    """Aux states [T, 3H] of a sequence."""
    return states_of(model, tokens).aux


class Drafting:
    """A drafter over its own pages, and a batch of empty rows."""

    def __init__(
        self, head: Eagle3Head, model: DecoderModel, tree: TreeSection, rows: int, pages: int = 2
    ) -> None:
        self.drafter = Eagle3Drafter(head, model, tree)
        self.planes = poisoned_planes(model, pages * rows + 1, self.drafter)
        self.batch = open_rows(model, rows, pages=pages, drafter=self.drafter)

    def read(self, row: int, tokens: Tensor, aux: Tensor, count: int) -> None:
        """Give a row tokens [E] and states [E, 3H], `count` of them valid, and commit them."""
        batch, each = self.batch.rows(row, row + 1), TokenRows.even(1, len(tokens), tokens.device)
        read = ReadTokens(each, tokens.roll(1), tokens, aux, torch.tensor([count]))
        self.drafter.extend(batch, self.planes, read)
        batch.seq_lens.add_(count)

    def draft(self, root: int, shape: TreeSection) -> tuple[Tree, list[Tensor]]:
        """Trees below a root, and every step's logits [B, beams, Vd]."""
        self.batch.roots.fill_(root)
        self.drafter.trace = []
        tree, _ = draft_tree(self.drafter.ops, self.drafter, self.batch, self.planes, shape)
        return tree, self.drafter.trace


def trained_on(head: Eagle3Head, model: DecoderModel, tokens: Tensor, aux: Tensor) -> list[Tensor]:
    """The trainer's logits [T, Vd] of every step over a sequence whose end has no aux states.

    The last k+1 positions have no input at step k; their rows mean nothing.
    """
    none = torch.zeros(0, dtype=torch.int64)
    padded = torch.cat((aux, torch.full((len(tokens) - len(aux), aux.shape[1]), 1e3)))
    batch = TrainBatch(("x",), (len(tokens),), tokens, padded, none, none, aux[:0])
    config, length = head.shape.rope_config(), len(tokens) + STEPS
    rotary = RotaryTable(config, length, device=torch.device("cpu"), dtype=torch.float32)
    rows = torch.arange(len(tokens))
    embedding = model.embedding if head.embedding is None else head.embedding
    unrolled = unroll(head, embedding, batch, rotary, rows=rows, steps=STEPS)
    return [head.logits(output) for output in unrolled.outputs]


def worst_difference(
    model: DecoderModel,
    head: Eagle3Head,
    *,
    extended: int,
    shift: Callable[[Tensor], Tensor] = lambda tokens: tokens,
    prefix: int = PREFIX,
    trained: Eagle3Head | None = None,
) -> float:
    """Largest difference over steps 0…4 between draft and training logits.

    The drafter reads PREFIX - extended tokens as a prompt and the rest as a round's emission, then
    drafts a chain; the trainer, with `head` or another one, sees the prefix followed by that chain.
    """
    tokens = random_tokens(prefix + 1, seed=5)  # the last one is the root
    aux = aux_of(model, tokens[:-1])
    shape = TreeSection(top_k=1, steps=STEPS, nodes=STEPS + 1)
    pages = -(-(prefix + STEPS) // PAGE) + 1
    drafting, read = Drafting(head, model, shape, 1, pages), prefix - extended
    drafting.read(0, shift(tokens[: read + 1])[1:], aux[:read], read)
    if extended:
        padding = torch.zeros(2, dtype=torch.int64)
        wide = torch.cat((aux[read:], torch.full((2, aux.shape[1]), 9.0)))
        drafting.read(0, torch.cat((tokens[read + 1 :], padding)), wide, extended)
    tree, drafted = drafting.draft(int(tokens[-1]), shape)
    chain = tree.tokens[0, 1:]
    expected = trained_on(trained or head, model, torch.cat((tokens, chain)), aux)
    assert len(drafted) == STEPS
    return max(
        float((ours[0, 0] - theirs[prefix - 1]).abs().max())
        for ours, theirs in zip(drafted, expected, strict=True)
    )


class BlockDrafting:
    """A drafter over its own pages, which hold NaN, and a batch of empty rows."""

    def __init__(self, head: DflashHead, model: DecoderModel, rows: int) -> None:
        steps = head.shape.predicted
        chain = TreeSection.chain(steps)
        self.tree = chain if head.shape.markov_rank else TreeSection(top_k=3, steps=steps, nodes=12)
        self.drafted = torch.empty(0, dtype=torch.int64)  # the chain, where it is one
        self.drafter = DflashDrafter(head, model, self.tree)
        self.planes = poisoned_planes(model, 2 * rows + 1, self.drafter)
        self.batch = open_rows(model, rows, pages=2, drafter=self.drafter)

    def read(self, row: int, aux: Tensor, count: int) -> None:
        """Give a row states [E, 3H], `count` of them valid, and commit them."""
        batch, each = self.batch.rows(row, row + 1), TokenRows.even(1, len(aux), aux.device)
        none = torch.zeros(len(aux), dtype=torch.int64)
        read = ReadTokens(each, none, none, aux, torch.tensor([count]))
        self.drafter.extend(batch, self.planes, read)
        batch.seq_lens.add_(count)

    def logits(self, root: int) -> Tensor:
        """Of the first row [steps, Vd]; with a Markov head, after the tokens `drafted`."""
        self.batch.roots.fill_(root)
        self.drafter.trace = []
        self.drafted = self.drafter.candidates(self.batch, self.planes, self.tree).tokens[0]
        return torch.cat([each[0] for each in self.drafter.trace])


def block_trained_on(
    head: DflashHead, model: DecoderModel, tokens: Tensor, aux: Tensor, anchor: int
) -> Tensor:
    """What training computes behind token `anchor` of a text that goes on [b - 1, Vd]."""
    label = torch.tensor([anchor + 1])
    batch = TrainBatch(
        ("x",), (len(tokens),), tokens, aux, label, label, aux[:1, : model.config.hidden_size]
    )
    lm_head = model.embedding
    objective = BlockObjective(1, 4.0, 0)
    trained = DflashModel(
        head, model.embedding, lm_head, objective, max_length=len(tokens), dtype=torch.float32
    )
    count = head.shape.predicted
    states = trained.draft(batch, cut_blocks(batch, torch.tensor([0]), count + 1))[0]
    before = tokens[anchor : anchor + count]
    return head.proposing(states[head.shape.first :], before) @ head.output_rows().T


def worst_block_difference(model: DecoderModel, head: DflashHead, *, prefix: int) -> float:
    """Likewise between a block's draft logits and training's; the last four tokens of the prefix
    are read as a round's emission, over what an earlier block has left."""
    tokens = random_tokens(prefix + head.shape.block_size + 4, seed=5)
    aux = states_of(model, tokens).aux
    drafting, read = BlockDrafting(head, model, 2), prefix - 4
    drafting.read(1, aux[9:20], 11)  # a neighbour, which must not matter
    drafting.read(0, aux[:read], read)
    drafting.logits(3)
    padding = torch.full((2, aux.shape[1]), 9.0)
    drafting.read(0, torch.cat((aux[read:prefix], padding)), 4)
    drafted = drafting.logits(int(tokens[prefix]))
    if head.shape.markov_rank:
        tokens[prefix + 1 : prefix + 1 + len(drafting.drafted)] = drafting.drafted
    expected = block_trained_on(head, model, tokens, aux, prefix)
    return float((drafted - expected).abs().max())
