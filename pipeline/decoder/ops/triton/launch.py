"""Where every kernel starts, and the dialect that kernels are written in.

Scalars of a grid (`tl.program_id`) are widened to 64 bits before they multiply a stride: a cache or
a block of logits passes 2^31 elements on large machines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.layer import Packed

# To Triton all of these are tensors, and it accepts no annotation from outside its own language.
# `jit` reads them: they decide which launches share a compiled kernel.
#: A tensor's first element, as the kernel sees it. Whether its address is a multiple of 16 bytes is
#: compiled in, and lets threads load several elements at once.
Pointer: TypeAlias = tl.tensor
#: The same of metadata, read by the element: a row of a table begins anywhere.
Table: TypeAlias = tl.tensor
#: A number that may differ from launch to launch without a new compilation.
Scalar: TypeAlias = tl.tensor
#: A distance between elements, which no launch of an engine changes: whether it is a multiple of 16
#: is compiled in.
Stride: TypeAlias = tl.tensor
#: A value inside a kernel: a block of numbers, or a single one.
Block: TypeAlias = tl.tensor
#: Whether kernels run in Triton's interpreter, on the CPU; decided by TRITON_INTERPRET at import.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, specialised on the annotated types only.

    A server meets every prompt length and every slot. Triton would compile a kernel anew, which
    takes seconds, where a count becomes 1 or a multiple of 16, or a table's row stands elsewhere.
    """
    kinds = function.__annotations__
    free = [name for name, kind in kinds.items() if kind in ("Scalar", "Table")]
    return triton.jit(function, do_not_specialize=free, do_not_specialize_on_alignment=free)


@jit
def dot(left: Block, right: Block, WIDEN: tl.constexpr) -> Block:
    """Matrix product in float32; float32 itself is not rounded to TF32.

    WIDEN: the interpreter cannot multiply bfloat16.
    """
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@jit
def is_last(arrived: Pointer, count: Scalar) -> Block:
    """Whether this program is the last of `count` to arrive; what the others stored is there then,
    past the first-level cache (".cg"), which knows nothing of other multiprocessors' stores.

    The counter is zero before, and again after.
    """
    tl.debug_barrier()  # all threads' results stand before one of them says so
    last = tl.atomic_add(arrived, 1) == count - 1
    if last:
        tl.store(arrived, 0)
    return last


def power_of_two(size: int, least: int = 1) -> int:
    """The block that holds `size` elements: the next power of two, at least `least`."""
    return max(least, 1 << (size - 1).bit_length())


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
