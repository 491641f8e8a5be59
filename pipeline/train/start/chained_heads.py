"""Chained heads before their first step: shape, starting weights, and what is solved of them.

A head is linear where it attends to nothing: its output, before its last norm, is input_proj on the
normed embedding and hidden state. It should be y, as in least_squares.py, whatever the head: each
predicts the final state behind the token that it reads.

    1  fc             of (aux, e) that explain y, the part that reads aux; e: normed embedding
    2  input_proj     of each head, of what it reads; for head k the heads before it are run
    3  final norm     the target's, times the cosine between prediction and truth
    4  head 0's MLP   what is left of y, on the MLP's own activations

The others' MLPs and every attention begin as the target's last layer, a tenth of it.

Shapes: R rows (labels), H hidden size, I intermediate size, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config import HeadSection
from pipeline.console import notice
from pipeline.eagle3.chained.head import ChainedHead, ChainedLayer, ChainedShape
from pipeline.eagle3.chained.init import chained_shape_for, start_chain, start_chained_layers
from pipeline.eagle3.init import DraftVocabulary, inverse_norm, random_init
from pipeline.eagle3.layers import RotaryTable
from pipeline.errors import ConfigError
from pipeline.records import TargetContract
from pipeline.target.weights import TargetWeights
from pipeline.train.chained.unroll import run_heads, tokens_of
from pipeline.train.data.batches import TrainBatch
from pipeline.train.start.block_drafter import check_sizes
from pipeline.train.start.least_squares import LEAST_SURE, Fit, fit_of
from pipeline.train.start.ridge import Rows, solve_ridge
from pipeline.train.ttt.attention import UnrolledAttention

#: Keys of `train.head_config` that decide a chain, beside the sizes of any head.
CHAINED_FIXED = ("heads", "chain_input")
SIZES = ("draft_vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def chained_shape(
    section: HeadSection, target_directory: Path, contract: TargetContract
) -> ChainedShape:
    """The heads' shape for the target in `target_directory`.

    Raises ConfigError for one that cannot be.
    """
    from transformers import AutoConfig

    target: Any = AutoConfig.from_pretrained(target_directory).get_text_config()
    asked = {name: getattr(section, name) for name in (*SIZES, *CHAINED_FIXED)}
    shape = chained_shape_for(target, **asked)
    check_sizes(shape, "train.head_config")
    last = contract.num_layers - 1
    if shape.chain_input == "final" and contract.capture_layers[-1] != last:
        problem = f"the states end with layer {contract.capture_layers[-1]}, the target with {last}"
        fix = f"make the states with target.capture_layers ending with {last}, or read aux"
        raise ConfigError(problem, where="train.head_config.chain_input=final", fix=fix)
    return shape


def new_chain(
    section: HeadSection,
    shape: ChainedShape,
    vocabulary: DraftVocabulary,
    weights: TargetWeights,
    *,
    last_layer: int,
    seed: int,
) -> ChainedHead:
    """Float32 heads with the starting weights that `section` asks for."""
    head = ChainedHead(shape)
    random_init(head, seed)
    head.set_vocabulary(vocabulary.target_ids)
    rows = weights.lm_head() if section.init_lm_head == "target" else None
    copied = start_chain(head, rows, weights.final_norm())
    if section.init_layer != "random":
        copied += start_chained_layers(head, weights.layer(last_layer))
    which = f"{shape.heads} heads start alike, from the target's"
    notice("train", f"{which} {', '.join(copied)}; all else is random")
    return head


@torch.no_grad()
def solve_chain(
    head: ChainedHead,
    embedding: Tensor,
    final_norm: Tensor,
    many: Iterable[TrainBatch],
    few: Iterable[TrainBatch],
) -> list[Fit]:
    """Solve the heads' linear parts in place, one fit a head.

    embedding [V, H] and final_norm [H] are the target's; on `many` batches fc is solved, all else
    on `few`. Deterministic, as `start_by_least_squares`.
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
        active, given = _entering(layer, lambda: layer.after_attention(joined[at], mixed))
        return active, batch.teacher_states * inverse - given

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
    active, given = read
    return active, given


def _rotary(head: ChainedHead, batch: TrainBatch) -> RotaryTable:
    longest, device = max(batch.lengths) + 1, batch.token_ids.device
    rope = head.shape.rope_config()
    return RotaryTable(rope, longest, device=device, dtype=torch.float32)
