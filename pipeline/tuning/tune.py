"""Which draft tree is fastest for which batch size (`tree: auto`): acceptance × measured costs.

trace           decode some prompts plainly, and at every position draft all that a wide tree holds
acceptance      replay the rounds that one shape would have made: no model is run again
measure_costs   time the pieces of a round on this machine
best_shapes     the shape with the largest predicted speedup, for each batch size

Where the drafter itself leaves something open, such as the budget of its cache or the size of its
blocks, every variant is traced and timed, and the best shape of the best variant is the choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from pipeline.config import TreeSection
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.tree import WINDOW
from pipeline.drafters.registry import DrafterFactory
from pipeline.tuning.cost import STEP_COUNTS, Costs, measure_costs
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
) -> dict[int, Choice]:
    """Trace prompts, time rounds at each batch size in `rows`, choose. Raises as `trace`.

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
