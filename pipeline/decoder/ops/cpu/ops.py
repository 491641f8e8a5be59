"""The decoder's operations on CPU in bf16, by C++ kernels for AVX512-BF16 compiled on first use.

One promise beyond the reference: what a token gives does not depend, to the last bit, on the batch,
the tree, the chunk or the number of threads around it. A node that was verified in a tree has exactly
the states and logits that plain decoding would have given it.

Shapes as in reference.py. Accumulation is in float32, results are rounded once.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache, lru_cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pipeline.decoder.ops.base import PAGE, TorchOps
from pipeline.decoder.ops.cpu.library import Unavailable, load_library
from pipeline.decoder.ops.layer import AttentionMetadata, LayerWeights
from pipeline.decoder.tree import SamplingTensors, Tree, VerifyOutput


def load() -> CpuOps | None:
    """The backend, compiled if need be; None where it cannot run, see `why_not`."""
    return _attempt()[0] if _enabled() else None


def why_not() -> str:
    """Why `load` gives None; empty where it does not."""
    return _attempt()[1] if _enabled() else "EAGLE3_NATIVE=0"


def available(dtype: torch.dtype) -> bool:
    """Can this machine run the backend, and does it compute in `dtype`?"""
    return dtype is torch.bfloat16 and load() is not None


def _enabled() -> bool:
    return os.environ.get("EAGLE3_NATIVE") != "0"


@cache
def _attempt() -> tuple[CpuOps | None, str]:
    try:
        return CpuOps(load_library()), ""
    except Unavailable as reason:
        return None, str(reason)


class Weight:
    """A matrix [outputs, inputs] in the layout of linear.cpp."""

    __slots__ = ("_data", "address", "inputs", "outputs")

    def __init__(self, data: Tensor, outputs: int, inputs: int) -> None:
        self._data, self.address, self.outputs, self.inputs = data, data.data_ptr(), outputs, inputs


class _Layer(ctypes.Structure):
    """Layer of layer.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "qkv",
                "output",
                "gate_up",
                "down",
                "qkv_bias",
                "query_norm",
                "key_norm",
                "output_bias",
                "post_norm",
            )
        ),
        *((name, ctypes.c_int64) for name in ("heads", "groups", "size", "hidden", "inner")),
    )


class _AttentionMetadata(ctypes.Structure):
    """AttentionMetadata of layer.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("cos", "sin", "positions", "slots", "table", "starts", "visible")
        ),
        *((name, ctypes.c_int64) for name in ("rows", "count", "pages")),
    )


class CpuOps(TorchOps):
    """bf16 only; a float32 model takes TorchOps."""

    name = "native"

    # An operation on one token takes a few µs, so the wrappers do as little as they can: one allocation, one call.

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library  # a function is an attribute of its own once it was looked up
        self._most_proposed = int(library.eagle3_most_proposed())
        self._layers: WeakKeyDictionary[LayerWeights, _Layer] = WeakKeyDictionary()
        self._place: tuple[
            AttentionMetadata | None, _AttentionMetadata, tuple[Tensor | None, ...]
        ] = None, _AttentionMetadata(), ()  # the last forward's

    def pack(self, weight: Tensor) -> Weight:
        """A weight [out, in] in panels of 32 outputs. The original is not needed any more."""
        assert weight.dtype is torch.bfloat16
        weight = weight.contiguous()
        outputs, inputs = weight.shape
        data = torch.empty(self._library.eagle3_packed_size(outputs, inputs), dtype=torch.uint8)
        assert data.data_ptr() % 64 == 0
        self._library.eagle3_pack(
            weight.data_ptr(), outputs, inputs, data.data_ptr(), torch.get_num_threads()
        )
        return Weight(data, outputs, inputs)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        assert x.dtype is torch.bfloat16
        x = x.contiguous()
        rows, inputs = x.shape
        assert inputs == weight.inputs
        y = x.new_empty(rows, weight.outputs)
        self._library.eagle3_linear(
            x.data_ptr(),
            weight.address,
            _address(bias),
            y.data_ptr(),
            rows,
            inputs,
            weight.outputs,
            torch.get_num_threads(),
        )
        return y

    def add_rms_norm(
        self, x: Tensor, update: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        assert x.dtype is torch.bfloat16
        x = x.contiguous()
        rows, size = x.shape
        normed = torch.empty_like(x)
        if update is None:
            total, added = x, None
        else:
            total, added = torch.empty_like(x), update.contiguous().data_ptr()
        self._library.eagle3_add_rms_norm(
            x.data_ptr(),
            added,
            weight.data_ptr(),
            eps,
            normed.data_ptr(),
            total.data_ptr(),
            rows,
            size,
            torch.get_num_threads(),
        )
        return normed, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        assert gate_up.dtype is torch.bfloat16
        gate_up = gate_up.contiguous()
        rows, both = gate_up.shape
        y = gate_up.new_empty(rows, both // 2)
        self._library.eagle3_silu_mul(
            gate_up.data_ptr(), y.data_ptr(), rows, both // 2, torch.get_num_threads()
        )
        return y

    def layer(
        self,
        weights: LayerWeights,
        following_norm: Tensor,
        eps: float,
        place: AttentionMetadata,
        hidden: Tensor,
        normed: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> tuple[Tensor, Tensor]:
        assert (
            hidden.dtype is normed.dtype is keys.dtype is torch.bfloat16
            and hidden.is_contiguous()
            and normed.is_contiguous()
            and keys.is_contiguous()
        )
        if self._place[0] is not place:
            self._place = place, *_native_place(place)
        layer = self._layers.get(weights)
        if layer is None:
            layer = self._layers[weights] = _native_layer(
                weights, groups=keys.shape[1], size=keys.shape[3]
            )
        normed_sum, total = torch.empty_like(hidden), torch.empty_like(hidden)
        self._library.eagle3_layer(
            ctypes.addressof(layer), ctypes.addressof(self._place[1]), following_norm.data_ptr(), eps, hidden.data_ptr(), normed.data_ptr(),
            keys.data_ptr(), values.data_ptr(), normed_sum.data_ptr(), total.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
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
        assert (
            qkv.dtype is keys.dtype is rotary[0].dtype is torch.bfloat16
            and keys.is_contiguous()
            and values.is_contiguous()
        )
        qkv, positions, slots = qkv.contiguous(), positions.contiguous(), slots.contiguous()
        tokens, width = qkv.shape
        groups, size = keys.shape[1], keys.shape[3]
        heads = width // size - 2 * groups
        query = qkv.new_empty(tokens, heads, size)
        query_norm, key_norm = (
            (None, None) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr())
        )
        cos, sin = rotary[0].data_ptr(), rotary[1].data_ptr()
        self._library.eagle3_rope_write(
            qkv.data_ptr(), query_norm, key_norm, eps, cos, sin, positions.data_ptr(), slots.data_ptr(), keys.data_ptr(), values.data_ptr(),
            query.data_ptr(), tokens, heads, groups, PAGE, size, torch.get_num_threads(),
        )  # fmt: skip
        return query

    def tree_attention(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor,
        starts: Tensor,
        visible: Tensor | None,
    ) -> Tensor:
        """As in the reference, for even d; a query that sees nothing gives zeros."""
        assert (
            query.dtype is keys.dtype is torch.bfloat16
            and keys.is_contiguous()
            and values.is_contiguous()
        )
        query, table, starts = query.contiguous(), table.contiguous(), starts.contiguous()
        visible = None if visible is None else visible.contiguous()
        mixed = torch.empty_like(query)
        sizes = _sizes(*query.shape, keys.shape[1], table.shape[1])
        self._library.eagle3_tree_attention(
            query.data_ptr(), keys.data_ptr(), values.data_ptr(), table.data_ptr(), starts.data_ptr(), _address(visible),
            mixed.data_ptr(), sizes, torch.get_num_threads(),
        )  # fmt: skip
        return mixed

    def argmax(self, logits: Tensor) -> Tensor:
        if logits.dtype is not torch.bfloat16:
            return super().argmax(logits)
        logits = logits.contiguous()
        index = torch.empty(logits.shape[:-1], dtype=torch.int64)
        self._library.eagle3_argmax(
            logits.data_ptr(),
            index.data_ptr(),
            index.numel(),
            logits.shape[-1],
            torch.get_num_threads(),
        )
        return index

    def propose(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        rows, vocabulary = logits.shape
        if logits.dtype is not torch.bfloat16 or k > min(vocabulary, self._most_proposed):
            return super().propose(logits, k)
        logits = logits.contiguous()
        scores, index = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int64)
        self._library.eagle3_propose(
            logits.data_ptr(),
            k,
            scores.data_ptr(),
            index.data_ptr(),
            rows,
            vocabulary,
            torch.get_num_threads(),
        )
        return scores, index

    def grow_tree(
        self, roots: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int
    ) -> Tree:
        assert scores.dtype is torch.float32
        roots, tokens, parents, scores = (
            roots.contiguous(),
            tokens.contiguous(),
            parents.contiguous(),
            scores.contiguous(),
        )
        rows, count = tokens.shape
        kept = min(nodes - 1, count)
        tree = Tree(*torch.empty(4, rows, kept + 1, dtype=torch.int64).unbind())
        self._library.eagle3_grow_tree(
            roots.data_ptr(), tokens.data_ptr(), parents.data_ptr(), scores.data_ptr(), rows, count, kept,
            tree.tokens.data_ptr(), tree.parents.data_ptr(), tree.ancestors.data_ptr(), tree.depth.data_ptr(),
        )  # fmt: skip
        return tree

    def verify(self, tree: Tree, predicted: Tensor, depth: int) -> VerifyOutput:
        tokens, parents, predicted = (
            tree.tokens.contiguous(),
            tree.parents.contiguous(),
            predicted.contiguous(),
        )
        rows, nodes = tokens.shape
        path, emitted = torch.empty(2, rows, depth + 1, dtype=torch.int64).unbind()
        counts = torch.empty_like(path[:, 0])
        self._library.eagle3_verify(
            tokens.data_ptr(),
            parents.data_ptr(),
            predicted.data_ptr(),
            rows,
            nodes,
            depth,
            path.data_ptr(),
            counts.data_ptr(),
            emitted.data_ptr(),
        )
        return VerifyOutput(path, counts, emitted)

    def sample(
        self, logits: Tensor, tree: Tree, sampling: SamplingTensors, positions: Tensor, depth: int
    ) -> Tensor:
        if logits.dtype is not torch.bfloat16:
            return super().sample(logits, tree, sampling, positions, depth)
        logits, tokens, parents, positions = (
            logits.contiguous(),
            tree.tokens.contiguous(),
            tree.parents.contiguous(),
            positions.contiguous(),
        )
        rows, nodes, size = logits.shape
        predicted = torch.empty(rows, nodes, dtype=torch.int64)
        held = [
            part.contiguous()
            for part in (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seeds)
        ]
        self._library.eagle3_sample(
            logits.data_ptr(), tokens.data_ptr(), parents.data_ptr(), positions.data_ptr(), *(part.data_ptr() for part in held),
            predicted.data_ptr(), rows, nodes, size, torch.get_num_threads(),
        )  # fmt: skip
        return predicted

    def draw(self, logits: Tensor, sampling: SamplingTensors, positions: Tensor) -> Tensor:
        zeros = torch.zeros(len(logits), 1, dtype=torch.int64)
        return self.sample(
            logits[:, None], Tree(zeros, zeros, zeros, zeros), sampling, positions[:, None], 0
        )[:, 0]

    def compact(self, planes: Tensor, table: Tensor, starts: Tensor, path: Tensor) -> None:
        assert planes.is_contiguous()
        table, starts, path = table.contiguous(), starts.contiguous(), path.contiguous()
        layers, both, pages, groups, page, size = planes.shape
        self._library.eagle3_compact(
            planes.data_ptr(), layers * both, pages, groups, page, size * planes.element_size(), table.data_ptr(), starts.data_ptr(), path.data_ptr(),
            *path.shape[:1], table.shape[1], path.shape[1], torch.get_num_threads(),
        )  # fmt: skip


def _native_layer(weights: LayerWeights, *, groups: int, size: int) -> _Layer:
    assert all(
        tensor is None or tensor.dtype is torch.bfloat16
        for tensor in (weights.post_norm, weights.qkv_bias, weights.output_bias)
    )
    query_norm, key_norm = (
        (None, None)
        if weights.head_norms is None
        else (norm.data_ptr() for norm in weights.head_norms)
    )
    return _Layer(
        *(
            weight.address
            for weight in (weights.qkv, weights.output, weights.gate_up, weights.down)
        ),
        *(
            _address(weights.qkv_bias),
            query_norm,
            key_norm,
            _address(weights.output_bias),
            weights.post_norm.data_ptr(),
        ),
        *(weights.output.inputs // size, groups, size, weights.output.outputs, weights.down.inputs),
    )


def _native_place(place: AttentionMetadata) -> tuple[_AttentionMetadata, tuple[Tensor | None, ...]]:
    """The structure, and the tensors that it points into."""
    visible = None if place.visible is None else place.visible.contiguous()
    held = (
        *place.rotary,
        place.positions.contiguous(),
        place.slots.contiguous(),
        place.table.contiguous(),
        place.starts.contiguous(),
        visible,
    )
    count = len(place.positions) // place.rows
    return _AttentionMetadata(
        *(_address(tensor) for tensor in held), place.rows, count, place.table.shape[1]
    ), held


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@lru_cache(maxsize=4096)
def _sizes(
    rows: int, count: int, heads: int, size: int, groups: int, pages: int
) -> ctypes.Array[ctypes.c_int64]:
    """One pointer instead of six converted integers, which would cost more than the rest of the call."""
    return (ctypes.c_int64 * 6)(rows, count, heads, groups, size, pages)
