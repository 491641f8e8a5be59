"""The decoder's operations as Triton kernels: outputs, block sizes and grids; the kernels are in `kernels/`.

Made for CUDA graphs: grids and allocations follow from shapes alone, and nothing waits for the device.
Block sizes, warps and stages are fixed by shape and type, never tuned at run time, so that a graph
captured today does the same arithmetic tomorrow.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pipeline.decoder.ops.base import PAGE, TorchOps
from pipeline.decoder.ops.triton.activation import silu_mul_kernel
from pipeline.decoder.ops.triton.argmax import argmax_join_kernel, argmax_part_kernel
from pipeline.decoder.ops.triton.attention import merge_splits_kernel, tree_attention_kernel
from pipeline.decoder.ops.triton.compact import compact_kernel
from pipeline.decoder.ops.triton.language import INTERPRETED, power_of_two
from pipeline.decoder.ops.triton.norm import add_rms_norm_kernel
from pipeline.decoder.ops.triton.proposal import propose_join_kernel, propose_part_kernel
from pipeline.decoder.ops.triton.rope import rope_write_kernel
from pipeline.decoder.ops.triton.sampling import sample_kernel
from pipeline.decoder.ops.triton.tree import grow_tree_kernel, verify_kernel
from pipeline.decoder.tree import WINDOW, SamplingTensors, Tree, VerifyOutput, root_only

assert PAGE == WINDOW, "the attention kernel shifts a page's worth of bits"

#: About two programs for each multiprocessor of a large GPU: where a batch offers fewer, its keys are split.
_ENOUGH_PROGRAMS = 256
#: More splits than this cost more in the merge than they win.
_MOST_SPLITS = 64
#: A split shorter than this would not hide the time that its first page takes to arrive.
_LEAST_PAGES = 2
#: Candidates for top-k and top-p lie this far below the largest scaled logit, at first: e^-16 of its mass.
_NEAR = 16.0


class TritonOps(TorchOps):
    """Kernels for everything but matrix products, which stay with cuBLAS.

    Tensors are contiguous unless their strides are named: cache planes and page tables may be slices.
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
        self._launch(
            add_rms_norm_kernel,
            (count,),
            (x, x if update is None else update, weight, normed, total, eps),
            warps=min(16, max(1, block // 512)),
            SIZE=size,
            BLOCK=block,
            HAS_UPDATE=update is not None,
        )
        return normed, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        count, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(count, size)
        # Eight values a thread: one 16-byte load of bfloat16 from each half.
        block = min(1024, power_of_two(size))
        self._launch(
            silu_mul_kernel,
            (count, -(-size // block)),
            (gate_up, out),
            warps=4,
            SIZE=size,
            BLOCK=block,
        )
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
        groups, size = keys.shape[1], keys.shape[3]
        heads = qkv.shape[1] // size - 2 * groups
        query = qkv.new_empty(len(qkv), heads, size)
        query_gain, key_gain = (qkv, qkv) if norms is None else norms
        assert keys.stride() == values.stride() and keys.stride(3) == 1
        self._launch(
            rope_write_kernel,
            (len(qkv), -(-(heads + 2 * groups) // 4)),
            (
                qkv,
                query_gain,
                key_gain,
                eps,
                *rotary,
                positions,
                slots,
                query,
                keys,
                values,
                *keys.stride()[:3],
            ),
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
        table: Tensor,
        starts: Tensor,
        visible: Tensor | None,
    ) -> Tensor:
        rows, count, heads, size = query.shape
        groups, pages = keys.shape[1], table.shape[1]
        folded = count * (heads // groups)
        # bfloat16: as many rows as tensor cores take at once, so that a page is read by few programs.
        # float32 has no exact tensor cores; its products unroll into registers, which 16 rows do not overflow.
        narrow = query.dtype != torch.float32
        block = min(128, power_of_two(folded, 16)) if narrow else 16
        dim = power_of_two(size, 16)
        tiles = -(-folded // block)
        splits = split_count(tiles * rows * groups, pages)
        out = torch.empty_like(query)
        partial = (
            out
            if splits == 1
            else query.new_empty(splits, rows * groups, folded, size, dtype=torch.float32)
        )
        masses = (
            out
            if splits == 1
            else query.new_empty(splits, rows * groups, folded, dtype=torch.float32)
        )
        assert keys.stride() == values.stride() and keys.stride(3) == 1 and table.stride(1) == 1
        arrays = (
            query,
            keys,
            values,
            table,
            starts,
            starts if visible is None else visible,
            out,
            partial,
            masses,
        )
        self._launch(
            tree_attention_kernel,
            (tiles, rows * groups, splits),
            (
                *arrays,
                math.log2(math.e) * size**-0.5,
                count,
                pages,
                splits,
                *keys.stride()[:3],
                table.stride(0),
            ),
            warps=8 if block == 128 or not narrow else 4,
            # Half the stages fetch page numbers, half the pages: two pages in flight, 32 KiB each in bfloat16
            # at d = 128. float32 is for checks, and one page of it fills the room of two.
            stages=5 if narrow else 2,
            GROUPS=groups,
            SHARED=heads // groups,
            DIM=size,
            PAGE=PAGE,
            LEAST_PAGES=_LEAST_PAGES,
            ROWS_BLOCK=block,
            DIM_BLOCK=dim,
            CAUSAL=visible is None,
            SPLIT=splits > 1,
            WIDEN=INTERPRETED,
        )
        if splits > 1:
            blocks = {"DIM_BLOCK": dim, "SPLITS_BLOCK": power_of_two(splits)}
            shape = {"GROUPS": groups, "SHARED": heads // groups, "DIM": size}
            self._launch(
                merge_splits_kernel,
                (folded, rows * groups),
                (partial, masses, out, count, splits),
                warps=4,
                **shape,
                **blocks,
            )
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        size = logits.shape[-1]
        rows = logits.numel() // size
        block = min(4096, power_of_two(size))
        parts = -(-size // block)
        keys = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
        index = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
        self._launch(argmax_part_kernel, (rows, parts), (logits, keys, size), warps=8, BLOCK=block)
        self._launch(
            argmax_join_kernel,
            (rows,),
            (keys, index, parts),
            warps=1,
            PARTS_BLOCK=power_of_two(parts),
        )
        return index

    def propose(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        rows, size = logits.shape
        # Short blocks: finding k in a block takes k passes over its registers, and blocks run side by side.
        block = max(min(2048, power_of_two(size)), power_of_two(k))
        parts = -(-size // block)
        keys = torch.empty(rows, parts, k, dtype=torch.int64, device=logits.device)
        peaks, masses = torch.empty(2, rows, parts, dtype=torch.float32, device=logits.device)
        scores = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
        index = torch.empty(rows, k, dtype=torch.int64, device=logits.device)
        self._launch(
            propose_part_kernel,
            (rows, parts),
            (logits, keys, peaks, masses, size),
            warps=4,
            K=k,
            BLOCK=block,
        )
        blocks = {"PARTS_BLOCK": power_of_two(parts), "KEYS_BLOCK": power_of_two(parts * k)}
        self._launch(
            propose_join_kernel,
            (rows,),
            (keys, peaks, masses, scores, index, parts),
            warps=4,
            K=k,
            **blocks,
        )
        return scores, index

    def grow_tree(
        self, roots: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int
    ) -> Tree:
        rows, count = tokens.shape
        kept = min(nodes - 1, count)
        if kept == 0:
            return root_only(roots)
        tree = Tree(
            *(torch.empty(rows, kept + 1, dtype=torch.int64, device=roots.device) for _ in range(4))
        )
        arrays = (
            roots,
            tokens,
            parents,
            scores,
            tree.tokens,
            tree.parents,
            tree.ancestors,
            tree.depth,
        )
        self._launch(
            grow_tree_kernel,
            (rows,),
            (*arrays, count),
            warps=4,
            KEPT=kept,
            BLOCK=power_of_two(count),
        )
        return tree

    def verify(self, tree: Tree, predicted: Tensor, depth: int) -> VerifyOutput:
        rows, nodes = tree.tokens.shape
        path, emitted = torch.empty(2, rows, depth + 1, dtype=torch.int64, device=predicted.device)
        counts = torch.empty(rows, dtype=torch.int64, device=predicted.device)
        arrays = (tree.tokens, tree.parents, predicted, path, counts, emitted)
        # One warp: its reductions need no shared memory.
        self._launch(
            verify_kernel,
            (rows,),
            (*arrays, nodes, depth + 1),
            warps=1,
            NODES_BLOCK=power_of_two(nodes),
        )
        return VerifyOutput(path, counts, emitted)

    def sample(
        self, logits: Tensor, tree: Tree, sampling: SamplingTensors, positions: Tensor, depth: int
    ) -> Tensor:
        rows, nodes, size = logits.shape
        predicted = torch.empty(rows, nodes, dtype=torch.int64, device=logits.device)
        values = torch.empty(rows, size, dtype=torch.float32, device=logits.device)
        index = torch.empty(rows, size, dtype=torch.int32, device=logits.device)
        arrays = (
            logits,
            tree.tokens,
            tree.parents,
            positions,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.seeds,
        )
        self._launch(
            sample_kernel,
            (rows,),
            (*arrays, values, index, predicted, nodes, size, depth + 1),
            warps=16,  # a row has one multiprocessor to itself: this keeps it busy at four values a thread
            NEAR=_NEAR,
            NODES_BLOCK=power_of_two(nodes),
            BLOCK=min(2048, power_of_two(size)),
            WAYS=4,
        )
        return predicted

    def draw(self, logits: Tensor, sampling: SamplingTensors, positions: Tensor) -> Tensor:
        return self.sample(
            logits[:, None], root_only(torch.zeros_like(positions)), sampling, positions[:, None], 0
        )[:, 0]

    def compact(self, planes: Tensor, table: Tensor, starts: Tensor, path: Tensor) -> None:
        layers, sides, _, groups, _, size = planes.shape
        rows, moved = path.shape
        assert planes.stride(5) == 1 and table.stride(1) == 1
        self._launch(
            compact_kernel,
            (layers * sides, rows, groups),
            (planes, table, starts, path, moved, *planes.stride()[:5], table.stride(0)),
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
        """Every kernel starts here; ahead-of-time compilation listens in its place."""
        kernel[grid](*arguments, **constants, num_warps=warps, num_stages=stages)


def split_count(programs: int, pages: int) -> int:
    """Into how many parts to split the keys of `programs` problems whose tables are `pages` wide; a matter of shapes alone."""
    return max(1, min(_ENOUGH_PROGRAMS // programs, _MOST_SPLITS, pages // _LEAST_PAGES))
