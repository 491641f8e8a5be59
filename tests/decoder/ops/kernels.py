"""The C++ kernels at every level of instructions that this machine has, in both types."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from pipeline.config.isa import machine_levels
from pipeline.decoder.ops.cpu import ops as cpu_ops
from pipeline.decoder.ops.cpu.library import Unavailable
from pipeline.decoder.ops.cpu.ops import CpuOps

#: For float32 the levels above avx512 have nothing more.
KERNELS = [
    (level, dtype)
    for level in machine_levels()
    for dtype in (torch.bfloat16, torch.float32)
    if dtype is torch.bfloat16 or level in ("avx2", "avx512")
]


def name_of(kernels: tuple[str, torch.dtype]) -> str:
    level, dtype = kernels
    return f"{level}-{'bf16' if dtype is torch.bfloat16 else 'fp32'}"


@cache
def load_kernels(level: str, dtype: torch.dtype) -> CpuOps:
    """Skips the test where they cannot be compiled."""
    if cpu_ops.load(dtype) is None:
        pytest.skip(cpu_ops.why_not(dtype))
    try:
        return CpuOps(level, dtype)
    except Unavailable as reason:
        pytest.fail(str(reason))


def numbers(ops: CpuOps, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal numbers in the type of the operations."""
    return (torch.randn(*shape) * scale).to(ops.dtype)


def assert_rounded(got: Tensor, wanted: Tensor, slack: float = 1e-5) -> None:
    """`got` is `wanted` to about half a unit in the last place of its type, plus `slack`."""
    relative = 2.0**-8 if got.dtype is torch.bfloat16 else 2.0**-18
    torch.testing.assert_close(got.to(wanted.dtype), wanted, rtol=relative, atol=slack)
