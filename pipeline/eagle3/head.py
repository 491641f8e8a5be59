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

from collections.abc import Callable
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from pipeline.eagle3.layers import rms_norm, swiglu

#: (q [.., Q, d], k [.., G, d], v [.., G, d]), before rotary embedding → attention output [.., Q, d]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


#: A window moves in steps of so many positions, and so many in front are always seen: pages of the
#: decoder's cache, which hides whole ones.
WINDOW_STEP = 64


def hidden_positions(lengths: Tensor, window: int) -> Tensor:
    """How many positions from WINDOW_STEP on a draft window hides, of each of `lengths` [..].

        position   0 … 63 │ 64 … 64+h-1 │ 64+h … L-1          h: a multiple of 64
                   sinks  │   hidden    │ `window` to window + 63 of them

    A query at position L-1, and all that is drafted behind it, sees the rest. Sinks keep softmax
    from moving its mass onto recent tokens (StreamingLLM, Xiao et al. 2023, arXiv:2309.17453).
    """
    return ((lengths - window) // WINDOW_STEP - 1).clamp(min=0) * WINDOW_STEP


#: Bounds that no model reaches; tensors of such shapes can still be described without an overflow.
Size = Annotated[int, Field(gt=0, le=2**24)]
Count = Annotated[int, Field(gt=0, le=2**12)]


class DraftShape(BaseModel):
    """What decides the tensors' shapes and the positions in a head of any kind."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    vocab_size: Size  # of the target
    draft_vocab_size: Size
    rms_norm_eps: float = Field(gt=0, lt=1)
    rope_parameters: dict[str, Any]  # as transformers writes them; the target's
    max_position_embeddings: int = Field(gt=0)

    def rope_config(self) -> Any:
        """A transformers configuration that carries the rotary parameters, of one head.

        It refuses a number of heads that does not divide the hidden size, which a head may have.
        """
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.head_dim,
            num_attention_heads=1,
            head_dim=self.head_dim,
            rope_parameters=dict(self.rope_parameters) or None,
            max_position_embeddings=self.max_position_embeddings,
        )


class HeadShape(DraftShape):
    """Of an EAGLE-3 head."""

    fc_norm: bool = False  # a norm of each aux state before fc
    norm_output: bool = False  # the next step reads the normed output
    draft_window: int = Field(0, ge=0)  # recent positions that a query sees; 0: all


class CausalAttention(nn.Module):
    """The projections around attention that someone else computes."""

    def __init__(self, shape: DraftShape, width: int, *, bias: bool = False) -> None:
        """Queries, keys and values read inputs of `width`."""
        super().__init__()
        self.head_dim = shape.head_dim
        query = shape.num_attention_heads * shape.head_dim
        key = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(width, query, bias=bias)
        self.k_proj = nn.Linear(width, key, bias=bias)
        self.v_proj = nn.Linear(width, key, bias=bias)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=False)

    def project_qkv(self, x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [.., width] → query [.., Q, d] of all or of `rows`, key and value [.., G, d]."""
        wanted = x if rows is None else x[rows]
        return (
            self._by_head(self.q_proj(wanted)),
            self._by_head(self.k_proj(x)),
            self._by_head(self.v_proj(x)),
        )

    def _by_head(self, x: Tensor) -> Tensor:
        """[.., heads·d] → [.., heads, d]; there may be no rows."""
        return x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)

    def project_output(self, attention_output: Tensor) -> Tensor:
        """[.., Q, d] → [.., H]."""
        return torch.as_tensor(self.o_proj(attention_output.flatten(-2)))


class SwiGluMlp(nn.Module):
    """A layer's MLP."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., H] → [.., H]."""
        return torch.as_tensor(self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x))))


class RmsNorm(nn.Module):
    """RMS norm with a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class _DraftLayer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = CausalAttention(shape, 2 * shape.hidden_size)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = SwiGluMlp(shape)

    def project_qkv(
        self,
        embedding: Tensor,
        hidden: Tensor,
        rows: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All before attention: [.., H] each → query [.., Q, d], key and value [.., G, d].

        With `rows` [A] of [N, H], queries are those of the rows alone; kept [.., 2H] are factors of
        what is read, as training's dropout draws them.
        """
        normed = (self.input_layernorm(embedding), self.hidden_norm(hidden))
        joined = torch.cat(normed, dim=-1)  # [.., 2H]
        return self.self_attn.project_qkv(joined if kept is None else joined * kept, rows)

    def after_attention(self, hidden: Tensor, attention_output: Tensor) -> Tensor:
        """All after it: hidden [.., H], attention output [.., Q, d] → un-normed output [.., H]."""
        hidden = hidden + self.self_attn.project_output(attention_output)
        return torch.as_tensor(hidden + self.mlp(self.post_attention_layernorm(hidden)))


class BorrowedRows(nn.Module):
    """The target's output rows in place of an lm_head: neither trained nor stored."""

    weight: Tensor  # [V, H]; [0, H] until the target's are lent

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(0, hidden_size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., H] → logits [.., V]."""
        return torch.nn.functional.linear(x, self.weight)


class DraftingHead(nn.Module):
    """What heads of every kind have. None has an embedding: the target's is used.

    Buffers map the draft vocabulary: row i of `lm_head` proposes target token `i + d2t[i]`
    (d2t [Vd] int64, an offset), and `t2d` [V] bool marks the tokens that can be proposed.
    """

    shape: DraftShape
    fc: nn.Linear  # 3H → H
    norm: RmsNorm  # of what lm_head reads
    lm_head: nn.Linear | BorrowedRows  # H → Vd
    d2t: Tensor
    t2d: Tensor

    def _add_vocabulary(self, shape: DraftShape, *, borrowed: bool = False) -> None:
        """The tensors of the draft vocabulary, which stand behind all others."""
        hidden, size = shape.hidden_size, shape.draft_vocab_size
        self.lm_head = BorrowedRows(hidden) if borrowed else nn.Linear(hidden, size, bias=False)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))

    @property
    def aux_projection(self) -> nn.Linear | None:
        """What joins the aux states; None where the head reads none."""
        return self.fc

    def normed_aux(self, aux_states: Tensor) -> Tensor:
        """What `fc` reads [.., 3H], of aux states [.., 3H]."""
        return aux_states

    def normed_output(self, output: Tensor) -> Tensor:
        """What `lm_head` reads, of an output of a step [.., H]."""
        return output

    def target_ids(self) -> Tensor:
        """Target token of each draft row [Vd], ascending."""
        return torch.arange(self.shape.draft_vocab_size, device=self.d2t.device) + self.d2t

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Install the draft vocabulary: target ids [Vd], ascending and distinct."""
        assert bool((target_ids[1:] > target_ids[:-1]).all()), "draft vocabulary must be ascending"
        self.d2t.copy_(target_ids - torch.arange(len(target_ids)))
        self.t2d.zero_()
        self.t2d[target_ids] = True

    def count_parameters(self) -> int:
        """Trained parameters; the target's embedding is not one of them."""
        return sum(parameter.numel() for parameter in self.parameters())


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
