"""What calls read through one pointer, field by field as in kernels.h and draft.cpp."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.decoder.ops.layer import AttentionMetadata, LayerStack


class MatrixStruct(ctypes.Structure):
    """`Matrix` of kernels.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "wide")),
    ]


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [outputs, inputs] in the layout of linear.cpp."""

    data: Tensor  # uint8
    struct: MatrixStruct
    address: int  # of `struct`
    outputs: int
    inputs: int


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """Pointers for a call, null for what is missing; the caller keeps the tensors alive."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


#: `kInside` of kernels.h.
_INSIDE = -(2**63)


def refuse_outside(token: int, vocabulary: int) -> None:
    """Raise IndexError, as torch does, for a token that a kernel found no embedding of."""
    if token != _INSIDE:
        raise IndexError(f"token {token} is outside the embedding of {vocabulary} tokens")


def _fields(*, pointers: str, numbers: str) -> list[tuple[str, Any]]:
    fields = [(name, ctypes.c_void_p) for name in pointers.split()]
    return [*fields, *((name, ctypes.c_int64) for name in numbers.split())]


class LayerStruct(ctypes.Structure):
    """`Layer`: the addresses of a LayerWeights and of the norm after it, and its sizes."""

    _fields_ = _fields(
        pointers="qkv output gate_up down qkv_bias query_norm key_norm output_bias post_norm norm",
        numbers="heads groups size captured",
    )


class DraftHeadStruct(ctypes.Structure):
    """`DraftHead`: the addresses of a DraftHead."""

    _fields_ = _fields(
        pointers="layer lm_head embedding embed_norm hidden_norm target_ids",
        numbers="norm_output vocabulary",
    )


class MetadataStruct(ctypes.Structure):
    """`Metadata`: the addresses of an AttentionMetadata, and its sizes."""

    _fields_ = _fields(
        pointers="cos sin positions slot_mapping block_table seq_lens cu_seqlens_q mask",
        numbers="rows tokens pages",
    )
    source: AttentionMetadata | None = None
    tensors: tuple[Tensor | None, ...] = ()  # what the addresses point into


def layer_structs(
    stack: LayerStack, dtype: torch.dtype, *, groups: int, size: int
) -> ctypes.Array[LayerStruct]:
    structs = (LayerStruct * len(stack.layers))()
    for index, (weights, norm) in enumerate(zip(stack.layers, stack.norms, strict=True)):
        query_norm, key_norm = weights.head_norms or (None, None)
        bias, output_bias, post_norm = weights.qkv_bias, weights.output_bias, weights.post_norm
        vectors = bias, query_norm, key_norm, output_bias, post_norm, norm
        assert all(each is None or each.dtype is dtype for each in vectors)
        matrices = weights.qkv, weights.output, weights.gate_up, weights.down
        pointers = *(matrix.address for matrix in matrices), *addresses(*vectors)
        captured = stack.captured.index(index) if index in stack.captured else -1
        sizes = weights.output.inputs // size, groups, size, captured
        structs[index] = LayerStruct(*pointers, *sizes)
    return structs


def metadata_struct(metadata: AttentionMetadata) -> MetadataStruct:
    cos, sin = metadata.rotary
    assert cos.is_contiguous() and sin.is_contiguous()
    indices = metadata.positions, metadata.slot_mapping, metadata.block_table, metadata.seq_lens
    mask = None if metadata.mask is None else metadata.mask.contiguous()
    tensors = (
        cos,
        sin,
        *(tensor.contiguous() for tensor in (*indices, metadata.cu_seqlens_q)),
        mask,
    )
    sizes = len(metadata.seq_lens), len(metadata.positions), metadata.block_table.shape[1]
    struct = MetadataStruct(*addresses(*tensors), *sizes)
    struct.source, struct.tensors = metadata, tensors
    return struct
