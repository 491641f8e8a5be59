"""Which charts a report has numbers for, each with the words that carry its message without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pipeline.console import one_line
from pipeline.reports import AcceptanceFigures, EvalReport, LoadCurve, LoadPoint, RoundCounters
from pipeline.serve_eval.page import charts
from pipeline.serve_eval.page.charts import Interval, Line
from pipeline.serve_eval.page.wording import fixed, plain, timed

#: Characters shown of a category in a figure, its caption or the terminal's table.
LONGEST_NAME = 60


class Chart(NamedTuple):
    """A figure with its caption."""

    title: str
    svg: str
    caption: str


def charts_of(report: EvalReport) -> list[Chart]:
    """In the order of the page."""
    return [
        *_acceptance(report),
        *_groups(report),
        *_speed(report),
        *_load(report),
        *_comparisons(report),
    ]


def _acceptance(report: EvalReport) -> list[Chart]:
    drawn = []
    figures = report.acceptance
    if report.alpha:
        ranges = [(each.low, each.high) for each in figures.conditional] if figures else []
        joint = [each.value for each in figures.joint] if figures else []
        svg = charts.alpha_by_depth(report.alpha, ranges, joint)
        drawn.append(Chart("Acceptance by draft position", svg, _alpha_caption(report.alpha)))
    counters = RoundCounters.total(each.counters for each in report.prompts if each.counters)
    if counters.drafted:
        svg = charts.accepted_lengths(counters.accepted_lengths)
        nothing = counters.accepted_lengths[0] / counters.rounds
        caption = (
            f"Of {plain(counters.rounds)} rounds {100 * nothing:.0f} % accepted nothing and "
            "emitted one token, the target's own; each other emitted one more than it accepted."
        )
        drawn.append(Chart("Tokens that a round accepted", svg, caption))
    return drawn


def _groups(report: EvalReport) -> list[Chart]:
    drawn = []
    tau, label = report.acceptance_length, "τ, tokens a round"
    whole = f"{label} (line: all requests, {tau:.2f})"
    if report.by_category:
        known = report.groups.get("category", {})
        rows = [
            _row(name, known[name])
            if name in known
            else Interval(_short(name), *[row.acceptance_length] * 3)
            for name, row in report.by_category.items()
        ]
        rows.sort(key=lambda row: -row.value)
        svg = charts.intervals(rows, whole, line=tau, key="category")
        drawn.append(Chart("Acceptance length by category", svg, _category_caption(rows)))
    for kind, title in (("turn", "by turn"), ("context", "by tokens of context")):
        if len(groups := report.groups.get(kind, {})) > 1:
            rows = [_row(name, each) for name, each in groups.items()]
            svg = charts.intervals(rows, whole, line=tau, key=kind)
            caption = "Bars are 95 % intervals over draws of prompts."
            drawn.append(Chart(f"Acceptance length {title}", svg, caption))
    if report.shapes:
        rows = [
            _row(f"{each.name}{' (this report)' if each.own else ''}", each.acceptance)
            for each in report.shapes
        ]
        caption = (
            "Steps / top-k / tokens verified, as SGLang names them; top-k 1 is a chain, as vLLM "
            f"drafts it. Replayed on {report.shapes[0].acceptance.requests} prompts, each exact."
        )
        svg = charts.intervals(rows, label, key="shapes")
        drawn.append(Chart("Acceptance length with the drafts of servers", svg, caption))
    return drawn


def _speed(report: EvalReport) -> list[Chart]:
    drawn = []
    if rates := timed(report.tokens_per_second):
        caption = (
            "Plain is the same decoder without a drafter; HF generate is the transformers "
            "library's own, so that a slow baseline cannot flatter."
        )
        drawn.append(Chart("Speed by way of decoding", charts.tokens_per_second(rates), caption))
    if points := _speedup_points(report):
        faster = f"{sum(speedup > 1 for _, speedup in points)} of {len(points)}"
        caption = (
            f"Each dot is a prompt; {faster} are decoded faster with the drafter than without it."
        )
        drawn.append(Chart("What acceptance buys", charts.speedup_by_tau(points), caption))
    return drawn


def _load(report: EvalReport) -> list[Chart]:
    """The two charts of every serving benchmark, of our decoder and of live servers."""
    curves = [*report.load, *(server.curve for server in report.servers)]
    if not curves:
        return []
    measures: Sequence[tuple[str, str, str, Callable[[LoadPoint], float]]] = (
        ("tpot", "Time per output token", "ms, median", lambda at: 1e3 * at.tpot_seconds.p50),
        ("throughput", "Throughput", "tokens per second", lambda at: at.throughput),
    )
    caption = (
        "Closed loop: as a request ends the next begins. Grey and dashed is plain decoding, on the "
        "same requests in turns."
    )
    return [
        Chart(
            f"{title} against concurrency",
            charts.by_concurrency([_line(curve, measure) for curve in curves], label, key),
            caption,
        )
        for key, title, label, measure in measures
    ]


def _line(curve: LoadCurve, measure: Callable[[LoadPoint], float]) -> Line:
    points = [(float(point.concurrency), measure(point)) for point in curve.points]
    return Line(curve_name(curve), _is_plain(curve), points)


def _is_plain(curve: LoadCurve) -> bool:
    return curve.name == "plain" or bool(curve.settings.get("plain"))


def curve_name(curve: LoadCurve) -> str:
    """Way of decoding, whose server it was, and what it was measured at."""
    settings = curve.settings
    temperature, length = settings.get("temperature"), settings.get("context")
    own = curve.name in ("plain", "speculative")
    parts = [
        "plain" if _is_plain(curve) else "speculative",
        "" if own else f"{curve.name} server",
        settings.get("mode"),
        f"{length:,} tokens" if isinstance(length, int) else "",
        f"temperature {temperature:g}" if isinstance(temperature, float | int) else "",
    ]
    return ", ".join(_short(str(part)) for part in parts if part)


class LoadRow(NamedTuple):
    """A point of a curve."""

    name: str
    at: LoadPoint
    gain: float | None  # in throughput, over plain decoding of the same; None without
    tree: str  # steps/top_k/nodes where batch sizes have trees of their own


def load_rows(report: EvalReport) -> list[LoadRow]:
    """All points, of the decoder first. A server is held against one of its kind that was asked the
    same without its drafter (eval.server.plain)."""
    curves = [(("", str(curve.settings)), curve) for curve in report.load]
    for server in report.servers:
        curves.append(((server.kind, str(server.workload)), server.curve))
    plain = {
        (case, at.concurrency): at.throughput
        for case, curve in curves
        if _is_plain(curve)
        for at in curve.points
    }
    return [
        LoadRow(
            curve_name(curve),
            at,
            at.throughput / base if base else None,
            ""
            if _is_plain(curve)
            else curve.settings.get("trees", {}).get(str(at.concurrency), ""),
        )
        for case, curve in curves
        for at in curve.points
        for base in [None if _is_plain(curve) else plain.get((case, at.concurrency))]
    ]


def _comparisons(report: EvalReport) -> list[Chart]:
    if not report.comparisons:
        return []
    differences = [(each.rival, each.difference) for each in report.comparisons]
    rows = [Interval(_short(name), each.value, each.low, each.high) for name, each in differences]
    svg = charts.intervals(
        rows, "own τ less the rival's, on the same prompts", line=0, digits=3, key="differences"
    )
    caption = (
        "Right of the line the report's own drafter accepts more. An interval across the line is "
        "no difference that so many prompts could show."
    )
    return [Chart("Against rivals", svg, caption)]


def _row(name: str, figures: AcceptanceFigures) -> Interval:
    tau = figures.acceptance_length
    return Interval(_short(name), tau.value, tau.low, tau.high)


def _short(name: str) -> str:
    return one_line(name, LONGEST_NAME)


def _alpha_caption(alpha: Sequence[float]) -> str:
    first, last = fixed(alpha[0]), fixed(alpha[-1])
    later = f"guess number {len(alpha)} with {last} if all before it were"
    return f"The first guess is confirmed with probability {first}, {later}."


def _category_caption(rows: Sequence[Interval]) -> str:
    best, worst = rows[0], rows[-1]
    if len(rows) == 1:
        return f"All prompts are of the category {best.name}."
    return (
        f"Best on {best.name} ({fixed(best.value)}), worst on {worst.name} ({fixed(worst.value)})."
    )


def _speedup_points(report: EvalReport) -> list[tuple[float, float]]:
    """(τ, speedup over plain) of each prompt that was timed both ways."""
    measured: list[tuple[float, Mapping[str, float]]] = [
        (prompt.acceptance_length, prompt.tokens_per_second) for prompt in report.prompts
    ]
    return [
        (tau, rates["speculative"] / rates["plain"])
        for tau, rates in measured
        if rates.get("plain") and "speculative" in rates
    ]
