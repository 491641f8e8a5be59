"""Norm and SwiGLU that keep only their inputs: values to the bit, gradients against autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.eagle3.frugal import norm, swiglu

#: name → ours, plain, shapes of the inputs
CASES: dict[
    str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[tuple[int, ...], ...]]
] = {
    "norm": (
        lambda x, w: norm(x, w, 1e-5),
        lambda x, w: F.rms_norm(x, (8,), w, 1e-5),
        ((3, 5, 8), (8,)),
    ),
    "norm of one vector": (
        lambda x, w: norm(x, w, 1e-5),
        lambda x, w: F.rms_norm(x, (8,), w, 1e-5),
        ((8,), (8,)),
    ),
    "swiglu": (swiglu, lambda gate, up: F.silu(gate) * up, ((3, 5, 8), (3, 5, 8))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_equals_the_plain_operation(name: str, dtype: torch.dtype, tolerance: float) -> None:
    ours, plain, shapes = CASES[name]
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes
    ]
    found, expected = ours(*inputs), plain(*inputs)
    assert torch.equal(found, expected)
    upper = torch.randn(found.shape, generator=generator).to(dtype)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, upper),
        torch.autograd.grad(expected, inputs, upper),
        rtol=tolerance,
        atol=tolerance,
    )
    with torch.no_grad():
        assert torch.equal(ours(*inputs), expected)


@pytest.mark.parametrize("name", CASES)
def test_keeps_its_inputs_alone(name: str) -> None:
    ours, _, shapes = CASES[name]
    inputs = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ours(*inputs)
    assert kept == [tensor.data_ptr() for tensor in inputs]
