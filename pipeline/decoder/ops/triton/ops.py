"""The decoder's operations as Triton kernels: outputs, block sizes and grids of each launch.

Made for CUDA graphs: grids and allocations follow from shapes alone, and nothing waits for the
device. Block sizes, warps and stages are fixed by shape and type, never tuned at run time, so that
a graph captured today does the same arithmetic tomorrow.

What is compiled depends on the model, the tree and the width of the block table. The lengths of
prompts, positions and slots compile nothing more than those of `warm_up_lengths` and a long one.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.decoder.ops.draft import Candidates, DraftNoise
from pipeline.decoder.ops.layer import (
    PAGE,
    AttentionMetadata,
    Float8Rows,
    LayerStack,
    LayerWeights,
    Packed,
)
from pipeline.decoder.ops.lookup import HEAVIEST, chain_depths
from pipeline.decoder.ops.tree import WINDOW, Beams, SamplingTensors, Tree, VerifyOutput, root_only
from pipeline.decoder.ops.triton.attention import tree_attention_kernel
from pipeline.decoder.ops.triton.launch import INTERPRETED, Launcher, power_of_two
from pipeline.decoder.ops.triton.layers import (
    add_rms_norm_kernel,
    compact_kernel,
    embed_concat_kernel,
    gate_mul_kernel,
    rope_write_kernel,
    slot_mapping_kernel,
)
from pipeline.decoder.ops.triton.logits import (
    argmax_kernel,
    draw_kernel,
    perturb_drafts_kernel,
    propose_join_kernel,
    propose_part_kernel,
    threshold_kernel,
)
from pipeline.decoder.ops.triton.lookup import (
    look_up_kernel,
    merge_kernel,
    tree_of_chains_kernel,
    write_history_kernel,
)
from pipeline.decoder.ops.triton.products import (
    add_product_kernel,
    gated_product_kernel,
    product_kernel,
    project_heads_kernel,
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

#: Forwards of more tokens leave their products to cuBLAS: arithmetic binds them, not the weights.
MOST_FUSED = 64
#: Products of more pieces of so many tokens with float8 widen it: a byte for each piece is more
#: than one to read, two to write and two to read again.
MOST_PIECES = 5
#: Rows of a weight that a program reads at a time, in two blocks.
HALF_ROWS = 64
#: Programs of a product, about, and steps of each: two for every multiprocessor of an H100, with
#: enough steps to keep loads in flight.
PRODUCT_PROGRAMS, LEAST_STEPS = 256, 4
#: Counters of an engine, at first: the blocks of the widest product.
ARRIVALS = 4096
#: What the splits of a product leave behind, written and read, is an eighth of its weight at most.
SPLIT_INPUTS = 32
#: Tokens of a history that a program compares, and that one writes.
_COMPARED, _WRITTEN = 1024, 32

assert PAGE == WINDOW, "the attention kernel shifts a page's worth of bits"


class Normed(NamedTuple):
    """States that the product which reads them norms."""

    hidden: Tensor  # [T, H]
    gain: Tensor  # [H]
    squares: Tensor  # [T, blocks] sums of hidden² over each block's columns, float32


class TritonOps(Launcher):
    """Kernels for everything but matrix products of many tokens, which stay with cuBLAS.

    Cache planes and block tables may be slices, of which the strides are passed on. All else is
    contiguous, or is copied.
    """

    warm_up_lengths = (1, 17, 33)  # tiles of 16, 32 and 64 tokens in products

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(dtype)
        self._counters: list[Tensor] = []
        self._widest = 0  # parameters of the largest matrix that is held in float8

    def scratch_bytes(self, rows: int, query_len: int, heads: int, size: int, drawn: int) -> int:
        queries = rows * min(query_len, MOST_SPLIT) * heads
        attention = 4 * MOST_CHUNKS * queries * (size + 1)
        # Splits are doubled while there are too few programs.
        outputs = 2 * PRODUCT_PROGRAMS * max(2 * HALF_ROWS, size)
        product = 4 * outputs * min(rows * query_len, MOST_FUSED) + 4 * ARRIVALS
        product += self.dtype.itemsize * self._widest
        return attention + product + drawn * CAPACITY * self.dtype.itemsize

    def pack_float8(self, weight: Tensor) -> Packed:
        # Kernels read a weight in two halves.
        return super().pack_float8(weight) if len(weight) % 2 else self._hold(Float8Rows.of(weight))

    def pack_layer(self, weight: Tensor) -> Packed:
        rows = None if len(weight) % 2 else Float8Rows.exactly(weight)
        return self.pack(weight) if rows is None else self._hold(rows)

    def _hold(self, rows: Float8Rows) -> Float8Rows:
        self._widest = max(self._widest, rows.values.numel())
        return rows

    def linear(self, x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, Float8Rows):
            return super().linear(x, weight, bias)
        if len(x) > MOST_PIECES * MOST_FUSED:
            return super().linear(x, weight.widened().to(self.dtype), bias)
        out = x.new_empty(len(x), len(weight))
        where = 0.0, -(-len(weight) // (2 * HALF_ROWS)), HALF_ROWS
        parts = (torch.split(each, MOST_FUSED) for each in (x, out))
        for read, written in zip(*parts, strict=True):
            each = *where, (written,)
            self._product(product_kernel, read, weight, bias, *each, OUTPUTS=len(weight))
        return out

    def layers(
        self,
        stack: LayerStack,
        metadata: AttentionMetadata,
        hidden: Tensor,
        normed: Tensor,
        plane: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        size = plane.shape[-1]
        odd = any(weights.gelu or weights.update_norms for weights in stack.layers)
        # With heads of 256 the products' stages would take 170 KiB of an A100's 163.
        if odd or len(hidden) > MOST_FUSED or size not in (32, 64, 128):
            return super().layers(stack, metadata, hidden, normed, plane)
        captured = list[Tensor]()
        x: Tensor | Normed = normed
        for index, (weights, norm) in enumerate(zip(stack.layers, stack.norms, strict=True)):
            (keys, values), own = plane[index], metadata.of(weights)
            query = self.project_heads(x, weights, stack.eps, own, keys, values)
            mixed = self.tree_attention(query, keys, values, own).flatten(1)
            output = weights.output, weights.output_bias
            if (group := weights.group) is not None:  # sums stand between a product and its norm
                update = group.sum(self.linear(mixed, *output))
                between, hidden = self.add_rms_norm(hidden, update, weights.post_norm, stack.eps)
                inner = self.gated_product(between, weights.gate_up, stack.eps)
                update = group.sum(self.linear(inner, weights.down))
                x, hidden = self.add_rms_norm(hidden, update, norm, stack.eps)
            else:
                attended = self.add_product(mixed, *output, hidden, weights.post_norm)
                inner = self.gated_product(attended, weights.gate_up, stack.eps)
                x = self.add_product(inner, weights.down, None, attended.hidden, norm)
                hidden = x.hidden
            if index in stack.captured:
                captured.append(hidden)
        if isinstance(x, Normed):
            x, _ = self.add_rms_norm(hidden, None, stack.norms[-1], stack.eps)
        return x, hidden, torch.cat(captured, dim=-1) if captured else hidden[:, :0]

    def project_heads(
        self,
        x: Tensor | Normed,
        weights: LayerWeights,
        eps: float,
        metadata: AttentionMetadata,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Queries [T, Q, d] of x [T, In], rotated; keys and values go to their slots."""
        assert keys.stride() == values.stride() and keys.stride(3) == 1
        groups, size = keys.shape[1], keys.shape[3]
        heads, cos = len(weights.qkv) // size - 2 * groups, metadata.rotary[0]
        query = keys.new_empty(len(metadata.positions), heads, size)
        norms = (cos, cos) if weights.head_norms is None else weights.head_norms
        where = *norms, *metadata.rotary, metadata.positions, metadata.slot_mapping
        self._product(
            project_heads_kernel,
            x, weights.qkv, weights.qkv_bias, eps, heads + 2 * groups, size // 2,
            (*where, query, keys, values, *keys.stride()[:3]),
            strided=(keys, values),
            QUERY_HEADS=heads,
            GROUPS=groups,
            PAGE=PAGE,
            HEAD_NORMS=weights.head_norms is not None,
        )  # fmt: skip
        return query

    def add_product(
        self, x: Tensor, weight: Packed, bias: Tensor | None, hidden: Tensor, gain: Tensor
    ) -> Normed:
        """hidden [T, H] + x [T, In] · weightᵀ, for a product that norms it with `gain`."""
        outputs = len(weight)
        blocks = -(-outputs // (2 * HALF_ROWS))
        total = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        squares = total.new_empty(len(x), blocks, dtype=torch.float32)
        own = hidden.contiguous(), total, squares
        self._product(
            add_product_kernel, x, weight, bias, 0.0, blocks, HALF_ROWS, own, OUTPUTS=outputs
        )
        return Normed(total, gain, squares)

    def gated_product(self, x: Tensor | Normed, weight: Packed, eps: float) -> Tensor:
        """silu(first half) · second half [T, I] of x [T, H] · weightᵀ."""
        outputs, read = len(weight) // 2, x.hidden if isinstance(x, Normed) else x
        out = read.new_empty(len(read), outputs)
        where = eps, -(-outputs // HALF_ROWS), HALF_ROWS, (out,)
        self._product(gated_product_kernel, x, weight, None, *where, OUTPUTS=outputs)
        return out

    def _product(
        self,
        kernel: Any,
        x: Tensor | Normed,
        weight: Packed,
        bias: Tensor | None,
        eps: float,
        blocks: int,
        half: int,
        own: tuple[Any, ...],
        strided: tuple[Tensor, ...] = (),
        **constants: Any,
    ) -> None:
        """Launch a kernel of products.py: x [T, In] by `blocks` times 2 · half rows of the weight;
        `own` are the arguments that are this kernel's alone."""
        held, gain, squares = x if isinstance(x, Normed) else (x.contiguous(),) * 3
        (tokens, size), narrow = held.shape, held.dtype != torch.float32
        rounded = isinstance(weight, Float8Rows)
        block = power_of_two(tokens, 16)
        # As many bytes in flight of float8 as of bfloat16; 64 tokens' sums leave no registers.
        step = (128 if rounded and block <= 32 else 64) if narrow else 32
        splits = splits_of(blocks, -(-size // step), size // (SPLIT_INPUTS * block))
        parts = squares.shape[1] if isinstance(x, Normed) else 0
        left = (blocks, splits, tokens, 2 * half) if splits > 1 else (0,)
        partial = held.new_empty(left, dtype=torch.float32)
        stored, scales = (weight.values, weight.scales) if rounded else (weight, held)
        inputs = held, gain, squares, stored, scales, held if bias is None else bias
        self._launch(
            kernel,
            (blocks, splits),
            (*inputs, partial, self._arrivals(blocks, held.device), tokens, eps, *own),
            warps=4,
            # 18 KiB a stage with 16 tokens (bfloat16; float8 takes up to 21): two programs share a
            # multiprocessor.
            stages=(5 if block <= 32 and not rounded else 4) if narrow else 2,
            strided=strided,
            **constants,
            SIZE=size,
            HALF=half,
            TOKENS_BLOCK=block,
            SIZE_BLOCK=step,
            SHARE=-(-size // (step * splits)),
            SPLITS=splits,
            PARTS=parts,
            PARTS_BLOCK=power_of_two(parts) if parts else 1,
            BIASED=bias is not None,
            SCALED=rounded,
            WIDEN=INTERPRETED,
        )

    def _arrivals(self, count: int, device: torch.device) -> Tensor:
        """`count` counters or more that are zero before and after every kernel: of programs that
        have left something for the last one. Captured graphs keep their address: they stay."""
        if not self._counters or len(self._counters[-1]) < count:
            size = max(count, ARRIVALS)
            self._counters.append(torch.zeros(size, dtype=torch.int32, device=device))
        return self._counters[-1]

    def add_rms_norm(
        self,
        x: Tensor,
        update: Tensor | None,
        weight: Tensor,
        eps: float,
        update_norm: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        count, size = x.shape
        x = x.contiguous()
        normed = x.new_empty(x.shape)
        total = x if update is None else x.new_empty(x.shape)
        block = power_of_two(size)
        added = x if update is None else update.contiguous()
        arguments = added, weight, weight if update_norm is None else update_norm, normed, total
        self._launch(
            add_rms_norm_kernel, (count,), (x, *arguments, eps), _norm_warps(block),
            SIZE=size, BLOCK=block,
            HAS_UPDATE=update is not None, UPDATE_NORM=update_norm is not None,
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

    def gate_mul(self, gate_up: Tensor, *, gelu: bool = False) -> Tensor:
        count, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(count, size)
        # Eight values a thread: one 16-byte load of bfloat16 from each half.
        block = min(1024, power_of_two(size))
        grid, arguments = (count, -(-size // block)), (gate_up.contiguous(), out)
        self._launch(gate_mul_kernel, grid, arguments, warps=4, SIZE=size, BLOCK=block, GELU=gelu)
        return out

    def compute_slot_mapping(
        self, block_table: Tensor, seq_lens: Tensor, row: Tensor, within: Tensor
    ) -> tuple[Tensor, Tensor]:
        if block_table.stride(1) != 1:
            block_table = block_table.contiguous()
        entries, slots = _int64(2, *row.shape, like=row)
        inputs = block_table, seq_lens.contiguous(), row.contiguous(), within.contiguous()
        self._launch(
            slot_mapping_kernel,
            (-(-len(row) // 128),),
            (*inputs, entries, slots, len(row), block_table.stride(0)),
            warps=1,
            strided=(block_table,),
            PAGE=PAGE,
            BLOCK=128,
        )
        return entries, slots

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
        narrow = query.dtype != torch.float32
        scale, strides = math.log2(math.e) * size**-0.5, keys.stride()[:3]
        tiles = -(-max_query_len * group // block)
        arrived = self._arrivals(rows * groups * tiles if room > 1 else 1, query.device)
        self._launch(
            tree_attention_kernel,
            (tiles, rows * groups, room),
            (*inputs, out, partial, lse, arrived, scale, *cuts, *strides, block_table.stride(0)),
            # Of wide heads four warps' registers spill.
            warps=8 if block == 128 or not narrow or size > 128 else 4,
            # Two programs share a multiprocessor, and so does their shared memory: with two pages
            # of 32 KiB in flight (bfloat16, d = 128) a program of 64 rows takes 81 KiB of 113 on an
            # H100, and 56 of 81 on an A100. A third page would leave one program alone.
            stages=4 if narrow else 2,
            strided=(keys, values, block_table),
            GROUPS=groups,
            GROUP_SIZE=group,
            DIM=size,
            PAGE=PAGE,
            MOST_SPLIT=MOST_SPLIT,
            LEAST_CHUNK=LEAST_CHUNK,
            QUERIES_A_PAGE=QUERIES_A_PAGE,
            ROWS_BLOCK=block,
            DIM_BLOCK=power_of_two(size, 16),
            CAUSAL=causal,
            SLIDING=metadata.first_seen is not None,
            WIDEN=INTERPRETED,
        )
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
        return self._argmax(logits.contiguous())[0].view(logits.shape[:-1])

    def _argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The index of each row's largest logit, -1 for a NaN's, and the keys of its blocks."""
        size = logits.shape[-1]
        rows, block = logits.numel() // size, logits_block(size)
        keys, index = _int64(rows, -(-size // block), like=logits), _int64(rows, like=logits)
        arrived = self._arrivals(rows, logits.device)
        self._launch(
            argmax_kernel, tuple(keys.shape), (logits, keys, index, arrived), warps=8,
            SIZE=size, BLOCK=block, PARTS_BLOCK=power_of_two(keys.shape[1]),
        )  # fmt: skip
        return index, keys

    def propose(
        self, logits: Tensor, k: int, target_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
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
            propose_join_kernel, (rows,),
            (*by_part, index if target_ids is None else target_ids, scores, index, parts), warps=4,
            K=k, PARTS_BLOCK=power_of_two(parts), KEYS_BLOCK=power_of_two(parts * k),
            MAPPED=target_ids is not None,
        )  # fmt: skip
        return scores, index

    def perturb_drafts(
        self, logits: Tensor, noise: DraftNoise, target_ids: Tensor | None = None
    ) -> Tensor:
        rows, size, logits = len(noise.seeds), logits.shape[-1], logits.contiguous()
        block, noisy = min(1024, power_of_two(size)), torch.empty_like(logits)
        by_row = (each.contiguous() for each in noise)
        tokens = noise.seeds if target_ids is None else target_ids
        self._launch(
            perturb_drafts_kernel, (rows, -(-size // block)),
            (logits, noisy, tokens, *by_row, len(logits) // rows), warps=4,
            SIZE=size, BLOCK=block, MAPPED=target_ids is not None,
        )  # fmt: skip
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
        count, logits, capacity = rows * nodes, logits.contiguous(), min(CAPACITY, size)
        _, keys = self._argmax(logits)
        grid, block = tuple(keys.shape), logits_block(size)
        sizes: dict[str, Any] = {"SIZE": size, "BLOCK": block, "PARTS_BLOCK": power_of_two(grid[1])}
        threshold = torch.empty(count, dtype=torch.float32, device=logits.device)
        scratch, masses = logits.new_empty(count, capacity), _int64(*grid, like=logits)
        arrived = self._arrivals(2 * count, logits.device)
        filters = sampling.temperature, sampling.top_p, sampling.top_k
        self._launch(
            threshold_kernel,
            grid,
            (logits, keys, *filters, scratch, masses, arrived, threshold, nodes),
            warps=8,
            **sizes,
            CAPACITY=capacity,
            NEAR=NEAR,
            UNIT=2.0 ** (62 - size.bit_length()),  # the sum of all stays below 2^62
            HELD_BLOCK=min(1024, power_of_two(size)),
            WAYS=4,
        )
        drawn, index = torch.empty_like(keys), _int64(count, like=logits)
        noise = sampling.temperature, sampling.seeds, positions.contiguous()
        self._launch(
            draw_kernel, grid, (logits, threshold, *noise, drawn, index, arrived, nodes), warps=8,
            **sizes,
        )  # fmt: skip
        return index.view(rows, nodes)

    def draw(self, logits: Tensor, sampling: SamplingTensors, positions: Tensor) -> Tensor:
        tree = root_only(positions)
        return self.sample(logits[:, None], tree, sampling, positions[:, None], 0)[:, 0]

    def write_history(
        self,
        history: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        max_query_len: int,
        tokens: Tensor,
        next_tokens: Tensor,
        counts: Tensor,
    ) -> None:
        rows, size = history.shape
        read = (part.contiguous() for part in (seq_lens, cu_seqlens_q, tokens, next_tokens, counts))
        self._launch(
            write_history_kernel, (rows, -(-(max_query_len + 1) // _WRITTEN)),
            (history, *read, size), warps=1, BLOCK=_WRITTEN,
        )  # fmt: skip

    def look_up(
        self,
        history: Tensor,
        seq_lens: Tensor,
        *,
        max_match: int,
        least: int,
        most: int,
        steps: int,
    ) -> tuple[Tensor, Tensor]:
        rows, size = history.shape
        parts, chains = -(-size // _COMPARED), _int64(rows, most, steps, like=history)
        keys, lengths = (_int64(rows, count * most, like=history) for count in (parts, 1))
        arrived = self._arrivals(rows, history.device)
        made = keys, arrived, lengths, chains
        self._launch(
            look_up_kernel,
            (rows, parts),
            (history, seq_lens.contiguous(), *made, size, max_match, least, steps),
            warps=4,
            MOST=most,
            BLOCK=_COMPARED,
            PARTS_BLOCK=power_of_two(parts * most),
            STEPS_BLOCK=power_of_two(steps),
        )
        return lengths, chains

    def tree_of_chains(self, chains: Tensor, lengths: Tensor, top_k: int) -> Candidates:
        (rows, count, steps), block = chains.shape, power_of_two(chains.shape[1])
        tokens, parents = _int64(2, rows, steps * count, like=chains)
        scores = torch.empty(tokens.shape, dtype=torch.float32, device=chains.device)
        self._launch(
            tree_of_chains_kernel, (rows,),
            (chains.contiguous(), lengths.contiguous(), tokens, parents, scores, steps, top_k),
            warps=_block_warps(block), CHAINS=count, BLOCK=block, HEAVIEST=HEAVIEST,
        )  # fmt: skip
        return Candidates(tokens, parents, scores, chain_depths(steps, count, chains.device))

    def merge_candidates(
        self, drafted: Candidates, looked_up: Candidates, steps: int
    ) -> Candidates:
        rows, count = drafted.tokens.shape
        size = looked_up.tokens.shape[1]
        width, block = size // steps, power_of_two(size // steps)
        tokens, parents = _int64(2, rows, count + size, like=drafted.tokens)
        scores = drafted.scores.new_empty(tokens.shape)
        inputs = (part.contiguous() for part in (*drafted, *looked_up[:3]))
        self._launch(
            merge_kernel,
            (rows,),
            (*inputs, tokens, parents, scores, count, steps),
            warps=_block_warps(block),
            WIDTH=width,
            WIDTH_BLOCK=block,
            BLOCK=min(128, power_of_two(count)),
        )
        return Candidates(tokens, parents, scores, torch.cat((drafted.depths, looked_up.depths)))


def tile_rows(folded: int, dtype: torch.dtype, *, causal: bool) -> int:
    """Folded queries of one program, of at most `folded` a row and group.

    bfloat16: as many as tensor cores take at once, so that few programs read a page. A tree has one
    shape; chunks of prompts come in every length, which must not compile anything. float32 has no
    exact tensor cores; its products unroll into registers, which 16 rows do not overflow.
    """
    if dtype == torch.float32:
        return 16
    return 64 if causal else min(128, power_of_two(folded, 16))


def splits_of(blocks: int, steps: int, most: int) -> int:
    """Among how many programs the steps of each of a product's blocks are divided."""
    splits = 1
    while blocks * splits < PRODUCT_PROGRAMS and 2 * splits <= min(most, steps // LEAST_STEPS):
        splits *= 2
    return splits


def chunks_of(used: int, folded: int = 1) -> tuple[int, int]:
    """Into how many chunks a row of `used` pages and `folded` queries a key/value head is cut, and
    their pages, as the kernel does it."""
    chunk = LEAST_CHUNK
    while chunk * MOST_CHUNKS < used or chunk * QUERIES_A_PAGE < folded:
        chunk *= 2
    return max(-(-used // chunk), 1), chunk


def logits_block(size: int) -> int:
    """Logits of a row that one program looks at: whole groups of four."""
    return min(4096, power_of_two(size, 4))


def _norm_warps(block: int) -> int:
    """A row stays in registers: 16 values a thread up to H = 8192, more only beyond."""
    return min(16, max(1, block // 512))


def _block_warps(chains: int) -> int:
    """Of what has a block of so many rows, and of columns as many or 128: no thread spills."""
    return 4 if chains <= 16 else 16


def _int64(*shape: int, like: Tensor) -> Tensor:
    """An empty tensor of integers beside `like`."""
    return torch.empty(shape, dtype=torch.int64, device=like.device)
