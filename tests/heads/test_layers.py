"""RMSNorm and SwiGLU that keep only their inputs: values to the bit, gradients against autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pipeline.heads.base import rms_norm, swiglu
from pipeline.target.rotary import RotaryTable


class Case(NamedTuple):
    own: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]  # of the inputs


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, 1e-5)


def _plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (8,), weight, 1e-5)


def _plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


CASES = {
    "norm": Case(_norm, _plain_norm, ((3, 5, 8), (8,))),
    "norm of one vector": Case(_norm, _plain_norm, ((8,), (8,))),
    "swiglu": Case(swiglu, _plain_swiglu, ((3, 5, 8), (3, 5, 8))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_equals_the_plain_operation(name: str, dtype: torch.dtype, tolerance: float) -> None:
    own, plain, shapes = CASES[name]
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes
    ]
    output, expected = own(*inputs), plain(*inputs)
    assert torch.equal(output, expected)
    upper = torch.randn(output.shape, generator=generator).to(dtype)
    torch.testing.assert_close(
        torch.autograd.grad(output, inputs, upper),
        torch.autograd.grad(expected, inputs, upper),
        rtol=tolerance,
        atol=tolerance,
    )
    with torch.no_grad():
        assert torch.equal(own(*inputs), expected)


@pytest.mark.parametrize("name", CASES)
def test_keeps_its_inputs_alone(name: str) -> None:
    own, _, shapes = CASES[name]
    inputs = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        own(*inputs)
    assert kept == [tensor.data_ptr() for tensor in inputs]


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_a_longer_rotary_table_turns_no_position_otherwise(kind: str) -> None:
    """A trainer's table is as long as its documents, a decoder's as what may be decoded."""
    config: Any = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        head_dim=8,
        rope_parameters={"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]},
        max_position_embeddings=128,
    )
    device, length = torch.device("cpu"), 32
    turns = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    for longer in (length, 33, 128, 400):
        table = RotaryTable(config, longer, device=device, dtype=torch.float32)
        assert len(table.cos) == len(table.sin) == longer
        for ours, theirs in zip((table.cos, table.sin), turns, strict=True):
            assert torch.equal(ours[:length], theirs[0])
