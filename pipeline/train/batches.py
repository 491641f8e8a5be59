"""Packed micro-batches: documents one after the other, no padding.

    documents    a0 a1 a2 a3 a4 | b0 b1 b2 b3        lengths (5, 4), N = 9
    supervised          ●  ●  ●          ●  ●        tokens that the target generated
    labels              2  3  4          7  8        their flat positions j; depth 2 3 4 2 3 in the document
    teacher           t1 t2 t3        t6 t7          final state at j-1, one a label

Labels whose depth is below 2 are never predicted (position 0 at step 0 predicts token 2) and are left out.

Shapes: N tokens of a batch, S labels, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.store.states import StatesSample
from pipeline.train.corpus import FIRST_LABEL, Corpus, Piece, read_piece


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the training device."""

    sample_ids: tuple[str, ...]
    lengths: tuple[int, ...]  # of the documents, adding up to N
    token_ids: Tensor  # int64 [N]
    aux_states: Tensor  # [N, 3H]
    labels: Tensor  # int64 [S], flat position j of each predicted token
    depths: Tensor  # int64 [S], position of the same token inside its document
    teacher_states: Tensor  # [S, H], the target's final state at j-1

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """The same batch on `device`, states in `dtype`."""
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            aux_states=self.aux_states.to(device, dtype),
            labels=self.labels.to(device),
            depths=self.depths.to(device),
            teacher_states=self.teacher_states.to(device, dtype),
        )


def read_batch(corpus: Corpus, pieces: Sequence[Piece]) -> Batch:
    """Read the states of `pieces` and pack them."""
    return pack_samples([read_piece(corpus, piece) for piece in pieces])


def pack_samples(documents: Sequence[tuple[StatesSample, Tensor]]) -> Batch:
    """Concatenate samples, each with the final state's row of its positions (see `read_piece`)."""
    labels, depths, teachers = [], [], []
    offset = 0
    for sample, rows in documents:
        depth = sample.loss_mask.nonzero().flatten()
        depth = depth[depth >= FIRST_LABEL]
        labels.append(depth + offset)
        depths.append(depth)
        teachers.append(sample.final_states[rows[depth - 1]])
        offset += len(sample.token_ids)
    samples = [sample for sample, _ in documents]
    return Batch(
        sample_ids=tuple(sample.sample_id for sample in samples),
        lengths=tuple(len(sample.token_ids) for sample in samples),
        token_ids=torch.cat([sample.token_ids for sample in samples]).long(),
        aux_states=torch.cat([sample.aux_states for sample in samples]),
        labels=torch.cat(labels),
        depths=torch.cat(depths),
        teacher_states=torch.cat(teachers),
    )
