"""A block drafter (DFlash, Chen et al. 2026, arXiv:2602.06036), with DFlashDraftModel's names.

    aux states [N, L·H] ──fc──► hidden_norm ──► context [N, H]         entries before the root
                                                  │
                                                  ├─ k_proj, v_proj of each layer, no queries
                                                  ▼
    position        0      1      2    …  b-1    keys and values of context and block;
    block          root   mask   mask  …  mask   every position of the block sees both, whole
                    │      │      │        │     (but in causal layers and those with a window)
                    └──────┴─ layers ──────┴─► norm ─► lm_head: position k predicts the token
                                                       k behind the root

The marginals of all b-1 tokens come from one forward. A layer is one of Qwen3: q and
k of each head pass norms before rotary embedding. The mask is the embedding of `mask_token_id`, and
embeddings are the target's. A head for a part of the vocabulary carries its lm_head, d2t and t2d,
as vLLM reads them beside the layers; one with `target_lm_head` uses the target's rows instead.

DSpark (arXiv:2607.05147) is the same module whose positions predict the token after their own, the
root's the first, and whose tokens depend on each other: the token before a position adds a bias of
low rank r to its logits, so that what is chosen at one position decides what is likely at the next.

    position         0      1      2    …  b-1
    block           root   mask   mask  …  mask ── layers, norm ──► h
    predicts         t1     t2     t3   …   tb      logits = lm_head h + w2 w1[t before]
                                                    confidence = sigmoid(proj [h ; w1[t before]])

Shapes: L aux layers, N context entries, T block tokens, b block size, H hidden size, Q query heads,
G key/value heads, d head size, V target and Vd draft vocabulary, r rank of the bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from pipeline.heads.base import DraftingHead, DraftShape, NormedProjections, RmsNorm, SwiGluMlp

#: A block's entries have to fit beside a tree's bits, and no published head drafts more.
MOST_BLOCK = 16


MOST_LAYERS = 256


MOST_RANK = 4096


class BlockQkv(NamedTuple):
    """Of block tokens, normed, before rotary embedding."""

    query: Tensor  # [T, Q, d]
    key: Tensor  # [T, G, d]
    value: Tensor  # [T, G, d]


class ContextKeys(NamedTuple):
    """Of context entries, normed, before rotary embedding."""

    key: Tensor  # [N, G, d]
    value: Tensor  # [N, G, d]


class Sight(NamedTuple):
    """What a layer's queries see."""

    window: int = 0  # positions, the query's own and those before it; 0: all
    causal: bool = False  # of the block no more than the query's own position and those before it


#: (block, context, sight) → attention output [T, Q, d]
AttendBlocks = Callable[[BlockQkv, ContextKeys, Sight], Tensor]


class DflashShape(DraftShape):
    """Of a block drafter."""

    num_hidden_layers: int = Field(gt=0, le=MOST_LAYERS)
    block_size: int  # root included
    mask_token_id: int  # whose embedding stands for a token to predict
    attention_bias: bool = False  # of all four projections
    sliding_window: int = Field(0, ge=0)  # positions that queries of the sliding layers see
    sliding_layers: tuple[int, ...] = ()
    causal_layers: tuple[int, ...] = ()
    target_lm_head: bool = False  # logits by the target's rows, of its whole vocabulary
    anchor_predicts: bool = False  # the root's position predicts the token after it
    markov_rank: int = Field(0, ge=0, le=MOST_RANK)  # r; 0: no bias by the token before
    confidence: bool = False

    @property
    def first(self) -> int:
        """The position of a block that predicts the token after the root."""
        return int(not self.anchor_predicts)

    @property
    def predicted(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size - self.first

    def sight(self, layer: int) -> Sight:
        """Of one of the layers."""
        window = self.sliding_window if layer in self.sliding_layers else 0
        return Sight(window, layer in self.causal_layers)


class BlockLayer(nn.Module):
    """A layer of the drafter."""

    def __init__(self, shape: DflashShape, sight: Sight) -> None:
        super().__init__()
        self.sight = sight
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = NormedProjections(shape, shape.hidden_size, bias=shape.attention_bias)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = SwiGluMlp(shape)

    def forward(self, hidden: Tensor, context: Tensor, attend: AttendBlocks) -> Tensor:
        """Block hidden [T, H] and context [N, H] → block hidden [T, H]."""
        normed = self.input_layernorm(hidden)
        block = BlockQkv(self.self_attn.project_query(normed), *self.self_attn.project_keys(normed))
        mixed = attend(block, ContextKeys(*self.self_attn.project_keys(context)), self.sight)
        hidden = hidden + self.self_attn.project_output(mixed)
        return torch.as_tensor(hidden + self.mlp(self.post_attention_layernorm(hidden)))


class MarkovHead(nn.Module):
    """A bias of logits by the token before: the product of two matrices."""

    def __init__(self, shape: DflashShape) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(shape.vocab_size, shape.markov_rank)
        self.markov_w2 = nn.Linear(shape.markov_rank, shape.draft_vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """The log-odds of the share of a position's proposals that will be accepted."""

    def __init__(self, shape: DflashShape) -> None:
        super().__init__()
        self.proj = nn.Linear(shape.hidden_size + shape.markov_rank, 1)


class DflashHead(DraftingHead):
    """Parameters and maths of the block drafter."""

    shape: DflashShape

    def __init__(self, shape: DflashShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.aux_layers * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(
            BlockLayer(shape, shape.sight(number)) for number in range(shape.num_hidden_layers)
        )
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.markov_head = MarkovHead(shape) if shape.markov_rank else None
        self.confidence_head = ConfidenceHead(shape) if shape.confidence else None
        self._add_vocabulary(shape, borrowed=shape.target_lm_head)

    def context(self, aux_states: Tensor) -> Tensor:
        """Aux states [N, L · H] → what every layer's keys and values of the context read [N, H]."""
        return torch.as_tensor(self.hidden_norm(self.fc(aux_states)))

    def proposing(self, states: Tensor, previous: Tensor) -> Tensor:
        """What `output_rows` and the confidence read [R, H + r]: outputs [R, H], and w1 of the
        tokens before what they predict [R]."""
        if self.markov_head is None:
            return states
        return torch.cat((states, self.markov_head.markov_w1(previous)), dim=-1)

    def output_rows(self) -> Tensor:
        """lm_head and w2 side by side [Vd, H + r]: logits are their products with `proposing`."""
        if self.markov_head is None:
            return self.lm_head.weight
        return torch.cat((self.lm_head.weight, self.markov_head.markov_w2.weight), dim=-1)

    def run(self, embedded: Tensor, context: Tensor, attend: AttendBlocks) -> Tensor:
        """Block embeddings [T, H], context [N, H] → what `lm_head` reads [T, H]."""
        hidden = embedded
        for layer in self.layers:
            hidden = layer(hidden, context, attend)
        return torch.as_tensor(self.norm(hidden))

    def block_tokens(self, roots: Tensor) -> Tensor:
        """Token ids [A, b] of the blocks behind `roots` [A]: the root, then masks."""
        masks = roots.new_full((len(roots), self.shape.block_size - 1), self.shape.mask_token_id)
        return torch.cat((roots[:, None], masks), dim=1)


SHAPE, HEAD = DflashShape, DflashHead
