"""The draft head of EAGLE-3 (Li et al. 2025, arXiv:2503.01840, §3), with SGLang's parameter names.

    aux states [.., 3H] ──fc──► g ─┐ hidden [.., H]
                                   ├─► hidden_norm ────┐
    token embedding [.., H] ───────│──► input_layernorm ┴─concat─► q,k,v ─(attention)─► o ─┐
                                   └───────────────── + ◄──────────────────────────────────┘
                                                      ├─► post_attention_layernorm ─► MLP ─┐
                                                      + ◄──────────────────────────────────┘
                                                      │
                       next step's hidden (un-normed) ◄─┴─► norm ─► lm_head ─► logits [.., Vd]

EAGLE-3.1 (arXiv:2605.09992) adds two switches, each off by default:

    fc_norm        each of the three aux states passes its own norm before fc: fc_norm.0, .1, .2
    norm_output    the next step's hidden is taken behind `norm` instead of before it:
                   layer ─► norm ─┬─► next step's hidden
                                  └─► lm_head ─► logits

`draft_window`, a third switch, hides positions that are far back (see `hidden_positions`).

Training and decoding differ only in which keys a query sees, so attention is passed in.

Shapes: H hidden size, V target vocabulary, Vd draft vocabulary, Q query heads, G key/value heads,
d head size; `..` any leading dimensions.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from pipeline.heads.base import (
    Attend,
    AttentionProjections,
    DraftingHead,
    DraftShape,
    RmsNorm,
    SwiGluMlp,
)


class HeadShape(DraftShape):
    """Of an EAGLE-3 head."""

    fc_norm: bool = False  # a norm of each aux state before fc
    norm_output: bool = False  # the next step reads the normed output
    draft_window: int = Field(0, ge=0)  # recent positions that a query sees; 0: all


class _DraftLayer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = AttentionProjections(shape, 2 * shape.hidden_size)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = SwiGluMlp(shape)

    def project_qkv(
        self,
        embedding: Tensor,
        hidden: Tensor,
        rows: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All before attention: [.., H] each → query [.., Q, d], key and value [.., G, d].

        With `rows` [A] of [N, H], queries are those of the rows alone; mask [.., 2H] are factors of
        what is read, as training's dropout draws them.
        """
        normed = (self.input_layernorm(embedding), self.hidden_norm(hidden))
        joined = torch.cat(normed, dim=-1)  # [.., 2H]
        return self.self_attn.project_qkv(joined if mask is None else joined * mask, rows)

    def after_attention(self, hidden: Tensor, attention_output: Tensor) -> Tensor:
        """All after it: hidden [.., H], attention output [.., Q, d] → un-normed output [.., H]."""
        hidden = hidden + self.self_attn.project_output(attention_output)
        return torch.as_tensor(hidden + self.mlp(self.post_attention_layernorm(hidden)))


class Eagle3Head(DraftingHead):
    """Parameters and maths of the EAGLE-3 head."""

    shape: HeadShape

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(
                RmsNorm(shape.hidden_size, shape.rms_norm_eps) for _ in range(3)
            )
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = _DraftLayer(shape)
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self._add_vocabulary(shape)

    def normed_aux(self, aux_states: Tensor) -> Tensor:
        """What `fc` reads [.., 3H]: the aux states, each behind its norm if the head has them."""
        if not self.shape.fc_norm:
            return aux_states
        states = aux_states.chunk(3, dim=-1)  # low, middle, high, each [.., H]
        pairs = zip(self.fc_norm, states, strict=True)
        return torch.cat([norm(state) for norm, state in pairs], dim=-1)

    def project(self, aux_states: Tensor) -> Tensor:
        """Aux states [.., 3H] → g [.., H], the hidden input of step 0."""
        return torch.as_tensor(self.fc(self.normed_aux(aux_states)))

    def step(self, embedding: Tensor, hidden: Tensor, attend: Attend) -> Tensor:
        """One pass of the decoder layer: → output [.., H], the hidden input of the next step."""
        attention_output = attend(*self.midlayer.project_qkv(embedding, hidden))
        return self.after_attention(hidden, attention_output)

    def after_attention(self, hidden: Tensor, attention_output: Tensor) -> Tensor:
        """The rest of `step`: hidden [.., H], attention output [.., Q, d] → output [.., H]."""
        output = self.midlayer.after_attention(hidden, attention_output)
        return torch.as_tensor(self.norm(output)) if self.shape.norm_output else output

    def normed_output(self, output: Tensor) -> Tensor:
        """What `lm_head` reads, for an output of `step` [.., H]: normed once, here or there."""
        return output if self.shape.norm_output else torch.as_tensor(self.norm(output))

    def logits(self, output: Tensor) -> Tensor:
        """Output of `step` [.., H] → logits over the draft vocabulary [.., Vd]."""
        return torch.as_tensor(self.lm_head(self.normed_output(output)))


SHAPE, HEAD = HeadShape, Eagle3Head
