"""Which drafter pays at which batch size and context, and with which shape.

    traces of prompts of a context   ─┐
    costs of a round at (B, S)       ─┴► for each drafter the best shape, τ, speedup   `plan_cell`
    rounds of that shape, by turns with plain ones ─► what was measured                `run_rounds`

MagicDec (arXiv:2408.11049, §3) reasons about the same quantities: at a large B · S a round's time
is that of reading keys and values, which verification shares and a full draft does not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from statistics import fmean

import torch

from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.drafter import Drafter
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.round import decode_round, prefill_prompt
from pipeline.decoder.tree import WINDOW
from pipeline.drafters.registry import DrafterFactory
from pipeline.tuning.cost import Costs, measure_costs, open_batch, trimmed_mean
from pipeline.tuning.trace import Traces, trace
from pipeline.tuning.tune import best_shapes, shapes_for, widest_for

#: Points of a cell's cost curves, and turns of its pieces.
_NODES, _BEAMS, _STEPS, _REPEATS = (1, 2, 4, 8, 16, 32), (1, 2, 4), (1, 3, 6), 5


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
    model: DecoderModel,
    factory: DrafterFactory,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
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
    model: DecoderModel,
    name: str,
    traced: Sequence[Traced],
    rows: int,
    context: int,
) -> PlannedCell:
    """Time a round's pieces for `rows` rows of `context` entries, and choose variant and shape."""
    cells = [_plan_variant(model, name, *each, rows, context) for each in traced]
    return max(cells, key=lambda cell: cell.speedup)


def _plan_variant(
    model: DecoderModel,
    name: str,
    factory: DrafterFactory,
    traces: Traces,
    rows: int,
    context: int,
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
