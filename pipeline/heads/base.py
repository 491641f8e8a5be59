"""What heads of every algorithm share: shape, layers, draft vocabulary.

The backward passes of RMSNorm and SwiGLU keep their inputs and nothing else. Autograd by itself
keeps three float32 tensors of a norm's size in bfloat16 training, and the activated gate of
SwiGLU. Both are cheaper to compute again than to hold for every step of an unroll.
Values are those of the plain operations, to the bit.

Shapes: H hidden size, L aux layers, V target vocabulary, Vd draft vocabulary, Q query heads,
G key/value heads, d head size; `..` any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from pipeline.decoder.ops.parallel import LayerDivision, LayerSizes, TensorGroup
from pipeline.errors import HeadError

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
    aux_layers: Count = 3  # L, whose states the head reads side by side

    @property
    def target_width(self) -> int:
        """The hidden size of the target, of whose states the head reads `aux_layers`."""
        return self.hidden_size

    @property
    def width_field(self) -> str:
        """The field that says `target_width`."""
        return "hidden_size"

    def division(self, group: TensorGroup | None) -> LayerDivision:
        """Of its layers among the ranks of a group; they are whole on each where that cannot be."""
        key = self.num_key_value_heads, self.head_dim
        sizes = LayerSizes(self.num_attention_heads, *key, self.intermediate_size)
        return LayerDivision(sizes, group if group and sizes.divides(group.size) else None)

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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in the type of x [.., H]."""
    if not torch.is_grad_enabled():
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return torch.as_tensor(_RmsNorm.apply(x, weight, eps))  # type: ignore[no-untyped-call]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (Shazeer 2020, arXiv:2002.05202), both [.., I]."""
    if not torch.is_grad_enabled():
        return F.silu(gate) * up
    return torch.as_tensor(_SwiGlu.apply(gate, up))  # type: ignore[no-untyped-call]


class _RmsNorm(torch.autograd.Function):
    """With r = 1/sqrt(mean(x²) + eps), n = x·r and u = dy·weight:

    dx = r·(u - n·mean(u·n))    dweight = Σ dy·n
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        size, exact = x.shape[-1], torch.promote_types(x.dtype, torch.float32)
        dy = grads[0].to(exact).reshape(-1, size)  # [rows, H]
        wide = x.to(exact).reshape(-1, size)
        inverse = torch.linalg.vecdot(wide, wide).div(size).add(ctx.eps).rsqrt()[:, None]  # r
        normed = wide * inverse  # n
        dweight = torch.linalg.vecdot(dy, normed, dim=0) if ctx.needs_input_grad[1] else None
        u = dy * weight.to(exact)
        mean = torch.linalg.vecdot(u, normed).div(size)[:, None]  # [rows, 1]
        dx = torch.addcmul(u, normed, mean, value=-1).mul_(inverse)
        dweight = None if dweight is None else dweight.to(weight.dtype)
        return dx.to(x.dtype).view_as(x), dweight, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():  # silu's own rule, and its value, which up's gradient needs
            leaf = gate.detach().requires_grad_()
            active = F.silu(leaf)
        (slope,) = torch.autograd.grad(active, leaf, grads[0] * up)
        return slope, active.detach().mul_(grads[0])


#: (q [.., Q, d], k [.., G, d], v [.., G, d]), before rotary embedding → attention output [.., Q, d]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class AttentionProjections(nn.Module):
    """The projections around attention, which the caller computes."""

    def __init__(
        self,
        shape: DraftShape,
        width: int,
        *,
        bias: bool = False,
        output_bias: bool = False,
    ) -> None:
        """Queries, keys and values read inputs of `width`."""
        super().__init__()
        self.head_dim = shape.head_dim
        query = shape.num_attention_heads * shape.head_dim
        key = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(width, query, bias=bias)
        self.k_proj = nn.Linear(width, key, bias=bias)
        self.v_proj = nn.Linear(width, key, bias=bias)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=output_bias)

    def project_qkv(self, x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [.., width] → query [.., Q, d] of all or of `rows`, key and value [.., G, d]."""
        return self.project_query(x if rows is None else x[rows]), *self.project_keys(x)

    def project_query(self, x: Tensor) -> Tensor:
        """x [.., width] → queries [.., Q, d]."""
        return self._by_head(self.q_proj(x))

    def project_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [.., width] → keys and values [.., G, d]."""
        return self._by_head(self.k_proj(x)), self._by_head(self.v_proj(x))

    def _by_head(self, x: Tensor) -> Tensor:
        """[.., heads·d] → [.., heads, d]; there may be no rows."""
        return x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)

    def project_output(self, attention_output: Tensor) -> Tensor:
        """[.., Q, d] → [.., H]."""
        return torch.as_tensor(self.o_proj(attention_output.flatten(-2)))


class NormedProjections(AttentionProjections):
    """Each head of queries and keys is normed, as Qwen3's."""

    def __init__(self, shape: DraftShape, width: int, *, bias: bool = False) -> None:
        """With `bias` all four projections have one."""
        super().__init__(shape, width, bias=bias, output_bias=bias)
        self.q_norm = RmsNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RmsNorm(shape.head_dim, shape.rms_norm_eps)

    def project_query(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.q_norm(super().project_query(x)))

    def project_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().project_keys(x)
        return torch.as_tensor(self.k_norm(key)), value


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
    fc: nn.Linear  # L · H → H
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
    def embedding(self) -> Tensor | None:
        """The head's own embedding [V, H]; None where it reads the target's."""
        return None

    @property
    def aux_projection(self) -> nn.Linear | None:
        """What joins the aux states; None where the head reads none."""
        return self.fc

    def normed_aux(self, aux_states: Tensor) -> Tensor:
        """What `fc` reads [.., L · H], of aux states [.., L · H]."""
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

    def check_fits(self, hidden_size: int, vocab_size: int) -> None:
        """Raise HeadError where the head contradicts the sizes of a loaded target."""
        fix = "use the head that was trained for this target"
        for field, own, of_target in (
            (self.shape.width_field, self.shape.target_width, hidden_size),
            ("vocab_size", self.shape.vocab_size, vocab_size),
        ):
            if own != of_target:
                problem = f"{field} is {own}, the target's is {of_target}"
                raise HeadError(problem, where="head", fix=fix)
        target_ids = self.target_ids()
        if bool(((target_ids < 0) | (target_ids >= vocab_size)).any()):
            problem = f"d2t leads outside the target's vocabulary of {vocab_size} tokens"
            raise HeadError(problem, where="head", fix=fix)

    def count_parameters(self) -> int:
        """Trained parameters; the target's embedding is not one of them."""
        return sum(parameter.numel() for parameter in self.parameters())
