"""The unroll as first written down: one mask over all keys of all steps, every position and logit.

    keys      step 0: N          step 1: N    step 2: N      mask of step 2 [N, 3N]
    queries   causal, document   diagonal     diagonal

Tests compare the trainer with it, the benchmark measures what the trainer saves.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.learning.batches import TrainBatch
from pipeline.target.rotary import RotaryTable, rotate


def dense_unroll(
    head: Eagle3Head, embedding: Tensor, batch: TrainBatch, *, steps: int
) -> list[Tensor]:
    """Outputs [N, H] of every step at every position; embedding [V, H] is the target's."""
    total = batch.tokens
    lengths = torch.tensor(batch.lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.cat([torch.arange(length) for length in batch.lengths])
    causal = (document[:, None] == document) & (position[:, None] >= position)
    rope, longest = head.shape.rope_config(), max(batch.lengths) + steps
    rotary = RotaryTable(rope, longest, device=torch.device("cpu"), dtype=batch.aux_states.dtype)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    hidden, outputs = head.project(batch.aux_states), []
    for k in range(steps):
        mask = torch.cat([causal, *[torch.eye(total, dtype=torch.bool)] * k], dim=1)  # [N, N(1+k)]

        def attend(
            query: Tensor, key: Tensor, value: Tensor, k: int = k, mask: Tensor = mask
        ) -> Tensor:
            cos, sin = rotary.at(position + k)
            keys.append(rotate(key, cos, sin))
            values.append(value)
            groups = query.shape[1] // key.shape[1]
            every_key, every_value = (
                torch.cat(part).repeat_interleave(groups, 1).transpose(0, 1)
                for part in (keys, values)
            )  # [Q, N(1+k), d]
            rotated = rotate(query, cos, sin).transpose(0, 1)
            scores = rotated @ every_key.transpose(1, 2) * query.shape[-1] ** -0.5
            weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
            return torch.as_tensor((weights @ every_value).transpose(0, 1))

        inputs = batch.token_ids[(torch.arange(total) + k + 1).clamp(max=total - 1)]
        hidden = head.step(embedding[inputs], hidden, attend)
        outputs.append(hidden)
    return outputs


def dense_loss(
    head: Eagle3Head,
    embedding: Tensor,
    target_output_rows: Tensor,
    batch: TrainBatch,
    *,
    steps: int,
    decay: float,
) -> Tensor:
    """Soft cross-entropy as `TttModel` defines it, from the logits of every position.

    target_output_rows [Vd, H] are those of the draft vocabulary.
    """
    total, exact = batch.tokens, torch.promote_types(batch.aux_states.dtype, torch.float32)
    in_vocabulary = head.t2d[batch.token_ids[batch.labels]]
    states = batch.aux_states.new_zeros(total, head.shape.hidden_size)
    states[batch.labels] = batch.teacher_states  # of the token at its own position j
    teacher = torch.softmax((states @ target_output_rows.T).to(exact), dim=-1)  # [N, Vd]
    loss = torch.zeros((), dtype=exact)
    for k, output in enumerate(dense_unroll(head, embedding, batch, steps=steps)):
        counted = torch.zeros(total, dtype=torch.bool)
        counted[batch.labels[in_vocabulary & (batch.depths >= k + 2)] - k - 2] = True
        log_probability = torch.log_softmax(head.logits(output).to(exact), dim=-1)  # [N, Vd]
        divergence = -(log_probability * F.pad(teacher, (0, 0, 0, k + 2))[k + 2 :]).sum(-1)
        loss = loss + decay**k * (divergence * counted).sum() / len(batch.labels)
    return loss
