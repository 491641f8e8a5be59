"""Launches of what chooses tokens: from logits, among beams, along a tree."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.decoder.ops.triton.language import power_of_two
from pipeline.decoder.ops.triton.launch import Launcher
from pipeline.decoder.ops.triton.sampling import draw_part_kernel, threshold_kernel
from pipeline.decoder.ops.triton.top_k import (
    argmax_join_kernel,
    argmax_part_kernel,
    propose_join_kernel,
    propose_part_kernel,
)
from pipeline.decoder.ops.triton.tree import grow_tree_kernel, select_beams_kernel, verify_kernel
from pipeline.decoder.tree import Beams, SamplingTensors, Tree, VerifyOutput, root_only

#: Candidates for top-k and top-p lie this far below the largest scaled logit, at first: e^-16 of
#: its mass.
NEAR = 16.0
#: As many of them are copied beside each other at most.
CAPACITY = 16384


class ChoiceOps(Launcher):
    """Logits, beams and trees are read as contiguous; a view of them is copied first."""

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
        given = (score, gained, proposed, beam_mask, hidden, bits)
        beams = Beams(
            total=score.new_empty(rows, k * k),
            best=_int64(rows, k, like=score),
            score=score.new_empty(rows, k),
            token=_int64(rows, k, like=score),
            beam_mask=_int64(rows, k, like=score),
            hidden=hidden.new_empty(rows * k, size),
        )
        kept = beams.total, beams.best, beams.score, beams.token, beams.beam_mask, beams.hidden
        self._launch(
            select_beams_kernel,
            (rows, k),
            (*(part.contiguous() for part in given), *kept),
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
        kept = min(nodes - 1, count)
        if kept == 0:
            return root_only(roots)
        tree = Tree(*(_int64(rows, kept + 1, like=roots) for _ in range(4)))
        candidates = (part.contiguous() for part in (roots, tokens, parents, scores))
        grown = tree.tokens, tree.parents, tree.tree_mask, tree.depth
        self._launch(
            grow_tree_kernel, (rows,), (*candidates, *grown, count),
            warps=4, KEPT=kept, BLOCK=power_of_two(count),
        )  # fmt: skip
        return tree

    def verify(self, tree: Tree, predicted: Tensor, depth: int) -> VerifyOutput:
        rows, nodes = predicted.shape
        assert predicted.shape == tree.tokens.shape
        path, emitted = _int64(2, rows, depth + 1, like=predicted)
        counts = _int64(rows, like=predicted)
        given = (part.contiguous() for part in (tree.tokens, tree.parents, predicted))
        self._launch(
            verify_kernel, (rows,), (*given, path, counts, emitted, nodes, depth + 1),
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
        kept = sampling.temperature, sampling.top_p, sampling.top_k
        self._launch(
            threshold_kernel,
            (rows * nodes,),
            (logits, *kept, scratch, threshold, nodes),
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


def _int64(*shape: int, like: Tensor) -> Tensor:
    """An empty tensor of integers beside `like`."""
    return torch.empty(shape, dtype=torch.int64, device=like.device)
