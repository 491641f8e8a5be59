"""The decoder's operations on CPUs: C++ kernels for four levels of instructions, compiled on first
use.

One promise beyond the reference: what a token gives does not depend, to the last bit, on the batch,
the tree, the chunk or the number of threads around it. A node that was verified in a tree has
exactly the states and logits that plain decoding would have given it. In float32 it does not depend
on the level either.

Activations are bfloat16 or float32, whichever the operations are made for; accumulation is in
float32 and results are rounded once. Weights that are stored in bfloat16 stay so in memory and are
widened in registers where the processor does not multiply them. Shapes as in base.py.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pipeline.config import cpu_kernels
from pipeline.config.isa import LEVELS, isa_level
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.cpu.library import (
    DraftHeadStruct,
    LayerStruct,
    MatrixStruct,
    MetadataStruct,
    Unavailable,
    Weight,
    addresses,
    layer_structs,
    load_library,
    metadata_struct,
    refuse_outside,
)
from pipeline.decoder.ops.draft import Candidates, DraftHead, DraftNoise, beam_depths
from pipeline.decoder.ops.layer import AttentionMetadata, LayerStack
from pipeline.decoder.ops.tree import Beams, SamplingTensors, Tree, VerifyOutput

_threads = torch.get_num_threads


def load(dtype: torch.dtype) -> CpuOps | None:
    """The backend for activations of a type, compiled if need be; None where it cannot run."""
    return _attempt(isa_level(), dtype)[0] if cpu_kernels() else None


def why_not(dtype: torch.dtype) -> str:
    """Why `load` gives None; empty where it does not."""
    if not cpu_kernels():
        return "EAGLE3_CPU_KERNELS switches them off"
    return _attempt(isa_level(), dtype)[1]


@cache
def _attempt(level: str | None, dtype: torch.dtype) -> tuple[CpuOps | None, str]:
    if level is None:
        return None, "the kernels are for x86-64 Linux with AVX2 and FMA"
    if dtype not in (torch.bfloat16, torch.float32):
        return None, f"the kernels compute in bfloat16 or float32, not in {dtype}"
    if dtype is torch.float32 and level in ("avx512_bf16", "amx"):
        level = "avx512"  # the levels above have nothing more for float32
    try:
        return CpuOps(level, dtype), ""
    except Unavailable as reason:
        return None, str(reason)


def _fits_bfloat16(weight: Tensor) -> bool:
    """Whether nothing of a weight is lost in bfloat16, as of a head, which is stored so."""
    parts = weight[:8], weight  # the first rows tell most
    return all(torch.equal(part.bfloat16().to(part.dtype), part) for part in parts)


class CpuOps(TorchOps):
    """Kernels of one level for activations of one type."""

    name = "cpu"
    repeatable = "always"

    # An operation on one token takes a few µs, so the wrappers do as little as they can: one
    # allocation, one call.

    def __init__(self, level: str, dtype: torch.dtype) -> None:
        """Raises Unavailable where the kernels cannot be compiled or loaded."""
        assert level in LEVELS
        super().__init__(dtype)
        self.arithmetic_name = level
        #: A function is an attribute of its own once it was looked up.
        self._library = load_library(level, dtype)
        self._most_proposed = int(self._library.eagle3_most_proposed())
        self._stacks: WeakKeyDictionary[LayerStack, Any] = WeakKeyDictionary()
        self._heads: WeakKeyDictionary[DraftHead, DraftHeadStruct] = WeakKeyDictionary()
        self._memory = WeightMemory()
        self._metadata = MetadataStruct()  # the last forward's

    def pack(self, weight: Tensor) -> Weight:
        """A weight [out, in] in panels of 32 outputs. The original is not needed any more."""
        narrow = self.dtype is torch.bfloat16 or _fits_bfloat16(weight)
        weight = weight.to(torch.bfloat16 if narrow else torch.float32)
        weight, wide = weight.contiguous(), int(weight.dtype is torch.float32)
        outputs, inputs = weight.shape
        size = self._library.eagle3_packed_size(outputs, inputs, wide)
        data = self._memory.empty(size)
        assert data.data_ptr() % 64 == 0
        self._library.eagle3_pack(*addresses(weight, data), outputs, inputs, wide, _threads())
        struct = MatrixStruct(data.data_ptr(), outputs, inputs, wide)
        return Weight(data, struct, ctypes.addressof(struct), outputs, inputs)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        assert x.dtype is self.dtype
        x = x.contiguous()
        rows, inputs = x.shape
        assert inputs == weight.inputs
        y = x.new_empty(rows, weight.outputs)
        bias_at = None if bias is None else bias.data_ptr()
        self._library.eagle3_linear(
            x.data_ptr(), weight.address, bias_at, y.data_ptr(), rows, _threads(), None
        )
        return y

    def add_rms_norm(
        self,
        x: Tensor,
        update: Tensor | None,
        weight: Tensor,
        eps: float,
        update_norm: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert x.dtype is self.dtype and weight.dtype is torch.float32
        x = x.contiguous()
        normed, total = torch.empty_like(x), x
        if update is not None:
            update, total = update.contiguous(), torch.empty_like(x)
            if update_norm is not None:  # which is written over it
                update = update.clone()
        tensors = x, update, update_norm, weight, normed, total
        self._library.eagle3_add_rms_norm(*addresses(*tensors), eps, *x.shape, _threads())
        return normed, total

    def gate_mul(self, gate_up: Tensor, *, gelu: bool = False) -> Tensor:
        assert gate_up.dtype is self.dtype
        gate_up = gate_up.contiguous()
        rows, both = gate_up.shape
        y = gate_up.new_empty(rows, both // 2)
        self._library.eagle3_gate_mul(*addresses(gate_up, y), gelu, rows, both // 2, _threads())
        return y

    def compute_slot_mapping(
        self, block_table: Tensor, seq_lens: Tensor, row: Tensor, within: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs = [tensor.contiguous() for tensor in (block_table, seq_lens, row, within)]
        entries, slot_mapping = torch.empty(2, len(row), dtype=torch.int64).unbind()
        outputs = entries, slot_mapping
        self._library.eagle3_compute_slot_mapping(
            *addresses(*inputs, *outputs), len(row), block_table.shape[1]
        )
        return outputs

    def layers(
        self,
        stack: LayerStack,
        metadata: AttentionMetadata,
        hidden: Tensor,
        normed: Tensor,
        plane: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if stack.divided:
            return super().layers(stack, metadata, hidden, normed, plane)
        assert hidden.dtype is normed.dtype is plane.dtype is self.dtype
        assert metadata.rotary[0].dtype is self.dtype and plane.is_contiguous()
        for each in stack.layers:
            metadata.of(each)  # raises where the forward has none for it
        structs = self._structs_of(stack, plane)
        output = hidden.clone(memory_format=torch.contiguous_format)
        normed, output_normed = normed.contiguous(), torch.empty_like(output)
        tokens, size = output.shape
        count, captures = len(stack.layers), len(stack.captured)
        aux = output.new_empty(tokens, captures * size)
        self._library.eagle3_layers(
            ctypes.addressof(structs),
            count,
            self._address_of(metadata),
            *addresses(normed, output, output_normed, plane),
            plane.numel() // (2 * count),
            aux.data_ptr(),
            captures,
            stack.eps,
            _threads(),
        )
        return output_normed, output, aux

    def embed_concat(
        self,
        tokens: Tensor,
        embedding: Tensor,
        hidden: Tensor,
        embed_norm: Tensor,
        hidden_norm: Tensor,
        eps: float,
    ) -> Tensor:
        assert hidden.dtype is embedding.dtype is self.dtype and embedding.is_contiguous()
        assert embed_norm.dtype is hidden_norm.dtype is torch.float32
        tokens, hidden = tokens.contiguous(), hidden.contiguous()
        rows, size = hidden.shape
        both = hidden.new_empty(rows, 2 * size)
        tensors = tokens, embedding, hidden, embed_norm, hidden_norm, both
        sizes = eps, rows, size, len(embedding)
        outside = self._library.eagle3_embed_concat(*addresses(*tensors), *sizes)
        refuse_outside(outside, len(embedding))
        return both

    def rope_write(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        metadata: AttentionMetadata,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        assert qkv.dtype is keys.dtype is metadata.rotary[0].dtype is self.dtype
        assert keys.is_contiguous() and values.is_contiguous()
        qkv = qkv.contiguous()
        tokens, width = qkv.shape
        groups, size = keys.shape[1], keys.shape[3]
        heads = width // size - 2 * groups
        query = qkv.new_empty(tokens, heads, size)
        before = addresses(qkv, *(norms or (None, None)))
        sizes = heads, groups, size
        self._library.eagle3_rope_write(
            *before,
            self._address_of(metadata),
            *addresses(keys, values, query),
            eps,
            *sizes,
            _threads(),
        )
        return query

    def tree_attention(
        self, query: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """As in the reference, for even d; a query that sees nothing gives zeros."""
        assert query.dtype is keys.dtype is self.dtype
        assert keys.is_contiguous() and values.is_contiguous()
        query = query.contiguous()
        mixed = torch.empty_like(query)
        _, heads, size = query.shape
        self._library.eagle3_tree_attention(
            *addresses(query, keys, values),
            self._address_of(metadata),
            mixed.data_ptr(),
            heads,
            keys.shape[1],
            size,
            _threads(),
        )
        return mixed

    def argmax(self, logits: Tensor) -> Tensor:
        if logits.dtype is not self.dtype:
            return super().argmax(logits)
        logits = logits.contiguous()
        index = torch.empty(logits.shape[:-1], dtype=torch.int64)
        sizes = index.numel(), logits.shape[-1]
        self._library.eagle3_argmax(*addresses(logits, index), *sizes, _threads())
        return index

    def propose(
        self, logits: Tensor, k: int, target_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        rows, vocabulary = logits.shape
        if logits.dtype is not self.dtype or k > min(vocabulary, self._most_proposed):
            return super().propose(logits, k, target_ids)
        logits = logits.contiguous()
        scores, index = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int64)
        self._library.eagle3_propose(
            *addresses(logits, scores, index), k, rows, vocabulary, _threads()
        )
        return scores, index if target_ids is None else target_ids[index]

    def perturb_drafts(
        self, logits: Tensor, noise: DraftNoise, target_ids: Tensor | None = None
    ) -> Tensor:
        if logits.dtype is not self.dtype:
            return super().perturb_drafts(logits, noise, target_ids)
        logits, rows = logits.contiguous(), len(noise.seeds)
        noisy = torch.empty_like(logits)
        tensors = logits, noisy, target_ids, *(each.contiguous() for each in noise)
        sizes = 0, rows, len(logits) // rows, logits.shape[-1]
        self._library.eagle3_perturb_drafts(*addresses(*tensors), *sizes, _threads())
        return noisy

    def select_beams(
        self,
        score: Tensor,
        gained: Tensor,
        proposed: Tensor,
        beam_mask: Tensor,
        hidden: Tensor,
        bits: Tensor,
    ) -> Beams:
        assert score.dtype is gained.dtype is torch.float32
        tensors = score, gained, proposed, beam_mask, hidden, bits
        inputs = [tensor.contiguous() for tensor in tensors]
        rows, k = score.shape
        best, token, selected_mask = torch.empty(3, rows, k, dtype=torch.int64).unbind()
        total, selected_score = torch.empty(rows, k * k), torch.empty(rows, k)
        selected_hidden = torch.empty_like(inputs[4])
        outputs = total, best, selected_score, token, selected_mask, selected_hidden
        bytes_each = hidden.shape[1] * hidden.element_size()
        self._library.eagle3_select_beams(*addresses(*inputs, *outputs), rows, k, bytes_each)
        return Beams(*outputs)

    def draft_beams(
        self,
        head: DraftHead,
        state: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        positions: Tensor,
        plane: Tensor,
        steps: int,
        k: int,
        trace: list[Tensor] | None = None,
        noise: DraftNoise | None = None,
    ) -> Candidates:
        vocabulary = len(head.target_ids)
        beyond = head.sliding_window or k > min(vocabulary, self._most_proposed)
        if beyond or head.stack.divided:
            cache_rows = block_table, seq_lens, positions
            return super().draft_beams(head, state, *cache_rows, plane, steps, k, trace, noise)
        tensors, norms = (
            (head.embedding, *head.rotary, state, plane),
            (head.embed_norm, head.hidden_norm),
        )
        assert all(each.dtype is self.dtype and each.is_contiguous() for each in tensors)
        assert all(each.dtype is torch.float32 for each in norms)
        block_table, seq_lens = block_table.contiguous(), seq_lens.contiguous()
        positions = positions.contiguous()
        struct = self._heads.get(head)
        if struct is None:
            layer = ctypes.addressof(self._structs_of(head.stack, plane))
            weights = addresses(head.embedding, *norms, head.target_ids)
            layers = len(head.stack.layers)
            numbers = head.norm_output, head.norm_before_residual, layers, len(head.embedding)
            struct = DraftHeadStruct(layer, head.lm_head.address, *weights, *numbers)
            self._heads[head] = struct
        rows, count = len(state), k + (steps - 1) * k * k
        cache = *head.rotary, positions, None, block_table, seq_lens, None, None, None, None
        metadata = MetadataStruct(*addresses(*cache), rows, 0, block_table.shape[1])
        tokens, parents = torch.empty(2, rows, count, dtype=torch.int64).unbind()
        scores = torch.empty(rows, count)
        beams = 1 + (steps - 1) * k if trace is not None else k
        logits = state.new_empty(rows * beams, vocabulary)
        drawing = [None] * 3 if noise is None else [each.contiguous() for each in noise]
        outside = self._library.eagle3_draft_beams(
            ctypes.addressof(struct),
            ctypes.addressof(metadata),
            *addresses(state, plane),
            plane.numel() // (2 * len(head.stack.layers)),
            *addresses(tokens, parents, scores, logits, *drawing),
            trace is not None,
            steps,
            k,
            head.stack.eps,
            _threads(),
        )
        refuse_outside(outside, len(head.embedding))
        if trace is not None:
            sizes = [rows, *[rows * k] * (steps - 1)]
            trace += [each.view(rows, -1, vocabulary) for each in torch.split(logits, sizes)]
        return Candidates(tokens, parents, scores, beam_depths(steps, k, state.device))

    def grow_tree(
        self, roots: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int
    ) -> Tree:
        assert scores.dtype is torch.float32
        inputs = [part.contiguous() for part in (roots, tokens, parents, scores)]
        rows, count = tokens.shape
        below = min(nodes - 1, count)
        grown = torch.empty(4, rows, below + 1, dtype=torch.int64).unbind()
        self._library.eagle3_grow_tree(*addresses(*inputs, *grown), rows, count, below)
        return Tree(*grown)

    def verify(self, tree: Tree, predicted: Tensor, depth: int) -> VerifyOutput:
        inputs = [part.contiguous() for part in (tree.tokens, tree.parents, predicted)]
        rows, nodes = predicted.shape
        path, emitted = torch.empty(2, rows, depth + 1, dtype=torch.int64).unbind()
        counts = torch.empty_like(path[:, 0])
        outputs = path, counts, emitted
        self._library.eagle3_verify(*addresses(*inputs, *outputs), rows, nodes, depth)
        return VerifyOutput(*outputs)

    def sample(
        self, logits: Tensor, tree: Tree, sampling: SamplingTensors, positions: Tensor, depth: int
    ) -> Tensor:
        if logits.dtype is not self.dtype:
            return super().sample(logits, tree, sampling, positions, depth)
        by_row = sampling.temperature, sampling.top_p, sampling.top_k, sampling.seeds
        tensors = logits, tree.tokens, tree.parents, positions, *by_row
        inputs = [tensor.contiguous() for tensor in tensors]
        predicted = torch.empty(logits.shape[:2], dtype=torch.int64)
        self._library.eagle3_sample(*addresses(*inputs, predicted), *logits.shape, _threads())
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
        self._library.eagle3_compact(*addresses(planes, *inputs), *plane, *branch, _threads())

    def _structs_of(self, stack: LayerStack, plane: Tensor) -> ctypes.Array[LayerStruct]:
        """Of a stack, whose keys and values go to planes like this one."""
        structs = self._stacks.get(stack)
        if structs is None:
            structs = layer_structs(stack, self.dtype, groups=plane.shape[3], size=plane.shape[5])
            self._stacks[stack] = structs
        return structs

    def _address_of(self, metadata: AttentionMetadata) -> int:
        """Of the struct of a forward's metadata, which all its layers share."""
        if self._metadata.source is not metadata:
            self._metadata = metadata_struct(metadata)
        return ctypes.addressof(self._metadata)


_PAGE = 2 << 20
_LINE = 64  # bytes of a cache line
#: What is asked for at one time, for many weights; larger ones have memory of their own.
_CHUNK = 64 << 20
_MADV_HUGEPAGE = 14  # <sys/mman.h>
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class WeightMemory:
    """Memory for weights, side by side in huge pages where the kernel gives them.

    A forward reads every weight once and nothing twice. With pages of 4 KiB that is a walk of the
    page table for every 64 cache lines, with pages of 2 MiB one for every 32,768. Weights are
    pieces of chunks; a chunk is freed with the last piece of it.
    """

    def __init__(self) -> None:
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def empty(self, size: int) -> Tensor:
        """`size` bytes, aligned to cache lines."""
        if size > _CHUNK // 4:
            return _huge_pages(size)[:size]
        if self._used + size > len(self._chunk):
            self._chunk, self._used = _huge_pages(_CHUNK), 0
        piece = self._chunk[self._used : self._used + size]
        self._used += -(-size // _LINE) * _LINE
        return piece


def _huge_pages(size: int) -> Tensor:
    """At least `size` bytes that begin and end with a huge page."""
    size = -(-size // _PAGE) * _PAGE
    memory = torch.empty(size + _PAGE, dtype=torch.uint8)
    first = -memory.data_ptr() % _PAGE
    # Where the kernel has no huge pages, small ones do.
    _madvise(memory.data_ptr() + first, size, _MADV_HUGEPAGE)
    return memory[first : first + size]
