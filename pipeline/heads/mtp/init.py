"""Chained heads before their first step: shape, starting weights, and what is solved of them.

A head is linear where it attends to nothing: its output, before its last norm, is input_proj on the
normed embedding and hidden state. It should be y, as in least_squares.py, whatever the head: each
predicts the final state behind the token that it reads.

    1  fc             of (aux, e) that explain y, the part that reads aux; e: normed embedding
    2  input_proj     of each head, of what it reads; for head k the heads before it are run
    3  final norm     the target's, times the cosine between prediction and truth
    4  head 0's MLP   what is left of y, on the MLP's own activations

The others' MLPs and every attention begin as random.

Shapes: R rows (labels), H hidden size, I intermediate size, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config import TrainSection
from pipeline.errors import ConfigError
from pipeline.heads.algorithm import check_fixed
from pipeline.heads.init import (
    FC_START,
    LEAST_SURE,
    DraftVocabulary,
    Fit,
    check_sizes,
    copy_plain_layer,
    fit_of,
    fold_norm,
    init_fc,
    inverse_norm,
    print_start,
    random_init,
    shape_for,
)
from pipeline.heads.mtp import ALGORITHM, FIXED
from pipeline.heads.mtp.shape import ChainedHead, ChainedLayer, ChainedShape
from pipeline.heads.mtp.ttt import run_heads, tokens_of
from pipeline.learning.attention import UnrolledAttention
from pipeline.learning.batches import TrainBatch
from pipeline.learning.least_squares import BatchesOf, Rows, labels_needed, solve_ridge
from pipeline.records import TargetContract
from pipeline.target.open import Target
from pipeline.target.rotary import RotaryTable
from pipeline.target.weights import TargetWeights


def choose_shape(
    section: TrainSection, target_directory: Path, contract: TargetContract
) -> ChainedShape:
    """The heads' shape for the target in `target_directory`.

    Raises ConfigError for one that cannot be.
    """
    from transformers import AutoConfig

    target: Any = AutoConfig.from_pretrained(target_directory).get_text_config()
    sizes = {name: getattr(section.head_config, name) for name in FIXED}
    shape = shape_for(ChainedShape, target, **sizes, aux_layers=len(contract.capture_layers))
    check_sizes(shape, "train.head_config")
    last = contract.num_layers - 1
    if shape.chain_input == "final" and contract.capture_layers[-1] != last:
        problem = f"the states end with layer {contract.capture_layers[-1]}, the target with {last}"
        fix = f"make the states with target.capture_layers ending with {last}, or read aux"
        raise ConfigError(problem, where="train.head_config.chain_input=final", fix=fix)
    return shape


def continue_shape(section: TrainSection, head: ChainedHead, where: str) -> ChainedShape:
    """The shape of an earlier chain. Raises ConfigError where training cannot go on with it."""
    if section.ttt_steps < (heads := head.shape.heads):
        problem = f"{section.ttt_steps} steps are too few for the {heads} heads of {where}"
        fix = f"set at least {heads}, one a head"
        raise ConfigError(problem, where="train.ttt_steps", fix=fix)
    for name in ("dropout", "activation_checkpointing", "compile"):
        if getattr(section, name):
            problem = f"the head that training starts from has several heads ({where})"
            raise ConfigError(problem, where=f"train.{name}", fix="leave it out")
    check_fixed(ALGORITHM.settings(section), head.shape, where)
    return head.shape


def new_head(
    section: TrainSection,
    shape: ChainedShape,
    vocabulary: DraftVocabulary,
    weights: TargetWeights,
    *,
    num_layers: int,
    seed: int,
) -> ChainedHead:
    """Float32 heads with the first weights that `section` names."""
    head, settings = ChainedHead(shape), section.head_config
    random_init(head, seed)
    head.set_vocabulary(vocabulary.target_ids)
    rows = weights.lm_head() if settings.init_lm_head == "target" else None
    begun = init_chain(head, rows, weights.final_norm())
    copied = ["lm_head and norms"] if rows is not None else []
    if settings.init_layer == "target_last":
        copied += copy_layers(head, weights.layer(num_layers - 1))
    print_start(f"{shape.heads} heads start alike,", begun, copied)
    return head


def init_least_squares(
    section: TrainSection, head: ChainedHead, target: Target, batches: BatchesOf, seed: int
) -> list[str]:
    """Solve what is linear in the heads on the first batches; → lines for the log."""
    del section, seed
    labels = labels_needed(head.shape.hidden_size)
    weights, device = target.weights, target.device
    embedding, norm = weights.embedding().to(device), weights.final_norm().to(device)
    # input_proj has half of fc's regressors
    many, few = batches(labels), batches(labels // 2)
    fits = solve_least_squares(head, embedding, norm, many, few)
    explained = ", ".join(f"{fit.explained:.0%}" for fit in fits)
    return [
        f"heads solved by least squares on {fits[0].rows:,} labels",
        f"of the target's states they explain {explained}, head by head",
    ]


@torch.no_grad()
def solve_least_squares(
    head: ChainedHead,
    embedding: Tensor,
    final_norm: Tensor,
    many: Iterable[TrainBatch],
    few: Iterable[TrainBatch],
) -> list[Fit]:
    """Solve the heads' linear parts in place, one fit a head.

    embedding [V, H] and final_norm [H] are the target's; on `many` batches fc is solved, all else
    on `few`. Deterministic, as `solve_least_squares`.
    """
    embedding, inverse, fits = embedding.float(), inverse_norm(final_norm), list[Fit]()
    if head.aux_projection is not None:
        _solve_fc(head.aux_projection.weight, many, _aux_rows(head, embedding, inverse))
    for k, layer in enumerate(head.layers):
        layer.token_layernorm.weight.fill_(1.0)
        layer.hidden_layernorm.weight.fill_(1.0)
        layer.post_attention_layernorm.weight.fill_(1.0)
        fit, cosine = _solve_input(layer, few, _input_rows(head, k, embedding, inverse))
        layer.final_layernorm.weight.copy_(final_norm * max(cosine, LEAST_SURE))
        by_mlp = _solve_mlp(head, embedding, inverse, few) if k == 0 else 0.0
        fits.append(fit._replace(explained_by_mlp=by_mlp))
    return fits


# Functions of their own, so that one solution's moments are gone before the next one's sums.
def _solve_fc(weight: Tensor, batches: Iterable[TrainBatch], rows_of: Rows) -> None:
    weight.copy_(solve_ridge(batches, rows_of).weights[: weight.shape[1]].T)


def _solve_input(
    layer: ChainedLayer, batches: Iterable[TrainBatch], rows_of: Rows
) -> tuple[Fit, float]:
    """Solve what the layer reads; → what was solved, and its cosine."""
    solved = solve_ridge(batches, rows_of)
    layer.input_proj.weight.copy_(solved.weights.T)
    return fit_of(solved), solved.cosine


def _solve_mlp(
    head: ChainedHead, embedding: Tensor, inverse: Tensor, batches: Iterable[TrainBatch]
) -> float:
    """Solve head 0's MLP; the share of what the linear part leaves that it explains."""
    down = head.layers[0].mlp.down_proj.weight
    down.zero_()
    solved = solve_ridge(batches, _mlp_rows(head, embedding, inverse))
    down.copy_(solved.weights.T)
    return solved.explained


def _aux_rows(head: ChainedHead, embedding: Tensor, inverse: Tensor) -> Rows:
    """Regressors (aux, e) [R, 4H] of head 0, and y [R, H]."""

    def rows(stored: TrainBatch) -> tuple[Tensor, Tensor]:
        batch = stored.to(embedding.device, torch.float32)
        tokens = embedding[batch.token_ids[batch.labels - 1]]
        normed = torch.nn.functional.rms_norm(tokens, tokens.shape[-1:])
        read = torch.cat((batch.aux_states[batch.labels - 2], normed), dim=-1)
        return read, batch.teacher_states * inverse

    return rows


def _input_rows(head: ChainedHead, k: int, embedding: Tensor, inverse: Tensor) -> Rows:
    """What head k's input_proj reads [R, 2H], and y [R, H], of the labels that it predicts."""

    def rows(stored: TrainBatch) -> tuple[Tensor, Tensor]:
        batch = stored.to(embedding.device, torch.float32)
        predicted = batch.depths >= k + 2
        at = batch.labels[predicted] - k - 2
        hidden = run_heads(head, embedding, batch, _rotary(head, batch), k)[-1][at]
        read = head.layers[k].normed_inputs(tokens_of(embedding, batch, k)[at], hidden)
        return read, batch.teacher_states[predicted] * inverse

    return rows


def _mlp_rows(head: ChainedHead, embedding: Tensor, inverse: Tensor) -> Rows:
    """Activations of head 0's MLP [R, I], whose `down` must be 0, and what is left of y [R, H]."""
    layer = head.layers[0]

    def rows(stored: TrainBatch) -> tuple[Tensor, Tensor]:
        batch = stored.to(embedding.device, torch.float32)
        at, rotary = batch.labels - 2, _rotary(head, batch)
        joined = layer.join(tokens_of(embedding, batch, 0), head.project(batch.aux_states))
        attention = UnrolledAttention(batch.lengths, at, rotary)
        mixed, _ = attention.attend(0, *layer.project_qkv(joined, at), [])
        active, normed_input = _entering(layer, lambda: layer.after_attention(joined[at], mixed))
        return active, batch.teacher_states * inverse - normed_input

    return rows


def _entering(layer: ChainedLayer, run: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """What the MLP's last matrix and the last norm read while `run` runs the layer."""
    read = list[Tensor]()
    hooks = [
        module.register_forward_pre_hook(lambda _module, inputs: read.append(inputs[0]))
        for module in (layer.mlp.down_proj, layer.final_layernorm)
    ]
    run()
    for hook in hooks:
        hook.remove()
    active, normed_input = read
    return active, normed_input


def _rotary(head: ChainedHead, batch: TrainBatch) -> RotaryTable:
    max_length, device = max(batch.lengths) + 1, batch.token_ids.device
    rope = head.shape.rope_config()
    return RotaryTable(rope, max_length, device=device, dtype=torch.float32)


#: What the layer of a head keeps of its first output: input_proj alone begins as an identity.
_LAYER_SCALE = 0.1


def init_chain(head: ChainedHead, target_lm_head: Tensor | None, target_final_norm: Tensor) -> str:
    """Every head passes on what it reads: input_proj is near the identity on the hidden half.

    fc starts near the identity on the high aux state. target_lm_head [V, H], whose rows lm_head
    takes; target_final_norm [H]. Returns what begins so.
    """
    size, begun = head.shape.hidden_size, "input_proj: identity on the hidden state"
    with torch.no_grad():
        if head.shape.chain_input == "aux":
            init_fc(head)
            begun = f"{FC_START}, {begun}"
        else:
            head.target_norm.copy_(target_final_norm)
        for number, layer in enumerate(head.layers):
            layer.input_proj.weight.mul_(0.1)
            layer.input_proj.weight[:, :size] += torch.eye(size)
            if target_lm_head is not None:
                layer.final_layernorm.weight.copy_(target_final_norm)
            if head.shape.chain_input == "final" or (number and target_lm_head is not None):
                layer.hidden_layernorm.weight.copy_(inverse_norm(target_final_norm))
        if target_lm_head is not None:
            head.lm_head.weight.copy_(target_lm_head[head.target_ids()])
    return begun


def copy_layers(head: ChainedHead, source: Mapping[str, Tensor]) -> list[str]:
    """Copy what fits of a target layer, named relative to it, into every head; what did.

    What its attention and its MLP write begins small: the residual stream is a guess already.
    """
    copied: list[str] = []
    with torch.no_grad():
        for layer in head.layers:
            copied = copy_plain_layer(layer, _without_head_norms(layer, source))
            layer.self_attn.o_proj.weight.mul_(_LAYER_SCALE)
            layer.mlp.down_proj.weight.mul_(_LAYER_SCALE)
    return copied


def _without_head_norms(own: ChainedLayer, source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The layer with its norms of queries and keys inside their projections: a head has none."""
    folded = dict(source)
    read = source.get("input_layernorm.weight", own.input_layernorm.weight)
    for name in ("q", "k"):
        projection = f"self_attn.{name}_proj.weight"
        norm = source.get(f"self_attn.{name}_norm.weight")
        if norm is not None and projection in source and source[projection].shape[1] == len(read):
            folded[projection] = fold_norm(source[projection], norm, read, own.self_attn.head_dim)
    return folded
