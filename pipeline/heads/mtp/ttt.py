"""All heads of a chain over a batch; steps behind them unroll the last one.

    step 0   tokens  x1 x2 x3 x4      step 1   tokens  x2 x3 x4 x5
             states  h0 h0 h0 h0               states  a0 a1 a2 a3     a = output of head 0
             teach   x2 x3 x4 x5               teach   x3 x4 x5 x6

Every head attends to its own keys at positions up to its own, so heads before the last are computed
for all N positions: the next one's keys are made from what they give. The last is computed for rows
with a label ahead. A step behind it is one of training-time test (ttt/unroll.py), with the last
head's keys of all positions in the place of step 0's.

Shapes: N tokens, A rows, H hidden size.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from pipeline.config import TrainSection
from pipeline.heads.mtp.shape import ChainedHead
from pipeline.heads.unrolled import Objective, Unroll, UnrolledModel, embed_tokens, rows_by_position
from pipeline.learning.attention import UnrolledAttention
from pipeline.learning.batches import TrainBatch
from pipeline.target.rotary import RotaryTable


class ChainedModel(UnrolledModel[ChainedHead]):
    """All heads at once: the loss of step k reaches the heads before it."""

    def unrolled(self, head: ChainedHead, batch: TrainBatch, rows: Tensor) -> Unroll:
        steps = self.objective.steps
        return unroll_chain(head, self.embedding, batch, self.rotary(), rows=rows, steps=steps)


def unroll_chain(
    head: ChainedHead,
    embedding: Tensor,
    batch: TrainBatch,
    rotary: RotaryTable,
    *,
    rows: Tensor,
    steps: int,
) -> Unroll:
    """Outputs of `steps` steps, at least one a head. embedding [V, H] is the target's.

    rows [A] ascending.
    """
    *before, last = head.layers
    assert steps > len(before), "a head without a step is not trained"
    states = run_heads(head, embedding, batch, rotary, len(before))
    hidden, outputs = states[-1], [state[rows] for state in states[1:]]
    attention = UnrolledAttention(batch.lengths, rows, rotary)
    joined = last.join(tokens_of(embedding, batch, len(before)), hidden)  # [N, H]
    mixed, own = attention.attend(0, *last.project_qkv(joined, rows), [])
    past, hidden = [own], last.after_attention(joined[rows], mixed)
    outputs.append(hidden)
    for k in range(len(before) + 1, steps):
        joined = last.join(embed_tokens(embedding, batch, rows + k + 1), hidden)  # [A, H]
        mixed, own = attention.attend(len(past), *last.project_qkv(joined), list(past))
        past.append(own)
        hidden = last.after_attention(joined, mixed)
        outputs.append(hidden)
    return Unroll(tuple(outputs), rows, rows_by_position(batch, rows))


def run_heads(
    head: ChainedHead, embedding: Tensor, batch: TrainBatch, rotary: RotaryTable, count: int
) -> list[Tensor]:
    """What heads 0 … count read, each [N, H]: the last one's is what head count - 1 gives."""
    hidden = [head.project(batch.aux_states)]
    every = torch.arange(batch.tokens, device=batch.token_ids.device)
    attention = UnrolledAttention(batch.lengths, every, rotary)
    for k, layer in enumerate(head.layers[:count]):
        joined = layer.join(tokens_of(embedding, batch, k), hidden[-1])
        mixed, _ = attention.attend(0, *layer.project_qkv(joined), [])
        hidden.append(layer.after_attention(joined, mixed))
    return hidden


def tokens_of(embedding: Tensor, batch: TrainBatch, k: int) -> Tensor:
    """Embeddings that head k reads [N, H]: token t+k+1's at t, zero where a document begins."""
    every = torch.arange(batch.tokens, device=batch.token_ids.device)
    starts = torch.tensor([0, *accumulate(batch.lengths)][:-1], device=every.device)
    return embed_tokens(embedding, batch, every + k + 1).index_fill(0, starts, 0)


def trained_model(
    section: TrainSection,
    head: ChainedHead,
    embedding: Tensor,
    lm_head: Tensor,
    *,
    max_length: int,
    dtype: torch.dtype,
    seed: int,
) -> ChainedModel:
    """The heads with their objective; embedding and lm_head [V, H] are the target's."""
    del seed
    objective = Objective.of(section)
    return ChainedModel(head, embedding, lm_head, objective, max_length=max_length, dtype=dtype)
