"""The decoder's operations on CPU in bf16, by C++ kernels for AVX512-BF16 compiled on first use.

One promise beyond the reference: what a token gives does not depend, to the last bit, on the batch,
the tree, the chunk or the number of threads around it. A node that was verified in a tree has
exactly the states and logits that plain decoding would have given it.

Shapes as in base.py. Accumulation is in float32, results are rounded once.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pipeline.config import cpu_kernels
from pipeline.decoder.ops.base import PAGE, TorchOps
from pipeline.decoder.ops.cpu.library import Unavailable, load_library
from pipeline.decoder.ops.layer import AttentionMetadata, LayerWeights
from pipeline.decoder.tree import SamplingTensors, Tree, VerifyOutput

_threads = torch.get_num_threads


def load() -> CpuOps | None:
    """The backend, compiled if need be; None where it cannot run, see `why_not`."""
    return _attempt()[0] if cpu_kernels() else None


def why_not() -> str:
    """Why `load` gives None; empty where it does not."""
    return (
        _attempt()[1]
        if cpu_kernels()
        else "run.cpu_kernels or EAGLE3_CPU_KERNELS switches them off"
    )


def available(dtype: torch.dtype) -> bool:
    """Can this machine run the backend, and does it compute in `dtype`?"""
    return dtype is torch.bfloat16 and load() is not None


@cache
def _attempt() -> tuple[CpuOps | None, str]:
    try:
        return CpuOps(load_library()), ""
    except Unavailable as reason:
        return None, str(reason)


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [outputs, inputs] in the layout of linear.cpp."""

    data: Tensor
    outputs: int
    inputs: int


class CpuOps(TorchOps):
    """bf16 only; a float32 model takes TorchOps."""

    name = "cpu"

    # An operation on one token takes a few µs, so the wrappers do as little as they can: one
    # allocation, one call.

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library  # a function is an attribute of its own once it was looked up
        self._most_proposed = int(library.eagle3_most_proposed())
        self._layers: WeakKeyDictionary[LayerWeights, _LayerStruct] = WeakKeyDictionary()
        self._metadata = _MetadataStruct()  # the last forward's

    def pack(self, weight: Tensor) -> Weight:
        """A weight [out, in] in panels of 32 outputs. The original is not needed any more."""
        assert weight.dtype is torch.bfloat16
        weight = weight.contiguous()
        outputs, inputs = weight.shape
        data = torch.empty(self._library.eagle3_packed_size(outputs, inputs), dtype=torch.uint8)
        assert data.data_ptr() % 64 == 0
        self._library.eagle3_pack(*_addresses(weight, data), outputs, inputs, _threads())
        return Weight(data, outputs, inputs)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        assert x.dtype is torch.bfloat16
        x = x.contiguous()
        rows, inputs = x.shape
        assert inputs == weight.inputs
        y = x.new_empty(rows, weight.outputs)
        self._library.eagle3_linear(
            *_addresses(x, weight.data, bias, y), rows, inputs, weight.outputs, _threads()
        )
        return y

    def add_rms_norm(
        self, x: Tensor, update: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        assert x.dtype is torch.bfloat16
        x = x.contiguous()
        normed, total = torch.empty_like(x), x
        if update is not None:
            update, total = update.contiguous(), torch.empty_like(x)
        self._library.eagle3_add_rms_norm(
            *_addresses(x, update, weight, normed, total), eps, *x.shape, _threads()
        )
        return normed, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        assert gate_up.dtype is torch.bfloat16
        gate_up = gate_up.contiguous()
        rows, both = gate_up.shape
        y = gate_up.new_empty(rows, both // 2)
        self._library.eagle3_silu_mul(*_addresses(gate_up, y), rows, both // 2, _threads())
        return y

    def layer(
        self,
        weights: LayerWeights,
        following_norm: Tensor,
        eps: float,
        metadata: AttentionMetadata,
        hidden: Tensor,
        normed: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> tuple[Tensor, Tensor]:
        assert hidden.dtype is normed.dtype is keys.dtype is torch.bfloat16
        assert hidden.is_contiguous() and normed.is_contiguous() and keys.is_contiguous()
        if self._metadata.source is not metadata:
            self._metadata = _metadata_struct(metadata)
        layer = self._layers.get(weights)
        if layer is None:
            layer = _layer_struct(weights, groups=keys.shape[1], size=keys.shape[3])
            self._layers[weights] = layer
        normed_sum, total = torch.empty_like(hidden), torch.empty_like(hidden)
        tensors = following_norm, hidden, normed, keys, values, normed_sum, total
        structs = ctypes.addressof(layer), ctypes.addressof(self._metadata)
        self._library.eagle3_layer(*structs, *_addresses(*tensors), eps, _threads())
        return normed_sum, total

    def rope_write(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        rotary: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        assert qkv.dtype is keys.dtype is rotary[0].dtype is torch.bfloat16
        assert keys.is_contiguous() and values.is_contiguous()
        qkv, positions, slots = qkv.contiguous(), positions.contiguous(), slots.contiguous()
        tokens, width = qkv.shape
        groups, size = keys.shape[1], keys.shape[3]
        heads = width // size - 2 * groups
        query = qkv.new_empty(tokens, heads, size)
        query_norm, key_norm = norms or (None, None)
        tensors = qkv, query_norm, key_norm, *rotary, positions, slots, keys, values, query
        self._library.eagle3_rope_write(
            *_addresses(*tensors), eps, tokens, heads, groups, PAGE, size, _threads()
        )
        return query

    def tree_attention(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """As in the reference, for even d; a query that sees nothing gives zeros."""
        assert query.dtype is keys.dtype is torch.bfloat16
        assert keys.is_contiguous() and values.is_contiguous()
        query, block_table, seq_lens = (
            tensor.contiguous() for tensor in (query, block_table, seq_lens)
        )
        mask, mixed = None if mask is None else mask.contiguous(), torch.empty_like(query)
        tensors = query, keys, values, block_table, seq_lens, mask, mixed
        sizes = _sizes(*query.shape, keys.shape[1], block_table.shape[1])
        self._library.eagle3_tree_attention(*_addresses(*tensors), sizes, _threads())
        return mixed

    def argmax(self, logits: Tensor) -> Tensor:
        if logits.dtype is not torch.bfloat16:
            return super().argmax(logits)
        logits = logits.contiguous()
        index = torch.empty(logits.shape[:-1], dtype=torch.int64)
        sizes = index.numel(), logits.shape[-1]
        self._library.eagle3_argmax(*_addresses(logits, index), *sizes, _threads())
        return index

    def propose(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        rows, vocabulary = logits.shape
        if logits.dtype is not torch.bfloat16 or k > min(vocabulary, self._most_proposed):
            return super().propose(logits, k)
        logits = logits.contiguous()
        scores, index = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int64)
        self._library.eagle3_propose(
            *_addresses(logits, scores, index), k, rows, vocabulary, _threads()
        )
        return scores, index

    def grow_tree(
        self, roots: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int
    ) -> Tree:
        assert scores.dtype is torch.float32
        inputs = [part.contiguous() for part in (roots, tokens, parents, scores)]
        rows, count = tokens.shape
        kept = min(nodes - 1, count)
        grown = torch.empty(4, rows, kept + 1, dtype=torch.int64).unbind()
        self._library.eagle3_grow_tree(*_addresses(*inputs, *grown), rows, count, kept)
        return Tree(*grown)

    def verify(self, tree: Tree, predicted: Tensor, depth: int) -> VerifyOutput:
        inputs = [part.contiguous() for part in (tree.tokens, tree.parents, predicted)]
        rows, nodes = predicted.shape
        path, emitted = torch.empty(2, rows, depth + 1, dtype=torch.int64).unbind()
        counts = torch.empty_like(path[:, 0])
        outputs = path, counts, emitted
        self._library.eagle3_verify(*_addresses(*inputs, *outputs), rows, nodes, depth)
        return VerifyOutput(*outputs)

    def sample(
        self, logits: Tensor, tree: Tree, sampling: SamplingTensors, positions: Tensor, depth: int
    ) -> Tensor:
        if logits.dtype is not torch.bfloat16:
            return super().sample(logits, tree, sampling, positions, depth)
        by_row = sampling.temperature, sampling.top_p, sampling.top_k, sampling.seeds
        tensors = logits, tree.tokens, tree.parents, positions, *by_row
        inputs = [tensor.contiguous() for tensor in tensors]
        predicted = torch.empty(logits.shape[:2], dtype=torch.int64)
        self._library.eagle3_sample(*_addresses(*inputs, predicted), *logits.shape, _threads())
        return predicted

    def draw(self, logits: Tensor, sampling: SamplingTensors, positions: Tensor) -> Tensor:
        zeros = torch.zeros(len(logits), 1, dtype=torch.int64)
        tree = Tree(zeros, zeros, zeros, zeros)
        return self.sample(logits[:, None], tree, sampling, positions[:, None], 0)[:, 0]

    def compact(self, planes: Tensor, block_table: Tensor, seq_lens: Tensor, path: Tensor) -> None:
        assert planes.is_contiguous()
        inputs = [tensor.contiguous() for tensor in (block_table, seq_lens, path)]
        layers, sides, pages, groups, page, size = planes.shape
        plane = layers * sides, pages, groups, page, size * planes.element_size()
        branch = len(path), block_table.shape[1], path.shape[1]
        self._library.eagle3_compact(*_addresses(planes, *inputs), *plane, *branch, _threads())


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    """Pointers for a call, null for what is missing; the caller keeps the tensors alive."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


@lru_cache(maxsize=4096)
def _sizes(
    rows: int, count: int, heads: int, size: int, groups: int, pages: int
) -> ctypes.Array[ctypes.c_int64]:
    """One pointer: converting six integers would cost more than the rest of the call."""
    return (ctypes.c_int64 * 6)(rows, count, heads, groups, size, pages)


# What the call of a whole layer reads, field by field as in layer.cpp -----------------------------


def _fields(*, pointers: str, numbers: str) -> list[tuple[str, Any]]:
    addresses = [(name, ctypes.c_void_p) for name in pointers.split()]
    return [*addresses, *((name, ctypes.c_int64) for name in numbers.split())]


class _LayerStruct(ctypes.Structure):
    """`Layer`: the addresses of a LayerWeights, and its sizes."""

    _fields_ = _fields(
        pointers="qkv output gate_up down qkv_bias query_norm key_norm output_bias post_norm",
        numbers="heads groups size hidden inner",
    )


class _MetadataStruct(ctypes.Structure):
    """`Metadata`: the addresses of an AttentionMetadata, and its sizes."""

    _fields_ = _fields(
        pointers="cos sin positions slots block_table seq_lens mask", numbers="rows count pages"
    )
    source: AttentionMetadata | None = None
    tensors: tuple[Tensor | None, ...] = ()  # what the addresses point into


def _layer_struct(weights: LayerWeights, *, groups: int, size: int) -> _LayerStruct:
    query_norm, key_norm = weights.head_norms or (None, None)
    vectors = weights.qkv_bias, query_norm, key_norm, weights.output_bias, weights.post_norm
    assert all(vector is None or vector.dtype is torch.bfloat16 for vector in vectors)
    matrices = weights.qkv, weights.output, weights.gate_up, weights.down
    addresses = _addresses(*(matrix.data for matrix in matrices), *vectors)
    heads, hidden, inner = (
        weights.output.inputs // size,
        weights.output.outputs,
        weights.down.inputs,
    )
    return _LayerStruct(*addresses, heads, groups, size, hidden, inner)


def _metadata_struct(metadata: AttentionMetadata) -> _MetadataStruct:
    mask = None if metadata.mask is None else metadata.mask.contiguous()
    indices = metadata.positions, metadata.slots, metadata.block_table, metadata.seq_lens
    tensors = *metadata.rotary, *(tensor.contiguous() for tensor in indices), mask
    count = len(metadata.positions) // metadata.rows
    pages = metadata.block_table.shape[1]
    struct = _MetadataStruct(*_addresses(*tensors), metadata.rows, count, pages)
    struct.source, struct.tensors = metadata, tensors
    return struct
