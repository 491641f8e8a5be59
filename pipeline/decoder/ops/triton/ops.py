"""The decoder's operations as Triton kernels: outputs, block sizes and grids of each launch.

Made for CUDA graphs: grids and allocations follow from shapes alone, and nothing waits for the
device. Block sizes, warps and stages are fixed by shape and type, never tuned at run time, so that
a graph captured today does the same arithmetic tomorrow.

What is compiled depends on the model, the tree and the width of the block table. The lengths of
prompts, positions and slots compile nothing: a prompt of one token and a long one warm them all.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pipeline.decoder.ops.layer import PAGE, AttentionMetadata
from pipeline.decoder.ops.tree import WINDOW, Beams, SamplingTensors, Tree, VerifyOutput, root_only
from pipeline.decoder.ops.triton.attention import merge_chunks_kernel, tree_attention_kernel
from pipeline.decoder.ops.triton.launch import INTERPRETED, Launcher, power_of_two
from pipeline.decoder.ops.triton.layers import (
    add_rms_norm_kernel,
    compact_kernel,
    embed_concat_kernel,
    rope_write_kernel,
    silu_mul_kernel,
)
from pipeline.decoder.ops.triton.logits import (
    argmax_join_kernel,
    argmax_part_kernel,
    draw_part_kernel,
    propose_join_kernel,
    propose_part_kernel,
    threshold_kernel,
)
from pipeline.decoder.ops.triton.tree import grow_tree_kernel, select_beams_kernel, verify_kernel

#: Candidates for top-k and top-p lie this far below the largest scaled logit, at first: e^-16 of
#: its mass.
NEAR = 16.0
#: As many of them are copied beside each other at most.
CAPACITY = 16384
#: Rows of more tokens than this are not cut into chunks: their tiles are enough programs.
MOST_SPLIT = WINDOW
# Attention's floor is the cache: 2 · G · d values an entry, read once for all nodes of a tree. At
# 8 groups, d = 128 in bfloat16 these are 4 KiB; 8192 entries take an H100 (3.35 TB/s) 10 us a
# layer. One multiprocessor loads 25 GB/s of that, two pages in flight; a chunk of two pages is
# 64 KiB a group.
LEAST_CHUNK = 2
# Each of its folded queries (GROUP_SIZE a node) leaves d numbers in float32, written once and read
# once. At eight of them a page these are a quarter of the keys and values that a chunk reads.
QUERIES_A_PAGE = 8
#: More chunks of a row than this cost more in the merge than they win; long rows have longer ones.
MOST_CHUNKS = 32

assert PAGE == WINDOW, "the attention kernel shifts a page's worth of bits"


class TritonOps(Launcher):
    """Kernels for everything but matrix products, which stay with cuBLAS.

    Cache planes and block tables may be slices, of which the strides are passed on. All else is
    contiguous, or is copied.
    """

    def scratch_bytes(self, rows: int, query_len: int, heads: int, size: int, drawn: int) -> int:
        queries = rows * min(query_len, MOST_SPLIT) * heads
        return 4 * MOST_CHUNKS * queries * (size + 1) + drawn * CAPACITY * self.dtype.itemsize

    def add_rms_norm(
        self, x: Tensor, update: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        count, size = x.shape
        x = x.contiguous()
        normed = x.new_empty(x.shape)
        total = x if update is None else x.new_empty(x.shape)
        block = power_of_two(size)
        arguments = x, x if update is None else update.contiguous(), weight, normed, total, eps
        self._launch(
            add_rms_norm_kernel, (count,), arguments, _norm_warps(block),
            SIZE=size, BLOCK=block, HAS_UPDATE=update is not None,
        )  # fmt: skip
        return normed, total

    def embed_concat(
        self,
        tokens: Tensor,
        embedding: Tensor,
        hidden: Tensor,
        embed_norm: Tensor,
        hidden_norm: Tensor,
        eps: float,
    ) -> Tensor:
        count, size = hidden.shape
        out = hidden.new_empty(count, 2 * size)
        inputs = tokens.contiguous(), embedding, hidden.contiguous(), embed_norm, hidden_norm
        block = power_of_two(size)
        self._launch(
            embed_concat_kernel, (count, 2), (*inputs, out, eps), _norm_warps(block),
            SIZE=size, BLOCK=block,
        )  # fmt: skip
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        count, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(count, size)
        # Eight values a thread: one 16-byte load of bfloat16 from each half.
        block = min(1024, power_of_two(size))
        grid, arguments = (count, -(-size // block)), (gate_up.contiguous(), out)
        self._launch(silu_mul_kernel, grid, arguments, warps=4, SIZE=size, BLOCK=block)
        return out

    def rope_write(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        metadata: AttentionMetadata,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        assert keys.stride() == values.stride() and keys.stride(3) == 1
        qkv, (groups, size) = qkv.contiguous(), (keys.shape[1], keys.shape[3])
        heads = qkv.shape[1] // size - 2 * groups
        query = qkv.new_empty(len(qkv), heads, size)
        gains = (qkv, qkv) if norms is None else norms
        inputs = qkv, *gains, eps, *metadata.rotary, metadata.positions, metadata.slot_mapping
        self._launch(
            rope_write_kernel,
            (len(qkv), -(-(heads + 2 * groups) // 4)),
            (*inputs, query, keys, values, *keys.stride()[:3]),
            warps=1,  # four heads, a few kilobytes: more warps would only wait
            strided=(keys, values),
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
        self, query: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        block_table, mask = metadata.block_table, metadata.mask
        assert keys.stride() == values.stride() and keys.stride(3) == 1
        assert block_table.stride(1) == 1
        query, (_, heads, size) = query.contiguous(), query.shape
        (rows, pages), groups, max_query_len = (
            block_table.shape,
            keys.shape[1],
            metadata.max_query_len,
        )
        group, causal = heads // groups, mask is None
        block = tile_rows(max_query_len * group, query.dtype, causal=causal)
        room = min(MOST_CHUNKS, -(-pages // LEAST_CHUNK))
        if rows == 1 and len(query) > MOST_SPLIT:
            room = 1  # this row is not cut
        most = min(max_query_len, MOST_SPLIT)  # tokens of a row that is cut
        parts = (room, rows * groups, most * group) if room > 1 else (0,)
        partial = query.new_empty(*parts, size, dtype=torch.float32)
        lse, out = partial.new_empty(parts), query.new_empty(query.shape)
        lengths = metadata.seq_lens, metadata.cu_seqlens_q
        optional = [lengths[0] if each is None else each for each in (mask, metadata.first_seen)]
        inputs = query, keys, values, block_table, *lengths, *optional
        cuts = pages, most
        shape: dict[str, Any] = {
            "GROUPS": groups,
            "GROUP_SIZE": group,
            "DIM": size,
            "PAGE": PAGE,
            "MOST_SPLIT": MOST_SPLIT,
            "LEAST_CHUNK": LEAST_CHUNK,
            "QUERIES_A_PAGE": QUERIES_A_PAGE,
            "DIM_BLOCK": power_of_two(size, 16),
            "CAUSAL": causal,
        }
        narrow = query.dtype != torch.float32
        scale, strides = math.log2(math.e) * size**-0.5, keys.stride()[:3]
        self._launch(
            tree_attention_kernel,
            (-(-max_query_len * group // block), rows * groups, room),
            (*inputs, out, partial, lse, scale, *cuts, *strides, block_table.stride(0)),
            warps=8 if block == 128 or not narrow else 4,
            # Two programs share a multiprocessor, and so does their shared memory: with two pages
            # of 32 KiB in flight (bfloat16, d = 128) a program of 64 rows takes 81 KiB of 113 on an
            # H100, and 56 of 81 on an A100. A third page would leave one program alone.
            stages=4 if narrow else 2,
            strided=(keys, values, block_table),
            **shape,
            ROWS_BLOCK=block,
            SLIDING=metadata.first_seen is not None,
            WIDEN=INTERPRETED,
        )
        if room > 1:
            self._launch(
                merge_chunks_kernel, (most * group, rows * groups),
                (partial, lse, out, *lengths, *cuts, room),
                warps=4, **shape, CHUNKS_BLOCK=power_of_two(room),
            )  # fmt: skip
        return out

    def compact(self, planes: Tensor, block_table: Tensor, seq_lens: Tensor, path: Tensor) -> None:
        assert planes.stride(5) == 1 and block_table.stride(1) == 1
        layers, sides, _, groups, _, size = planes.shape
        rows, moved = path.shape
        strides = *planes.stride()[:5], block_table.stride(0)
        self._launch(
            compact_kernel,
            (layers * sides, rows, groups),
            (planes, block_table, seq_lens.contiguous(), path.contiguous(), moved, *strides),
            warps=1 if moved <= 16 else 4,
            strided=(planes, block_table),
            GROUPS=groups,
            DIM=size,
            PAGE=PAGE,
            MOVED_BLOCK=power_of_two(moved),
            DIM_BLOCK=power_of_two(size),
        )

    def argmax(self, logits: Tensor) -> Tensor:
        size = logits.shape[-1]
        rows = logits.numel() // size
        block = min(4096, power_of_two(size))
        parts = -(-size // block)
        keys = _int64(rows, parts, like=logits)
        arguments = logits.contiguous(), keys
        self._launch(argmax_part_kernel, (rows, parts), arguments, warps=8, SIZE=size, BLOCK=block)
        return self._join(keys).view(logits.shape[:-1])

    def propose(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        rows, size = logits.shape
        # Short blocks: finding k in a block takes k passes over its registers, and blocks run side
        # by side.
        block = max(min(2048, power_of_two(size)), power_of_two(k))
        parts = -(-size // block)
        keys, index = _int64(rows, parts, k, like=logits), _int64(rows, k, like=logits)
        peaks, masses = torch.empty(2, rows, parts, dtype=torch.float32, device=logits.device)
        scores = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
        by_part = keys, peaks, masses
        self._launch(
            propose_part_kernel, (rows, parts), (logits.contiguous(), *by_part), warps=4,
            SIZE=size, K=k, BLOCK=block,
        )  # fmt: skip
        self._launch(
            propose_join_kernel, (rows,), (*by_part, scores, index, parts), warps=4,
            K=k, PARTS_BLOCK=power_of_two(parts), KEYS_BLOCK=power_of_two(parts * k),
        )  # fmt: skip
        return scores, index

    def select_beams(
        self,
        score: Tensor,
        gained: Tensor,
        proposed: Tensor,
        beam_mask: Tensor,
        hidden: Tensor,
        bits: Tensor,
    ) -> Beams:
        (rows, k), size = score.shape, hidden.shape[1]
        inputs = (score, gained, proposed, beam_mask, hidden, bits)
        beams = Beams(
            total=score.new_empty(rows, k * k),
            best=_int64(rows, k, like=score),
            score=score.new_empty(rows, k),
            token=_int64(rows, k, like=score),
            beam_mask=_int64(rows, k, like=score),
            hidden=hidden.new_empty(rows * k, size),
        )
        outputs = beams.total, beams.best, beams.score, beams.token, beams.beam_mask, beams.hidden
        self._launch(
            select_beams_kernel,
            (rows, k),
            (*(part.contiguous() for part in inputs), *outputs),
            warps=4,
            K=k,
            SIZE=size,
            BLOCK=power_of_two(k * k),
            SIZE_BLOCK=power_of_two(size),
        )
        return beams

    def grow_tree(
        self, roots: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int
    ) -> Tree:
        rows, count = tokens.shape
        below = min(nodes - 1, count)
        if below == 0:
            return root_only(roots)
        tree = Tree(*(_int64(rows, below + 1, like=roots) for _ in range(4)))
        candidates = (part.contiguous() for part in (roots, tokens, parents, scores))
        grown = tree.tokens, tree.parents, tree.tree_mask, tree.depth
        self._launch(
            grow_tree_kernel, (rows,), (*candidates, *grown, count),
            warps=4, SELECTED=below, BLOCK=power_of_two(count),
        )  # fmt: skip
        return tree

    def verify(self, tree: Tree, predicted: Tensor, depth: int) -> VerifyOutput:
        rows, nodes = predicted.shape
        assert predicted.shape == tree.tokens.shape
        path, emitted = _int64(2, rows, depth + 1, like=predicted)
        counts = _int64(rows, like=predicted)
        inputs = (part.contiguous() for part in (tree.tokens, tree.parents, predicted))
        self._launch(
            verify_kernel, (rows,), (*inputs, path, counts, emitted, nodes, depth + 1),
            warps=1,  # its reductions need no shared memory then
            NODES_BLOCK=power_of_two(nodes),
        )  # fmt: skip
        return VerifyOutput(path, counts, emitted)

    def sample(
        self, logits: Tensor, tree: Tree, sampling: SamplingTensors, positions: Tensor, depth: int
    ) -> Tensor:
        rows, nodes, size = logits.shape
        logits = logits.contiguous()
        block = min(4096, power_of_two(size, 4))
        parts, capacity = -(-size // block), min(CAPACITY, power_of_two(size))
        threshold = torch.empty(rows, nodes, dtype=torch.float32, device=logits.device)
        scratch = logits.new_empty(rows * nodes, capacity)
        filters = sampling.temperature, sampling.top_p, sampling.top_k
        self._launch(
            threshold_kernel,
            (rows * nodes,),
            (logits, *filters, scratch, threshold, nodes),
            # A node has one multiprocessor to itself: this keeps it busy at four values a thread.
            warps=16,
            SIZE=size,
            CAPACITY=capacity,
            NEAR=NEAR,
            BLOCK=min(2048, power_of_two(size)),
            WAYS=4,
        )
        keys = _int64(rows * nodes, parts, like=logits)
        drawn = sampling.temperature, sampling.seeds, positions.contiguous(), keys, nodes
        self._launch(
            draw_part_kernel, (rows * nodes, parts), (logits, threshold, *drawn), warps=8,
            SIZE=size, BLOCK=block,
        )  # fmt: skip
        return self._join(keys).view(rows, nodes)

    def draw(self, logits: Tensor, sampling: SamplingTensors, positions: Tensor) -> Tensor:
        tree = root_only(positions)
        return self.sample(logits[:, None], tree, sampling, positions[:, None], 0)[:, 0]

    def _join(self, keys: Tensor) -> Tensor:
        """keys [rows, parts] → the index of each row's largest key, -1 for a NaN's."""
        rows, parts = keys.shape
        index, block = _int64(rows, like=keys), power_of_two(parts)
        self._launch(argmax_join_kernel, (rows,), (keys, index, parts), warps=1, PARTS_BLOCK=block)
        return index


def tile_rows(folded: int, dtype: torch.dtype, *, causal: bool) -> int:
    """Folded queries of one program, of at most `folded` a row and group.

    bfloat16: as many as tensor cores take at once, so that few programs read a page. A tree has one
    shape; chunks of prompts come in every length, which must not compile anything. float32 has no
    exact tensor cores; its products unroll into registers, which 16 rows do not overflow.
    """
    if dtype == torch.float32:
        return 16
    return 64 if causal else min(128, power_of_two(folded, 16))


def chunks_of(used: int, folded: int = 1) -> tuple[int, int]:
    """Into how many chunks a row of `used` pages and `folded` queries a key/value head is cut, and
    their pages, as the kernel does it."""
    chunk = LEAST_CHUNK
    while chunk * MOST_CHUNKS < used or chunk * QUERIES_A_PAGE < folded:
        chunk *= 2
    return max(-(-used // chunk), 1), chunk


def _norm_warps(block: int) -> int:
    """A row stays in registers: 16 values a thread up to H = 8192, more only beyond."""
    return min(16, max(1, block // 512))


def _int64(*shape: int, like: Tensor) -> Tensor:
    """An empty tensor of integers beside `like`."""
    return torch.empty(shape, dtype=torch.int64, device=like.device)
