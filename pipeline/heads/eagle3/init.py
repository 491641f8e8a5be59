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

Attention is random, so step 2 is meant for the own token and 3 sees what attention makes of it.
Queries and keys that made every token find itself began better and ended the same; those of the
target's last layer, and its neurons, end worse (docs/log.md).

Only step 0 is solved. Later steps of the unroll, context, and everything that is not linear are
training's part.

Shapes: R rows (labels that step 0 predicts), H hidden size, I intermediate size, Q query and G
key/value heads, d head size, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config import HeadSection, TrainSection
from pipeline.errors import ConfigError
from pipeline.heads.algorithm import check_fixed
from pipeline.heads.eagle3 import ALGORITHM
from pipeline.heads.eagle3.shape import Eagle3Head, HeadShape, has_other_window
from pipeline.heads.eagle3.ttt import Layer, unroll
from pipeline.heads.init import (
    FC_START,
    LEAST_SURE,
    SIZES,
    DraftVocabulary,
    Fit,
    _norm_before_mlp,
    check_sizes,
    copy_mlp,
    fit_of,
    fold_norm,
    init_fc,
    init_lm_head,
    inverse_norm,
    print_start,
    random_init,
    shape_for,
)
from pipeline.learning.batches import TrainBatch
from pipeline.learning.least_squares import BatchesOf, Rows, labels_needed, solve_ridge
from pipeline.records import TargetContract
from pipeline.target.open import Target
from pipeline.target.rotary import RotaryTable
from pipeline.target.weights import TargetWeights


def choose_shape(
    section: TrainSection, target_directory: Path, contract: TargetContract
) -> HeadShape:
    """The head's shape for the target in `target_directory`. Raises ConfigError."""
    shape = head_shape(section.head_config, target_directory)
    return shape.model_copy(update={"aux_layers": len(contract.capture_layers)})


def head_shape(section: HeadSection, target_directory: Path) -> HeadShape:
    """`choose_shape` of the section that says it."""
    from transformers import AutoConfig

    target: Any = AutoConfig.from_pretrained(target_directory).get_text_config()
    sizes = {name: getattr(section, name) for name in (*SIZES, "fc_norm", "norm_output")}
    shape = shape_for(HeadShape, target, **sizes, draft_window=section.draft_window or 0)
    check_sizes(shape, "train.head_config")
    return shape


def continue_shape(section: TrainSection, head: Eagle3Head, where: str) -> HeadShape:
    """The shape of an earlier head; a draft window decides no tensor, so another one is taken."""
    check_fixed(ALGORITHM.settings(section), head.shape, where)
    window = section.head_config.draft_window
    if window and (other := has_other_window(head.shape)):
        problem = f"the head that training starts from has {other} ({where})"
        raise ConfigError(problem, where="train.head_config.draft_window", fix="leave it out")
    return head.shape.model_copy(update={"draft_window": window}) if window else head.shape


def new_head(
    section: TrainSection,
    shape: HeadShape,
    vocabulary: DraftVocabulary,
    weights: TargetWeights,
    *,
    num_layers: int,
    seed: int,
) -> Eagle3Head:
    """A float32 head with the first weights that `section` names."""
    head, settings = Eagle3Head(shape), section.head_config
    random_init(head, seed)
    head.set_vocabulary(vocabulary.target_ids)
    init_fc(head)
    copied = list[str]()
    if settings.init_lm_head == "target":
        init_lm_head(head, weights.lm_head(), weights.final_norm())
        copied.append("lm_head and norm")
    if settings.init_layer == "target_last":
        copied += copy_layer(head, weights.layer(num_layers - 1))
    print_start("head starts", FC_START, copied)
    return head


def init_least_squares(
    section: TrainSection, head: Eagle3Head, target: Target, batches: BatchesOf, seed: int
) -> list[str]:
    """Solve what is linear in `head` on the first batches; → lines for the log."""
    del section, seed
    labels = labels_needed(head.shape.hidden_size)
    embedding = target.weights.embedding().to(target.device)
    fit = solve_least_squares(head, embedding, batches(labels))
    few = "" if fit.rows >= labels else f", fewer than the {labels:,} that it should have"
    linear = f"{fit.explained:.0%} of the target's states explained linearly"
    rest = f"{fit.explained_by_mlp:.0%} of the rest by the MLP"
    return [
        f"head solved by least squares on {fit.rows:,} labels{few}",
        f"{fit.measured_on}: {linear}, {rest}; ridge {fit.strength:g}",
    ]


def copy_layer(head: Eagle3Head, layer: Mapping[str, Tensor]) -> list[str]:
    """Copy what fits of a target layer, named relative to it, into the head's; returns what did.

    Projections that read [embedding ; hidden] take the target's matrix for the hidden half and keep
    a small random embedding half. Norms of queries and keys, which a head has not, go into their
    projections. A narrower MLP takes the neurons with the largest output norm. What is not there
    or has another shape stays as it is.
    """
    with torch.no_grad():
        # First the norms: the projections are scaled for what they let through.
        norms = _copy_norms(head, layer)
        return [*_copy_attention(head, layer), *copy_mlp(head.midlayer.mlp, layer), *norms]


def _copy_norms(head: Eagle3Head, layer: Mapping[str, Tensor]) -> list[str]:
    """The norms before attention and before the MLP, whatever the target calls the latter."""
    own = head.midlayer
    before_mlp = _norm_before_mlp(layer)
    pairs = (("input_layernorm", own.hidden_norm), (before_mlp, own.post_attention_layernorm))
    fitting = [(name, norm) for name, norm in pairs if f"{name}.weight" in layer]
    for name, norm in fitting:
        norm.weight.copy_(layer[f"{name}.weight"])
    return ["norms"] if fitting else []


def _copy_attention(head: Eagle3Head, layer: Mapping[str, Tensor]) -> list[str]:
    copied = []
    own, size = head.midlayer, head.shape.hidden_size
    for name in ("q_proj", "k_proj", "v_proj"):
        source, weight = layer.get(f"self_attn.{name}.weight"), getattr(own.self_attn, name).weight
        if source is None or source.shape != (weight.shape[0], size):
            continue
        norm = layer.get(f"self_attn.{name[0]}_norm.weight")
        if norm is not None:
            source = fold_norm(source, norm, own.hidden_norm.weight, head.shape.head_dim)
        weight[:, size:].copy_(source)
        copied.append(name)
    output = layer.get("self_attn.o_proj.weight")
    if output is not None and output.shape == own.self_attn.o_proj.weight.shape:
        own.self_attn.o_proj.weight.copy_(output)
        copied.append("o_proj")
    return copied


#: What the parts that read the hidden state keep of their first values.
_HIDDEN_SCALE = 0.1


@torch.no_grad()
def solve_least_squares(head: Eagle3Head, embedding: Tensor, batches: Iterable[TrainBatch]) -> Fit:
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
    head.fc.weight.copy_(linear.weights[:-size].T)
    covariance = linear.moments[-size:, -size:].clone()
    covariance.diagonal().add_(1e-4)
    _factorise_values(head, linear.weights[-size:].T, covariance)
    return fit_of(linear), linear.cosine


def _rows(head: Eagle3Head, embedding: Tensor, inverse: Tensor) -> Rows:
    """Regressors (aux, e) [R, (L + 1) H] and y [R, H] of a batch: of its labels, and of all
    alternatives."""

    def rows(stored: TrainBatch) -> tuple[Tensor, Tensor]:
        batch = stored.to(embedding.device, torch.float32)
        states = head.normed_aux(batch.aux_states[batch.labels - 2])  # [S, L · H]
        tokens, teachers = batch.token_ids[batch.labels - 1], batch.teacher_states
        ids, others = batch.alternative_ids, batch.alternative_states
        if ids is not None and others is not None:
            count = 1 + ids.shape[1]
            states = states.repeat_interleave(count, dim=0)
            tokens = torch.cat((tokens[:, None], ids), dim=1).flatten()
            teachers = torch.cat((teachers, others), dim=1).view(len(tokens), -1)
        normed = head.midlayer.input_layernorm(embedding[tokens])  # [R, H]
        return torch.cat((states, normed), dim=-1), teachers * inverse

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
    attention.v_proj.weight[:, shape.hidden_size :].mul_(_HIDDEN_SCALE)


def _activations(head: Eagle3Head, embedding: Tensor, inverse: Tensor) -> Rows:
    """Activations φ of the MLP [R, I], and what all else leaves of y [R, H]; `down` must be 0.

    What the layer gives is taken in front of the norm that `norm_output` puts behind it: `down`
    adds to that.
    """
    layer = Layer.of(head)._replace(output=lambda hidden: hidden)
    rope = head.shape.rope_config()

    def rows(stored: TrainBatch) -> tuple[Tensor, Tensor]:
        batch, active = stored.to(embedding.device, torch.float32), list[Tensor]()
        max_length = max(batch.lengths) + 1
        rotary = RotaryTable(rope, max_length, device=embedding.device, dtype=torch.float32)
        hook = head.midlayer.mlp.down_proj.register_forward_pre_hook(
            lambda _module, inputs: active.append(inputs[0])
        )
        predicting = batch.labels - 2
        unrolled = unroll(head, embedding, batch, rotary, rows=predicting, steps=1, layer=layer)
        hook.remove()
        return active[0], batch.teacher_states * inverse - unrolled.outputs[0]

    return rows
