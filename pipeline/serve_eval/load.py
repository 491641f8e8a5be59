"""Speed with several requests at a time: closed loops on our own decoder, with and without drafter.

    concurrency 2    slot 0  ├─ a ─┤├──── c ────┤├─ d ─┤        as one request ends, the next begins
                     slot 1  ├──── b ────┤├─ e ─┤ …

Both ways take turns on blocks of the same requests, so that whatever else the machine does hits
both. Replies above temperature 0 are drawn by seed, the same seeds for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice, product
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from pipeline.config import EvalSection, tree_labels
from pipeline.console import progress_bar
from pipeline.decoder.request import Completion, Request
from pipeline.errors import ConfigError
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.records import Prompt
from pipeline.reports import LoadCurve, LoadPoint, Percentiles
from pipeline.serve_eval.acceptance import acceptance_figures
from pipeline.serve_eval.measure import Comparison
from pipeline.serve_eval.questions import fill_context, first_question
from pipeline.target.template import ChatTemplate
from pipeline.tuning.cost import measure_costs
from pipeline.tuning.roofline import Roofline, best_speedup, eta, matmul_rate, read_bandwidth

#: Blocks of a point's requests, in which both ways take turns.
_BLOCKS = 4
#: Requests of a point for each that is open, so that the end, where slots are empty, weighs little.
_PER_SLOT = 4


class Workload(NamedTuple):
    """What all points of a pair of curves are asked."""

    settings: dict[str, Any]  # of the curves
    contexts: Sequence[tuple[int, ...]]  # token ids of each prompt
    stop_ids: tuple[int, ...]
    temperature: float = 0.0
    imposed: tuple[int, ...] = ()  # drafted tokens that rounds accept in turn; (): what is right


def measure_load(
    own: Comparison, prompts: Sequence[Prompt], template: ChatTemplate, section: EvalSection
) -> tuple[LoadCurve, ...]:
    """A pair of curves for every mode, context and temperature of `eval.load`; first turns."""
    if not section.load.concurrency:
        return ()
    return measure_workloads(own, _workloads(own, prompts, template, section), section, "eval")


def measure_workloads(
    own: Comparison, workloads: Sequence[Workload], section: EvalSection, stage: str
) -> tuple[LoadCurve, ...]:
    """Both ways of each, at every concurrency of `eval.load`; `stage` is what progress is of."""
    machine, counts = Rates(0.0, 0.0), sorted(set(section.load.concurrency))
    measured: list[tuple[dict[str, Any], list[_Point]]] = []
    total = len(workloads) * len(counts)
    with progress_bar(stage, unit="points", total=total, note="load") as bar:
        for work in workloads:
            measured.append((work.settings, []))
            for count in counts:
                asked = section.load.requests or max(_PER_SLOT * count, len(work.contexts))
                machine = machine.best_of(_machine(own))
                requests = list(_requests(work, asked, section.max_new_tokens))
                measured[-1][1].append(_measure(own, requests, count, work))
                bar.advance(1)
    return tuple(curve for each in measured for curve in _curves(own, *each, machine))


def _workloads(
    own: Comparison, prompts: Sequence[Prompt], template: ChatTemplate, section: EvalSection
) -> list[Workload]:
    load = section.load
    templates = {"": template}
    if load.modes:
        templates = {
            mode: template.varied(kwargs=kwargs, where="eval.load.modes")
            for mode, kwargs in load.modes.items()
        }
    contexts = fitting_contexts(own, prompts, templates)
    left_out = len(prompts) - len(next(iter(contexts.values())))
    trees = tree_labels(own.trees)
    cases = product(templates, load.contexts or (None,), load.temperatures)
    return [
        Workload(
            {
                "temperature": temperature,
                **({"mode": mode, **load.modes[mode]} if mode else {}),
                **({"context": length} if length else {}),
                **({"prompts_left_out": left_out} if left_out else {}),
                **({"trees": trees} if len(trees) > 1 else {}),
            },
            filled(contexts[mode], length) if length else contexts[mode],
            template.stop_ids,
            temperature,
        )
        for mode, length, temperature in cases
    ]


def fitting_contexts(
    own: Comparison, prompts: Sequence[Prompt], templates: Mapping[str, ChatTemplate]
) -> dict[str, list[tuple[int, ...]]]:
    """Of the prompts whose first turn fits in every mode, so that all curves are of the same."""
    each = [
        {mode: first_question(prompt, one).context for mode, one in templates.items()}
        for prompt in prompts
    ]
    fitting = [contexts for contexts in each if all(map(own.fits, contexts.values()))]
    if not fitting:
        raise ConfigError(
            "no prompt leaves room for its reply"
            + (" in every mode" if len(templates) > 1 else ""),
            where="eval.load.modes" if len(templates) > 1 else "eval.sources",
            fix="choose shorter prompts or lower eval.max_new_tokens",
        )
    return {mode: [contexts[mode] for contexts in fitting] for mode in templates}


def filled_length(section: EvalSection, positions: int) -> int:
    """Tokens of the longest request of `eval.load.contexts`, 0 without. Raises ConfigError."""
    if not section.load.concurrency or not section.load.contexts:
        return 0
    longest = max(section.load.contexts) + section.max_new_tokens
    if longest > positions:
        problem = f"{max(section.load.contexts)} tokens and a reply of {section.max_new_tokens} do"
        raise ConfigError(
            f"{problem} not fit into {positions} positions",
            where="eval.load.contexts",
            fix="name shorter ones, or lower eval.max_new_tokens",
        )
    return longest


def filled(contexts: Sequence[tuple[int, ...]], length: int) -> list[tuple[int, ...]]:
    """Each behind as much of the others as makes `length` tokens."""
    return [fill_context(contexts, index, length) for index in range(len(contexts))]


class Rates(NamedTuple):
    """What the machine can do: bytes read and operations a second."""

    bandwidth: float
    flops: float

    def best_of(self, other: Rates) -> Rates:
        """A shared machine shows what it can do at its best moment."""
        return Rates(max(self.bandwidth, other.bandwidth), max(self.flops, other.flops))


class _Point(NamedTuple):
    """Both ways at one concurrency, behind contexts of so many tokens."""

    plain: LoadPoint
    drafted: LoadPoint
    context: int


def _curves(
    own: Comparison, settings: dict[str, Any], points: Sequence[_Point], machine: Rates
) -> tuple[LoadCurve, LoadCurve]:
    drafted = tuple(
        each.drafted.model_copy(update={"efficiency": _efficiency(own, each, machine)})
        for each in points
    )
    plain = tuple(each.plain for each in points)
    return (
        LoadCurve(name="plain", settings=settings, points=plain),
        LoadCurve(name="speculative", settings=settings, points=drafted),
    )


def _requests(work: Workload, total: int, limit: int) -> Iterator[Request]:
    """`total` requests; ids say which prompt each is of, seeds differ where prompts repeat."""
    for index, (number, context) in enumerate(islice(cycle(enumerate(work.contexts)), total)):
        name = f"{number}:{index}"
        yield Request(name, context, limit, work.stop_ids, temperature=work.temperature, seed=index)


def _measure(own: Comparison, requests: Sequence[Request], count: int, work: Workload) -> _Point:
    """One concurrency."""
    engines = [
        own.engine(speculative=False, slots=count),
        own.engine(speculative=True, slots=count, trees=own.trees, imposed=work.imposed),
    ]
    for engine in engines:  # first uses allocate
        list(engine.generate(requests[:count]))
    done: list[list[Completion]] = [[], []]
    seconds, peaks, cuda = [0.0, 0.0], [0, 0], own.model.device.type == "cuda"
    size = -(-len(requests) // min(_BLOCKS, max(1, len(requests) // count)))
    for turn, first in enumerate(range(0, len(requests), size)):
        for way in (0, 1) if turn % 2 else (1, 0):
            if cuda:
                torch.cuda.reset_peak_memory_stats(own.model.device)
            started = perf_counter()
            done[way] += engines[way].generate(requests[first : first + size])
            seconds[way] += perf_counter() - started
            if cuda:
                peaks[way] = max(peaks[way], torch.cuda.max_memory_allocated(own.model.device))
    plain, drafted = (
        _point(some, count, work.temperature, spent).model_copy(
            update={
                "cache_bytes": engine.pools.most_used_bytes,
                "peak_memory_bytes": peak if cuda else None,
            }
        )
        for some, spent, engine, peak in zip(done, seconds, engines, peaks, strict=True)
    )
    context = int(median(len(request.prompt_ids) for request in requests))
    context += requests[0].max_new_tokens // 2
    parts = _round_seconds(own, count, context, sampling=work.temperature > 0)
    return _Point(plain, drafted.model_copy(update={"round_seconds": parts}), context)


def _point(done: Sequence[Completion], count: int, temperature: float, seconds: float) -> LoadPoint:
    """In a closed loop a request is sent when its slot is free: to wait for one is not its time."""
    well = [each for each in done if each.error is None]
    statistics = [each.statistics for each in well]
    tokens = sum(len(each.token_ids) for each in well)
    later = [each.seconds_per_token for each in statistics if each.round_tokens]
    prompts = [each.request_id.partition(":")[0] for each in well]
    counters = [each.counters() for each in statistics]
    drafted = sum(each.drafted for each in counters)
    return LoadPoint(
        concurrency=count,
        temperature=temperature,
        requests=len(well),
        failed=len(done) - len(well),
        seconds=seconds,
        tokens=tokens,
        throughput=tokens / seconds,
        ttft_seconds=percentiles([each.first_token_seconds for each in statistics]),
        tpot_seconds=percentiles(later),
        acceptance=acceptance_figures(counters, prompts) if drafted else None,
    )


def percentiles(values: Sequence[float]) -> Percentiles:
    """Zeros of nothing."""
    if not values:
        return Percentiles(mean=0.0, p50=0.0, p90=0.0, p99=0.0)
    p50, p90, p99 = (float(each) for each in np.percentile(values, (50, 90, 99)))
    return Percentiles(mean=float(np.mean(values)), p50=p50, p90=p90, p99=p99)


def _round_seconds(
    own: Comparison, count: int, context: int, *, sampling: bool
) -> dict[str, float]:
    """A round by part, timed alone at this batch size; `draft` holds all its steps. Nothing where
    nothing is drafted."""
    if (tree := own.trees.get(count, own.tree)) is None:
        return {}
    costs = measure_costs(
        own.model,
        own.factory(tree),
        count,
        min(context, own.model.max_length - tree.steps - 1),
        (tree.nodes,),
        beam_counts=(tree.top_k,),
        step_counts=(tree.steps,),
        repeats=5,
        sampling=sampling,
    )
    return {
        "plain": costs.plain_seconds,
        "verify": costs.verify_seconds(tree.nodes),
        "draft": (tree.steps - 1) * costs.draft_seconds(tree.top_k),
        "extend": costs.extend_seconds(tree.steps),
        "other": costs.other_seconds(tree.nodes),
    }


def _machine(own: Comparison) -> Rates:
    """At this moment."""
    device = own.model.device
    size, megabytes = (8192, 512) if device.type == "cuda" else (1024, 256)
    flops = matmul_rate(device, size=size, dtype=own.model.dtype)
    return Rates(read_bandwidth(device, megabytes=megabytes, runs=3), flops)


def _efficiency(own: Comparison, point: _Point, machine: Rates) -> float | None:
    """η of an EAGLE-3 head; the floors of other drafters are not written down."""
    tree, acceptance = own.trees.get(point.drafted.concurrency, own.tree), point.drafted.acceptance
    if tree is None or acceptance is None or not point.plain.throughput:
        return None
    drafter = own.factory(tree)
    if not isinstance(drafter, Eagle3Drafter):
        return None
    gain = point.drafted.throughput / point.plain.throughput
    roofline = Roofline(*machine, rows=point.drafted.concurrency, context=point.context)
    tau = acceptance.acceptance_length.value
    return eta(gain, best_speedup(own.model, drafter, tree, tau, roofline))
