"""What a round costs on this machine, piece by piece.

    round(shape) = T_verify(nodes) + (steps - 1) · T_draft(top_k) + T_extend(steps) + T_other(nodes)
    speedup      = τ · T_AR / round(shape)

    T_verify   forward, logits and argmax of a tree's nodes; T_AR is T_verify of one node
    T_draft    one draft step: the head on top_k beams, and what each of them proposes
    T_extend   the head on steps + 1 accepted tokens, and the first proposal
    T_other    growing the tree, walking it, compacting keys, moving the batch on

`measure_costs` times the pieces, `Costs` predicts from them. What the machine could do is in
`roofline`.
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
from pipeline.decoder.graphs import captured
from pipeline.decoder.kv import PageAllocator, pages_for
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
        steps, nodes = shape.steps, shape.nodes
        drafting = (steps - 1) * self.draft_seconds(shape.top_k) + self.extend_seconds(steps)
        return self.verify_seconds(nodes) + drafting + self.other_seconds(nodes)

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

    Medians of `repeats` interleaved runs, so that a slow moment of the machine meets all pieces
    alike. On CUDA each piece is a graph, as in the engine. The drafter gets a new plane of keys and
    values: make the engine that uses it afterwards. Raises ValueError when no round fits behind the
    context.
    """
    longest = max(step_counts)
    if context + longest >= model.max_length:
        problem = f"a round of {longest} steps behind it does not fit into max_length"
        raise ValueError(f"context is {context}, {problem} {model.max_length}")
    nodes = sorted({1, *node_counts})
    trees = [count for count in nodes if count > 1]
    pieces = _Pieces(model, drafter, rows, context, longest)
    launches: dict[_Name, Callable[[], object]] = {}
    launches |= {("verify", count): partial(pieces.verify, pieces.tree(count)) for count in nodes}
    launches |= {("other", count): partial(pieces.other, count) for count in trees}
    launches |= {("extend", steps): partial(pieces.extend, steps) for steps in step_counts}
    launches |= {("propose", beams): partial(pieces.draft, beams, 1) for beams in beam_counts}
    unrolled = 1 + _UNROLLED
    launches |= {("unroll", beams): partial(pieces.draft, beams, unrolled) for beams in beam_counts}
    seconds = _medians(launches, model.device, repeats)

    def step_seconds(beams: int) -> float:
        """The difference holds whole steps only: neither the first proposal nor the call itself."""
        return (seconds["unroll", beams] - seconds["propose", beams]) / _UNROLLED

    return Costs(
        verify={count: seconds["verify", count] for count in nodes},
        draft={beams: step_seconds(beams) for beams in beam_counts},
        extend={steps: seconds["extend", steps] for steps in step_counts},
        other={count: seconds["other", count] for count in trees},
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
    """Greedy rows of `entries` cache entries, `emitted` tokens a round; the target's plane."""
    pages = pages_for(entries)
    allocator = PageAllocator(rows * pages + 1, device=model.device)
    plane = model.plane(allocator)
    drafter.make_plane(allocator)
    batch = DecodeBatch.empty(
        rows,
        pages=pages,
        state_size=drafter.state_size,
        emitted=emitted,
        dtype=model.dtype,
        device=model.device,
    )
    for row in range(rows):
        held = allocator.allocate(pages)
        assert held is not None
        batch.open_row(row, held)
    return batch, plane


class _Pieces:
    """What is timed. Contents are random: no piece takes longer or shorter for them."""

    def __init__(
        self, model: DecoderModel, drafter: Eagle3Drafter, rows: int, context: int, steps: int
    ) -> None:
        """`steps` is the deepest tree that `extend` is asked for."""
        self._model, self._drafter, self._context = model, drafter, context
        entries = context + WINDOW
        self._batch, self._plane = open_batch(model, drafter, rows, entries, emitted=_ACCEPTED + 1)
        self._batch.seq_lens.fill_(context)
        self._batch.roots.random_(model.vocabulary)
        self._batch.drafter_state.normal_()
        self._candidates = _candidates(self._batch, model.vocabulary)
        aux = rows, steps + 1, 3 * model.config.hidden_size
        self._aux = torch.randn(aux, dtype=model.dtype, device=model.device)

    def tree(self, nodes: int) -> Tree:
        roots = self._batch.roots
        if nodes == 1:
            return root_only(roots)
        return self._model.ops.grow_tree(roots, *self._candidates, nodes)

    def verify(self, tree: Tree) -> object:
        return read_tree(self._model, self._plane, self._batch, tree, 0, sampling=False)

    def draft(self, beams: int, steps: int) -> object:
        shape = TreeSection(top_k=beams, steps=steps, nodes=WINDOW)
        return self._drafter.candidates(self._batch, shape)

    def extend(self, steps: int) -> None:
        """Read what the deepest branch would emit, and make the first proposal behind it."""
        batch, emitted = self._batch, steps + 1
        tokens, aux = self._candidates[0][:, :emitted], self._aux[:, :emitted]
        self._drafter.extend(batch, tokens, aux, torch.full_like(batch.seq_lens, emitted))
        self._drafter.candidates(batch, _FIRST_PROPOSAL)

    def other(self, nodes: int) -> None:
        batch, ops = self._batch, self._model.ops
        # The target agrees with the second of each pair: see `_candidates`.
        predicted = self._candidates[0][:, 1 : nodes + 1]
        accepted = ops.verify(self.tree(nodes), predicted, _ACCEPTED)
        ops.compact(self._plane, batch.block_table, batch.seq_lens, accepted.path)
        batch.advance(accepted)
        batch.seq_lens.fill_(self._context)


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
    """Each piece behind an untimed forward: a round's own, too, sweeps the caches before it."""
    cuda = device.type == "cuda"
    # Rounds run as graphs, and launches from Python would hide what kernels take.
    launches = {name: captured(piece).replay if cuda else piece for name, piece in pieces.items()}
    sweep, seconds = launches["verify", 1], _cuda_seconds if cuda else _host_seconds
    taken: dict[_Name, list[float]] = {name: [] for name in pieces}
    for turn in range(repeats + 1):
        for name, launch in launches.items():
            sweep()
            took = seconds(launch)
            if turn:  # the first one warms up
                taken[name].append(took)
    return {name: median(times) for name, times in taken.items()}


def _host_seconds(launch: Callable[[], object]) -> float:
    begun = time.perf_counter()
    launch()
    return time.perf_counter() - begun


def _cuda_seconds(launch: Callable[[], object]) -> float:
    """Between two events behind kernels that still run: the host's own time does not count."""
    event = partial(torch.cuda.Event, enable_timing=True)
    begun, ended = event(), event()
    begun.record()
    launch()
    ended.record()
    torch.cuda.synchronize()
    return float(begun.elapsed_time(ended)) / 1000  # milliseconds


def _interpolate(curve: Mapping[int, float], x: int) -> float:
    """Straight lines between the measured points, the outermost ones continued."""
    points = sorted(curve)
    if len(points) == 1:
        return curve[points[0]]
    right = min(max(bisect_left(points, x), 1), len(points) - 1)
    low, high = points[right - 1], points[right]
    return curve[low] + (curve[high] - curve[low]) * (x - low) / (high - low)
