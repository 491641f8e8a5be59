"""What a round costs on this machine, piece by piece.

    round(shape) = T_verify(nodes) + (steps - 1) · T_draft(top_k) + T_extend(steps) + T_other(nodes)
    speedup      = τ · T_AR / round(shape)

    T_verify   forward, logits and argmax of a tree's nodes; T_AR is T_verify of one node
    T_draft    one draft step: the head on top_k beams, and what each of them proposes
    T_extend   the head on steps + 1 accepted tokens, and the first proposal
    T_other    growing the tree, walking it, compacting keys, moving the batch on

`measure_costs` times the pieces, `Costs` predicts from them. `Roofline` says what the pieces take
at what the machine can do (Williams et al. 2009):

    floor = max(bytes / bandwidth, operations / flops)

where weights are read once whatever the batch is, in the form in which the backend stores them, and
the context's keys and values once a row. Norms, biases, embedding rows and activations are small in
comparison and left out.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median

import torch

from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch, TokenRows
from pipeline.decoder.drafter import Drafter, DraftWork, ReadTokens
from pipeline.decoder.graphs import CaptureStream
from pipeline.decoder.kv import Planes, Pools, on_gpu, pages_for
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.draft import Candidates
from pipeline.decoder.ops.layer import Packed, packed_bytes
from pipeline.decoder.ops.parallel import VocabularySlice
from pipeline.decoder.ops.tree import WINDOW, Tree, root_only
from pipeline.decoder.round import count_proposed, verify_forward

#: Where the curves are measured; between two points they are taken to be straight.
NODE_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
BEAM_COUNTS = (1, 2, 4, 8)
STEP_COUNTS = (1, 3, 6)
#: Draft steps after the first proposal whose mean is T_draft; fewer of a shallower drafter.
_DRAFT_STEPS = 4
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


def measure_costs(
    model: DecoderModel,
    drafter: Drafter,
    rows: int,
    context: int,
    node_counts: Sequence[int] = NODE_COUNTS,
    *,
    beam_counts: Sequence[int] = BEAM_COUNTS,
    step_counts: Sequence[int] = STEP_COUNTS,
    repeats: int = 15,
    sampling: bool = False,
) -> Costs:
    """What a round costs for `rows` rows with `context` committed tokens each: see `CostMeter`."""
    counts = node_counts, beam_counts, step_counts
    meter = CostMeter(model, drafter, rows, context, *counts, sampling=sampling)
    for _ in range(repeats):
        meter.turn()
    return meter.costs()


class CostMeter:
    """Times the pieces of a round in turns, in each of which every piece runs once.

    So a slow moment of the machine meets all pieces alike, and whoever measures something beside
    them can do so between two turns. On CUDA each piece is a graph, as in the engine.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: DecoderModel,
        drafter: Drafter,
        rows: int,
        context: int,
        node_counts: Sequence[int] = NODE_COUNTS,
        beam_counts: Sequence[int] = BEAM_COUNTS,
        step_counts: Sequence[int] = STEP_COUNTS,
        *,
        sampling: bool = False,
    ) -> None:
        """Of `rows` rows with `context` committed tokens each; with `sampling` choices are drawn.

        Raises ValueError when no round fits after the context.
        """
        max_steps = max(step_counts)
        if context + max_steps >= model.max_length:
            problem = f"a round of {max_steps} steps after it does not fit into max_length"
            raise ValueError(f"context is {context}, {problem} {model.max_length}")
        nodes = sorted({1, *node_counts})
        pieces = _Pieces(model, drafter, rows, context, max_steps, sampling=sampling)
        self._draft_steps = min(_DRAFT_STEPS, drafter.depth - 1)
        launches: dict[_Name, Callable[[], object]] = {}
        for count in nodes:
            launches["verify", count] = partial(pieces.verify, pieces.tree(count))
        for count in nodes[1:]:
            launches["other", count] = partial(pieces.other, count)
        for steps in step_counts:
            launches["extend", steps] = partial(pieces.extend, steps)
        for beams in beam_counts:
            launches["propose", beams] = partial(pieces.draft, beams, 1)
            launches["draft", beams] = partial(pieces.draft, beams, 1 + self._draft_steps)
        self._seconds: Callable[[Callable[[], object]], float] = _host_seconds
        if on_gpu(model.device):
            # Rounds run as graphs, and launches from Python would hide what kernels take.
            stream = CaptureStream(model.device)
            # A graph keeps neither its stream nor what it reads, the pieces' trees among that.
            self._held = stream, dict(launches)
            launches = {name: stream.capture(piece).replay for name, piece in launches.items()}
            self._seconds = _cuda_seconds
        for launch in launches.values():  # warms up
            launch()
        self._launches = launches
        self._taken: dict[_Name, list[float]] = {name: [] for name in launches}

    @torch.inference_mode()
    def turn(self) -> None:
        """Time every piece once, after an untimed forward: a round's own pieces, too, stand after
        one that has swept the caches."""
        for name, launch in self._launches.items():
            self._launches["verify", 1]()
            self._taken[name].append(self._seconds(launch))

    def costs(self) -> Costs:
        """Of all turns so far; there must be one."""
        seconds = {name: trimmed_mean(taken) for name, taken in self._taken.items()}

        def curve(kind: str) -> dict[int, float]:
            return {count: value for (name, count), value in seconds.items() if name == kind}

        # The difference holds whole steps only: neither the first proposal nor the call itself.
        propose, drafted = curve("propose"), curve("draft")
        count = max(self._draft_steps, 1)  # who drafts one step has no other
        steps = {beams: (drafted[beams] - propose[beams]) / count for beams in propose}
        draft = {beams: max(0.0, seconds) for beams, seconds in steps.items()}  # lookups are free
        return Costs(curve("verify"), draft, curve("extend"), curve("other"))


def trimmed_mean(seconds: Sequence[float]) -> float:
    """Mean without the shortest and the longest tenth, rounded up, of three times or more.

    Unlike medians, means add up: a machine that is interrupted now and then prolongs a round by as
    much as it prolongs the round's pieces, but the median of a short piece does not show it.
    """
    cut = -(-len(seconds) // 10) if len(seconds) > 2 else 0
    return fmean(sorted(seconds)[cut : len(seconds) - cut])


def open_batch(
    model: DecoderModel, drafter: Drafter | None, rows: int, entries: int, *, emitted: int
) -> tuple[DecodeBatch, Planes]:
    """Greedy rows of `entries` cache entries, `emitted` tokens a round, and their pages' planes."""
    pages, device = pages_for(entries), model.device
    pools = Pools(
        model.plane_shape, drafter, pages=rows * pages + 1, rows=rows, device=model.device
    )
    batch = DecodeBatch.empty(rows, pages=pages, emitted=emitted, device=device, drafter=drafter)
    block_table = torch.arange(1, pools.shared.pages, device=device).view(rows, pages)
    drafter_block_table = torch.arange(1, pools.drafter_pages.pages, device=device).view(rows, -1)
    zeros = torch.zeros(rows, dtype=torch.int64, device=device)
    batch.open(block_table, zeros, zeros, zeros, zeros + 1, drafter_block_table)
    return batch, pools.planes


class _Pieces:
    """What is timed. Contents are random: no piece takes longer or shorter for them."""

    def __init__(
        self,
        model: DecoderModel,
        drafter: Drafter,
        rows: int,
        context: int,
        steps: int,
        *,
        sampling: bool,
    ) -> None:
        """`steps` is the deepest tree that `extend` is asked for."""
        self._model, self._drafter, self._context = model, drafter, context
        entries = context + WINDOW
        self._batch, self._planes = open_batch(model, drafter, rows, entries, emitted=_ACCEPTED + 1)
        self._batch.seq_lens.fill_(context)
        self._batch.roots.random_(model.vocabulary)
        state = self._batch.drafter_state
        if state.is_floating_point():
            state.normal_()
        else:
            state.random_(model.vocabulary)
        self._candidates = _candidates(self._batch, model.vocabulary)
        aux = rows, steps + 1, len(model.stack.captured) * model.config.hidden_size
        self._aux = torch.randn(aux, dtype=model.dtype, device=model.device)
        self._sampling = sampling
        self._batch.temperature.fill_(float(sampling))
        self._batch.top_p.fill_(1)
        self._logits = torch.randn(rows, model.vocabulary, dtype=model.dtype, device=model.device)

    def tree(self, nodes: int) -> Tree:
        roots = self._batch.roots
        if nodes == 1:
            return root_only(roots)
        return self._model.ops.grow_tree(roots, *self._candidates[:3], nodes)

    def verify(self, tree: Tree) -> object:
        model, batch = self._model, self._batch
        if self._sampling and tree.tokens.shape[1] > 1:  # a draw for each node that is walked
            for _ in range(_ACCEPTED):
                model.ops.draw(self._logits, batch.sampling, batch.seq_lens)
        return verify_forward(model, self._planes, batch, tree, 0, sampling=self._sampling)

    def draft(self, beams: int, steps: int) -> object:
        shape = TreeSection(top_k=beams, steps=steps, nodes=WINDOW)
        return self._drafter.candidates(self._batch, self._planes, shape)

    def extend(self, steps: int) -> None:
        """Read what the deepest branch would emit, and make the first proposal after it."""
        batch, planes, emitted = self._batch, self._planes, steps + 1
        tokens = self._candidates[0][:, :emitted].flatten()
        read = ReadTokens(
            rows=TokenRows.even(len(batch), emitted, tokens.device),
            tokens=tokens,
            next_tokens=tokens,
            aux=self._aux[:, :emitted].flatten(0, 1),
            counts=torch.full_like(batch.seq_lens, emitted),
        )
        self._drafter.extend(batch, planes, read)
        self._drafter.candidates(batch, planes, _FIRST_PROPOSAL)

    def other(self, nodes: int) -> None:
        batch, ops = self._batch, self._model.ops
        # The target agrees with the second of each pair: see `_candidates`.
        predicted = self._candidates[0][:, 1 : nodes + 1]
        tree = self.tree(nodes)
        accepted = ops.verify(tree, predicted, _ACCEPTED)
        ops.compact(self._planes.target, batch.block_table, batch.seq_lens, accepted.path)
        batch.commit(accepted, count_proposed(self._candidates, tree))
        batch.seq_lens.fill_(self._context)


def _candidates(batch: DecodeBatch, vocabulary: int) -> Candidates:
    """Candidates of any tree up to the window, C of them.

    Pairs of siblings below the second one of the pair above, so that an accepted branch is never
    contiguous and its keys have to be moved:

        root ─┬─ 0
              └─ 1 ─┬─ 2
                    └─ 3 ─┬─ 4
                          └─ 5 …
    """
    index = torch.arange(WINDOW + 2, device=batch.roots.device)  # [C]
    each = (len(batch), -1)
    return Candidates(
        (index % vocabulary).expand(each).contiguous(),
        (index // 2 * 2 - 1).expand(each).contiguous(),
        (-index.float()).expand(each).contiguous(),
        index // 2 + 1,
    )


def _host_seconds(launch: Callable[[], object]) -> float:
    begun = time.perf_counter()
    launch()
    return time.perf_counter() - begun


def _cuda_seconds(launch: Callable[[], object]) -> float:
    """Between two events after kernels that still run: the host's own time does not count."""
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


@dataclass(frozen=True)
class Roofline:
    """A machine, and the batch that it decodes."""

    bandwidth: float  # bytes/s
    flops: float  # FLOP/s, a multiply-add being two
    rows: int
    context: float  # entries of each row that a layer sees

    def seconds(
        self,
        matrices: Sequence[tuple[int, int]],  # (parameters, tokens a row that pass through them)
        tokens: int,  # read, a row
        *,
        entry: int,  # numbers in the keys and values of one token
        queries: int,  # numbers in its queries
        stored: float,  # bytes of a parameter
        dtype: torch.dtype,  # of keys and values
    ) -> float:
        """The floor of one forward."""
        # The context's entries are read, the new ones written; queries meet keys, then weights
        # values.
        cache = self.rows * (self.context + tokens) * entry
        weights = sum(parameters for parameters, _ in matrices)
        read = stored * weights + dtype.itemsize * cache
        products = sum(2 * parameters * count for parameters, count in matrices)
        attention = 4 * tokens * self.context * queries
        operations = self.rows * (products + attention)
        return max(read / self.bandwidth, operations / self.flops)


def s_max(
    tau: float, t_ar: float, t_verify: float, t_draft: float, t_extend: float, steps: int
) -> float:
    """The speedup of τ tokens a round when every piece runs at its floor and nothing else does."""
    return tau * t_ar / (t_verify + (steps - 1) * t_draft + t_extend)


def best_speedup(
    model: DecoderModel, drafter: Drafter, shape: TreeSection, tau: float, roofline: Roofline
) -> float | None:
    """S_max of trees of this shape; None for a drafter whose floor is not known."""
    if (work := drafter.work(shape)) is None:
        return None
    return s_max(
        tau,
        floor_seconds(model, 1, roofline),
        floor_seconds(model, shape.nodes, roofline),
        draft_floor_seconds(work, roofline),
        extend_floor_seconds(work, roofline),
        shape.steps,
    )


def round_floor_seconds(
    model: DecoderModel, drafter: Drafter, shape: TreeSection, roofline: Roofline
) -> float | None:
    """Of a round of such trees; None for a drafter whose floor is not known."""
    if (work := drafter.work(shape)) is None:
        return None
    verify, draft = floor_seconds(model, shape.nodes, roofline), draft_floor_seconds(work, roofline)
    return verify + (shape.steps - 1) * draft + extend_floor_seconds(work, roofline)


def floor_seconds(model: DecoderModel, tokens: int, roofline: Roofline) -> float:
    """T_AR or T_verify: a forward of `tokens` tokens a row, with logits of all of them."""
    size, layers = model.head_dim, len(model.layers)
    seen = sum(min(window or roofline.context, roofline.context) for window in model.windows)
    matrices = [(layers * layer_parameters(model) + _lm_head_parameters(model), tokens)]
    entry, queries = 2 * layers * model.kv_heads * size, layers * model.num_heads * size
    return replace(roofline, context=seen / layers).seconds(
        matrices,
        tokens,
        entry=entry,
        queries=queries,
        stored=_stored_bytes(model),
        dtype=model.dtype,
    )


def model_bytes(model: DecoderModel) -> float:
    """What a forward reads of the target's weights: every matrix once, a tied lm_head included."""
    return sum(map(packed_bytes, _matrices(model)))


def layer_parameters(model: DecoderModel) -> int:
    """Of the matrices of one of the target's layers."""
    hidden, size = model.config.hidden_size, model.head_dim
    # q and o, k and v
    attention = hidden * size * (2 * model.num_heads + 2 * model.kv_heads)
    return int(attention + 3 * hidden * model.inner)


def _stored_bytes(model: DecoderModel) -> float:
    """Of a parameter, as the backend has packed it: bf16 weights stay so under fp32 arithmetic."""
    parameters = len(model.layers) * layer_parameters(model) + _lm_head_parameters(model)
    return model_bytes(model) / parameters


def _lm_head_parameters(model: DecoderModel) -> int:
    """Of what this process has of lm_head."""
    ranks = model.group.size if model.group else 1
    return int(-(-model.vocabulary // ranks) * model.config.hidden_size)


def _matrices(model: DecoderModel) -> Iterator[Packed]:
    """All that a forward multiplies with."""
    for layer in model.layers:
        yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
    yield model.lm_head.rows if isinstance(model.lm_head, VocabularySlice) else model.lm_head


def draft_floor_seconds(work: DraftWork, roofline: Roofline) -> float:
    """T_draft: one step."""
    return _head_seconds(work, work.step, work.beams, roofline)


def extend_floor_seconds(work: DraftWork, roofline: Roofline) -> float:
    """T_extend: what a round has accepted."""
    return _head_seconds(work, work.extension, work.accepted, roofline)


def _head_seconds(
    work: DraftWork, matrices: Sequence[tuple[int, int]], tokens: int, roofline: Roofline
) -> float:
    seen = min(work.window or roofline.context, roofline.context)
    return replace(roofline, context=seen).seconds(
        matrices,
        tokens,
        entry=work.entry,
        queries=work.queries,
        stored=work.weight_bytes,
        dtype=work.dtype,
    )


def read_bandwidth(device: torch.device, *, megabytes: int = 512, runs: int = 9) -> float:
    """Bytes per second of the fastest sequential reader.

    A sum keeps one stream a thread in flight; a product of a matrix and a vector reads several rows
    at once, which most CPUs need for their all.
    """
    source = torch.ones(megabytes * 2**20 // 4, device=device)
    matrix, vector = source.view(-1, 2048), torch.ones(2048, device=device)
    readers: list[Callable[[], object]] = [source.sum, lambda: matrix @ vector]
    taken: list[list[float]] = [
        [_seconds(read, device) for read in readers] for _ in range(1 + runs)
    ]
    return 4 * source.numel() / min(float(median(each)) for each in zip(*taken[1:], strict=True))


def matmul_rate(device: torch.device, *, size: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """FLOP/s of a square product."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        for _ in range(5):
            left @ right

    taken: list[float] = [_seconds(multiply, device) for _ in range(6)]
    return 10.0 * size**3 / float(median(taken[1:]))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    started = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
