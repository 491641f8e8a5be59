"""The figures of report.html: matplotlib drawings as inline SVG that follows the page's colours.

Matplotlib only knows fixed colours, so each figure is drawn in stand-in colours that are then
replaced by CSS variables; one drawing serves the light and the dark page. Text stays text: it takes
the page's font, can be searched, and is read out by screen readers.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, cycle
from operator import mul
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
}

_Points = Sequence[float]

#: Figure width in inches; heights follow the content. The page scales the drawing to its column.
WIDTH, HEIGHT = 6.0, 3.3


def alpha_by_depth(
    alpha: Sequence[float], intervals: Sequence[tuple[float, float]] = (), joint: _Points = ()
) -> str:
    """α_k as bars, with intervals where they are known, and as dots the share of rounds that get at
    least k draft tokens accepted."""
    depths = range(1, len(alpha) + 1)
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(HEIGHT)
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
        axes.legend(frameon=False, loc="upper right", borderaxespad=0, fontsize=10)
        return _svg(figure, "alpha")


def accepted_lengths(rounds: Sequence[int]) -> str:
    """Share of the rounds that accepted 0, 1, … drafted tokens."""
    total = sum(rounds)
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(HEIGHT)
        counts = range(len(rounds))
        shares = [100 * each / total for each in rounds]
        bars = axes.bar(counts, shares, width=0.62, color=ACCENT)
        axes.bar_label(bars, fmt="%.0f %%", padding=3, color=INK)
        axes.set_ylim(0, 1.15 * max(shares))
        axes.set_xticks(list(counts))
        axes.set_xlabel("drafted tokens that a round accepted")
        axes.set_ylabel("% of rounds")
        axes.grid(axis="x", visible=False)
        return _svg(figure, "lengths")


class Interval(NamedTuple):
    """A named figure with the ends of its interval."""

    name: str
    value: float
    low: float
    high: float


def intervals(
    rows: Sequence[Interval], label: str, *, line: float | None = None, digits: int = 2, key: str
) -> str:
    """Dots with their intervals, the first row on top; a line for comparison."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(max(HEIGHT * 0.6, 0.36 * len(rows) + 1.0))
        heights = range(len(rows))[::-1]
        for height, row in zip(heights, rows, strict=True):
            axes.plot([row.low, row.high], [height, height], color=ACCENT, linewidth=2.2)
        values = [row.value for row in rows]
        axes.scatter(values, list(heights), color=ACCENT, s=40, zorder=3)
        if line is not None:
            axes.axvline(line, color=SECOND, linewidth=1.6)
        sign = "+" if key == "differences" else ""
        labels = [f"{row.name}  {row.value:{sign}.{digits}f}" for row in rows]
        axes.set_yticks(list(heights), labels, color=INK)
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_xlabel(label)
        axes.grid(axis="y", visible=False)
        return _svg(figure, key)


class Line(NamedTuple):
    """Points of one way of decoding; `plain` ones are the baseline's."""

    name: str
    plain: bool
    points: Sequence[tuple[float, float]]


def by_concurrency(lines: Sequence[Line], label: str, key: str) -> str:
    """A measure over the requests that are open at a time; the baseline in grey."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(HEIGHT)
        settings = dict.fromkeys(_setting(each) for each in lines)
        marks = dict(zip(settings, cycle("os^Dv<>"), strict=False))
        for each in lines:
            counts, values = zip(*each.points, strict=True)
            axes.plot(
                counts,
                values,
                color=MUTED if each.plain else ACCENT,
                marker=marks[_setting(each)],
                linestyle="--" if each.plain else "-",
                linewidth=1.6,
                label=each.name,
            )
        ticks = sorted({count for each in lines for count, _ in each.points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{count:g}" for count in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests at a time")
        axes.set_ylabel(label)
        axes.legend(frameon=False, fontsize=10)
        return _svg(figure, key)


def _setting(line: Line) -> str:
    """What both ways of decoding were measured at has one mark."""
    return line.name.partition(", ")[2]


def tokens_per_second(rates: Mapping[str, float]) -> str:
    """One bar a way of decoding, the speculative one in colour and on top."""
    names = list(rates)[::-1]
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(HEIGHT)
        colours = [ACCENT if name == "speculative" else MUTED for name in names]
        bars = axes.barh(
            [MODE_NAMES.get(name, name) for name in names],
            [rates[name] for name in names],
            height=0.55,
            color=colours,
        )
        axes.bar_label(bars, fmt="%.1f", padding=4, color=INK)
        axes.set_xlim(0, 1.16 * max(rates.values()))
        axes.set_xlabel("tokens per second, median over prompts")
        axes.grid(axis="y", visible=False)
        return _svg(figure, "speed")


def speedup_by_tau(points: Sequence[tuple[float, float]]) -> str:
    """One dot a prompt: its τ, and its speedup over plain decoding."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(HEIGHT)
        axes.axhline(1, color=SECOND, linewidth=1.6, label="as fast as plain decoding")
        axes.scatter(
            [tau for tau, _ in points],
            [speedup for _, speedup in points],
            s=34,
            color=ACCENT,
            alpha=0.65,
            linewidths=0,
        )
        axes.set_ylim(0, 1.15 * max(1.0, *(speedup for _, speedup in points)))
        axes.set_xlabel("τ of the prompt")
        axes.set_ylabel("speedup over plain")
        axes.legend(frameon=False, loc="lower right", borderaxespad=0, fontsize=10)
        return _svg(figure, "prompts")


def speedup_by_context(curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Speedup over plain decoding, a line a drafter, over the tokens of context."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(HEIGHT)
        axes.axhline(1, color=SECOND, linewidth=1.6)
        marks = cycle("os^Dv<>")
        for (name, points), mark in zip(curves.items(), marks, strict=False):
            contexts, speedups = zip(*points, strict=True)
            axes.plot(contexts, speedups, color=ACCENT, marker=mark, label=name, linewidth=1.4)
        ticks = sorted({context for points in curves.values() for context, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{context:,}" for context in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens of context")
        axes.set_ylabel("speedup over plain")
        axes.legend(frameon=False, fontsize=10)
        return _svg(figure, "contexts")


#: What a reader calls the keys of `tokens_per_second`.
MODE_NAMES = {"speculative": "speculative", "plain": "plain", "hf": "HF generate"}


def _axes(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    return figure, axes


def _svg(figure: Figure, name: str) -> str:
    """The `<svg>` element alone, without ids that two figures would share.

    Screen readers skip it: the page describes each figure in words, and a table holds the numbers.
    """
    buffer = io.StringIO()
    empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    salted = {**_STYLE, "svg.hashsalt": name}  # hashes of marks and clips differ between figures
    with matplotlib.rc_context(salted):
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
