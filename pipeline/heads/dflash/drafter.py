"""Drafting with a block drafter (DFlash, arXiv:2602.06036): one forward, and the tree of its
marginals (DDTree, arXiv:2604.12989).

A row with L committed tokens x0…x(L-1) and root xL has L entries in each of the drafter's layers,
keys and values of the context states fc(aux i) at position i. A draft writes its block behind them:

    entry        0     …   L-1  │   L     L+1    L+2   …   L+b-1        visible to the whole block,
    key, value   aux0  …        │  root   mask   mask  …   mask         and seen by nobody else
    predicts                    │    ·    x(L+1) x(L+2) …  x(L+b-1)

The extension that follows overwrites what the block has left with the context of accepted tokens.
A block is drafted whole, whatever the tree's depth: as it was trained, or, by `block_size`, with
fewer masks, which is cheaper and a little less right, for every position sees all masks.

With a Markov head (DSpark, arXiv:2607.05147) a position's logits depend on the token before it, so
a beam goes over the positions, of which each is a product of rank r for every beam. With a
confidence output, the score of what a position proposes after a token is multiplied by the
confidence there: where the drafter is unsure, the tree ends and spends its nodes elsewhere. Below a
threshold nothing is proposed.

Shapes: B rows, b block size, D depths, k beams, H hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config import BlockDrafterSection, DrafterSection, DsparkDrafterSection, TreeSection
from pipeline.decoder.batch import DecodeBatch, TokenRows
from pipeline.decoder.drafter import Drafter, DrafterFactory, ReadTokens, TreeDrafter, Trees
from pipeline.decoder.kv import Planes, PlaneShape
from pipeline.decoder.model import DecoderModel, fuse_layer, pack_lm_head, stored
from pipeline.decoder.ops.draft import (
    Candidates,
    DraftNoise,
    beam_depths,
    candidate_parents,
    join_marginals,
)
from pipeline.decoder.ops.layer import AttentionMetadata, LayerStack, Packed
from pipeline.decoder.ops.tree import HEADROOM
from pipeline.errors import ConfigError
from pipeline.heads.dflash.shape import DflashHead, Sight
from pipeline.target.rotary import RotaryTable

#: The smallest block that is tried, root included.
_LEAST_BLOCK = 3


class DflashDrafter(TreeDrafter):
    """One head, and a tree from each of its blocks. It keeps no state beside its planes."""

    def __init__(
        self,
        head: DflashHead,
        model: DecoderModel,
        trees: Trees,
        *,
        block_size: int | None = None,
        confidence_weight: float = 1.0,
        confidence_threshold: float = 0.0,
    ) -> None:
        """The head's weights are copied; the target's embedding, type, device and operations are
        used. `block_size` tokens are drafted at a time, root included; None: as it was trained. The
        confidence, where there is one, is taken to the power of `confidence_weight`; below
        `confidence_threshold` a branch ends.

        Raises HeadError when head and target do not fit, ConfigError for a tree that is deeper than
        a block, or a block longer than the trained one.
        """
        head.check_fits(model.config.hidden_size, model.vocabulary)
        super().__init__(trees, head.shape.draft_vocab_size)
        self.ops, self.dtype = model.ops, model.dtype
        self.shape = head.shape
        trained = head.shape.block_size
        self.block_size = trained if block_size is None else block_size
        check_block(self.block_size, trained)
        check_depth(self.depth, self.block_size - head.shape.first)
        self.confidence_weight = confidence_weight
        self._least_odds = -math.inf
        if confidence_threshold:
            self._least_odds = math.log(confidence_threshold / (1 - confidence_threshold))
        # An extension writes an entry more than a tree is deep.
        self.lookahead = max(self.block_size, self.depth + 1)
        self._division = head.shape.division(model.group)
        key = self._division.part.groups, head.shape.head_dim
        self.planes = (PlaneShape(head.shape.num_hidden_layers, *key, model.dtype),)
        self._load(head, model)
        #: Set to a list to record every draft's logits [B, steps, Vd], or with a Markov head those
        #: of every depth [B, beams, Vd] (tests, analysis).
        self.trace: list[Tensor] | None = None

    def prefill(self, batch: DecodeBatch, planes: Planes, read: ReadTokens, ended: int) -> None:
        del ended
        self.extend(batch, planes, read)

    def extend(self, batch: DecodeBatch, planes: Planes, read: ReadTokens) -> None:
        # Entries behind the valid ones are written too; the next round overwrites them unseen.
        metadata = batch.metadata(self.ops, self._rotary, read.rows)
        states, eps = self.ops.linear(read.aux, self._fc), self.shape.rms_norm_eps
        context, _ = self.ops.add_rms_norm(states, None, self._hidden_norm, eps)  # [T, H]
        layers = zip(self._layers, self._keys_values, planes.drafter[0], strict=True)
        for layer, (projection, bias), (keys, values) in layers:
            # [T, 2G d]: nothing asks, so no queries
            both = self.ops.linear(context, projection, bias)
            self.ops.rope_write(both, layer.head_norms, eps, metadata, keys, values)

    def candidates(self, batch: DecodeBatch, planes: Planes, shape: TreeSection) -> Candidates:
        rows, block = len(batch), self.block_size
        tokens = torch.cat((batch.roots[:, None], self._masks.expand(rows, -1)), 1)  # [B, b]
        even = TokenRows.even(rows, block, tokens.device)
        every = torch.full_like(tokens, (1 << block) - 1).flatten()
        whole = batch.metadata(self.ops, self._rotary, even, mask=every)
        embedded, eps = F.embedding(tokens.flatten(), self._embedding), self.shape.rms_norm_eps
        normed, hidden = self.ops.add_rms_norm(embedded, None, self._input_norm, eps)  # [B · b, H]
        for sight, layers, stack in self._stacks:
            metadata, plane = self._seen(whole, even, sight), planes.drafter[0][layers]
            normed, hidden, _ = self.ops.layers(stack, metadata, hidden, normed, plane)
        first = self.shape.first
        states = normed.view(rows, block, -1)[:, first : first + shape.steps]
        logits = self.ops.logits(states.flatten(0, 1), self._lm_head)  # [B · steps, Vd]
        noise = batch.noise()
        if self.shape.markov_rank:
            by_depth = states, logits.view(rows, shape.steps, -1)
            return self._search(batch.roots, noise, *by_depth, self.shapes.beams(shape))
        if self.trace is not None:
            self.trace.append(logits.view(rows, shape.steps, -1))
        if noise is not None:
            noise = noise.by_depth(shape.steps)
            logits = self.ops.perturb_drafts(logits, noise, self._target_ids)
        scores, ids = self.ops.propose(logits, self.shapes.beams(shape), self._target_ids)
        return join_marginals(*(each.view(rows, shape.steps, -1) for each in (scores, ids)))

    def _search(
        self, roots: Tensor, noise: DraftNoise | None, states: Tensor, logits: Tensor, k: int
    ) -> Candidates:
        """The k likeliest branches of every depth, and what each proposes next, of states [B, D, H]
        and their logits [B, D, Vd] without the bias."""
        rows, steps, _ = logits.shape
        token, score = roots[:, None], torch.zeros(rows, 1, device=logits.device)  # [B, n]
        tokens, cumulative, chosen = list[Tensor](), list[Tensor](), list[Tensor]()
        for depth in range(steps):
            drawn = noise and noise.deeper(depth)
            gained, proposed = self._propose(states[:, depth], logits[:, depth], token, drawn, k)
            total = (score[:, :, None] + gained).flatten(1)  # [B, n · k]
            tokens.append(proposed.flatten(1))
            cumulative.append(total)
            if depth == 0:
                score, token = total, tokens[0]
            elif depth < steps - 1:
                best = torch.sort(total, dim=-1, descending=True, stable=True).indices[:, :k]
                chosen.append(best)
                score, token = total.gather(1, best), tokens[-1].gather(1, best)
        parents, depths = candidate_parents(chosen, tokens, k), beam_depths(steps, k, logits.device)
        return Candidates(torch.cat(tokens, 1), parents, torch.cat(cumulative, 1), depths)

    def _propose(
        self, state: Tensor, logits: Tensor, before: Tensor, noise: DraftNoise | None, k: int
    ) -> tuple[Tensor, Tensor]:
        """Scores and target ids of the best k [B, n, k] at a position of state [B, H] and logits
        [B, Vd], after each of the tokens `before` [B, n]."""
        rows, beams = before.shape
        latent = F.embedding(before, self._w1)  # [B, n, r]
        bias = self.ops.linear(latent.flatten(0, 1), self._w2).view(rows, beams, -1)
        logits = (logits[:, None] + bias).flatten(0, 1)  # [B · n, Vd]
        if self.trace is not None:
            self.trace.append(logits.view(rows, beams, -1))
        if noise is not None:
            logits = self.ops.perturb_drafts(logits, noise, self._target_ids)
        scores, ids = (
            each.view(rows, beams, k) for each in self.ops.propose(logits, k, self._target_ids)
        )
        if self.shape.confidence:
            read = torch.cat((state[:, None].expand(-1, beams, -1), latent), dim=-1)
            odds = F.linear(read.float(), *self._confidence)  # [B, n, 1]
            scores = scores + self.confidence_weight * F.logsigmoid(odds)
            scores = scores.masked_fill(odds < self._least_odds, -torch.inf)
        return scores, ids

    def _seen(self, whole: AttentionMetadata, rows: TokenRows, sight: Sight) -> AttentionMetadata:
        """Of a block that is `whole`, what layers of such a sight see."""
        mask, within = whole.mask, rows.within
        if sight.causal:
            mask = (2 << within) - 1
        if not sight.window:
            return replace(whole, mask=mask)
        entries = whole.seq_lens[rows.row] + within
        first_seen = (entries + (1 - sight.window)).clamp(min=0)
        return replace(whole, mask=mask, first_seen=first_seen)

    def _load(self, head: DflashHead, model: DecoderModel) -> None:
        """Copy the head's weights into the form that the operations want."""
        device, ops, shape = model.device, self.ops, self.shape
        weights: dict[str, Tensor] = {
            name: tensor.clone() for name, tensor in head.state_dict().items()
        }

        def norm(name: str) -> Tensor:
            return weights[f"{name}.weight"].to(device, torch.float32)

        names = [f"layers.{index}." for index in range(shape.num_hidden_layers)]
        inside = [
            {
                name.removeprefix(prefix): weights[name]
                for name in weights
                if name.startswith(prefix)
            }
            for prefix in names
        ]
        inputs = [norm(f"{prefix}input_layernorm") for prefix in names]
        division = self._division
        layers = tuple(fuse_layer(layer, ops, device, division=division) for layer in inside)
        norms = (*inputs[1:], norm("norm"))
        self._input_norm, self._layers = inputs[0], layers
        #: Neighbours of one sight: what they see, which they are, and they.
        self._stacks: list[tuple[Sight, slice, LayerStack]] = []
        for sight, numbers in groupby(range(len(layers)), shape.sight):
            first, *others = numbers
            part = slice(first, first + len(others) + 1)
            stack = LayerStack(layers[part], norms[part], shape.rms_norm_eps, captured=())
            self._stacks.append((sight, part, stack))

        def fused(layer: dict[str, Tensor], kind: str) -> Tensor:
            both = [layer[f"self_attn.{name}_proj.{kind}"] for name in "kv"]
            return stored(torch.cat(both), device)

        biased = shape.attention_bias
        self._keys_values: list[tuple[Packed, Tensor | None]] = [
            (
                ops.pack(fused(each, "weight")),
                fused(each, "bias").to(self.dtype) if biased else None,
            )
            for each in map(division.slice, inside)
        ]
        self._hidden_norm, self._fc = (
            norm("hidden_norm"),
            ops.pack(stored(weights["fc.weight"], device)),
        )
        if shape.target_lm_head:
            self._lm_head = model.lm_head
        else:
            lm_head = stored(weights["lm_head.weight"], device)
            self._lm_head = pack_lm_head(lm_head, ops.pack, division.group)
        if shape.markov_rank:
            self._w1 = weights["markov_head.markov_w1.weight"].to(device, self.dtype)
            self._w2 = ops.pack(stored(weights["markov_head.markov_w2.weight"], device))
        if shape.confidence:
            pair = (weights[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
            self._confidence = tuple(each.to(device, torch.float32) for each in pair)
        self._target_ids, self._embedding = head.target_ids().to(device), model.embedding
        self._masks = torch.full((1, self.block_size - 1), shape.mask_token_id, device=device)
        length = model.max_length + HEADROOM
        rotary = RotaryTable(shape.rope_config(), length, device=device, dtype=self.dtype)
        self._rotary = rotary.cos, rotary.sin


def check_block(block_size: int, trained: int) -> None:
    """Raise ConfigError for a block that the head was not trained to draft."""
    if block_size > trained:
        problem = f"{block_size} is more than the {trained} tokens of the blocks it was trained on"
        fix = f"choose at most {trained}, or train with a larger block_size"
        raise ConfigError(problem, where="drafter.block_size", fix=fix)


def check_depth(depth: int, predicted: int) -> None:
    """Raise ConfigError for a tree that is deeper than a block has tokens to predict."""
    if depth > predicted:
        problem = f"{depth} is more than the {predicted} tokens that a block predicts"
        fix = f"choose at most {predicted}, or train with a larger block_size"
        raise ConfigError(problem, where="tree.steps", fix=fix)


def make_drafter(head: DflashHead, model: DecoderModel, trees: Trees) -> Drafter:
    """With the trained block."""
    return DflashDrafter(head, model, trees)


def drafter_factory(
    section: DrafterSection, head: DflashHead, model: DecoderModel
) -> DrafterFactory:
    """With the block of `section`, or with all that are worth a try, the trained one first."""
    kind = DsparkDrafterSection if head.shape.markov_rank else BlockDrafterSection
    chosen = section.settings(kind).model_dump(exclude={"block_size"})  # beside the block
    block_size = section.settings(kind).block_size
    trained = head.shape.block_size

    def of(size: int, choices: tuple[DrafterFactory, ...] = ()) -> DrafterFactory:
        def make(trees: Trees) -> Drafter:
            return DflashDrafter(head, model, trees, block_size=size, **chosen)

        depths, settings = tuple(range(1, size + 1 - head.shape.first)), {"block_size": size}
        return DrafterFactory(make, depths, settings=settings, choices=choices)

    if block_size is not None:
        check_block(block_size, trained)
        return of(block_size)
    return of(trained, tuple(of(size) for size in _blocks(trained)))


def _blocks(trained: int) -> list[int]:
    """The trained block and its halves, the smallest first."""
    sizes = [trained]
    while sizes[0] // 2 >= _LEAST_BLOCK:
        sizes.insert(0, sizes[0] // 2)
    return sizes
