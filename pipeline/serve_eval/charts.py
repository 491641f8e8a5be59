"""The charts of a report: which it has numbers for, each as inline SVG with a caption.

Matplotlib only knows fixed colours, so each chart is drawn in stand-in colours that are then
replaced by CSS variables; one drawing serves the light and the dark page. Text stays text: it takes
the page's font, can be searched, and is read out by screen readers. A caption carries the chart's
message without it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import accumulate, cycle
from operator import mul
from typing import Any, Concatenate, NamedTuple, ParamSpec

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.console import one_line
from pipeline.reports import (
    AcceptanceFigures,
    Estimate,
    EvalReport,
    LoadCurve,
    LoadPoint,
    RoundCounters,
)
from pipeline.serve_eval.wording import MODE_NAMES, fixed, plain, timed

#: Characters shown of a category in a chart, its caption or the terminal's table.
MAX_NAME = 60

INK, MUTED, GRID, ACCENT, SECOND = "#010101", "#020202", "#030303", "#040404", "#050505"
_CSS = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--line)",
    ACCENT: "var(--accent)",
    SECOND: "var(--second)",
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a category may hold dollar signs
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.borderaxespad": 0,
}
#: Inches; the page scales a drawing to its column.
_WIDTH, _HEIGHT = 6.0, 3.3
_MARKS = "os^Dv<>"

_Arguments = ParamSpec("_Arguments")


class Chart(NamedTuple):
    """A chart with its caption."""

    title: str
    svg: str
    caption: str


class Line(NamedTuple):
    """Points of one curve; the baseline's are `plain`. Curves of one `setting` share a mark."""

    name: str
    points: Sequence[tuple[float, float]]
    plain: bool = False
    setting: str = ""


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
    charts = []
    figures, alpha = report.acceptance, report.alpha
    if alpha:
        svg = _alpha_by_depth(
            alpha,
            [(each.low, each.high) for each in figures.conditional] if figures else [],
            [each.value for each in figures.joint] if figures else [],
        )
        later = f"guess number {len(alpha)} with {fixed(alpha[-1])} if all before it were"
        caption = f"The first guess is confirmed with probability {fixed(alpha[0])}, {later}."
        charts.append(Chart("Acceptance by draft position", svg, caption))
    counters = RoundCounters.total(each.counters for each in report.prompts if each.counters)
    if counters.drafted:
        nothing = counters.accepted_lengths[0] / counters.rounds
        caption = (
            f"Of {plain(counters.rounds)} rounds {100 * nothing:.0f} % accepted nothing and "
            "emitted one token, the target's own; each other emitted one more than it accepted."
        )
        svg = _accepted_lengths(counters.accepted_lengths)
        charts.append(Chart("Tokens that a round accepted", svg, caption))
    return charts


def _groups(report: EvalReport) -> list[Chart]:
    charts = []
    tau, label = report.acceptance_length, "τ, tokens a round"
    all_requests = f"{label} (line: all requests, {tau:.2f})"
    if report.by_category:
        intervals = report.groups.get("category", {})
        rows = [
            (name, _tau(intervals[name]) if name in intervals else _point(row.acceptance_length))
            for name, row in report.by_category.items()
        ]
        rows.sort(key=lambda row: -row[1].value)
        best, worst = (f"{_short(name)} ({fixed(at.value)})" for name, at in (rows[0], rows[-1]))
        caption = f"Best on {best}, worst on {worst}."
        if len(rows) == 1:
            caption = f"All prompts are of the category {_short(rows[0][0])}."
        svg = _intervals(rows, all_requests, line=tau)
        charts.append(Chart("Acceptance length by category", svg, caption))
    for kind, title in (("turn", "by turn"), ("context", "by tokens of context")):
        if len(groups := report.groups.get(kind, {})) > 1:
            rows = [(name, _tau(each)) for name, each in groups.items()]
            svg = _intervals(rows, all_requests, line=tau)
            caption = "Bars are 95 % intervals over draws of prompts."
            charts.append(Chart(f"Acceptance length {title}", svg, caption))
    if report.shapes:
        own = " (this report)" if report.drafter.lookup is None else " (this report's tree)"
        rows = [
            (f"{each.name}{own if each.own else ''}", _tau(each.acceptance))
            for each in report.shapes
        ]
        caption = (
            "Steps / top-k / tokens verified, as SGLang names them; top-k 1 is a chain, as vLLM "
            f"drafts it. Replayed on {report.shapes[0].acceptance.requests} prompts, each exact"
        )
        caption += "." if report.drafter.lookup is None else ", without the lookup."
        svg = _intervals(rows, label)
        charts.append(Chart("Acceptance length with the drafts of servers", svg, caption))
    return charts


def _speed(report: EvalReport) -> list[Chart]:
    charts = []
    if rates := timed(report.tokens_per_second):
        caption = (
            "Plain is the same decoder without a drafter; HF generate is the transformers "
            "library's own, so that a slow baseline cannot flatter."
        )
        charts.append(Chart("Speed by way of decoding", _tokens_per_second(rates), caption))
    points = [
        (prompt.acceptance_length, rates["speculative"] / rates["plain"])
        for prompt in report.prompts
        if (rates := prompt.tokens_per_second).get("plain") and "speculative" in rates
    ]
    if points:
        faster = f"{sum(speedup > 1 for _, speedup in points)} of {len(points)}"
        caption = (
            f"Each dot is a prompt; {faster} are decoded faster with the drafter than without it."
        )
        charts.append(Chart("What acceptance buys", _speedup_by_tau(points), caption))
    return charts


def _load(report: EvalReport) -> list[Chart]:
    """The two charts of every serving benchmark, of our decoder and of live servers."""
    curves = [*report.load, *(server.curve for server in report.servers)]
    if not curves:
        return []
    measures: Sequence[tuple[str, str, Callable[[LoadPoint], float]]] = (
        ("Time per output token", "ms, median", lambda at: 1e3 * at.tpot_seconds.p50),
        ("Throughput", "tokens per second", lambda at: at.throughput),
    )
    caption = (
        "Closed loop: as a request ends the next begins. Grey and dashed is plain decoding, on the "
        "same requests in turns."
    )
    return [
        Chart(
            f"{title} against concurrency",
            _lines([_load_line(curve, measure) for curve in curves], "requests at a time", label),
            caption,
        )
        for title, label, measure in measures
    ]


def _load_line(curve: LoadCurve, measure: Callable[[LoadPoint], float]) -> Line:
    points = [(float(point.concurrency), measure(point)) for point in curve.points]
    name = curve_name(curve)
    return Line(name, points, is_plain(curve), setting=name.partition(", ")[2])


def _comparisons(report: EvalReport) -> list[Chart]:
    if not report.comparisons:
        return []
    rows = [(each.rival, each.difference) for each in report.comparisons]
    svg = _intervals(rows, "own τ less the rival's, on the same prompts", line=0, form="+.3f")
    caption = (
        "Right of the line the report's own drafter accepts more. An interval across the line is "
        "no difference that so many prompts could show."
    )
    return [Chart("Against rivals", svg, caption)]


def is_plain(curve: LoadCurve) -> bool:
    """Whether nothing was drafted."""
    return curve.name == "plain" or bool(curve.settings.get("plain"))


def curve_name(curve: LoadCurve) -> str:
    """Way of decoding, kind of server, and settings of the measurement."""
    settings = curve.settings
    temperature, length = settings.get("temperature"), settings.get("context")
    own = curve.name in ("plain", "speculative")
    parts = [
        "plain" if is_plain(curve) else "speculative",
        "" if own else f"{curve.name} server",
        settings.get("mode"),
        f"{length:,} tokens" if length else "",
        f"temperature {temperature:g}" if temperature is not None else "",
    ]
    return ", ".join(_short(str(part)) for part in parts if part)


def speedup_by_context(curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Speedup over plain decoding by tokens of context, a line for each drafter."""
    lines = [Line(name, points, setting=name) for name, points in curves.items()]
    return _lines(lines, "tokens of context", "speedup over plain", level=1)


def _tau(figures: AcceptanceFigures) -> Estimate:
    return figures.acceptance_length


def _point(value: float) -> Estimate:
    return Estimate(value=value, low=value, high=value)


def _short(name: str) -> str:
    return one_line(name, MAX_NAME)


def _drawn(draw: Callable[Concatenate[Axes, _Arguments], object]) -> Callable[_Arguments, str]:
    """A function that draws into axes → one that returns the drawing as an `<svg>` element."""

    @wraps(draw)
    def drawing(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> str:
        # Ids of marks and clips hash their content and a salt: they differ between charts.
        salt = repr((draw.__name__, arguments, options))
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": salt}):
            figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
            figure.patch.set_visible(False)
            axes = figure.add_subplot()
            axes.patch.set_visible(False)
            draw(axes, *arguments, **options)
            return _svg(figure)

    return drawing


@_drawn
def _alpha_by_depth(
    axes: Axes,
    alpha: Sequence[float],
    intervals: Sequence[tuple[float, float]],
    joint: Sequence[float],
) -> None:
    """α_k as bars, with intervals where they are known, and as dots the share of rounds that get at
    least k draft tokens accepted."""
    depths = range(1, len(alpha) + 1)
    label = "α, given that all before were accepted"
    axes.bar(depths, alpha, width=0.62, color=ACCENT, label=label)
    tops = list(alpha)
    for depth, (low, high) in zip(depths, intervals, strict=False):
        axes.plot([depth, depth], [low, high], color=INK, linewidth=1.4)
        tops[depth - 1] = max(tops[depth - 1], high)
    for depth, value, top in zip(depths, alpha, tops, strict=True):
        axes.text(depth, top + 0.02, f"{value:.2f}", ha="center", color=INK)
    axes.plot(
        depths,
        joint if len(joint) == len(alpha) else list(accumulate(alpha, mul)),
        color=SECOND,
        marker="o",
        markersize=5,
        linewidth=1.6,
        label="share of rounds that get this far",
    )
    axes.set_ylim(0, 1.18)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_xticks(list(depths))
    axes.set_xlabel("draft position k")
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper right")


@_drawn
def _accepted_lengths(axes: Axes, rounds: Sequence[int]) -> None:
    """Share of the rounds that accepted 0, 1, … drafted tokens."""
    shares = [100 * each / sum(rounds) for each in rounds]
    bars = axes.bar(range(len(rounds)), shares, width=0.62, color=ACCENT)
    axes.bar_label(bars, fmt="%.0f %%", padding=3, color=INK)
    axes.set_ylim(0, 1.15 * max(shares))
    axes.set_xticks(list(range(len(rounds))))
    axes.set_xlabel("drafted tokens that a round accepted")
    axes.set_ylabel("% of rounds")
    axes.grid(axis="x", visible=False)


@_drawn
def _intervals(
    axes: Axes,
    rows: Sequence[tuple[str, Estimate]],
    label: str,
    *,
    line: float | None = None,
    form: str = ".2f",
) -> None:
    """Dots with their intervals, the first row on top; a line for comparison."""
    axes.figure.set_figheight(max(_HEIGHT * 0.6, 0.36 * len(rows) + 1.0))  # type: ignore[union-attr]
    heights = list(range(len(rows)))[::-1]
    for height, (_, each) in zip(heights, rows, strict=True):
        axes.plot([each.low, each.high], [height, height], color=ACCENT, linewidth=2.2)
    axes.scatter([each.value for _, each in rows], heights, color=ACCENT, s=40, zorder=3)
    if line is not None:
        axes.axvline(line, color=SECOND, linewidth=1.6)
    labels = [f"{_short(name)}  {each.value:{form}}" for name, each in rows]
    axes.set_yticks(heights, labels, color=INK)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel(label)
    axes.grid(axis="y", visible=False)


@_drawn
def _lines(
    axes: Axes, lines: Sequence[Line], xlabel: str, ylabel: str, *, level: float | None = None
) -> None:
    """Curves over a logarithmic axis, the baseline in grey; a level for comparison."""
    marks = dict(zip(dict.fromkeys(each.setting for each in lines), cycle(_MARKS), strict=False))
    if level is not None:
        axes.axhline(level, color=SECOND, linewidth=1.6)
    for each in lines:
        axes.plot(
            *zip(*each.points, strict=True),
            color=MUTED if each.plain else ACCENT,
            marker=marks[each.setting],
            linestyle="--" if each.plain else "-",
            linewidth=1.6,
            label=each.name,
        )
    ticks = sorted({x for each in lines for x, _ in each.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{x:,g}" for x in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.legend()


@_drawn
def _tokens_per_second(axes: Axes, rates: Mapping[str, float]) -> None:
    """One bar for each way of decoding, the speculative one in colour and on top."""
    modes = list(rates)[::-1]
    bars = axes.barh(
        [MODE_NAMES.get(mode, mode) for mode in modes],
        [rates[mode] for mode in modes],
        height=0.55,
        color=[ACCENT if mode == "speculative" else MUTED for mode in modes],
    )
    axes.bar_label(bars, fmt="%.1f", padding=4, color=INK)
    axes.set_xlim(0, 1.16 * max(rates.values()))
    axes.set_xlabel("tokens per second, median over prompts")
    axes.grid(axis="y", visible=False)


@_drawn
def _speedup_by_tau(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """One dot for each prompt: its τ, and its speedup over plain decoding."""
    axes.axhline(1, color=SECOND, linewidth=1.6, label="as fast as plain decoding")
    taus, speedups = zip(*points, strict=True)
    axes.scatter(taus, speedups, s=34, color=ACCENT, alpha=0.65, linewidths=0)
    axes.set_ylim(0, 1.15 * max(1.0, *speedups))
    axes.set_xlabel("τ of the prompt")
    axes.set_ylabel("speedup over plain")
    axes.legend(loc="lower right")


def _svg(figure: Figure) -> str:
    """The `<svg>` element alone, without ids that two charts would share.

    Screen readers skip it: the page describes each chart in words, and a table holds the numbers.
    """
    buffer = io.StringIO()
    empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=empty)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\s(width|height)="[\d.]+pt"', "", svg, count=2)
    # In tags alone: what stands between them is text, and its own `<` are escaped.
    svg = re.sub(r"<[^>]*>", lambda tag: _for_the_page(tag[0]), svg)
    return svg.replace("<svg", '<svg aria-hidden="true" focusable="false"', 1)


def _for_the_page(tag: str) -> str:
    tag = re.sub(r'^<g id="[^"]*"', "<g", tag)
    tag = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", tag)
    tag = re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", tag).replace("xlink:href", "href")
    for stand_in, variable in _CSS.items():
        tag = tag.replace(stand_in, variable)
    return tag
