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

Shapes: N tokens, S labels, A rows, H hidden size, V target and Vd draft vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pipeline.config import TrainSection
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.unrolled import Objective, Unroll, UnrolledModel, embed_tokens, rows_by_position
from pipeline.learning.attention import KeyValue, UnrolledAttention
from pipeline.learning.batches import TrainBatch
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
        seed: int = 0,
        checkpointing: bool = False,
        compiled: bool = False,
    ) -> None:
        """As of `UnrolledModel`; dropout is a share as of `draw_dropout`, by seed; the last two as
        of `Layer`."""
        parts = head, embedding, target_lm_head, objective
        super().__init__(*parts, max_length=max_length, dtype=dtype)
        computing = self._compute.head if self._compute else head
        self._layer = Layer.of(computing, checkpointing=checkpointing, compiled=compiled)
        self._dropout, self._seed = dropout, seed

    def unrolled(self, head: Eagle3Head, batch: TrainBatch, rows: Tensor) -> Unroll:
        share, width = self._dropout, 2 * head.shape.hidden_size
        return unroll(
            head,
            self.embedding,
            batch,
            self.rotary(),
            rows=rows,
            steps=self.objective.steps,
            layer=self._layer,
            dropout=draw_dropout(batch, share, seed=self._seed, width=width) if share else None,
        )


#: `Eagle3Head.step` before and behind attention
ProjectQkv = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor, Tensor]]


AfterAttention = Callable[[Tensor, Tensor], Tensor]


#: Rows n → factors [n, 2H] of what the layer reads, drawn anew by each call.
Dropout = Callable[[int], Tensor]


class Layer(NamedTuple):
    """How a step is computed: the head's layer around attention, what the backward pass keeps."""

    project_qkv: ProjectQkv
    after_attention: AfterAttention
    checkpointing: bool = False  # keep a step's inputs only; the backward pass computes it again

    @classmethod
    def of(cls, head: Eagle3Head, *, checkpointing: bool = False, compiled: bool = False) -> Layer:
        """The layer of `head`.

        Compiled, each part is one graph for any number of rows; attention stays outside. The
        compiled functions belong to this object: a copy of the head knows nothing of them.
        """
        project_qkv, after_attention = head.midlayer.project_qkv, head.after_attention
        if compiled:
            project_qkv = torch.compile(project_qkv, dynamic=True)
            after_attention = torch.compile(after_attention, dynamic=True)
        return cls(project_qkv, after_attention, checkpointing)

    def step(
        self,
        k: int,
        embedding: Tensor,
        hidden: Tensor,
        attention: UnrolledAttention,
        past: list[KeyValue],
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, KeyValue]:
        """Output [A, H] of step k, and its keys and values for later steps.

        embedding and hidden [N, H] at step 0, [A, H] later.
        """
        rows = None if past else attention.rows
        mask = dropout(len(embedding)) if dropout else None

        def run(embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            projected = self.project_qkv(embedding, hidden, rows, mask)
            attention_output, own = attention.attend(k, *projected, past)
            carried = hidden if rows is None else hidden[rows]
            return self.after_attention(carried, attention_output), *own

        if self.checkpointing:  # `run` draws no random numbers, so there is no state to put back
            output, key, value = checkpoint(
                run, embedding, hidden, use_reentrant=False, preserve_rng_state=False
            )
        else:
            output, key, value = run(embedding, hidden)
        return output, KeyValue(key, value)


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
) -> Unroll:
    """Run the head for `steps` steps. embedding [V, H] is the target's.

    rows [A] ascending; layer is the head's own when None; dropout as in `draw_dropout`.
    """
    layer = layer or Layer.of(head)
    attention = UnrolledAttention(batch.lengths, rows, rotary, head.shape.draft_window)
    following = torch.arange(1, batch.tokens + 1, device=batch.token_ids.device)
    inputs = embed_tokens(embedding, batch, following)
    hidden, own = layer.step(0, inputs, head.project(batch.aux_states), attention, [], dropout)
    outputs, past = [hidden], [own]
    for k in range(1, steps):
        inputs = embed_tokens(embedding, batch, rows + k + 1)
        hidden, own = layer.step(k, inputs, hidden, attention, list(past), dropout)
        outputs.append(hidden)
        past.append(own)
    return Unroll(tuple(outputs), rows, rows_by_position(batch, rows))


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
        seed=seed,
        checkpointing=section.activation_checkpointing,
        compiled=section.compile,
    )
