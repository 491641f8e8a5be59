"""Speed with several requests at a time: closed loops on our own decoder, with and without drafter.

    concurrency 2    slot 0  ├─ a ─┤├──── c ────┤├─ d ─┤        as one request ends, the next begins
                     slot 1  ├──── b ────┤├─ e ─┤ …

Both ways take turns on blocks of the same requests, so that other load on the machine affects both.
Replies above temperature 0 are drawn by seed, the same seeds for both.

`measure_load` is part of a report. `simulate` (`eagle3 simulate`) imposes acceptance lengths, to
show what a head of another τ would bring on this machine before it is trained: rounds draft, verify
and extend as ever, and accept a fixed number of drafted tokens. The text is not the target's, and
nothing of it enters a run or a report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice, product
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from pydantic import Field

from pipeline.config import EvalSection, RunConfig, prepare_process, tree_labels
from pipeline.console import console, long_step, notice, progress_bar
from pipeline.decoder.request import Completion, Request
from pipeline.errors import ConfigError
from pipeline.heads.base import DraftingHead
from pipeline.heads.init import DraftVocabulary, lend_rows
from pipeline.heads.registry import algorithm, open_head
from pipeline.records import Prompt, Record
from pipeline.reports import LoadCurve, LoadPoint
from pipeline.serve_eval.intervals import acceptance_figures, percentiles
from pipeline.serve_eval.measure import Comparison
from pipeline.serve_eval.questions import (
    fill_context,
    first_question,
    load_evaluation_prompts,
    readable,
)
from pipeline.store.manifest import find_manifest, vouched_head
from pipeline.target.arithmetic import decoder_arithmetic
from pipeline.target.open import Target, open_target
from pipeline.target.template import ChatTemplate
from pipeline.tuning.cost import Roofline, best_speedup, matmul_rate, measure_costs, read_bandwidth
from pipeline.tuning.verification import pattern_of

#: Blocks of a point's requests, in which both ways take turns.
_BLOCKS = 4
#: Requests of a point for each that is open, so that the end, where slots are empty, weighs little.
_PER_SLOT = 4


class Workload(NamedTuple):
    """The requests of a pair of curves."""

    settings: dict[str, Any]  # of the curves
    contexts: Sequence[tuple[int, ...]]  # token ids of each prompt
    stop_ids: tuple[int, ...]
    temperature: float = 0.0
    imposed: tuple[int, ...] = ()  # drafted tokens that rounds accept in turn; (): as verified


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
    """Both ways of each, at every concurrency of `eval.load`; `stage` labels the progress."""
    machine, counts = Rates(0.0, 0.0), sorted(set(section.load.concurrency))
    measured: list[tuple[dict[str, Any], list[_Point]]] = []
    total = len(workloads) * len(counts)
    with progress_bar(stage, unit="points", total=total, note="load") as bar:
        for work in workloads:
            measured.append((work.settings, []))
            for count in counts:
                total = section.load.requests or max(_PER_SLOT * count, len(work.contexts))
                machine = machine.best_of(_machine(own))
                requests = list(_requests(work, total, section.max_new_tokens))
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
    length = max(section.load.contexts) + section.max_new_tokens
    if length > positions:
        problem = f"{max(section.load.contexts)} tokens and a reply of {section.max_new_tokens} do"
        raise ConfigError(
            f"{problem} not fit into {positions} positions",
            where="eval.load.contexts",
            fix="name shorter ones, or lower eval.max_new_tokens",
        )
    return length


def filled(contexts: Sequence[tuple[int, ...]], length: int) -> list[tuple[int, ...]]:
    """Each, preceded by as much of the others as makes `length` tokens."""
    return [fill_context(contexts, index, length) for index in range(len(contexts))]


class Rates(NamedTuple):
    """What the machine can do: bytes read and operations a second."""

    bandwidth: float
    flops: float

    def best_of(self, other: Rates) -> Rates:
        """A shared machine shows what it can do at its best moment."""
        return Rates(max(self.bandwidth, other.bandwidth), max(self.flops, other.flops))


class _Point(NamedTuple):
    """Both ways at one concurrency, after contexts of so many tokens."""

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
    """η; None for a drafter whose floor is not known."""
    tree, acceptance = own.trees.get(point.drafted.concurrency, own.tree), point.drafted.acceptance
    if tree is None or acceptance is None or not point.plain.throughput:
        return None
    roofline = Roofline(*machine, rows=point.drafted.concurrency, context=point.context)
    tau = acceptance.acceptance_length.value
    best = best_speedup(own.model, own.factory(tree), tree, tau, roofline)
    return best and point.drafted.throughput / point.plain.throughput / best


class SimulatedPoint(NamedTuple):
    """One concurrency at one imposed τ."""

    context: int | None  # None: prompts as they are
    concurrency: int
    imposed: float
    reached: float  # what trees were deep enough for; a reply's last round is cut
    plain: float  # tokens/s
    simulated: float  # tokens/s

    @property
    def gain(self) -> float:
        return self.simulated / self.plain

    @property
    def pays_from(self) -> float:
        """τ at which drafting would be as fast as plain decoding: what a round costs, in tokens."""
        return self.reached / self.gain


class SimulatedLoad(Record):
    """What `eagle3 simulate --json` writes."""

    simulated: bool = Field(True, frozen=True)
    """Always: no acceptance in it was measured."""
    target: str
    """As in target.source."""
    drafter: str
    """Its name."""
    head: str
    """Directory of the head that drafted; `untrained` where there is none yet, empty without."""
    tree: dict[str, Any]
    """top_k, steps, nodes."""
    machine: str
    """Arithmetic and threads."""
    curves: tuple[LoadCurve, ...]
    """Pairs, plain and simulated, by context and imposed acceptance length."""

    def points(self) -> Iterator[SimulatedPoint]:
        """In the order of the curves."""
        for plain, simulated in zip(self.curves[::2], self.curves[1::2], strict=True):
            for before, after in zip(plain.points, simulated.points, strict=True):
                accepted = after.acceptance
                yield SimulatedPoint(
                    context=simulated.settings.get("context"),
                    concurrency=after.concurrency,
                    imposed=simulated.settings["imposed_acceptance_length"],
                    reached=accepted.acceptance_length.value if accepted else 1.0,
                    plain=before.throughput,
                    simulated=after.throughput,
                )


def simulate(config: RunConfig, lengths: Sequence[float]) -> SimulatedLoad:
    """Every acceptance length of `lengths` at each concurrency and context of `eval.load`.

    Raises ConfigError for a length that the tree cannot give, and for `tree: auto`.
    """
    prepare_process(config.run)
    section = config.eval
    _check(config, lengths)
    if not section.load.concurrency:
        load = section.load.model_copy(update={"concurrency": (1,)})
        section = section.model_copy(update={"load": load})
    target = open_target(config.target, decoded=True)
    template = target.template(system_prompt=section.system_prompt)
    prompts, _ = readable(load_evaluation_prompts(config)[0], [template])
    context = max(len(first_question(prompt, template).context) for prompt in prompts)
    with long_step("simulate", "loading the target"):
        head, named = _head(config, target)
        positions = head.shape.max_position_embeddings if head else target.positions
        own = Comparison(
            *(config, target, head, template),
            dtype=target.dtype,
            max_length=min(
                positions, max(context + section.max_new_tokens, filled_length(section, positions))
            ),
        )
    contexts = fitting_contexts(own, prompts, {"": template})[""]
    workloads = [
        Workload(
            {"imposed_acceptance_length": tau, **({"context": length} if length else {})},
            filled(contexts, length) if length else contexts,
            stop_ids=(),
            imposed=pattern_of(tau),
        )
        for length, tau in product(section.load.contexts or (None,), lengths)
    ]
    curves = measure_workloads(own, workloads, section, "simulate")
    arithmetic = decoder_arithmetic(own.model.ops, own.model.dtype, own.model.device)
    return SimulatedLoad(
        target=target.contract.source,
        drafter=section.drafter.name,
        head=named,
        tree=own.tree.model_dump(),
        machine=f"{arithmetic}, {arithmetic.threads} threads",
        curves=tuple(_renamed(curve) for curve in curves),
    )


def print_simulated(load: SimulatedLoad) -> None:
    """A row for each point."""
    from rich.table import Table

    shape = "/".join(str(load.tree[key]) for key in ("steps", "top_k", "nodes"))
    title = f"imposed acceptance, not measured: {load.drafter} {shape}"
    table = Table(title=title, title_justify="left", title_style="bold")
    names = ("context", "at a time", "τ imposed", "τ reached", "plain tokens/s", "simulated")
    for name in (*names, "over plain", "pays from τ"):
        table.add_column(name, justify="right")
    for each in load.points():
        table.add_row(
            f"{each.context:,}" if each.context else "prompts",
            str(each.concurrency),
            f"{each.imposed:.2f}",
            f"{each.reached:.2f}",
            f"{each.plain:,.1f}",
            f"{each.simulated:,.1f}",
            f"{each.gain:.2f}×",
            f"{each.pays_from:.2f}",
        )
    console.print(table)
    notice("simulate", "simulated: no head was evaluated, and nothing was stored in the run")


def _renamed(curve: LoadCurve) -> LoadCurve:
    name = "simulated" if curve.name == "speculative" else curve.name
    return curve.model_copy(update={"name": name})


def _check(config: RunConfig, lengths: Sequence[float]) -> None:
    tree = config.eval.tree
    if tree == "auto":
        problem = "tree: auto is picked by acceptance, of which there is none here"
        raise ConfigError(problem, where="eval.tree", fix="give top_k, steps and nodes")
    for tau in lengths:
        if not 1 <= tau <= 1 + tree.steps:
            problem = (
                f"a round of {tree.steps} steps emits 1 to {1 + tree.steps} tokens, not {tau:g}"
            )
            raise ConfigError(problem, where="--acceptance", fix="ask for less, or draft deeper")


def _head(config: RunConfig, target: Target) -> tuple[DraftingHead | None, str]:
    """`eval.head`, the run's own, or an untrained one of `train`; and where it is from."""
    section = config.eval
    if not section.drafter.needs_head:
        return None, ""
    if section.head or find_manifest(config.run.uri, "train"):
        location = vouched_head(config.run.uri, section.head)
        return open_head(location, expected=target.contract)[0], location.uri
    chosen, contract = algorithm(config.train), target.contract
    shape = chosen.init.choose_shape(config.train, target.directory, contract)
    vocabulary = DraftVocabulary(torch.arange(shape.draft_vocab_size), coverage=0.0)
    head = chosen.init.new_head(
        config.train,
        shape,
        vocabulary,
        target.weights,
        num_layers=contract.num_layers,
        seed=config.run.seed,
    )
    lend_rows(head, target.weights.lm_head())
    notice("simulate", "no head yet: an untrained one of the configured shape drafts")
    return head.to(torch.bfloat16), "untrained"
