"""`eagle3 plan-decode`: expected speedup of each drafter over batch size and context, and the best
shape of each, from what this machine measures and from the acceptance of the evaluation prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pipeline.config import DRAFTERS, DrafterSection, EvalSection, RunConfig, prepare_process
from pipeline.console import progress_bar
from pipeline.decoder.drafter import DrafterFactory
from pipeline.decoder.model import DecoderModel
from pipeline.drafters.registry import load_drafter
from pipeline.errors import ConfigError
from pipeline.heads.base import DraftingHead
from pipeline.heads.registry import open_head
from pipeline.planning.decode import DecodePlan, PlannedDecoding, crossings
from pipeline.serve_eval.questions import (
    fill_context,
    first_question,
    load_evaluation_prompts,
    readable,
)
from pipeline.store.manifest import vouched_head
from pipeline.target.arithmetic import decoder_arithmetic
from pipeline.target.open import Target, open_target
from pipeline.tuning.tune import PlannedCell, plan_cell, run_rounds, trace_variants


class Grid(NamedTuple):
    """What a plan is measured for."""

    drafters: Sequence[str]
    batches: Sequence[int]
    contexts: Sequence[int]
    prompts: int  # traced at each context
    new_tokens: int
    most_tokens: int  # cells of a larger batch x context are left out
    check: bool  # run the best shape of each cell beside plain decoding

    def batches_at(self, context: int) -> list[int]:
        """Those whose cells are measured."""
        return [batch for batch in self.batches if batch * context <= self.most_tokens]


def plan_decode(config: RunConfig, grid: Grid) -> DecodePlan:
    """Measure this machine. Raises ConfigError for contexts that the target does not hold."""
    prepare_process(config.run)
    target = open_target(config.target, decoded=True)
    model = DecoderModel.load(
        target.directory,
        target.contract.capture_layers,
        device=target.device,
        dtype=target.dtype,
        max_length=_max_length(grid, target),
    )
    head = _head(config, target, grid.drafters)
    questions = _contexts(config, target, grid.contexts, grid.prompts)
    total = len(grid.drafters) * sum(len(grid.batches_at(each)) for each in grid.contexts)
    cells: list[PlannedDecoding] = []
    with progress_bar("plan-decode", unit="cells", total=total) as bar:
        for name in grid.drafters:
            factory = load_drafter(_section(config.eval, name), model, target, head)
            assert factory is not None
            for cell in _cells(model, name, factory, grid, questions):
                cells.append(_record(cell))
                bar.advance(1)
    arithmetic = decoder_arithmetic(model.ops, model.dtype, model.device)
    return DecodePlan(
        basis="measured",
        machine=f"{arithmetic}, {arithmetic.threads} threads",
        target=target.contract.source,
        prompts=grid.prompts,
        new_tokens=grid.new_tokens,
        cells=tuple(cells),
        crossings=crossings(cells),
    )


def _cells(
    model: DecoderModel,
    name: str,
    factory: DrafterFactory,
    grid: Grid,
    questions: Mapping[int, Sequence[tuple[int, ...]]],
) -> Iterator[PlannedCell]:
    """Of one drafter, one after the other."""
    for context in grid.contexts:
        prompts = questions[context]
        traced = trace_variants(model, factory, prompts, grid.new_tokens)
        for batch in grid.batches_at(context):
            cell = plan_cell(model, name, traced, batch, context)
            if grid.check:
                drafter = cell.factory(cell.tree)
                cell = cell.checked(run_rounds(model, drafter, prompts, batch, grid.new_tokens))
            yield cell


def _max_length(grid: Grid, target: Target) -> int:
    """Prompt and reply of the longest context."""
    room = 16 * grid.new_tokens  # a row that accepts all runs ahead of one that accepts nothing
    length = max(grid.contexts) + room
    if length > target.positions:
        problem = f"{max(grid.contexts)} tokens of context and {room} more do not fit into the"
        raise ConfigError(
            f"{problem} {target.positions} positions of the target",
            where="--contexts",
            fix="plan for shorter contexts",
        )
    return length


def _section(section: EvalSection, name: str) -> DrafterSection:
    """The drafter with the settings that `eval.drafter` or a rival of `eval.compare` gives it."""
    configured = (section.drafter, *(rival.drafter for rival in section.compare))
    return next((each for each in configured if each.name == name), DrafterSection(name=name))


def _head(config: RunConfig, target: Target, drafters: Sequence[str]) -> DraftingHead | None:
    if not any(DRAFTERS[name].trained for name in drafters):
        return None
    location = vouched_head(config.run.uri, config.eval.head)
    return open_head(location, expected=target.contract)[0]


def _contexts(
    config: RunConfig, target: Target, contexts: Sequence[int], count: int
) -> dict[int, list[tuple[int, ...]]]:
    """Of each context length, `count` evaluation questions behind others that fill it."""
    template = target.template(system_prompt=config.eval.system_prompt)
    measured, _ = readable(load_evaluation_prompts(config)[0], [template])
    questions = [first_question(prompt, template).context for prompt in measured]
    if len(questions) < 2:
        fix = "name more of them; others stand before each to fill the context"
        raise ConfigError("one evaluation prompt is not enough", where="eval.sources", fix=fix)
    chosen = [index * len(questions) // count % len(questions) for index in range(count)]
    return {
        context: [fill_context(questions, index, context) for index in chosen]
        for context in contexts
    }


def _record(cell: PlannedCell) -> PlannedDecoding:
    costs, tree, ran = cell.costs, cell.tree, cell.measured
    pieces = {
        "t_ar": costs.plain_seconds,
        "t_verify": costs.verify_seconds(tree.nodes),
        "t_draft": costs.draft_seconds(tree.top_k),
        "t_extend": costs.extend_seconds(tree.steps),
        "t_other": costs.other_seconds(tree.nodes),
    }
    return PlannedDecoding(
        drafter=cell.drafter,
        batch=cell.rows,
        context=cell.context,
        tree=tree.model_dump(),
        settings=dict(cell.factory.settings),
        acceptance_length=cell.acceptance_length,
        speedup=cell.speedup,
        milliseconds={name: round(1e3 * seconds, 4) for name, seconds in pieces.items()},
        measured_speedup=ran and ran.speedup,
        measured_acceptance_length=ran and ran.acceptance_length,
        error=cell.error,
    )
