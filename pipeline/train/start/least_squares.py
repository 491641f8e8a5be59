"""A start by least squares: what is linear in the head is solved on the first batches, not trained.

A head at step 0 is a sum of three parts, of which two are linear where a position attends to its
own token alone, and the third is linear in its last matrix:

    out[i] = fc · aux[i]  +  o · v · e[i+1]  +  down · φ(norm(…))     e: normed embedding of x[i+1]

and it should be y[i+1] = f[i+1] / w: the teacher's final state, before the weight w of the target's
last norm (w / (w² + ε), as some weights are next to nothing). So

    1  fc, B   ridge regression of y on (aux, e), where B stands for o · v
    2  v, o    the best product of their rank for B, in the metric of the embeddings (Eckart-Young)
    3  down    ridge regression of what is left on the MLP's own activations φ
    4  norm    w, scaled by how far the prediction shrinks: an unsure head is an unsure distribution

Attention is as it was started, so step 2 is meant for the own token and 3 sees what attention makes
of it; queries and keys that made every token find itself began better and ended the same
(docs/training.md).

Only step 0 is solved. Later steps of the unroll, context, and everything that is not linear are
training's part.

Shapes: R rows (labels that step 0 predicts), H hidden size, I intermediate size, Q query and G
key/value heads, d head size, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.eagle3.head import Eagle3Head
from pipeline.eagle3.layers import RotaryTable
from pipeline.train.data.batches import TrainBatch, read_batch
from pipeline.train.data.corpus import Corpus
from pipeline.train.data.schedule import Schedule
from pipeline.train.ttt.unroll import unroll

#: Ridge, as a share of the mean square of a regressor.
_RIDGE, _RIDGE_MLP = 0.005, 0.1
#: What the parts that read the hidden state keep of their first values.
_KEPT = 0.1
#: Batches that the scale of `fc` is measured on.
SCALE_BATCHES = 8


class Fit(NamedTuple):
    """What was solved, for the log."""

    rows: int
    explained: float  # share of y's variance that the linear part explains, on the same rows
    explained_by_mlp: float  # share of the rest that the MLP explains


@torch.no_grad()
def start_by_least_squares(
    head: Eagle3Head, embedding: Tensor, batches: Iterable[TrainBatch]
) -> Fit:
    """Solve the head's linear parts on `batches`, which are gone through twice, in place.

    head, in float32: its `norm` holds the target's final norm, its MLP gate and up projections of
    any start. embedding [V, H] is the target's. Deterministic; sums are kept, not rows, so memory
    does not grow with the batches.
    """
    weight = head.norm.weight.clone()
    epsilon = (0.05 * weight.square().mean().sqrt()).square()
    inverse = weight / (weight.square() + epsilon)  # [H], 1/w
    head.midlayer.input_layernorm.weight.fill_(1.0)
    head.midlayer.post_attention_layernorm.weight.fill_(1.0)
    linear = _solve_linear(head, embedding.float(), batches, inverse)
    _factorise_values(head, linear)
    head.norm.weight.copy_(weight * linear.shrinkage)
    by_mlp = _solve_mlp(head, embedding.float(), batches, inverse)
    return Fit(linear.rows, linear.explained, by_mlp)


class FirstBatches:
    """The batches that training begins with, at least `tokens` tokens if there are as many.

    Read anew each time.
    """

    def __init__(self, corpus: Corpus, schedule: Schedule, tokens: int) -> None:
        self._corpus, self._schedule, self._tokens = corpus, schedule, tokens

    def __iter__(self) -> Iterator[TrainBatch]:
        tokens = 0
        for number in range(len(self._schedule)):
            if tokens >= self._tokens:
                break
            batch = read_batch(self._corpus, self._schedule.batch(number))
            tokens += batch.tokens
            yield batch


@torch.no_grad()
def fc_scale(head: Eagle3Head, batches: Iterable[TrainBatch]) -> float:
    """Factor of the learning rate of `fc`: 1 over the root mean square of what it reads.

    The residual stream grows from layer to layer, to ten and more where all other inputs of the
    head are normed to one. A step of Adam moves every weight alike, so it would move fc's output
    that much further. Two digits, so that the order of a sum on another machine changes nothing.
    """
    plain = (batch.to(head.fc.weight.device, torch.float32) for batch in batches)
    read = torch.cat([head.normed_aux(batch.aux_states[batch.labels - 2]) for batch in plain])
    return float(f"{min(1.0, 1 / float(read.square().mean().sqrt())):.2g}")


class _LinearFit(NamedTuple):
    token: Tensor  # B [H, H]
    covariance: Tensor  # of e [H, H]
    shrinkage: float  # root mean square of the prediction over that of y
    rows: int
    explained: float


def _solve_linear(
    head: Eagle3Head, embedding: Tensor, batches: Iterable[TrainBatch], inverse: Tensor
) -> _LinearFit:
    """fc, set in the head, and B."""
    size, device = head.shape.hidden_size, embedding.device
    gram = torch.zeros(4 * size, 4 * size, dtype=torch.float64, device=device)  # Σ x xᵀ
    cross = torch.zeros(4 * size, size, dtype=torch.float64, device=device)  # Σ x yᵀ
    total = torch.zeros(size, dtype=torch.float64, device=device)  # Σ y
    squares, count = 0.0, 0  # Σ |y|², rows
    for batch in batches:
        x, y = _rows(head, embedding, batch.to(device, torch.float32), inverse)  # [R, 4H], [R, H]
        gram += x.T @ x
        cross += x.T @ y
        total += y.sum(0)
        squares, count = squares + float(y.square().sum()), count + len(x)
    spread = (gram.diagonal() / count).sqrt() + 1e-3  # [4H]
    scaled = gram / spread / spread[:, None]
    scaled.diagonal().add_(_RIDGE * count)
    solved = torch.linalg.solve(scaled, cross / spread[:, None]) / spread[:, None]  # [4H, H]
    predicted = float((solved * (gram @ solved)).sum())  # Σ |prediction|²
    rest = squares - 2 * float((solved * cross).sum()) + predicted
    head.fc.weight.copy_(solved[: 3 * size].T)
    covariance = gram[3 * size :, 3 * size :] / count
    covariance.diagonal().add_(1e-4)
    explained = 1 - rest / (squares - float(total.square().sum()) / count)
    token, shrinkage = solved[3 * size :].T.float(), (predicted / squares) ** 0.5
    return _LinearFit(token, covariance.float(), shrinkage, count, explained)


def _rows(
    head: Eagle3Head, embedding: Tensor, batch: TrainBatch, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Regressors (aux, e) [R, 4H] and y [R, H] of a batch."""
    states = head.normed_aux(batch.aux_states[batch.labels - 2])  # [R, 3H]
    tokens = head.midlayer.input_layernorm(embedding[batch.token_ids[batch.labels - 1]])  # [R, H]
    return torch.cat((states, tokens), dim=-1), batch.teacher_states * inverse


def _factorise_values(head: Eagle3Head, linear: _LinearFit) -> None:
    """o · v = B as nearly as the values' rank G·d allows, directions weighed as embeddings do.

    With C = L Lᵀ the embeddings' covariance, the best product is that of the first singular triples
    of B L. A query head takes its group's values, so each of the Q/G heads of a group writes an
    equal part of them.
    """
    shape, attention = head.shape, head.midlayer.self_attn
    groups, size = shape.num_key_value_heads, shape.head_dim
    root = torch.linalg.cholesky(linear.covariance)  # L
    left, strengths, right = torch.linalg.svd(linear.token @ root)
    rank = min(groups * size, shape.hidden_size)
    order = torch.arange(rank)
    if rank % groups == 0:  # strengths spread over groups
        order = order.view(-1, groups).T.flatten()
    half = strengths[:rank].sqrt()
    write = left.new_zeros(shape.hidden_size, groups * size)
    read = left.new_zeros(groups * size, shape.hidden_size)
    write[:, :rank] = (left[:, :rank] * half)[:, order]
    scaled = half[:, None] * right[:rank]
    read[:rank] = torch.linalg.solve_triangular(root, scaled, upper=False, left=False)[order]
    heads = shape.num_attention_heads // groups  # of a group
    repeated = write.view(-1, groups, 1, size).expand(-1, groups, heads, size) / heads
    attention.o_proj.weight.copy_(repeated.reshape(shape.hidden_size, -1))  # [H, G, Q/G, d]
    attention.v_proj.weight[:, : shape.hidden_size].copy_(read)
    attention.v_proj.weight[:, shape.hidden_size :].mul_(_KEPT)


def _solve_mlp(
    head: Eagle3Head, embedding: Tensor, batches: Iterable[TrainBatch], inverse: Tensor
) -> float:
    """Set down in the head from what all else leaves; → share of that which it explains."""
    down = head.midlayer.mlp.down_proj.weight  # [H, I]
    gram = down.new_zeros(down.shape[1], down.shape[1])
    cross = down.new_zeros(down.shape[1], down.shape[0])
    before = down.new_zeros(())
    down.zero_()
    activations: list[Tensor] = []
    hook = head.midlayer.mlp.down_proj.register_forward_pre_hook(
        lambda _module, inputs: activations.append(inputs[0])
    )
    for stored in batches:
        batch = stored.to(embedding.device, torch.float32)
        rope, longest = head.shape.rope_config(), max(batch.lengths) + 1
        rotary = RotaryTable(rope, longest, device=embedding.device, dtype=torch.float32)
        unrolled = unroll(head, embedding, batch, rotary, rows=batch.labels[:1], steps=1)
        positions = batch.labels - 2
        active = activations.pop()[positions]  # φ [R, I]
        rest = batch.teacher_states * inverse - unrolled.outputs[0][positions]  # [R, H]
        gram += active.T @ active
        cross += active.T @ rest
        before += rest.square().sum()
    hook.remove()
    ridge = _RIDGE_MLP * gram.diagonal().mean()
    regularised = gram + ridge * torch.eye(len(gram), device=gram.device)
    solved = torch.linalg.solve(regularised, cross)  # [I, H]
    down.copy_(solved.T)
    # |rest - φ D|² = |rest|² - 2 <D, φᵀ rest> + <D, φᵀφ D>
    after = before - 2 * (solved * cross).sum() + (solved * (gram @ solved)).sum()
    return 1 - float(after / before)
