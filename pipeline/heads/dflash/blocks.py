"""Blocks of a batch: behind an anchor, which is a token that the drafter is asked to go on from.

Block of size b = 4 behind anchor a = 3 of a document, and what a query of it sees:

    context entries   0   1   2   3   4  │ block of 3      block of 4       predicts
    token             x0  x1  x2  x3  x4 │ x3 m  m  m      x4 m  m  m
    position          0   1   2   3   4  │ 3  4  5  6      4  5  6  7
    query x3          ●   ●   ●          │ ●  ●  ●  ●                       nothing
    query m, k = 1    ●   ●   ●          │ ●  ●  ●  ●                       x4, teacher at 3
    query m, k = 2    ●   ●   ●          │ ●  ●  ●  ●                       x5, teacher at 4
    query m, k = 3    ●   ●   ●          │ ●  ●  ●  ●                       x6, teacher at 5

Entry i of the context is made of the aux states of x_i, at position i. That of the anchor itself is
not there, as it is not when the decoder drafts behind a token that the target has not read yet. A
block sees its own document's entries and no other block: all of them are computed in one forward,
and each is what it would be alone.

An anchor is a token that a label follows. Position k predicts the label k tokens behind it as long
as all tokens up to there are labels: drafting ends where the reply does.

Shapes: N tokens, S labels, A anchors, b block size, Q query heads, G key/value heads, d head size.

Teacher, loss and accuracy of blocks.

The loss of an optimiser step with A anchors, blocks of size b and decay γ:

    loss = 1/M · Σ_anchors Σ_k exp(-(k - 1)/γ) D(teacher at a+k-1 , drafter at position k)

for k = 1 … K (arXiv:2602.06036: a first wrong token costs all after it). M is A. The teacher is
the target's distribution after the true tokens between, of which the drafter knows none: what it
learns is their mean. D and the teacher's restriction to the draft vocabulary are those of
`pipeline.heads.unrolled`.

Where the anchor predicts (DSpark), all of this stands one position to the left: K is b instead of
b - 1, and position k - 1 predicts the label k tokens behind the anchor. With a Markov head the
logits are biased by the true token before, the label at k - 1 or the anchor, and with a confidence
output c the loss has, at the weight of D, the cross-entropy between c and the overlap Σ min(p, q)
of teacher and drafter, of which no gradient is taken.

Shapes: N tokens, S labels, A anchors, b block size, K positions that predict, R labels that one
predicts and that give loss, H hidden size, r rank of the bias, V target and Vd draft vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config import TrainSection
from pipeline.config.train import Loss
from pipeline.heads.dflash.shape import BlockQkv, ContextKeys, DflashHead, Sight
from pipeline.heads.trained import StepResult, TrainedModel, count_coarse_rows
from pipeline.learning.batches import ROW_MULTIPLE, TrainBatch, fill_up
from pipeline.target.rotary import RotaryTable, rotate


class BlockObjective(NamedTuple):
    """What is minimised."""

    anchors: int  # of a micro-batch, at most
    decay: float  # γ
    seed: int  # that anchors are drawn by
    loss: Loss = "cross_entropy"
    temperature: float = 1.0  # of the teacher's softmax


class DflashModel(TrainedModel[DflashHead]):
    """The block drafter."""

    def __init__(
        self,
        head: DflashHead,
        embedding: Tensor,
        target_lm_head: Tensor,
        objective: BlockObjective,
        *,
        max_length: int,
        dtype: torch.dtype,
    ) -> None:
        """As of `TrainedModel`; max_length is the longest document."""
        super().__init__(
            *(head, embedding, target_lm_head),
            loss=objective.loss,
            temperature=objective.temperature,
            length=max(max_length, ROW_MULTIPLE) + head.shape.block_size,
            dtype=dtype,
        )
        self.objective = objective

    def counted(self, batch: TrainBatch) -> int:
        return min(self.objective.anchors, len(batch.labels))

    def forward(self, batch: TrainBatch, divisor: float | None = None) -> StepResult:
        """Draft the blocks of `batch` and compare them with the teacher.

        divisor is M over the number of micro-batches; the anchors of this one if it is alone.
        """
        drawn = draw_anchors(batch, self.objective.anchors, self.objective.seed)
        filled, real = fill_up(drawn.to(batch.labels.device))
        blocks = cut_blocks(batch, filled, self.head.shape.predicted + 1)
        blocks = blocks._replace(labels=blocks.labels.where(real[:, None], -1))
        head, divisor = self.computing(), self.counted(batch) if divisor is None else divisor
        return self._compare(head, self._draft(head, batch, blocks), blocks, batch, divisor)

    def draft(self, batch: TrainBatch, blocks: Blocks) -> Tensor:
        """What lm_head reads at every position of the blocks [A, b, H]."""
        return self._draft(self.computing(), batch, blocks)

    def _draft(self, head: DflashHead, batch: TrainBatch, blocks: Blocks) -> Tensor:
        size = head.shape.block_size
        attend = BlockAttention(batch.lengths, blocks, size, self.rotary())
        tokens = head.block_tokens(batch.token_ids[blocks.anchors])  # [A, b]
        embedded = F.embedding(tokens.flatten(), self.embedding)
        states = head.run(embedded, head.context(batch.aux_states), attend)
        return states.view(-1, size, states.shape[-1])

    def _compare(
        self, head: DflashHead, states: Tensor, blocks: Blocks, batch: TrainBatch, divisor: float
    ) -> StepResult:
        """Loss and accuracy of every position of `head`, which computes, one after the other."""
        counted, output_rows = self.giving_loss(batch), self.head.output_rows()  # [S], [Vd, H + r]
        # The type of the scales, and of all sums.
        exact = torch.promote_types(batch.aux_states.dtype, torch.float32)
        loss, hits = torch.zeros((), dtype=exact, device=states.device), list[Tensor]()
        for k, labels in enumerate(blocks.labels.unbind(1)):  # [A]
            rows, real = fill_up(((labels >= 0) & counted[labels]).nonzero().flatten())  # [R]
            weight, at = math.exp(-k / self.objective.decay) / divisor, batch.labels[labels[rows]]
            read = head.proposing(states[rows, head.shape.first + k], batch.token_ids[at - 1])
            weights = real[None].to(exact) * weight  # [1, R]
            overlaps = None if head.confidence_head is None else torch.empty_like(weights)
            own_loss, own_hits = self.compare(
                read[None],
                batch.teacher_states[labels[rows]],
                batch.token_ids[at],
                weights,
                real[None],
                output_rows,
                overlaps,
            )
            loss = loss + own_loss
            if head.confidence_head is not None and overlaps is not None:
                odds = head.confidence_head.proj(read).to(exact).T  # [1, R]
                unsure = F.binary_cross_entropy_with_logits(odds, overlaps, reduction="none")
                loss = loss + (unsure * weights).sum()
            hits.append(own_hits)
        coarse_rows = count_coarse_rows(batch.trained(batch.aux_states), self.head.shape.aux_layers)
        return StepResult(loss, torch.cat(hits), (blocks.labels >= 0).sum(0), coarse_rows)


class Blocks(NamedTuple):
    """What is trained of a batch."""

    anchors: Tensor  # int64 [A] flat positions, ascending
    positions: Tensor  # int64 [A] in their documents
    labels: Tensor  # int64 [A, K] label that each position predicts, as its number; -1: none


def draw_anchors(batch: TrainBatch, most: int, seed: int) -> Tensor:
    """Numbers [A], ascending, of the labels that the blocks begin at: `most` of them, or all.

    A function of seed and batch number, so that a training that was resumed draws the same.
    """
    count = len(batch.labels)
    if count <= most:
        return torch.arange(count)
    drawn = random.Random(f"{seed}/{batch.number}").sample(range(count), most)
    return torch.tensor(sorted(drawn))


def cut_blocks(batch: TrainBatch, drawn: Tensor, size: int) -> Blocks:
    """The blocks whose first predictions are the labels of the numbers `drawn` [A]; each is of
    `size` tokens, its anchor and K = size - 1 labels."""
    first = drawn.to(batch.labels.device)
    anchors, positions = batch.labels[first] - 1, batch.depths[first] - 1
    number_at = torch.full((batch.tokens + size,), -1, device=anchors.device)  # of labels
    number_at[batch.labels] = torch.arange(len(batch.labels), device=anchors.device)
    ahead = torch.arange(1, size, device=anchors.device)
    labels = number_at[anchors[:, None] + ahead]  # [A, K]
    # A label of the next document is at another distance from the begin of its own.
    own = batch.depths[labels.clamp(min=0)] == positions[:, None] + ahead
    reached = ((labels >= 0) & own).cumprod(1).bool()
    return Blocks(anchors, positions, labels.where(reached, -1))


EVERYTHING = Sight()


class BlockAttention:
    """Attention of all blocks of a batch, one document after the other, under one softmax each."""

    def __init__(self, lengths: tuple[int, ...], blocks: Blocks, size: int, rotary: RotaryTable):
        """rotary covers the longest document and a block."""
        device, self._size = blocks.anchors.device, size
        every = torch.cat([torch.arange(length, device=device) for length in lengths])
        inside = blocks.positions[:, None] + torch.arange(size, device=device)  # [A, b]
        self._context_turns, self._block_turns = rotary.at(every), rotary.at(inside.flatten())
        starts = [0, *accumulate(lengths)]
        ends = torch.tensor(starts, device=device)
        bounds = torch.searchsorted(blocks.anchors, ends).tolist()
        documents = zip(pairwise(starts), pairwise(bounds), strict=True)
        #: (entries, anchors) of each document that has anchors.
        self._documents = [
            (slice(*entries), slice(*anchors))
            for entries, anchors in documents
            if anchors[1] > anchors[0]
        ]
        self._positions = blocks.positions

    def __call__(self, block: BlockQkv, context: ContextKeys, sight: Sight = EVERYTHING) -> Tensor:
        """Block tokens [A · b, ..], context [N, G, d] → attention output [A · b, Q, d]."""
        query = rotate(block.query, *self._block_turns) * block.query.shape[-1] ** -0.5
        key = rotate(block.key, *self._block_turns)
        past = rotate(context.key, *self._context_turns)
        by_anchor = [
            part.view(-1, self._size, *part.shape[1:]) for part in (query, key, block.value)
        ]
        mixed = [
            _attend(
                [part[anchors] for part in by_anchor],
                past[entries],
                context.value[entries],
                self._positions[anchors],
                sight,
            )
            for entries, anchors in self._documents
        ]
        return torch.cat(mixed) if mixed else query


def _attend(
    blocks: Sequence[Tensor],
    past_key: Tensor,
    past_value: Tensor,
    positions: Tensor,
    sight: Sight,
) -> Tensor:
    """Of one document of n tokens: queries [A, b, Q, d], keys and values [A, b, G, d] of its
    blocks, past [n, G, d], positions [A] → [A · b, Q, d]."""
    query, key, value = blocks
    count, size, heads, width = query.shape
    length, groups = past_key.shape[:2]
    # A group's query heads beside each other: r = b · Q/G rows of an anchor.
    shared = heads // groups
    query = query.view(count, size, groups, shared, width).permute(2, 0, 1, 3, 4)
    query = query.reshape(groups, count, -1, width)  # [G, A, r, d]
    key, value = (part.permute(2, 0, 1, 3) for part in (key, value))  # [G, A, b, d]
    past_key, past_value = past_key.transpose(0, 1), past_value.transpose(0, 1)  # [G, n, d]
    scores = (query.flatten(1, 2) @ past_key.mT).view(groups, count, -1, length)
    entry, within = (torch.arange(each, device=query.device) for each in (length, size))
    unseen = entry >= positions[:, None, None]  # [A, 1, n]
    if sight.window:
        lowest = positions[:, None] + (within + 1 - sight.window)  # [A, b]
        hidden = entry < lowest[:, :, None]  # [A, b, n]
        unseen = unseen | hidden.repeat_interleave(shared, dim=1)  # [A, r, n]
    of_block = query @ key.mT  # [G, A, r, b]
    if sight.causal:
        ahead = (within > within[:, None]).repeat_interleave(shared, dim=0)  # [r, b]
        of_block = of_block.masked_fill(ahead, float("-inf"))
    scores = torch.cat((scores.masked_fill(unseen, float("-inf")), of_block), dim=-1)
    weights = scores.softmax(-1)  # [G, A, r, n + b]
    of_past = (weights[..., :length].flatten(1, 2) @ past_value).view_as(query)
    mixed = of_past + weights[..., length:] @ value
    mixed = mixed.view(groups, count, size, -1, width).permute(1, 2, 0, 3, 4)
    return mixed.reshape(count * size, heads, width)


def trained_model(
    section: TrainSection,
    head: DflashHead,
    embedding: Tensor,
    lm_head: Tensor,
    *,
    max_length: int,
    dtype: torch.dtype,
    seed: int,
) -> DflashModel:
    """The head with its objective; embedding and lm_head [V, H] are the target's."""
    settings, teacher = section.block, (section.loss, section.teacher_temperature)
    objective = BlockObjective(settings.anchors, settings.position_decay, seed, *teacher)
    return DflashModel(head, embedding, lm_head, objective, max_length=max_length, dtype=dtype)
