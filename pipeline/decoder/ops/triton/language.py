"""The dialect of the kernels: Triton, with names for the types of a kernel's arguments.

Scalars of a grid (`tl.program_id`) are widened to 64 bits before they multiply a stride: a cache or
a block of logits passes 2^31 elements on large machines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

# To Triton all three are tensors, and it accepts no annotation from outside its own language.
#: A tensor's first element, as the kernel sees it.
Pointer: TypeAlias = tl.tensor
#: A number that may differ from launch to launch without a new compilation.
Scalar: TypeAlias = tl.tensor
#: A value inside a kernel: a block of numbers, or a single one.
Block: TypeAlias = tl.tensor

#: Whether kernels run in Triton's interpreter, on the CPU; decided by TRITON_INTERPRET at import.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit` with a type."""
    return triton.jit(function)


def power_of_two(size: int, least: int = 1) -> int:
    """The block that holds `size` elements: the next power of two, at least `least`."""
    return max(least, 1 << (size - 1).bit_length())
