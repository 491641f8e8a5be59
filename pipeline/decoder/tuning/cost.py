"""What a round costs on this machine, piece by piece.

    round(shape) = T_verify(nodes) + (steps - 1) · T_draft(top_k) + T_extend(steps) + T_other(nodes)
    speedup      = τ · T_AR / round(shape)

    T_verify   forward, logits and argmax of a tree's nodes; T_AR is T_verify of one node
    T_draft    one draft step: the head on top_k beams, and what each of them proposes
    T_extend   the head on steps + 1 accepted tokens, and the first proposal
    T_other    growing the tree, walking it, compacting keys, moving the batch on

`measure_costs` times the pieces, `Costs` predicts from them. What the machine could do is in `roofline`.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.drafters.eagle3 import Eagle3Drafter
from pipeline.decoder.kv import PagedPool, pages_for
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.round import read_tree
from pipeline.decoder.tree import WINDOW, Tree, root_only

#: Where the curves are measured; between two points they are taken to be straight.
NODE_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
BEAM_COUNTS = (1, 2, 4, 8)
STEP_COUNTS = (1, 3, 6)

#: Draft steps behind the first proposal whose mean is T_draft.
_UNROLLED = 4
#: Drafted tokens that the timed bookkeeping accepts.
_ACCEPTED = 4
_FIRST_PROPOSAL = TreeSection(top_k=4, steps=1, nodes=5)

#: A timed piece, and the count that it was timed at.
_Name = tuple[str, int]


@dataclass(frozen=True)
class Costs:
    """Seconds of the pieces of a round, for one batch size and one length of context."""

    verify: Mapping[int, float]  # by nodes a row; 1 must be among them
    draft: Mapping[int, float]  # one step, by beams a row
    extend: Mapping[int, float]  # by the tree's steps
    other: Mapping[int, float]  # by nodes a row

    @property
    def plain_seconds(self) -> float:
        """T_AR: a token of plain decoding."""
        return self.verify[1]

    def verify_seconds(self, nodes: int) -> float:
        """T_verify."""
        return _interpolate(self.verify, nodes)

    def draft_seconds(self, beams: int) -> float:
        """T_draft."""
        return _interpolate(self.draft, beams)

    def extend_seconds(self, steps: int) -> float:
        """T_extend."""
        return _interpolate(self.extend, steps)

    def other_seconds(self, nodes: int) -> float:
        """T_other."""
        return _interpolate(self.other, nodes)

    def round_seconds(self, shape: TreeSection) -> float:
        """A whole round that drafts this tree."""
        drafting = (shape.steps - 1) * self.draft_seconds(shape.top_k) + self.extend_seconds(
            shape.steps
        )
        return self.verify_seconds(shape.nodes) + drafting + self.other_seconds(shape.nodes)

    def speedup(self, shape: TreeSection, tau: float) -> float:
        """Over plain decoding, when a round emits `tau` tokens a row."""
        return tau * self.plain_seconds / self.round_seconds(shape)


@torch.inference_mode()
def measure_costs(
    model: DecoderModel,
    drafter: Eagle3Drafter,
    rows: int,
    context: int,
    node_counts: Sequence[int] = NODE_COUNTS,
    *,
    beam_counts: Sequence[int] = BEAM_COUNTS,
    step_counts: Sequence[int] = STEP_COUNTS,
    repeats: int = 15,
) -> Costs:
    """Time the pieces of a round for `rows` rows with `context` committed tokens each.

    Medians of `repeats` interleaved runs, so that a slow moment of the machine meets all pieces alike. On
    CUDA each piece is a graph, as in the engine. The drafter gets a new plane of keys and values: make
    the engine that uses it afterwards. Raises ValueError when the context leaves a round no room.
    """
    if context + max(step_counts) >= model.max_length:
        raise ValueError(
            f"context is {context}, a round of {max(step_counts)} steps behind it does not fit into max_length {model.max_length}"
        )
    nodes = sorted({1, *node_counts})
    pieces = _pieces(model, drafter, rows, context, nodes, beam_counts, step_counts)
    seconds = _medians(pieces, model.device, repeats)
    return Costs(
        verify={count: seconds["verify", count] for count in nodes},
        # The difference holds whole steps only: neither the first proposal nor the call itself.
        draft={
            beams: (seconds["unroll", beams] - seconds["propose", beams]) / _UNROLLED
            for beams in beam_counts
        },
        extend={steps: seconds["extend", steps] for steps in step_counts},
        other={count: seconds["other", count] for count in nodes if count > 1},
    )


def median_costs(measured: Sequence[Costs]) -> Costs:
    """The median of several measurements, point by point."""

    def merged(name: str) -> dict[int, float]:
        curves = [getattr(costs, name) for costs in measured]
        return {count: median(curve[count] for curve in curves) for count in curves[0]}

    return Costs(merged("verify"), merged("draft"), merged("extend"), merged("other"))


def open_batch(
    model: DecoderModel, drafter: Eagle3Drafter, rows: int, entries: int, *, emitted: int
) -> tuple[DecodeBatch, Tensor]:
    """Greedy rows with room for `entries` cache entries each and `emitted` tokens a round, and the target's plane."""
    pages = pages_for(entries)
    pool = PagedPool(rows * pages + 1, device=model.device)
    plane = model.plane(pool)
    drafter.allocate(pool)
    batch = DecodeBatch.empty(
        rows,
        pages=pages,
        memory=drafter.memory,
        emitted=emitted,
        dtype=model.dtype,
        device=model.device,
    )
    for row in range(rows):
        held = pool.take(pages)
        assert held is not None
        batch.open_row(row, held, temperature=0.0, top_p=1.0, top_k=0, seed=0)
    return batch, plane


def _pieces(
    model: DecoderModel,
    drafter: Eagle3Drafter,
    rows: int,
    context: int,
    nodes: Sequence[int],
    beam_counts: Sequence[int],
    step_counts: Sequence[int],
) -> dict[_Name, Callable[[], object]]:
    """What is timed. Contents are random: no piece takes longer or shorter for them."""
    batch, plane = open_batch(model, drafter, rows, context + WINDOW, emitted=_ACCEPTED + 1)
    batch.starts.fill_(context)
    batch.roots.random_(model.vocabulary)
    batch.memory.normal_()
    tokens, parents, scores = _candidates(batch, model.vocabulary)
    longest = max(step_counts) + 1
    accepted = tokens[:, :longest]  # [B, E]
    aux = torch.randn(
        rows, longest, 3 * model.config.hidden_size, dtype=model.dtype, device=model.device
    )

    def grow(count: int) -> Tree:
        return (
            model.ops.grow_tree(batch.roots, tokens, parents, scores, count)
            if count > 1
            else root_only(batch.roots)
        )

    def read(tree: Tree) -> object:
        return read_tree(model, plane, batch, tree, 0, sampling=False)

    def extend(count: int) -> None:
        drafter.extend(
            batch, accepted[:, :count], aux[:, :count], torch.full_like(batch.starts, count)
        )
        drafter.candidates(batch, _FIRST_PROPOSAL)

    def other(count: int) -> None:
        # The target agrees with the second of each pair: see `_candidates`.
        walked = model.ops.verify(grow(count), tokens[:, 1 : count + 1], _ACCEPTED)
        model.ops.compact(plane, batch.table, batch.starts, walked.path)
        batch.advance(walked)
        batch.starts.fill_(context)

    def unroll(beams: int, steps: int) -> object:
        return drafter.candidates(batch, TreeSection(top_k=beams, steps=steps, nodes=WINDOW))

    pieces: dict[_Name, Callable[[], object]] = {
        ("verify", count): partial(read, grow(count)) for count in nodes
    }
    pieces |= {("other", count): partial(other, count) for count in nodes if count > 1}
    pieces |= {("extend", steps): partial(extend, steps + 1) for steps in step_counts}
    pieces |= {("propose", beams): partial(unroll, beams, 1) for beams in beam_counts}
    pieces |= {("unroll", beams): partial(unroll, beams, 1 + _UNROLLED) for beams in beam_counts}
    return pieces


def _candidates(batch: DecodeBatch, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates of any tree up to the window, as `grow_tree` wants them: each [B, C].

    Pairs of siblings below the second one of the pair above, so that an accepted branch is never
    contiguous and its keys have to be moved:

        root ─┬─ 0
              └─ 1 ─┬─ 2
                    └─ 3 ─┬─ 4
                          └─ 5 …
    """
    index = torch.arange(WINDOW + 2, device=batch.roots.device)  # [C]
    each = (len(batch), -1)
    return (
        (index % vocabulary).expand(each).contiguous(),
        (index // 2 * 2 - 1).expand(each).contiguous(),
        (-index.float()).expand(each).contiguous(),
    )


def _medians(
    pieces: Mapping[_Name, Callable[[], object]], device: torch.device, repeats: int
) -> dict[_Name, float]:
    """Each piece behind an untimed forward: in a round, too, the target's weights have swept the caches before it."""
    cuda = device.type == "cuda"
    launches = {name: _captured(piece) if cuda else piece for name, piece in pieces.items()}
    sweep, seconds = launches["verify", 1], _cuda_seconds if cuda else _host_seconds
    taken: dict[_Name, list[float]] = {name: [] for name in pieces}
    for round_trip in range(repeats + 1):
        for name, launch in launches.items():
            sweep()
            took = seconds(launch)
            if round_trip:  # the first one warms up
                taken[name].append(took)
    return {name: median(times) for name, times in taken.items()}


def _host_seconds(launch: Callable[[], object]) -> float:
    begun = time.perf_counter()
    launch()
    return time.perf_counter() - begun


def _cuda_seconds(launch: Callable[[], object]) -> float:
    """Between two events behind work that is still running, so that the host's own time does not count."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begun.record()
    launch()
    ended.record()
    torch.cuda.synchronize()
    return float(begun.elapsed_time(ended)) / 1000  # milliseconds


def _captured(piece: Callable[[], object]) -> Callable[[], object]:
    """The piece as a CUDA graph: rounds run as graphs, and launches from Python would hide what kernels take."""
    warm = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(2):
            piece()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        piece()
    return graph.replay


def _interpolate(curve: Mapping[int, float], x: int) -> float:
    """Straight lines between the measured points, the outermost ones continued."""
    points = sorted(curve)
    if len(points) == 1:
        return curve[points[0]]
    right = min(max(bisect_left(points, x), 1), len(points) - 1)
    low, high = points[right - 1], points[right]
    return curve[low] + (curve[high] - curve[low]) * (x - low) / (high - low)
