"""Training-time test: the head unrolled on its own outputs.

Position i, step k: reads the embedding of x[i+k+1] and a hidden state, predicts x[i+k+2].

    step 0   tokens  x1 x2 x3 x4      step 1   tokens  x2 x3 x4 x5
             states  g0 g1 g2 g3               states  a0 a1 a2 a3     a = un-normed output of step 0
             teach   x2 x3 x4 x5               teach   x3 x4 x5 x6

Read from a label, the supervised token at position j of its document: step k predicts it at
position i = j-k-2 (absent when that is before the document), and its teacher is the target's
distribution at position j-1, whatever the step.

Keys and values of later steps are seen by their own position only. So after step 0 the head is
computed for the rows that still have a label ahead, and for no others.

Shapes: N tokens, S labels, A continuing rows, H hidden size, V target and Vd draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.eagle3.head import Eagle3Head
from pipeline.eagle3.layers import RotaryTable
from pipeline.train.attention import UnrolledAttention
from pipeline.train.batches import Batch


class Unroll(NamedTuple):
    """Un-normed outputs of every step."""

    outputs: tuple[Tensor, ...]  # step 0 [N, H], later steps [A, H]
    rows: Tensor  # int64 [A], flat positions that later steps were computed for
    place: Tensor  # int64 [N], where a flat position stands in `rows`; 0 when it does not


def unroll(head: Eagle3Head, embedding: Tensor, batch: Batch, rotary: RotaryTable, *, rows: Tensor, steps: int) -> Unroll:
    """Run the head for `steps` steps. embedding [V, H] is the target's; rows [A] ascending."""
    attention = UnrolledAttention(batch.lengths, rows, rotary)
    hidden = head.step(_embed(embedding, batch, _every(batch) + 1), head.project(batch.aux_states), attention.step(0))
    outputs = [hidden]
    hidden = hidden[rows]
    for k in range(1, steps):
        hidden = head.step(_embed(embedding, batch, rows + k + 1), hidden, attention.step(k))
        outputs.append(hidden)
    place = torch.zeros_like(batch.token_ids)
    place[rows] = torch.arange(len(rows), device=rows.device)
    return Unroll(tuple(outputs), rows, place)


def step_logits(head: Eagle3Head, embedding: Tensor, batch: Batch, rotary: RotaryTable, *, steps: int) -> list[Tensor]:
    """Logits [N, Vd] of every step at every position, as the decoder would draft them.

    The last k+1 positions of a document have no input at step k; their rows mean nothing.
    """
    done = unroll(head, embedding, batch, rotary, rows=_every(batch), steps=steps)
    return [head.logits(output) for output in done.outputs]


def continuing_rows(batch: Batch, wanted: Tensor, steps: int) -> Tensor:
    """Flat positions that predict at least one wanted label after step 0, ascending [A].

    wanted [S] bool marks the labels that count.
    """
    needed = torch.zeros(batch.tokens, dtype=torch.bool, device=batch.token_ids.device)
    for k in range(1, steps):
        needed[(batch.labels - k - 2)[wanted & (batch.depths >= k + 2)]] = True
    return needed.nonzero().flatten()


def _every(batch: Batch) -> Tensor:
    return torch.arange(batch.tokens, device=batch.token_ids.device)


def _embed(embedding: Tensor, batch: Batch, positions: Tensor) -> Tensor:
    """Embeddings of the tokens at flat `positions`.

    Beyond its document a position reads a neighbour's token; such positions carry no label, and
    their keys are seen by nobody else.
    """
    return F.embedding(batch.token_ids[positions.clamp(max=batch.tokens - 1)], embedding)
