"""A start by least squares: what is linear in the head is solved on the first batches, not trained.

A head at step 0 is a sum of three parts, of which two are linear where a position attends to its
own token alone, and the third is linear in its last matrix:

    out[i] = fc · aux[i]  +  o · v · e[i+1]  +  down · φ(norm(…))     e: normed embedding of x[i+1]

and it should be y[i+1] = f[i+1] / w: the teacher's final state, before the weight w of the target's
last norm (w / (w² + ε), as some weights are next to nothing). So

    1  fc, B   ridge regression of y on (aux, e), where B stands for o · v
    2  v, o    the best product of their rank for B, in the metric of the embeddings (Eckart-Young)
    3  down    ridge regression of what is left on the MLP's own activations φ
    4  norm    w times the cosine between prediction and truth on labels that were held out: an
               unsure head is an unsure distribution

Attention is as it was started, so step 2 is meant for the own token and 3 sees what attention makes
of it; queries and keys that made every token find itself began better and ended the same
(docs/log.md).

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

from pipeline.eagle3.head import DraftingHead, Eagle3Head
from pipeline.eagle3.init import inverse_norm
from pipeline.eagle3.layers import RotaryTable
from pipeline.train.data.batches import TrainBatch, read_batch
from pipeline.train.data.corpus import Corpus
from pipeline.train.data.schedule import Schedule
from pipeline.train.start.ridge import Ridge, Rows, solve_ridge
from pipeline.train.ttt.unroll import Layer, unroll

#: Labels for each regressor of the linear part: with fewer, it is too much that of the sample.
ROWS_PER_REGRESSOR = 30
#: The least share of its own scale that the final norm keeps, where a prediction is worth nothing.
LEAST_SURE = 0.05
#: What the parts that read the hidden state keep of their first values.
_KEPT = 0.1
#: Batches that the scale of `fc` is measured on.
SCALE_BATCHES = 8


class Fit(NamedTuple):
    """What was solved, for the log."""

    rows: int
    held_out: int  # rows of them that the shares below are of; 0: all, as none could be held out
    strength: float  # of the ridge
    explained: float  # share of y's variance that the linear part explains
    explained_by_mlp: float = 0.0  # share of the rest that the MLP explains


@torch.no_grad()
def start_by_least_squares(
    head: Eagle3Head, embedding: Tensor, batches: Iterable[TrainBatch]
) -> Fit:
    """Solve the head's linear parts on `batches`, which are gone through four times, in place.

    head, in float32: its `norm` holds the target's final norm, its MLP gate and up projections of
    any start. embedding [V, H] is the target's. Deterministic; sums are kept, not rows, so memory
    does not grow with the batches.
    """
    weight = head.norm.weight.clone()
    inverse = inverse_norm(weight)
    head.midlayer.input_layernorm.weight.fill_(1.0)
    head.midlayer.post_attention_layernorm.weight.fill_(1.0)
    fit, cosine = _solve_linear(head, batches, _rows(head, embedding.float(), inverse))
    head.norm.weight.copy_(weight * max(cosine, LEAST_SURE))
    head.midlayer.mlp.down_proj.weight.zero_()
    by_mlp = solve_ridge(batches, _activations(head, embedding.float(), inverse))
    head.midlayer.mlp.down_proj.weight.copy_(by_mlp.weights.T)
    return fit._replace(explained_by_mlp=by_mlp.explained)


def _solve_linear(
    head: Eagle3Head, batches: Iterable[TrainBatch], rows_of: Rows
) -> tuple[Fit, float]:
    """Solve fc, values and output; → what was solved, and its cosine.

    A function of its own, so that moments of P by P are gone before the MLP's sums.
    """
    size = head.shape.hidden_size
    linear = solve_ridge(batches, rows_of)
    head.fc.weight.copy_(linear.weights[: 3 * size].T)
    covariance = linear.moments[3 * size :, 3 * size :].clone()
    covariance.diagonal().add_(1e-4)
    _factorise_values(head, linear.weights[3 * size :].T, covariance)
    return fit_of(linear), linear.cosine


def fit_of(ridge: Ridge) -> Fit:
    """What the log says of a linear part."""
    return Fit(ridge.rows, ridge.held_out, ridge.strength, ridge.explained)


def rows_wanted(hidden_size: int) -> int:
    """Labels that the linear part is solved on, if there are as many: it has 4·H regressors."""
    return ROWS_PER_REGRESSOR * 4 * hidden_size


class FirstBatches:
    """The batches that training begins with, until they have so many tokens, or labels.

    Of the first epoch only: the next one's labels are the same. Read anew each time.
    """

    def __init__(
        self, corpus: Corpus, schedule: Schedule, *, tokens: int | None = None, labels: int = 0
    ) -> None:
        self._corpus, self._schedule = corpus, schedule
        self._tokens, self._labels = tokens, labels

    def __iter__(self) -> Iterator[TrainBatch]:
        tokens = labels = 0
        for number in range(len(self._schedule)):
            enough = labels >= self._labels if self._tokens is None else tokens >= self._tokens
            if enough or self._schedule.locate(number)[0] > 0:
                break
            batch = read_batch(self._corpus, self._schedule.batch(number))
            tokens, labels = tokens + batch.trained_tokens, labels + len(batch.labels)
            yield batch


@torch.no_grad()
def fc_scale(head: DraftingHead, batches: Iterable[TrainBatch]) -> float:
    """Factor of the learning rate of `fc`: 1 over the root mean square of what it reads.

    The residual stream grows from layer to layer, to ten and more where all other inputs of the
    head are normed to one. A step of Adam moves every weight alike, so it would move fc's output
    that much further. Two digits, so that the order of a sum on another machine changes nothing.
    """
    if head.aux_projection is None:
        return 1.0
    device = head.aux_projection.weight.device
    plain = (batch.to(device, torch.float32) for batch in batches)
    read = torch.cat([head.normed_aux(batch.aux_states[batch.labels - 2]) for batch in plain])
    return float(f"{min(1.0, 1 / float(read.square().mean().sqrt())):.2g}")


def _rows(head: Eagle3Head, embedding: Tensor, inverse: Tensor) -> Rows:
    """Regressors (aux, e) [R, 4H] and y [R, H] of a batch."""

    def rows(stored: TrainBatch) -> tuple[Tensor, Tensor]:
        batch = stored.to(embedding.device, torch.float32)
        states = head.normed_aux(batch.aux_states[batch.labels - 2])  # [R, 3H]
        tokens = embedding[batch.token_ids[batch.labels - 1]]
        normed = head.midlayer.input_layernorm(tokens)  # [R, H]
        return torch.cat((states, normed), dim=-1), batch.teacher_states * inverse

    return rows


def _factorise_values(head: Eagle3Head, token: Tensor, covariance: Tensor) -> None:
    """o · v = B as nearly as the values' rank G·d allows, directions weighed as embeddings do.

    token is B [H, H]; with covariance C = L Lᵀ [H, H] of the embeddings, the best product is that
    of the first singular triples of B L. A query head takes its group's values, so each of the Q/G
    heads of a group writes an equal part of them.
    """
    shape, attention = head.shape, head.midlayer.self_attn
    groups, size = shape.num_key_value_heads, shape.head_dim
    root = torch.linalg.cholesky(covariance)  # L
    left, strengths, right = torch.linalg.svd(token @ root)
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


def _activations(head: Eagle3Head, embedding: Tensor, inverse: Tensor) -> Rows:
    """Activations φ of the MLP [R, I], and what all else leaves of y [R, H]; `down` must be 0.

    What the layer gives is taken in front of the norm that `norm_output` puts behind it: `down`
    adds to that.
    """
    layer = Layer(head.midlayer.project_qkv, head.midlayer.after_attention)
    rope = head.shape.rope_config()

    def rows(stored: TrainBatch) -> tuple[Tensor, Tensor]:
        batch, active = stored.to(embedding.device, torch.float32), list[Tensor]()
        longest = max(batch.lengths) + 1
        rotary = RotaryTable(rope, longest, device=embedding.device, dtype=torch.float32)
        hook = head.midlayer.mlp.down_proj.register_forward_pre_hook(
            lambda _module, inputs: active.append(inputs[0])
        )
        predicting = batch.labels - 2
        unrolled = unroll(head, embedding, batch, rotary, rows=predicting, steps=1, layer=layer)
        hook.remove()
        return active[0], batch.teacher_states * inverse - unrolled.outputs[0]

    return rows
