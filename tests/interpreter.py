"""Triton's interpreter with less bookkeeping: the same checks and results in half of the time.

For every operation on a tile it builds anew what depends on the tile's type alone, and an addition
of int32 is done a second time, by six more operations, to see whether it overflows. Before a launch
it patches the language, and again, attribute by attribute, before each call from one kernel's
function to another's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl  # type: ignore[import-untyped]
from triton.language.semantic import TritonSemantic  # type: ignore[import-untyped]
from triton.runtime import interpreter  # type: ignore[import-untyped]

from pipeline.decoder.ops.triton.launch import INTERPRETED

_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def remember() -> None:
    """From now on, in this process. Nothing is changed where kernels are compiled."""
    if INTERPRETED and hasattr(interpreter, "_LangPatchScope"):  # of triton 3.6 and 3.7
        interpreter._patch_lang = _patch_once(interpreter._patch_lang)
        interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
        TritonSemantic.binary_op_sanitize_overflow_impl = _refuse_overflow
        TritonSemantic.broadcast_impl_value = _where_shapes_differ(
            TritonSemantic.broadcast_impl_value
        )
        tl.block_type.__init__ = _by_type_and_shape(tl.block_type.__init__)
        tl.tensor.__init__ = _with_sizes_of_its_type(tl.tensor.__init__)


def _patch_once(patch_language: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """As `patch_language`, which nothing takes back but the end of a launch."""
    patched: set[frozenset[str]] = set()

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        def restore(self) -> None:
            super().restore()
            patched.clear()

    @cache
    def languages(function: Any) -> frozenset[str]:
        named = function.__globals__.values()
        return frozenset(each.__name__ for each in named if each is tl or each is tl.core)

    def patch(function: Any) -> Any:
        if (names := languages(function)) in patched:
            return Scope()
        patched.add(names)
        return patch_language(function)

    interpreter._LangPatchScope = Scope
    return patch


def _refuse_overflow(semantic: Any, left: Any, right: Any, operation: Any) -> None:
    """An AssertionError where a sum, difference or product of integers does not fit their type."""
    scalar = left.type.scalar
    if scalar.int_bitwidth >= 64:
        return
    exact = _EXACT[operation.__name__](
        left.handle.data.astype(np.int64), right.handle.data.astype(np.int64)
    )
    least, most = scalar.get_int_min_value(), scalar.get_int_max_value()
    assert least <= exact.min() and exact.max() <= most, f"int overflow in {operation.__name__}"


def _where_shapes_differ(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast_or_not(semantic: Any, left: Any, right: Any) -> Any:
        blocks = left.type.is_block(), right.type.is_block()
        if blocks == (True, True) and [*left.type.shape] == [*right.type.shape]:
            return left, right
        return broadcast(semantic, left, right) if any(blocks) else (left, right)

    return broadcast_or_not


def _by_name(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def converted(type: Any) -> Any:
        name = type.scalar.name
        if name not in known:
            known[name] = convert(type)
        return known[name]

    return converted


def _by_type_and_shape(build: Callable[..., None]) -> Callable[..., None]:
    made: dict[Any, dict[str, Any]] = {}

    def init(tile: Any, element_ty: Any, shape: Any) -> None:
        sizes = [getattr(size, "value", size) for size in shape]
        key = element_ty.name, *sizes
        if key not in made:
            build(tile, element_ty, sizes)
            made[key] = dict(tile.__dict__)
        tile.__dict__.update(made[key], element_ty=element_ty)

    return init


def _with_sizes_of_its_type(build: Callable[..., None]) -> Callable[..., None]:
    sizes: dict[Any, tuple[Any, Any]] = {}

    def init(tensor: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in sizes:
            build(tensor, handle, type)
            sizes[key] = tensor.shape, tensor.numel
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = sizes[key]

    return init
