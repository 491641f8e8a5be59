"""RMSNorm, SwiGLU and rotary positions, written once for training and decoding.

The backward passes of RMSNorm and SwiGLU keep their inputs and nothing else. Autograd by itself
keeps three float32 tensors of a norm's size in bfloat16 training, and the activated gate of
SwiGLU. Both are cheaper to compute again than to hold for every step of an unroll.
Values are those of the plain operations, to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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


class RotaryTable:
    """cos and sin of every position, from transformers' initialisers (default, llama3, yarn, …).

    `config` is any transformers configuration with `rope_parameters`, head size and
    `max_position_embeddings`. Of `dynamic` and `longrope`, whose frequencies change with the length
    of a text, they are those of texts within the model's original length, however long the table.
    """

    def __init__(
        self, config: Any, length: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        rotary = LlamaRotaryEmbedding(config=config)
        angles = torch.arange(length)[:, None].float() * rotary.inv_freq  # [S, d/2]
        angles, scale = torch.cat((angles, angles), dim=-1), rotary.attention_scaling
        self.cos = (angles.cos() * scale).to(device, dtype)  # [S, d]
        self.sin = (angles.sin() * scale).to(device, dtype)  # [S, d]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [..., d] for integer positions [...]."""
        return self.cos[positions], self.sin[positions]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (RoFormer, eq. 34) in the half-split layout of Hugging Face.

    x [..., heads, d]; cos, sin [..., d].
    """
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)
