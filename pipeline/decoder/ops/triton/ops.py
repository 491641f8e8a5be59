"""The decoder's operations as Triton kernels: outputs, block sizes and grids of each launch.

Made for CUDA graphs: grids and allocations follow from shapes alone, and nothing waits for the
device. Block sizes, warps and stages are fixed by shape and type, never tuned at run time, so that
a graph captured today does the same arithmetic tomorrow.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pipeline.decoder.ops.base import PAGE, TorchOps
from pipeline.decoder.ops.triton.attention import merge_splits_kernel, tree_attention_kernel
from pipeline.decoder.ops.triton.kv import compact_kernel, rope_write_kernel
from pipeline.decoder.ops.triton.language import INTERPRETED, power_of_two
from pipeline.decoder.ops.triton.rows import add_rms_norm_kernel, silu_mul_kernel
from pipeline.decoder.ops.triton.sampling import sample_kernel
from pipeline.decoder.ops.triton.top_k import (
    argmax_join_kernel,
    argmax_part_kernel,
    propose_join_kernel,
    propose_part_kernel,
)
from pipeline.decoder.ops.triton.tree import grow_tree_kernel, verify_kernel
from pipeline.decoder.tree import WINDOW, SamplingTensors, Tree, VerifyOutput, root_only

assert PAGE == WINDOW, "the attention kernel shifts a page's worth of bits"

#: About two programs for each multiprocessor of a large GPU: a batch that offers fewer has its keys
#: split.
_ENOUGH_PROGRAMS = 256
#: More splits than this cost more in the merge than they win.
_MOST_SPLITS = 64
#: A split shorter than this would not hide the time that its first page takes to arrive.
_LEAST_PAGES = 2
#: Candidates for top-k and top-p lie this far below the largest scaled logit, at first: e^-16 of
#: its mass.
_NEAR = 16.0


class TritonOps(TorchOps):
    """Kernels for everything but matrix products, which stay with cuBLAS.

    Tensors are contiguous unless their strides are named: cache planes and block tables may be
    slices.
    """

    name = "triton"

    def add_rms_norm(
        self, x: Tensor, update: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        count, size = x.shape
        normed = torch.empty_like(x)
        total = x if update is None else torch.empty_like(x)
        block = power_of_two(size)
        # A row stays in registers: 16 values a thread up to H = 8192, more only beyond.
        warps = min(16, max(1, block // 512))
        arguments = x, x if update is None else update, weight, normed, total, eps
        self._launch(
            add_rms_norm_kernel, (count,), arguments, warps,
            SIZE=size, BLOCK=block, HAS_UPDATE=update is not None,
        )  # fmt: skip
        return normed, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        count, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(count, size)
        # Eight values a thread: one 16-byte load of bfloat16 from each half.
        block = min(1024, power_of_two(size))
        grid = count, -(-size // block)
        self._launch(silu_mul_kernel, grid, (gate_up, out), warps=4, SIZE=size, BLOCK=block)
        return out

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
        assert keys.stride() == values.stride() and keys.stride(3) == 1
        groups, size = keys.shape[1], keys.shape[3]
        heads = qkv.shape[1] // size - 2 * groups
        query = qkv.new_empty(len(qkv), heads, size)
        gains = (qkv, qkv) if norms is None else norms
        inputs = qkv, *gains, eps, *rotary, positions, slots
        self._launch(
            rope_write_kernel,
            (len(qkv), -(-(heads + 2 * groups) // 4)),
            (*inputs, query, keys, values, *keys.stride()[:3]),
            warps=1,  # four heads, a few kilobytes: more warps would only wait
            QUERY_HEADS=heads,
            GROUPS=groups,
            HALF=size // 2,
            PAGE=PAGE,
            HEADS_BLOCK=4,
            HALF_BLOCK=power_of_two(size // 2),
            NORMS=norms is not None,
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
        assert keys.stride() == values.stride() and keys.stride(3) == 1
        assert block_table.stride(1) == 1
        rows, count, heads, size = query.shape
        groups, pages = keys.shape[1], block_table.shape[1]
        folded = count * (heads // groups)
        # bfloat16: as many rows as tensor cores take at once, so that few programs read a page.
        # float32 has no exact tensor cores; its products unroll into registers, which 16 rows do
        # not overflow.
        narrow = query.dtype != torch.float32
        block = min(128, power_of_two(folded, 16)) if narrow else 16
        dim = power_of_two(size, 16)
        tiles = -(-folded // block)
        splits = split_count(tiles * rows * groups, pages)
        out = partial = lse = torch.empty_like(query)
        if splits > 1:
            partial = query.new_empty(splits, rows * groups, folded, size, dtype=torch.float32)
            lse = query.new_empty(splits, rows * groups, folded, dtype=torch.float32)
        inputs = query, keys, values, block_table, seq_lens, seq_lens if mask is None else mask
        scale = math.log2(math.e) * size**-0.5
        strides = *keys.stride()[:3], block_table.stride(0)
        shape = {"GROUPS": groups, "GROUP_SIZE": heads // groups, "DIM": size, "DIM_BLOCK": dim}
        self._launch(
            tree_attention_kernel,
            (tiles, rows * groups, splits),
            (*inputs, out, partial, lse, scale, count, pages, splits, *strides),
            warps=8 if block == 128 or not narrow else 4,
            # Half the stages fetch page numbers, half the pages: two pages in flight, 32 KiB each
            # in bfloat16 at d = 128. float32 is for checks, and one page of it takes the space of
            # two.
            stages=5 if narrow else 2,
            **shape,
            PAGE=PAGE,
            LEAST_PAGES=_LEAST_PAGES,
            ROWS_BLOCK=block,
            CAUSAL=mask is None,
            SPLIT=splits > 1,
            WIDEN=INTERPRETED,
        )
        if splits > 1:
            self._launch(
                merge_splits_kernel, (folded, rows * groups), (partial, lse, out, count, splits),
                warps=4, **shape, SPLITS_BLOCK=power_of_two(splits),
            )  # fmt: skip
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        size = logits.shape[-1]
        rows = logits.numel() // size
        block = min(4096, power_of_two(size))
        parts = -(-size // block)
        joined = power_of_two(parts)
        keys = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
        index = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
        self._launch(argmax_part_kernel, (rows, parts), (logits, keys, size), warps=8, BLOCK=block)
        self._launch(argmax_join_kernel, (rows,), (keys, index, parts), warps=1, PARTS_BLOCK=joined)
        return index

    def propose(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        rows, size = logits.shape
        # Short blocks: finding k in a block takes k passes over its registers, and blocks run side
        # by side.
        block = max(min(2048, power_of_two(size)), power_of_two(k))
        parts = -(-size // block)
        keys = torch.empty(rows, parts, k, dtype=torch.int64, device=logits.device)
        peaks, masses = torch.empty(2, rows, parts, dtype=torch.float32, device=logits.device)
        scores = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
        index = torch.empty(rows, k, dtype=torch.int64, device=logits.device)
        by_part = keys, peaks, masses
        self._launch(
            propose_part_kernel, (rows, parts), (logits, *by_part, size), warps=4, K=k, BLOCK=block
        )
        self._launch(
            propose_join_kernel, (rows,), (*by_part, scores, index, parts), warps=4,
            K=k, PARTS_BLOCK=power_of_two(parts), KEYS_BLOCK=power_of_two(parts * k),
        )  # fmt: skip
        return scores, index

    def grow_tree(
        self, roots: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int
    ) -> Tree:
        rows, count = tokens.shape
        kept = min(nodes - 1, count)
        if kept == 0:
            return root_only(roots)
        shape = rows, kept + 1
        tree = Tree(*(torch.empty(shape, dtype=torch.int64, device=roots.device) for _ in range(4)))
        grown = tree.tokens, tree.parents, tree.ancestors, tree.depth
        self._launch(
            grow_tree_kernel, (rows,), (roots, tokens, parents, scores, *grown, count),
            warps=4, KEPT=kept, BLOCK=power_of_two(count),
        )  # fmt: skip
        return tree

    def verify(self, tree: Tree, predicted: Tensor, depth: int) -> VerifyOutput:
        rows, nodes = tree.tokens.shape
        path, emitted = torch.empty(2, rows, depth + 1, dtype=torch.int64, device=predicted.device)
        counts = torch.empty(rows, dtype=torch.int64, device=predicted.device)
        arrays = tree.tokens, tree.parents, predicted, path, counts, emitted
        self._launch(
            verify_kernel, (rows,), (*arrays, nodes, depth + 1),
            warps=1,  # its reductions need no shared memory then
            NODES_BLOCK=power_of_two(nodes),
        )  # fmt: skip
        return VerifyOutput(path, counts, emitted)

    def sample(
        self, logits: Tensor, tree: Tree, sampling: SamplingTensors, positions: Tensor, depth: int
    ) -> Tensor:
        rows, nodes, size = logits.shape
        predicted = torch.empty(rows, nodes, dtype=torch.int64, device=logits.device)
        values = torch.empty(rows, size, dtype=torch.float32, device=logits.device)
        index = torch.empty(rows, size, dtype=torch.int32, device=logits.device)
        by_row = sampling.temperature, sampling.top_p, sampling.top_k, sampling.seeds
        inputs = logits, tree.tokens, tree.parents, positions, *by_row
        self._launch(
            sample_kernel,
            (rows,),
            (*inputs, values, index, predicted, nodes, size, depth + 1),
            # A row has one multiprocessor to itself: this keeps it busy at four values a thread.
            warps=16,
            NEAR=_NEAR,
            NODES_BLOCK=power_of_two(nodes),
            BLOCK=min(2048, power_of_two(size)),
            WAYS=4,
        )
        return predicted

    def draw(self, logits: Tensor, sampling: SamplingTensors, positions: Tensor) -> Tensor:
        tree = root_only(torch.zeros_like(positions))
        return self.sample(logits[:, None], tree, sampling, positions[:, None], 0)[:, 0]

    def compact(self, planes: Tensor, block_table: Tensor, seq_lens: Tensor, path: Tensor) -> None:
        assert planes.stride(5) == 1 and block_table.stride(1) == 1
        layers, sides, _, groups, _, size = planes.shape
        rows, moved = path.shape
        strides = *planes.stride()[:5], block_table.stride(0)
        self._launch(
            compact_kernel,
            (layers * sides, rows, groups),
            (planes, block_table, seq_lens, path, moved, *strides),
            warps=1 if moved <= 16 else 4,
            GROUPS=groups,
            DIM=size,
            PAGE=PAGE,
            MOVED_BLOCK=power_of_two(moved),
            DIM_BLOCK=power_of_two(size),
        )

    def _launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        warps: int,
        stages: int = 1,
        **constants: Any,
    ) -> None:
        """Every kernel starts here; ahead-of-time compilation records the launch instead."""
        kernel[grid](*arguments, **constants, num_warps=warps, num_stages=stages)


def split_count(programs: int, pages: int) -> int:
    """Into how many parts the keys of `programs` problems over `pages` pages are split."""
    return max(1, min(_ENOUGH_PROGRAMS // programs, _MOST_SPLITS, pages // _LEAST_PAGES))
