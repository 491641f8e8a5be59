"""RMS norm and SwiGLU whose backward pass keeps their inputs and nothing else.

Autograd by itself keeps three float32 tensors of a norm's size in bfloat16 training, and the activated
gate of SwiGLU. Both are cheaper to compute again than to hold for every step of an unroll.
Values are those of the plain operations, to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.eagle3.layers import rms_norm


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of x [.., H] with weight [H]."""
    if not torch.is_grad_enabled():
        return rms_norm(x, weight, eps)
    return torch.as_tensor(_Norm.apply(x, weight, eps))  # type: ignore[no-untyped-call]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (Shazeer 2020, arXiv:2002.05202), both [.., I]."""
    if not torch.is_grad_enabled():
        return F.silu(gate) * up
    return torch.as_tensor(_SwiGlu.apply(gate, up))  # type: ignore[no-untyped-call]


class _Norm(torch.autograd.Function):
    """With r = 1/sqrt(mean(x²) + eps), n = x·r and u = dy·weight: dx = r·(u - n·mean(u·n)), dweight = Σ dy·n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        exact = torch.promote_types(x.dtype, torch.float32)
        upper = grads[0].to(exact).reshape(-1, x.shape[-1])  # [rows, H]
        wide = x.to(exact).reshape(-1, x.shape[-1])
        inverse = (
            torch.linalg.vecdot(wide, wide).div(x.shape[-1]).add(ctx.eps).rsqrt().unsqueeze(-1)
        )  # r [rows, 1]
        normed = wide * inverse  # n
        weight_grad = torch.linalg.vecdot(upper, normed, dim=0) if ctx.needs_input_grad[1] else None
        upper = upper * weight.to(exact)  # u
        mean = torch.linalg.vecdot(upper, normed).div(x.shape[-1]).unsqueeze(-1)  # [rows, 1]
        x_grad = torch.addcmul(upper, normed, mean, value=-1).mul_(inverse)
        return (
            x_grad.to(x.dtype).view_as(x),
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None,
        )


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0] * up, gate), F.silu(gate).mul_(grads[0])
