"""Where every kernel starts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.layer import Packed


def start_kernel(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    warps: int,
    stages: int,
    **constants: Any,
) -> None:
    """Ahead-of-time compilation records the launch instead."""
    kernel[grid](*arguments, **constants, num_warps=warps, num_stages=stages)


class Launcher(TorchOps):
    """Operations that launch kernels, in activations of type `dtype`."""

    name = arithmetic_name = "triton"
    repeatable = "no"  # cuBLAS chooses its algorithms

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(dtype)

    def pack(self, weight: Tensor) -> Packed:
        """cuBLAS multiplies one type with itself: the weight becomes the activations'."""
        return weight.to(self.dtype).contiguous()

    def _launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        warps: int,
        stages: int = 1,
        strided: tuple[Tensor, ...] = (),
        **constants: Any,
    ) -> None:
        """Launch over `grid`. A kernel knows the strides of the tensors in `strided` only."""
        for value in arguments:
            if isinstance(value, Tensor) and not value.is_contiguous():
                known = any(value is tensor for tensor in strided)
                assert known, f"{kernel.__name__} reads a view of shape {list(value.shape)}"
        self._start(kernel, grid, arguments, warps, stages, **constants)

    def _start(self, *launch: Any, **constants: Any) -> None:
        start_kernel(*launch, **constants)
