"""The draft head of EAGLE-3 (Li et al. 2025, arXiv:2503.01840, §3), with SGLang's parameter names.

    aux states [.., L·H] ──fc──► g ┐ hidden [.., H]
                                   ├─► hidden_norm ────┐
    token embedding [.., H] ───────│──► input_layernorm ┴─concat─► q,k,v ─(attention)─► o ─┐
                                   └───────────────── + ◄──────────────────────────────────┘
                                                      ├─► post_attention_layernorm ─► MLP ─┐
                                                      + ◄──────────────────────────────────┘
                                                      │
                       next step's hidden (un-normed) ◄─┴─► norm ─► lm_head ─► logits [.., Vd]

EAGLE-3.1 (arXiv:2605.09992) adds two switches, each off by default:

    fc_norm        each of the aux states passes its own norm before fc: fc_norm.0, .1, …
    norm_output    the next step's hidden is taken behind `norm` instead of before it:
                   layer ─► norm ─┬─► next step's hidden
                                  └─► lm_head ─► logits

What heads of other trainers have besides, as vLLM computes it:

    norm_before_fc         one norm over the joined aux states before fc: input_norm
    norm_before_residual   the layer adds to the normed hidden: the left branch begins behind
                           hidden_norm
    num_hidden_layers      further layers behind the first read its output alone: layers.1, …
    qk_norm                queries and keys of each head pass norms before rotary embedding (Qwen3)
    attention_bias         of queries, keys, values and attention's output
    sliding_window         a query sees so many positions, its own and those before it
    target_hidden_size     the target's, where the head is narrower: fc reads L of its states
    own_embedding          embed_tokens [V, H] stands in for the target's, and is not trained

`draft_window` hides positions that are far back (see `hidden_positions`).

Training and decoding differ only in which keys a query sees, so attention is passed in.

Shapes: H hidden size, W the target's (H, but for `target_hidden_size`), L aux layers, V target
vocabulary, Vd draft vocabulary, Q query heads, G key/value heads, d head size; `..` any leading
dimensions.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from pipeline.heads.base import (
    Attend,
    AttentionProjections,
    Count,
    DraftingHead,
    DraftShape,
    NormedProjections,
    RmsNorm,
    SwiGluMlp,
)


class HeadShape(DraftShape):
    """Of an EAGLE-3 head."""

    fc_norm: bool = False  # a norm of each aux state before fc
    norm_output: bool = False  # the next step reads the normed output
    norm_before_fc: bool = False  # a norm of the joined aux states before fc
    norm_before_residual: bool = False  # the residual stream begins with the normed hidden
    num_hidden_layers: Count = 1
    qk_norm: bool = False
    attention_bias: bool = False
    sliding_window: int = Field(0, ge=0)  # positions that a query sees; 0: all
    target_hidden_size: int = Field(0, ge=0, le=2**24)  # 0: hidden_size
    own_embedding: bool = False
    draft_window: int = Field(0, ge=0)  # recent positions that a query sees; 0: all

    @property
    def target_width(self) -> int:
        return self.target_hidden_size or self.hidden_size

    @property
    def width_field(self) -> str:
        return "target_hidden_size" if self.target_hidden_size else "hidden_size"


def has_other_window(shape: HeadShape) -> str:
    """Why a head can have no draft window; empty: it can.

    Behind the first layer a token's keys and values hold what the window before them showed.
    """
    if shape.sliding_window:
        return "a sliding window"
    return "several layers" if shape.num_hidden_layers > 1 else ""


class _DraftLayer(nn.Module):
    """The first layer with `hidden_norm`, which reads embedding and hidden state; or one behind."""

    def __init__(self, shape: HeadShape, *, first: bool) -> None:
        super().__init__()
        size, eps, bias = shape.hidden_size, shape.rms_norm_eps, shape.attention_bias
        self.input_layernorm = RmsNorm(size, eps)
        if first:
            self.hidden_norm = RmsNorm(size, eps)
        width = 2 * size if first else size
        self.self_attn = (
            NormedProjections(shape, width, bias=bias)
            if shape.qk_norm
            else AttentionProjections(shape, width, bias=bias, output_bias=bias)
        )
        self.post_attention_layernorm = RmsNorm(size, eps)
        self.mlp = SwiGluMlp(shape)
        self._norm_before_residual = first and shape.norm_before_residual

    def project_qkv(
        self,
        embedding: Tensor,
        hidden: Tensor,
        rows: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All before attention in the first layer: [.., H] each → query [.., Q, d], key and value
        [.., G, d].

        With `rows` [A] of [N, H], queries are those of the rows alone; mask [.., 2H] are factors of
        what is read, as training's dropout draws them.
        """
        normed = (self.input_layernorm(embedding), self.hidden_norm(hidden))
        joined = torch.cat(normed, dim=-1)  # [.., 2H]
        return self.self_attn.project_qkv(joined if mask is None else joined * mask, rows)

    def project_hidden(
        self, hidden: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same in a layer behind it, which reads hidden [.., H]."""
        return self.self_attn.project_qkv(self.input_layernorm(hidden), rows)

    def after_attention(self, hidden: Tensor, attention_output: Tensor) -> Tensor:
        """All after it: hidden [.., H], attention output [.., Q, d] → un-normed output [.., H]."""
        if self._norm_before_residual:
            hidden = self.hidden_norm(hidden)
        hidden = hidden + self.self_attn.project_output(attention_output)
        return torch.as_tensor(hidden + self.mlp(self.post_attention_layernorm(hidden)))


class _Embedding(nn.Module):
    """Rows [V, H] that are stored with the head and not trained."""

    weight: Tensor

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(rows, size))


class Eagle3Head(DraftingHead):
    """Parameters and maths of the EAGLE-3 head."""

    shape: HeadShape

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        size, read = shape.hidden_size, shape.aux_layers * shape.target_width
        if shape.own_embedding:
            self.embed_tokens = _Embedding(shape.vocab_size, size)
        if shape.norm_before_fc:
            self.input_norm = RmsNorm(read, shape.rms_norm_eps)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(
                RmsNorm(shape.target_width, shape.rms_norm_eps) for _ in range(shape.aux_layers)
            )
        self.fc = nn.Linear(read, size, bias=False)
        self.midlayer = _DraftLayer(shape, first=True)
        if shape.num_hidden_layers > 1:
            self.layers = nn.ModuleDict(
                {
                    str(number): _DraftLayer(shape, first=False)
                    for number in range(1, shape.num_hidden_layers)
                }
            )
        self.norm = RmsNorm(size, shape.rms_norm_eps)
        self._add_vocabulary(shape)

    @property
    def every_layer(self) -> list[_DraftLayer]:
        """The first layer, and those behind it."""
        behind = self.layers.values() if self.shape.num_hidden_layers > 1 else ()
        return [self.midlayer, *(layer for layer in behind if isinstance(layer, _DraftLayer))]

    @property
    def embedding(self) -> Tensor | None:
        return self.embed_tokens.weight if self.shape.own_embedding else None

    def normed_aux(self, aux_states: Tensor) -> Tensor:
        """What `fc` reads [.., L · W]: the aux states behind the norms that the head has."""
        if self.shape.norm_before_fc:
            aux_states = self.input_norm(aux_states)
        if not self.shape.fc_norm:
            return aux_states
        states = aux_states.chunk(self.shape.aux_layers, dim=-1)  # low to high, each [.., W]
        pairs = zip(self.fc_norm, states, strict=True)
        return torch.cat([norm(state) for norm, state in pairs], dim=-1)

    def project(self, aux_states: Tensor) -> Tensor:
        """Aux states [.., L · W] → g [.., H], the hidden input of step 0."""
        return torch.as_tensor(self.fc(self.normed_aux(aux_states)))

    def step(self, embedding: Tensor, hidden: Tensor, attend: Attend) -> Tensor:
        """One pass of the layers: → output [.., H], the hidden input of the next step.

        `attend` is called once a layer, in order.
        """
        first, *behind = self.every_layer
        projected = first.project_qkv(embedding, hidden)
        hidden = first.after_attention(hidden, attend(*projected))
        for layer in behind:
            hidden = layer.after_attention(hidden, attend(*layer.project_hidden(hidden)))
        return self.output(hidden)

    def output(self, hidden: Tensor) -> Tensor:
        """What the next step reads, of the last layer's output [.., H]."""
        return torch.as_tensor(self.norm(hidden)) if self.shape.norm_output else hidden

    def normed_output(self, output: Tensor) -> Tensor:
        """What `lm_head` reads, for an output of `step` [.., H]: normed once, here or there."""
        return output if self.shape.norm_output else torch.as_tensor(self.norm(output))

    def logits(self, output: Tensor) -> Tensor:
        """Output of `step` [.., H] → logits over the draft vocabulary [.., Vd]."""
        return torch.as_tensor(self.lm_head(self.normed_output(output)))


SHAPE, HEAD = HeadShape, Eagle3Head
