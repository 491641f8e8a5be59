"""A block drafter's start by least squares: what its first layer is told by attention, solved.

A position of a block begins as the embedding of the mask, so all that it learns comes through
attention; from random weights, attention finds the two tokens that matter only after very many
steps. So it is pointed at them, and what they say is solved on the first batches:

    head of a group   0          1                 2               3 …
    attends to        the root   the last entry    recent entries  as 0, 1, 2
    keys              u · x on the slow pairs of rotary embedding for the root, on the others for
                      context, with u such that u · x = 1 for the one kind and -1 for the others
    1  fc, B          ridge regression of y on (aux, e), as EAGLE-3's start does: position 1
    2  values         the best of B's inputs in the metric of the embeddings, and the largest
                      directions of the context, by turns
    3  o              ridge regression of y - mask on what attention then gives, all positions
    4  norm           the target's times the cosine between prediction and truth: an unsure drafter
                      is an unsure distribution

y is the teacher's final state before the weight of the target's last norm. The norm behind the
layers takes away any scale, so y is made `_SCALE` times larger: a step of Adam moves every weight
alike, and moves a large output by less. MLPs, and layers behind the first, begin as nothing.

Shapes: R rows, A anchors, b block size, H hidden size, Q query and G key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config import TrainSection
from pipeline.errors import ConfigError
from pipeline.heads.algorithm import check_fixed
from pipeline.heads.dflash import ALGORITHM, fixed
from pipeline.heads.dflash.blocks import BlockAttention, cut_blocks, draw_anchors
from pipeline.heads.dflash.shape import BlockLayer, BlockQkv, ContextKeys, DflashHead, DflashShape
from pipeline.heads.init import (
    FC_START,
    DraftVocabulary,
    check_sizes,
    copy_plain_layer,
    init_fc,
    init_lm_head,
    inverse_norm,
    measured_on,
    print_start,
    random_init,
    shape_for,
)
from pipeline.learning.batches import TrainBatch
from pipeline.learning.least_squares import BatchesOf, Ridge, Rows, labels_needed, solve_ridge
from pipeline.records import TargetContract
from pipeline.target.open import Target
from pipeline.target.rotary import RotaryTable
from pipeline.target.weights import TargetWeights


def choose_shape(
    section: TrainSection, target_directory: Path, contract: TargetContract
) -> DflashShape:
    """The drafter's shape for the target in `target_directory`.

    Raises ConfigError for one that cannot be.
    """
    from transformers import AutoConfig

    target: Any = AutoConfig.from_pretrained(target_directory).get_text_config()
    settings, where = section.block, f"train.{section.algorithm}"
    sizes = {name: getattr(settings, name) for name in fixed(settings)}
    shape = dflash_shape_for(target, **sizes, aux_layers=len(contract.capture_layers))
    check_sizes(shape, where)
    for key, value, most, what in (
        ("mask_token_id", shape.mask_token_id, contract.vocab_size - 1, "token"),
        ("layers", settings.layers, contract.num_layers, "number of layers"),
    ):
        if value > most:
            problem = f"{value} is above the target's last {what}, {most}"
            raise ConfigError(problem, where=f"{where}.{key}", fix=f"choose at most {most}")
    return shape


def continue_shape(section: TrainSection, head: DflashHead, where: str) -> DflashShape:
    """The shape of an earlier head."""
    check_fixed(ALGORITHM.settings(section), head.shape, where)
    return head.shape


def new_head(
    section: TrainSection,
    shape: DflashShape,
    vocabulary: DraftVocabulary,
    weights: TargetWeights,
    *,
    num_layers: int,
    seed: int,
) -> DflashHead:
    """A float32 drafter with the first weights that `section` names."""
    head = DflashHead(shape)
    random_init(head, seed)
    head.set_vocabulary(vocabulary.target_ids)
    init_fc(head)
    init_lm_head(head, weights.lm_head(), weights.final_norm())
    output = "output rows, which it keeps, and norm" if shape.target_lm_head else "lm_head and norm"
    copied = [output]
    if section.block.init_layers != "random":
        last = range(num_layers - shape.num_hidden_layers, num_layers)
        copied += copy_layers(head, [weights.layer(index) for index in last])
    copied += _blank_outputs(head, weights.embedding())
    print_start("head starts", FC_START, copied)
    return head


def init_least_squares(
    section: TrainSection, head: DflashHead, target: Target, batches: BatchesOf, seed: int
) -> list[str]:
    """Solve what is linear in `head` on the first batches; → lines for the log."""
    fit = solve_least_squares(
        head,
        target.weights.embedding().to(target.device),
        batches(labels_needed(head.shape.hidden_size)),
        anchors=section.block.anchors,
        decay=section.block.position_decay,
        seed=seed,
    )
    first = f"{fit.explained:.0%} of the target's states explained at position 1"
    every = f"{fit.explained_by_attention:.0%} at all by attention"
    return [
        f"block drafter solved by least squares on {fit.rows:,} labels",
        f"{fit.measured_on}: {first}, {every}",
    ]


def dflash_shape_for(
    target_config: Any,  # transformers configuration
    *,
    layers: int,
    block_size: int,
    mask_token_id: int | None,
    draft_vocab_size: int,
    intermediate_size: int | None,
    num_attention_heads: int | None,
    num_key_value_heads: int | None,
    target_lm_head: bool = False,
    markov_rank: int = 0,
    confidence: bool = False,
    aux_layers: int = 3,
) -> DflashShape:
    """A drafter for a transformers target configuration; None takes the target's own value.

    With the target's own rows it proposes the whole vocabulary, whatever `draft_vocab_size` is.
    With a Markov head the anchor predicts, as DSpark's does.
    """
    if target_lm_head:
        draft_vocab_size = int(target_config.vocab_size)
    return shape_for(
        DflashShape,
        target_config,
        draft_vocab_size=draft_vocab_size,
        intermediate_size=intermediate_size,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        num_hidden_layers=layers,
        block_size=block_size,
        target_lm_head=target_lm_head,
        anchor_predicts=markov_rank > 0,
        markov_rank=markov_rank,
        confidence=confidence,
        aux_layers=aux_layers,
        mask_token_id=_unused_token(target_config) if mask_token_id is None else mask_token_id,
    )


@torch.no_grad()
def _blank_outputs(head: DflashHead, embedding: Tensor) -> list[str]:
    """Begin a bias and a confidence that say nothing yet; → what was copied.

    Tokens of like embeddings [V, H] begin with like rows of w1: those are the embeddings in their
    largest directions, of mean square one, so that a step of Adam on w2 moves the bias.
    """
    if head.confidence_head is not None:
        head.confidence_head.proj.weight.zero_()
        head.confidence_head.proj.bias.zero_()
    if head.markov_head is None:
        return []
    embedding = embedding.float()
    values, vectors = torch.linalg.eigh(embedding.T @ embedding / len(embedding))
    count = min(head.shape.markov_rank, len(values))
    largest = vectors[:, -count:] / values[-count:].clamp(min=1e-12).sqrt()
    head.markov_head.markov_w1.weight[:, :count] = embedding @ largest
    head.markov_head.markov_w2.weight.zero_()
    return [f"markov_w1: {count} directions of the embedding"]


def _unused_token(target_config: Any) -> int:
    """A token that no reply holds: what pads, or begins, a text."""
    names = ("pad_token_id", "bos_token_id")
    ids = (getattr(target_config, name, None) for name in names)
    return int(next((token for token in ids if isinstance(token, int) and token >= 0), 0))


def copy_layers(head: DflashHead, sources: Sequence[Mapping[str, Tensor]]) -> list[str]:
    """Copy what fits of target layers, named relative to them, into the head's; what did.

    Context reads the projections behind `hidden_norm` as the first layer's input does behind its
    own, so that norm starts there. Where the target norms no queries and keys, their norms get the
    size that those have. What is not there or has another shape stays as it is.
    """
    copied: list[str] = []
    with torch.no_grad():
        for number, (layer, source) in enumerate(zip(head.layers, sources, strict=True)):
            assert isinstance(layer, BlockLayer)
            copied += [f"layers.{number}.{name}" for name in _copy_layer(layer, source)]
        first = sources[0].get("input_layernorm.weight")
        if first is not None:
            head.hidden_norm.weight.copy_(first)
            copied.append("hidden_norm")
    return copied


def _copy_layer(own: BlockLayer, source: Mapping[str, Tensor]) -> list[str]:
    copied = copy_plain_layer(own, source)
    for name in ("q", "k"):
        norm, head_dim = source.get(f"self_attn.{name}_norm.weight"), own.self_attn.head_dim
        weight = getattr(own.self_attn, f"{name}_norm").weight
        if norm is not None and norm.shape == (head_dim,):
            weight.copy_(norm)
        elif norm is None:
            projection = getattr(own.self_attn, f"{name}_proj").weight
            weight.fill_(_typical(projection, own.input_layernorm.weight))
    return copied


def _typical(weight: Tensor, read: Tensor) -> float:
    """Root mean square of what a projection [heads·d, H] gives behind a norm of weight [H]."""
    return float((weight.float() * read.float()).square().sum(1).mean().sqrt())


#: How much larger than y the first layer's output is.
_SCALE = 4.0


#: Weight of the norm of queries: the score of what a head is pointed at.
_SHARPNESS = 6.0


#: Ridge of the directions u, in shares of a regressor's mean square.
_PROBE_RIDGE = 1e-3


#: Batches that directions and covariances are measured on.
_MEASURED = 8


class BlockFit(NamedTuple):
    """What was solved, for the log."""

    rows: int  # labels
    held_out: int  # of them; 0: none could be
    explained: float  # share of y's variance at position 1, by a regression on both tokens
    explained_by_attention: float  # at all positions, by what attention gives

    @property
    def measured_on(self) -> str:
        """What the shares are of."""
        return measured_on(self.held_out)


@torch.no_grad()
def solve_least_squares(
    head: DflashHead,
    embedding: Tensor,
    batches: Iterable[TrainBatch],
    *,
    anchors: int,
    decay: float,
    seed: int,
) -> BlockFit:
    """Solve the drafter's first layer on `batches`, which are gone through five times, in place.

    head, in float32: its `norm` holds the target's final norm. embedding [V, H] is the target's;
    anchors, decay and seed are those of training. Deterministic; sums are kept, not rows.
    """
    embedding, weight = embedding.float(), head.norm.weight.clone()
    inverse = inverse_norm(weight)
    first = _blank_layers(head)
    linear = solve_ridge(batches, _rows(first, embedding, inverse))
    size = head.shape.hidden_size
    head.fc.weight.copy_(linear.weights[:-size].T)
    few = list(islice(batches, _MEASURED))
    _point_attention(head, first, embedding, few)
    _choose_values(head, first, linear, few)
    mixed = _MixedRows(head, first, embedding, inverse * _SCALE, (anchors, decay, seed))
    solved = solve_ridge(batches, mixed)
    first.self_attn.o_proj.weight.copy_(solved.weights.T)
    head.norm.weight.copy_(weight * max(solved.cosine, 0.05))
    return BlockFit(linear.rows, linear.held_out, linear.explained, solved.explained)


def _blank_layers(head: DflashHead) -> BlockLayer:
    """Make every layer pass on what it reads; → the first, its norms all ones."""
    for layer in head.layers:
        assert isinstance(layer, BlockLayer)
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    first = head.layers[0]
    assert isinstance(first, BlockLayer)
    for norm in (first.input_layernorm, first.self_attn.k_norm, head.hidden_norm):
        norm.weight.fill_(1.0)
    first.self_attn.q_norm.weight.fill_(_SHARPNESS)
    return first


def _rows(layer: BlockLayer, embedding: Tensor, inverse: Tensor) -> Rows:
    """Regressors (aux before the root, root's e) [R, (L + 1) H], y of position 1 [R, H]."""

    def rows(stored: TrainBatch) -> tuple[Tensor, Tensor]:
        batch = stored.to(embedding.device, torch.float32)
        roots = layer.input_layernorm(embedding[batch.token_ids[batch.labels - 1]])  # [R, H]
        states = batch.aux_states[batch.labels - 2]  # [R, L · H]
        return torch.cat((states, roots), dim=-1), batch.teacher_states * inverse

    return rows


def _point_attention(
    head: DflashHead, layer: BlockLayer, embedding: Tensor, few: list[TrainBatch]
) -> None:
    """Queries and keys, of rotary pairs from fast to slow: the last quarter marks roots."""
    shape, own = head.shape, layer.self_attn
    context, tokens = _seen(head, layer, embedding, few)
    mask = layer.input_layernorm(embedding[shape.mask_token_id])  # [H]
    of_root = _direction(tokens, torch.cat((context, mask.expand_as(tokens))))
    of_context = _direction(context, torch.cat((tokens, mask.expand_as(tokens))))
    half = shape.head_dim // 2
    pair = torch.arange(half, device=mask.device)
    quarter = max(1, half // 4)
    slow = (pair >= half - quarter).float()
    fast = 1 - slow
    rotary = RotaryTable(shape.rope_config(), 3, device=mask.device, dtype=torch.float32)
    # Turned so that the score is largest for the last entry, seen from the first position that
    # predicts: two positions back from position 1, one from the root's.
    back = 1 + shape.first
    cos, sin = rotary.cos[back, :half], rotary.sin[back, :half]
    nearest = fast * (1 + 3.0 * (pair < quarter))  # the fast pairs tell neighbours apart
    recent = fast * (pair >= half // 5)
    zero = torch.zeros_like(slow)
    queries = (
        torch.cat((slow, zero)),
        torch.cat((nearest * cos, -nearest * sin)),
        torch.cat((recent * cos, -recent * sin)),
    )
    key = torch.cat((slow, zero))[:, None] * of_root + torch.cat((fast, zero))[:, None] * of_context
    own.k_proj.weight.copy_(key.repeat(shape.num_key_value_heads, 1))
    shared = shape.num_attention_heads // shape.num_key_value_heads
    read = mask / mask.square().sum()
    if shape.anchor_predicts:  # the root asks as the masks do; a norm takes the size away
        read = _direction(torch.cat((tokens, mask.expand_as(tokens))), context)
    every = [
        queries[(index % shared if shared > 1 else index) % len(queries)]
        for index in range(shape.num_attention_heads)
    ]
    own.q_proj.weight.copy_(torch.cat(every)[:, None] * read)


def _seen(
    head: DflashHead, layer: BlockLayer, embedding: Tensor, few: list[TrainBatch]
) -> tuple[Tensor, Tensor]:
    """What projections read of context and of roots, each [N, H]."""
    plain = [batch.to(embedding.device, torch.float32) for batch in few]
    context = torch.cat([head.context(batch.aux_states) for batch in plain])
    return context, layer.input_layernorm(embedding[torch.cat([b.token_ids for b in plain])])


def _direction(ours: Tensor, others: Tensor) -> Tensor:
    """u [H] with u · x near 1 for rows of `ours` and near -1 for those of `others`."""
    rows = torch.cat((ours, others)).double()
    signs = torch.cat((rows.new_ones(len(ours)), -rows.new_ones(len(others))))
    gram = rows.T @ rows
    gram.diagonal().add_(_PROBE_RIDGE * gram.diagonal().mean())
    return torch.as_tensor(torch.linalg.solve(gram, rows.T @ signs).float())


def _choose_values(
    head: DflashHead, layer: BlockLayer, linear: Ridge, few: list[TrainBatch]
) -> None:
    """Value rows by turns: what B reads of a root, and the context's largest directions.

    Both have a mean square of one over what they are of.
    """
    size, rows = head.shape.hidden_size, layer.self_attn.v_proj.weight
    of_root = linear.weights[-size:].T  # B [H, H]
    covariance = linear.moments[-size:, -size:].clone()
    covariance.diagonal().add_(1e-4)
    root = torch.linalg.cholesky(covariance)
    count = len(rows) // 2
    _, _, directions = torch.linalg.svd(of_root @ root)
    rows[0::2] = torch.linalg.solve(root.T, directions[: len(rows) - count].T).T
    plain = [batch.to(rows.device, torch.float32) for batch in few]
    context = torch.cat([head.context(batch.aux_states) for batch in plain])
    values, vectors = torch.linalg.eigh(context.T @ context / len(context))
    rows[1::2] = (vectors[:, -count:] / values[-count:].clamp(min=1e-6).sqrt()).T


class _MixedRows:
    """Regressors: what attention gives at every position that a label is predicted at [R, Q d]; and
    y without the embedding that the position begins as [R, H]. Rows are weighed as the loss weighs
    them."""

    def __init__(
        self,
        head: DflashHead,
        layer: BlockLayer,
        embedding: Tensor,
        inverse: Tensor,
        drawing: tuple[int, float, int],
    ) -> None:
        self._head, self._layer, self._embedding, self._inverse = head, layer, embedding, inverse
        self._anchors, self._decay, self._seed = drawing

    def __call__(self, stored: TrainBatch) -> tuple[Tensor, Tensor]:
        batch, head = stored.to(self._embedding.device, torch.float32), self._head
        size = head.shape.block_size
        first, reach = head.shape.first, head.shape.predicted + 1
        blocks = cut_blocks(batch, draw_anchors(batch, self._anchors, self._seed), reach)
        rotary = RotaryTable(
            head.shape.rope_config(),
            max(batch.lengths) + reach,
            device=self._embedding.device,
            dtype=torch.float32,
        )
        attention = BlockAttention(batch.lengths, blocks, size, rotary)
        tokens = head.block_tokens(batch.token_ids[blocks.anchors])  # [A, b]
        embedded = F.embedding(tokens, self._embedding)  # [A, b, H]
        normed = self._layer.input_layernorm(embedded.flatten(0, 1))
        own = self._layer.self_attn
        block = BlockQkv(own.project_query(normed), *own.project_keys(normed))
        context = ContextKeys(*own.project_keys(head.context(batch.aux_states)))
        mixed = (
            attention(block, context, self._layer.sight)
            .flatten(1)
            .view(-1, size, own.o_proj.in_features)
        )
        predicted = blocks.labels >= 0  # [A, K]
        position = torch.arange(reach - 1, device=predicted.device)
        weight = torch.exp(-0.5 * position / self._decay).expand(len(tokens), -1)[predicted]
        y = batch.teacher_states[blocks.labels[predicted]] * self._inverse
        residual = y - embedded[:, first:][predicted]
        return mixed[:, first:][predicted] * weight[:, None], residual * weight[:, None]
