"""Backends of the operations, and how near each of them comes to the reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from pipeline.config.isa import machine_levels
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.cpu import ops as cpu_ops
from pipeline.decoder.ops.cpu.library import Unavailable
from pipeline.decoder.ops.cpu.ops import CpuOps
from pipeline.decoder.ops.eager import EagerOps
from pipeline.decoder.ops.triton.launch import INTERPRETED
from pipeline.decoder.ops.triton.ops import TritonOps

REFERENCE = TorchOps()
BF16, FP32 = torch.bfloat16, torch.float32
TYPES = [FP32, BF16]
#: The C++ kernels at every level that this machine has. For float32 the levels above avx512 have
#: nothing more.
KERNELS = [
    (level, dtype)
    for level in machine_levels()
    for dtype in (BF16, FP32)
    if dtype is BF16 or level in ("avx2", "avx512")
]


@dataclass(frozen=True)
class Backend:
    """Operations, with the relative and absolute errors that they may have."""

    ops: TorchOps
    rounded: tuple[float, float]  # of a result that is rounded once
    mixed: tuple[float, float]  # of attention
    device: torch.device

    @property
    def bits_alone(self) -> bool:
        """Whether a row has the same bits whatever stands beside it."""
        # In bfloat16 Triton's tiles are as high as the longest row.
        return self.is_cpp or (self.is_triton and self.ops.dtype is FP32)

    @property
    def is_cpp(self) -> bool:
        return isinstance(self.ops, CpuOps)

    @property
    def is_triton(self) -> bool:
        return isinstance(self.ops, TritonOps)

    def numbers(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal numbers in the type of the operations."""
        return (torch.randn(*shape) * scale).to(self.device, self.ops.dtype)

    def gains(self, *shape: int) -> Tensor:
        """Weights of norms: around one, float32."""
        return (1 + 0.3 * torch.randn(*shape)).to(self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, device=self.device)

    def near(self, got: Tensor, wanted: Tensor, **errors: float) -> None:
        """`errors` replace what a rounded result may have."""
        usual = dict(zip(("relative", "absolute"), self.rounded, strict=True))
        assert_near(got, wanted, **(usual | errors))


def assert_near(got: Tensor, wanted: Tensor, relative: float, absolute: float) -> None:
    """NaN equals NaN, and what float32 does not hold is infinite."""
    torch.testing.assert_close(
        got.float(), wanted.float(), rtol=relative, atol=absolute, equal_nan=True
    )


def cpu_backend(level: str, dtype: torch.dtype) -> Backend:
    """Of C++ at a level, or `eager`."""
    ops: TorchOps = EagerOps(dtype) if level == "eager" else load_kernels(level, dtype)
    if level == "eager":
        rounded = mixed = (1e-5, 1e-5) if dtype is FP32 else (2.0**-6, 2.0**-6)
    elif dtype is FP32:
        rounded, mixed = (2.0**-18, 1e-5), (2e-5, 2e-5)
    else:
        # Attention's weights are rounded before they mix values of size one: errors of 2^-9,
        # averaging out.
        rounded, mixed = (2.0**-8, 1e-5), (2.0**-7, 6e-3)
    return Backend(ops, rounded, mixed, torch.device("cpu"))


def triton_backend(dtype: torch.dtype, device: torch.device) -> Backend:
    """The interpreter cuts off what a GPU rounds."""
    step = 2.0**-18 if dtype is FP32 else 2.0**-7 if INTERPRETED else 2.0**-8
    mixed = (0, 1e-5 if dtype is FP32 else 2e-2)
    return Backend(TritonOps(dtype), (step, 1e-5), mixed, device)


def name_of(kernels: tuple[str, torch.dtype]) -> str:
    level, dtype = kernels
    return f"{level}-{'bf16' if dtype is BF16 else 'fp32'}"


@cache
def load_kernels(level: str, dtype: torch.dtype) -> CpuOps:
    """Skips the test where they cannot be compiled."""
    if cpu_ops.load(dtype) is None:
        pytest.skip(cpu_ops.why_not(dtype))
    try:
        return CpuOps(level, dtype)
    except Unavailable as reason:
        pytest.fail(str(reason))
