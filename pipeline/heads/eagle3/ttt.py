"""Training-time test: the head unrolled on its own outputs.

Position i, step k: reads the embedding of x[i+k+1] and a hidden state, predicts x[i+k+2].

    step 0   tokens  x1 x2 x3 x4      step 1   tokens  x2 x3 x4 x5
             states  g0 g1 g2 g3               states  a0 a1 a2 a3     a = output of step 0
             teach   x2 x3 x4 x5               teach   x3 x4 x5 x6

Read from a label, the supervised token at position j of its document: step k predicts it at
position i = j-k-2 (absent when that is before the document), and its teacher is the target's
distribution at position j-1, whatever the step.

Keys and values of step 0 are attended to by all later positions, and need no more than that
position's inputs; those of later steps are attended to by their own position only. So the head is
computed for the rows that have a label ahead, and of all others step 0's keys and values alone:

    position     0  1  2  3  4  5  6        tokens 5 and 6 are labels, K = 2
    key, value   ●  ●  ●  ●  ●  ●  ●
    step 0             ○  ●  ●              3 and 4 predict them; 2 is what step 1 begins with
    step 1             ●  ●

A head of several layers is computed for all positions at step 0, but for its last layer: the keys
and values of each are made of what the one before it gives there.

States with alternatives teach one step more. In place of x3 the target might have said b: what it
would have said then is known, and is learnt at the row that reads x3, whose past is the same.

    step 0   tokens  x1 x2 x3 x4      instead  tokens   b   at position 2, after the keys and values
             states  g0 g1 g2 g3               states  g2   of positions 0 and 1
             teach   x2 x3 x4 x5               teach   what follows x1 x2 b

Shapes: N tokens, S labels, A rows, B of them with an alternative, H hidden size, V target and Vd
draft vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pipeline.config import TrainSection
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.unrolled import (
    Beside,
    Objective,
    Unroll,
    UnrolledModel,
    embed_tokens,
    rows_by_position,
)
from pipeline.learning.attention import KeyValue, UnrolledAttention
from pipeline.learning.batches import TrainBatch, fill_up
from pipeline.target.rotary import RotaryTable


class TttModel(UnrolledModel[Eagle3Head]):
    """One head, unrolled on its own outputs."""

    def __init__(
        self,
        head: Eagle3Head,
        embedding: Tensor,
        target_lm_head: Tensor,
        objective: Objective,
        *,
        max_length: int,
        dtype: torch.dtype,
        dropout: float = 0.0,
        alternative_weight: float = 0.0,
        seed: int = 0,
        checkpointing: bool = False,
        compiled: bool = False,
    ) -> None:
        """As of `UnrolledModel`; dropout is a share as of `draw_dropout`, by seed, as alternatives
        are drawn; the last two as of `Layer`."""
        parts = head, embedding, target_lm_head, objective
        super().__init__(*parts, max_length=max_length, dtype=dtype)
        computing = self._compute.head if self._compute else head
        self._layer = Layer.of(computing, checkpointing=checkpointing, compiled=compiled)
        self._dropout, self._seed = dropout, seed
        self._alternative_weight = alternative_weight

    def unrolled(self, head: Eagle3Head, batch: TrainBatch, rows: Tensor) -> Unroll:
        share, width, weight = self._dropout, 2 * head.shape.hidden_size, self._alternative_weight
        return unroll(
            head,
            self.embedding,
            batch,
            self.rotary(),
            rows=rows,
            steps=self.objective.steps,
            layer=self._layer,
            dropout=draw_dropout(batch, share, seed=self._seed, width=width) if share else None,
            instead=draw_alternatives(batch, seed=self._seed, weight=weight) if weight else None,
        )


#: `Eagle3Head.step` before and behind attention
ProjectQkv = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor, Tensor]]


ProjectHidden = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]


AfterAttention = Callable[[Tensor, Tensor], Tensor]


#: Rows n → factors [n, 2H] of what the layer reads, drawn anew by each call.
Dropout = Callable[[int], Tensor]


class Attentions(NamedTuple):
    """Of one unroll."""

    rows: UnrolledAttention  # queries of the rows
    every: UnrolledAttention  # of all positions, at step 0 of a layer that another one reads


#: Keys and values of one step, a pair each layer.
StepKeys = tuple[KeyValue, ...]


class Layer(NamedTuple):
    """How a step is computed: the head's layers around attention, what the backward pass keeps."""

    project_qkv: ProjectQkv
    after_attention: AfterAttention
    behind: tuple[tuple[ProjectHidden, AfterAttention], ...] = ()  # layers after the first
    output: Callable[[Tensor], Tensor] = lambda hidden: hidden
    checkpointing: bool = False  # keep a step's inputs only; the backward pass computes it again

    @classmethod
    def of(cls, head: Eagle3Head, *, checkpointing: bool = False, compiled: bool = False) -> Layer:
        """The layers of `head`.

        Compiled, each part is one graph for any number of rows; attention stays outside. The
        compiled functions belong to this object: a copy of the head knows nothing of them.
        """
        first, *others = head.every_layer
        behind = [(layer.project_hidden, layer.after_attention) for layer in others]
        project_qkv, after_attention = first.project_qkv, first.after_attention
        if compiled:
            project_qkv = torch.compile(project_qkv, dynamic=True)
            after_attention = torch.compile(after_attention, dynamic=True)
            behind = [
                (torch.compile(before, dynamic=True), torch.compile(after, dynamic=True))
                for before, after in behind
            ]
        return cls(project_qkv, after_attention, tuple(behind), head.output, checkpointing)

    def step(
        self,
        k: int,
        embedding: Tensor,
        hidden: Tensor,
        attention: Attentions,
        past: list[StepKeys],
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, StepKeys]:
        """Output [A, H] of step k, and its keys and values for later steps.

        embedding and hidden [N, H] at step 0, [A, H] later.
        """
        mask = dropout(len(embedding)) if dropout else None

        def run(embedding: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
            keys: list[Tensor] = []
            for number in range(len(self.behind) + 1):
                every = not past and number < len(self.behind)
                rows = None if past or every else attention.rows.rows
                if number == 0:
                    projected = self.project_qkv(embedding, hidden, rows, mask)
                    after_attention = self.after_attention
                else:
                    project_hidden, after_attention = self.behind[number - 1]
                    projected = project_hidden(hidden, rows)
                attend = (attention.every if every else attention.rows).attend
                attention_output, own = attend(k, *projected, [step[number] for step in past])
                carried = hidden if rows is None else hidden[rows]
                hidden = after_attention(carried, attention_output)
                keys += own
            return self.output(hidden), *keys

        if self.checkpointing:  # `run` draws no random numbers, so there is no state to put back
            output, *keys = checkpoint(
                run, embedding, hidden, use_reentrant=False, preserve_rng_state=False
            )
        else:
            output, *keys = run(embedding, hidden)
        return output, tuple(KeyValue(*pair) for pair in zip(keys[::2], keys[1::2], strict=True))


def unroll(
    head: Eagle3Head,
    embedding: Tensor,
    batch: TrainBatch,
    rotary: RotaryTable,
    *,
    rows: Tensor,
    steps: int,
    layer: Layer | None = None,
    dropout: Dropout | None = None,
    instead: Instead | None = None,
) -> Unroll:
    """Run the head for `steps` steps, and `instead` of step 0. embedding [V, H] is the target's.

    rows [A] ascending; layer is the head's own when None; dropout as in `draw_dropout`.
    """
    layer = layer or Layer.of(head)
    windows = head.shape.draft_window, head.shape.sliding_window
    own_rows = UnrolledAttention(batch.lengths, rows, rotary, *windows)
    every = torch.arange(batch.tokens, device=batch.token_ids.device)
    whole = UnrolledAttention(batch.lengths, every, rotary, *windows) if layer.behind else own_rows
    attention, following = Attentions(own_rows, whole), every + 1
    inputs, projected = embed_tokens(embedding, batch, following), head.project(batch.aux_states)
    hidden, own = layer.step(0, inputs, projected, attention, [], dropout)
    outputs, past = [hidden], [own]
    for k in range(1, steps):
        inputs = embed_tokens(embedding, batch, rows + k + 1)
        hidden, own = layer.step(k, inputs, hidden, attention, list(past), dropout)
        outputs.append(hidden)
        past.append(own)
    beside = None
    if instead:
        alone = UnrolledAttention(batch.lengths, instead.rows, rotary, *windows, instead=True)
        inputs, hidden = F.embedding(instead.token_ids, embedding), projected[instead.rows]
        arguments = inputs, hidden, Attentions(alone, alone), past[:1], dropout
        output, _ = layer.step(0, *arguments)
        read = instead.teacher_states, instead.token_ids, instead.real, instead.weight
        beside = Beside(output, *read)
    return Unroll(tuple(outputs), rows, rows_by_position(batch, rows), beside)


class Instead(NamedTuple):
    """Tokens that rows read in place of the next one of their document."""

    rows: Tensor  # int64 [B], ascending flat positions, none of them the first of its document
    token_ids: Tensor  # int64 [B]
    teacher_states: Tensor  # [B, H]
    real: Tensor  # bool [B], which give loss; the others repeat the last one
    weight: float


def draw_alternatives(batch: TrainBatch, *, seed: int, weight: float) -> Instead | None:
    """One alternative of each label that is not predicted by the first row of its document; None
    where the batch has none. A function of seed and batch number on every device."""
    ids, states = batch.alternative_ids, batch.alternative_states
    if ids is None or states is None:
        return None
    behind = (batch.depths > 2).nonzero().flatten()  # [B], numbers of labels
    if not len(behind):
        return None
    number = random.Random(f"{seed}/alternatives/{batch.number}").getrandbits(63)
    generator, count = torch.Generator().manual_seed(number), ids.shape[1]
    drawn = torch.randint(count, behind.shape, generator=generator).to(ids.device)
    (behind, real), (drawn, _) = fill_up(behind), fill_up(drawn)
    teachers = states.view(len(states), count, -1)[behind, drawn]
    return Instead(batch.labels[behind] - 2, ids[behind, drawn], teachers, real, weight)


def draw_dropout(batch: TrainBatch, share: float, *, seed: int, width: int) -> Dropout:
    """Zero for a share of what the layer reads at each step, more for the rest (Srivastava et al.
    2014), so that little is learned by heart of data that is passed over often.

    A function of seed and batch number, so that a training that was resumed draws the same.
    """
    states, number = batch.aux_states, random.Random(f"{seed}/dropout/{batch.number}")
    generator = torch.Generator(states.device).manual_seed(number.getrandbits(63))

    def draw(rows: int) -> Tensor:
        mask = states.new_empty(rows, width).bernoulli_(1 - share, generator=generator)
        return mask.div_(1 - share)

    return draw


def trained_model(
    section: TrainSection,
    head: Eagle3Head,
    embedding: Tensor,
    lm_head: Tensor,
    *,
    max_length: int,
    dtype: torch.dtype,
    seed: int,
) -> TttModel:
    """The head with its objective; embedding and lm_head [V, H] are the target's."""
    return TttModel(
        head,
        embedding,
        lm_head,
        Objective.of(section),
        max_length=max_length,
        dtype=dtype,
        dropout=section.dropout,
        alternative_weight=section.alternative_weight,
        seed=seed,
        checkpointing=section.activation_checkpointing,
        compiled=bool(section.compile),
    )
