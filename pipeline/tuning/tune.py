"""Which draft tree, and which drafter, is fastest for which batch size and context.

    trace           decode some prompts plainly, and draft what a wide tree holds at every position
    acceptance      replay the rounds that one shape would have made: no model is run again
    measure_costs   time the pieces of a round on this machine
    best_shapes     the shape with the largest predicted speedup, for each batch size

`tune` chooses for `tree: auto`. Where the drafter itself leaves something open, such as the budget
of its cache or the size of its blocks, every variant is traced and timed, and the best shape of the
best variant is the choice. `plan_cell` does the same for one batch size B and context S of
`plan-decode`, and `run_rounds` measures its prediction. MagicDec (arXiv:2408.11049, §3) reasons
about the same quantities: at a large B · S a round's time is that of reading keys and values, which
verification shares and a full draft does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice
from statistics import fmean

import torch

from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.drafter import Drafter, DrafterFactory
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.tree import WINDOW
from pipeline.decoder.round import decode_round, prefill_prompt
from pipeline.target.parallel import Group
from pipeline.tuning.cost import STEP_COUNTS, Costs, measure_costs, open_batch, trimmed_mean
from pipeline.tuning.trace import Traces, acceptance, trace

#: Beams of the candidate shapes; 1 is a chain.
BEAM_WIDTHS = (1, 2, 3, 4, 6, 8)
DEPTHS = DrafterFactory.depths
NODE_BUDGETS = (4, 6, 8, 12, 16, 24, 32, 48, 64)
#: The widest and deepest of the candidate shapes: what to trace with.
WIDEST = TreeSection(top_k=max(BEAM_WIDTHS), steps=max(DEPTHS), nodes=max(NODE_BUDGETS))
#: Timed runs after each median: a choice between shapes needs less than a published figure.
_REPEATS = 5


@dataclass(frozen=True)
class Choice:
    """A shape, and what is expected of it."""

    shape: TreeSection
    acceptance_length: float  # τ
    speedup: float  # over plain decoding
    factory: DrafterFactory | None = None  # of the drafter whose shape it is, one variant of it

    @property
    def settings(self) -> dict[str, int]:
        """What was chosen beside the shape, such as {"budget": 512}."""
        return dict(self.factory.settings) if self.factory else {}

    @property
    def drafts(self) -> bool:
        """Whether the shape is faster than one node, which is plain decoding and an answer too."""
        return self.speedup > 1


def tune(
    model: DecoderModel,
    factory: DrafterFactory,
    prompts: Sequence[Sequence[int]],
    *,
    rows: Sequence[int],
    stop_ids: Sequence[int] = (),
    new_tokens: int = 48,
    sampling: bool = False,
    processes: Group | None = None,
) -> dict[int, Choice]:
    """Trace prompts, time rounds at each batch size in `rows`, choose; of several `processes` by
    the times of rank 0. Raises as `trace`.

    An engine has one drafter: the variant that is fastest at the smallest batch size is taken for
    all, with a shape of its own for each. `sampling` times rounds of requests that
    sample; what is accepted is traced greedily.
    """
    context = sum(map(len, prompts)) // len(prompts) + new_tokens // 2  # of an average reply
    tuned = [
        _tune_variant(
            model,
            variant,
            prompts,
            context,
            rows=rows,
            stop_ids=stop_ids,
            new_tokens=new_tokens,
            sampling=sampling,
            processes=processes or Group(),
        )
        for variant in factory.variants(context)
    ]
    return max(tuned, key=lambda choices: choices[min(rows)].speedup)


def _tune_variant(
    model: DecoderModel,
    factory: DrafterFactory,
    prompts: Sequence[Sequence[int]],
    context: int,
    *,
    rows: Sequence[int],
    stop_ids: Sequence[int],
    new_tokens: int,
    sampling: bool,
    processes: Group,
) -> dict[int, Choice]:
    widest = widest_for(factory)
    drafter = factory(widest)
    slots = min(len(prompts), max(rows))
    traces = trace(
        model,
        drafter,
        prompts,
        new_tokens,
        widest,
        widths=BEAM_WIDTHS,
        slots=slots,
        stop_ids=stop_ids,
    )
    context = min(context, model.max_length - widest.steps - 2)
    counts = sorted({*(step for step in STEP_COUNTS if step <= widest.steps), widest.steps})
    costs = {
        size: measure_costs(
            model, drafter, size, context, step_counts=counts, repeats=_REPEATS, sampling=sampling
        )
        for size in rows
    }
    costs = processes.broadcast(costs)
    best = best_shapes(costs, traces, shapes_for(factory))
    return {size: replace(choice, factory=factory) for size, choice in best.items()}


def widest_for(factory: DrafterFactory) -> TreeSection:
    """The widest and deepest tree that such a drafter can draft, and that is worth a try."""
    steps = max(factory.depths)
    widths = (width for width in BEAM_WIDTHS if (steps - 1) * width <= WINDOW)
    return WIDEST.model_copy(update={"steps": steps, "top_k": max(widths)})


def shapes_for(factory: DrafterFactory) -> list[TreeSection]:
    """Those that such a drafter can draft, and that are worth a try."""
    return list(candidate_shapes(factory.depths))


@cache
def candidate_shapes(depths: tuple[int, ...]) -> tuple[TreeSection, ...]:
    """Shapes that differ in what they can accept or in what they cost, small ones first.

    Left out: budgets beyond all that a draft proposes, and beams or steps beyond what the budget
    can hold, since the best n - 1 candidates have no more than n - 1 siblings or generations among
    them.
    """
    shapes = [TreeSection(top_k=1, steps=steps, nodes=steps + 1) for steps in depths]
    for beams in BEAM_WIDTHS[1:]:
        for steps in depths:
            most = 1 + beams + (steps - 1) * beams**2  # the root, and all that is proposed
            if (steps - 1) * beams > WINDOW:
                continue
            for smaller, budget in zip((0, *NODE_BUDGETS), NODE_BUDGETS, strict=False):
                if max(beams, steps) < budget and smaller < most:
                    nodes = min(budget, most)
                    shapes.append(TreeSection(top_k=beams, steps=steps, nodes=nodes))
    return tuple(shapes)


CANDIDATE_SHAPES = candidate_shapes(DEPTHS)


def best_shapes(
    costs_by_rows: Mapping[int, Costs],
    traces: Traces,
    shapes: Sequence[TreeSection] = CANDIDATE_SHAPES,
) -> dict[int, Choice]:
    """For each batch size, the covered shape with the largest predicted speedup.

    Each choice holds from its batch size upward, which is how drafters read {rows: shape};
    let the smallest size be 1. A speedup of at most 1 is returned like any other: no shape is then
    worth it (`Choice.drafts`).
    """
    taus = {shape: acceptance(traces, shape) for shape in shapes if traces.covers(shape)}
    if not taus:
        beams = sorted(traces.ranks)
        raise ValueError(f"none of {len(shapes)} shapes is covered by traces of {beams} beams")
    return {rows: _fastest(costs, taus) for rows, costs in sorted(costs_by_rows.items())}


def fastest(choices: Iterable[Choice]) -> Choice:
    """Of equals the first, which is the smallest."""
    return max(choices, key=lambda choice: choice.speedup)


def _fastest(costs: Costs, taus: Mapping[TreeSection, float]) -> Choice:
    return fastest(Choice(shape, tau, costs.speedup(shape, tau)) for shape, tau in taus.items())


#: Points of a cell's cost curves.
_NODES, _BEAMS, _STEPS = (1, 2, 4, 8, 16, 32), (1, 2, 4), (1, 3, 6)


@dataclass(frozen=True)
class Measurement:
    """What rounds of a shape gave, beside plain ones in the same turns."""

    plain_seconds: float
    round_seconds: float
    acceptance_length: float  # τ
    rounds: int

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.acceptance_length * self.plain_seconds / self.round_seconds


@dataclass(frozen=True)
class PlannedCell:
    """The best that a drafter is expected to do for `rows` rows of about `context` tokens."""

    drafter: str
    rows: int  # B
    context: int  # S
    tree: TreeSection
    acceptance_length: float  # τ, replayed
    speedup: float  # over plain decoding; at most 1: it does not pay
    costs: Costs
    factory: DrafterFactory  # the variant of the drafter
    measured: Measurement | None = None

    def checked(self, measured: Measurement) -> PlannedCell:
        """With what its shape gave when it was run."""
        return replace(self, measured=measured)

    @property
    def error(self) -> float | None:
        """Of the predicted speedup, as a share of the measured one."""
        return self.speedup / self.measured.speedup - 1 if self.measured else None


#: A variant of a drafter, and what it accepts.
Traced = tuple[DrafterFactory, Traces]


def trace_variants(
    model: DecoderModel, factory: DrafterFactory, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[Traced]:
    """Every variant that is worth a try after prompts of this length, traced."""
    context = sum(map(len, prompts)) // len(prompts)
    variants = factory.variants(context)
    return [(each, trace_drafter(model, each, prompts, new_tokens)) for each in variants]


def trace_drafter(
    model: DecoderModel,
    factory: DrafterFactory,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    shape: TreeSection | None = None,
) -> Traces:
    """Acceptance on prompts of one context length, over replies of `new_tokens`: that of `shape`,
    or of every shape that `plan_cell` chooses from.

    Stop tokens do not end replies. Raises as `trace`.
    """
    widest = widest_for(factory)
    widest = shape or widest.model_copy(update={"top_k": min(max(_BEAMS), widest.top_k)})
    widths = (shape.top_k,) if shape else _BEAMS
    return trace(model, factory(widest), prompts, new_tokens, widest, widths=widths)


def plan_cell(
    model: DecoderModel, name: str, traced: Sequence[Traced], rows: int, context: int
) -> PlannedCell:
    """Time a round's pieces for `rows` rows of `context` entries, and choose variant and shape."""
    cells = [_plan_variant(model, name, *each, rows, context) for each in traced]
    return max(cells, key=lambda cell: cell.speedup)


def _plan_variant(
    model: DecoderModel, name: str, factory: DrafterFactory, traces: Traces, rows: int, context: int
) -> PlannedCell:
    drafter = factory(widest_for(factory))
    steps = sorted({*(step for step in _STEPS if step <= drafter.depth), drafter.depth})
    costs = measure_costs(
        model,
        drafter,
        rows,
        context,
        _NODES,
        beam_counts=_BEAMS,
        step_counts=steps,
        repeats=_REPEATS,
    )
    shapes = [
        shape
        for shape in shapes_for(factory)
        if shape.nodes <= max(_NODES) and shape.top_k in _BEAMS
    ]
    choice = best_shapes({rows: costs}, traces, shapes)[rows]
    figures = choice.shape, choice.acceptance_length, choice.speedup
    return PlannedCell(name, rows, context, *figures, costs, factory)


@torch.inference_mode()
def run_rounds(
    model: DecoderModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    rows: int,
    new_tokens: int,
) -> Measurement:
    """Decode prompts `rows` at a time, each at least once: a plain and a drafted round in turns.

    No row ends before the others: rounds are of the whole batch until every row has `new_tokens`.
    """
    plain: list[float] = []
    drafted: list[float] = []
    emitted: list[int] = []
    for first in range(0, len(prompts), rows):
        some = list(islice(cycle(prompts), first, first + rows))
        ran = _decode_in_turns(model, drafter, some, new_tokens)
        plain += ran[0].seconds[1:]
        drafted += ran[1].seconds[1:]
        emitted += ran[1].tokens
    tau = fmean(emitted) / rows
    return Measurement(trimmed_mean(plain), trimmed_mean(drafted), tau, len(emitted))


def _decode_in_turns(
    model: DecoderModel, drafter: Drafter, prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[_Running, _Running]:
    """Plain and speculative rounds of the same rows."""
    max_prompt_len = max(map(len, prompts))
    plain = _Running(model, None, prompts, max_prompt_len + new_tokens + WINDOW)
    # A row that accepts all is `depth` rounds' tokens ahead of one that accepts nothing.
    reach = max_prompt_len + new_tokens * (drafter.depth + 1) + 2 * WINDOW
    drafted = _Running(model, drafter, prompts, min(reach, model.max_length + 2 * WINDOW))
    while min(drafted.emitted) < new_tokens and drafted.fits(model.max_length):
        if min(plain.emitted) < new_tokens:
            plain.round()
        drafted.round()
    while min(plain.emitted) < new_tokens:
        plain.round()
    return plain, drafted


class _Running:
    """Rows in the middle of their replies."""

    def __init__(
        self,
        model: DecoderModel,
        drafter: Drafter | None,
        prompts: Sequence[Sequence[int]],
        entries: int,
    ) -> None:
        self._model, self._drafter = model, drafter
        emitted = drafter.depth + 1 if drafter else 1
        self._batch: DecodeBatch
        self._planes: Planes
        self._batch, self._planes = open_batch(
            model, drafter, len(prompts), entries, emitted=emitted
        )
        for row, prompt in enumerate(prompts):
            tokens = torch.tensor(prompt, device=model.device)
            prefill_prompt(model, self._planes, drafter, self._batch.rows(row, row + 1), tokens)
        self.emitted = [0] * len(prompts)
        self.seconds: list[float] = []
        self.tokens: list[int] = []

    def fits(self, max_length: int) -> bool:
        """Whether every row has room for another round."""
        most = self._drafter.depth + 1 if self._drafter else 1
        return int(self._batch.seq_lens.max()) + most <= max_length

    def round(self) -> None:
        started = time.perf_counter()
        decode_round(self._model, self._planes, self._drafter, self._batch, sampling=False)
        counts = self._batch.counts.tolist()  # waits for a GPU
        self.seconds.append(time.perf_counter() - started)
        self.tokens.append(sum(counts))
        self.emitted = [before + count for before, count in zip(self.emitted, counts, strict=True)]
