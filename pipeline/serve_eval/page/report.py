"""What people read after an evaluation: a self-contained HTML page, and a table on the terminal.

    html = write_html(report)
    print_table(report)

Both take everything from the `EvalReport`. Of its open mappings they rely on these keys:
`by_category[name]["acceptance_length"]`, `drafter["name"]`, `lossless["greedy_fp32"]` and
`lossless["prompts_checked"]`, and where there is a head, `head["parameters"]`,
`head["share_of_target"]`, `head["draft_vocab_size"]` and `head["coverage"]`; any other key is shown
as it comes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from pipeline.console import console, logs_json, notice, one_line
from pipeline.reports import EvalReport
from pipeline.serve_eval.page import charts

#: Characters shown of a category in a figure, its caption or the terminal's table.
_LONGEST_NAME = 60


class Chart(NamedTuple):
    """A figure with the words that carry its message without it."""

    title: str
    svg: str
    caption: str


class Badge(NamedTuple):
    """The verdict on losslessness; `tone` is good, bad or none."""

    tone: str
    text: str


def write_html(report: EvalReport) -> str:
    """The report as one HTML page that loads nothing from elsewhere; all its text is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters |= {
        "fixed": _fixed,
        "rate": _rate,
        "percent": _percent,
        "plain": _plain,
        "share": lambda value, key: _share(key, value),
        "words": _words,
        "mode": _mode,
        "is_hash": _is_hash,
        "every_scalar": _every_scalar,
    }
    return environment.from_string(page_source("report.html.j2")).render(
        style=page_style(),
        report=report,
        contract=report.contract.model_dump(mode="json"),
        badge=_badge(report),
        plainly=_plain_decoding(report),
        charts=_charts(report),
        columns=_columns(report),
        cell=_cells(report),
        rates=_timed(report.tokens_per_second),
        speedup=_timed(report.speedup),
    )


def page_source(name: str) -> str:
    """A template or style of this package, as it is stored."""
    file = resources.files("pipeline.serve_eval.page").joinpath(name)
    return file.read_text(encoding="utf-8")


def page_style() -> Any:
    """The style of every page, which is no data and needs no escape."""
    from markupsafe import Markup

    return Markup(page_source("page.css"))


def print_table(report: EvalReport) -> None:
    """The figures and the categories as tables, or as one JSON object where logs are JSON."""
    if logs_json():
        _log_figures(report)
        return
    from rich.table import Table
    from rich.text import Text

    facts = Table(title="eagle3 eval", title_justify="left", title_style="bold", show_header=False)
    facts.add_column(style="cyan", no_wrap=True)
    facts.add_column()
    head, badge = report.head, _badge(report)
    rates, speedups = _timed(report.tokens_per_second), _timed(report.speedup)
    tau = Text.assemble((_fixed(report.acceptance_length), "bold"), " tokens a round")
    rate = "  ".join(f"{_mode(mode)} {_rate(rate)}" for mode, rate in rates.items())
    ratio = "  ".join(f"{_fixed(ratio)}× over {_mode(mode)}" for mode, ratio in speedups.items())
    colour = {"good": "green", "bad": "bold red"}.get(badge.tone, "")
    facts.add_row("acceptance length τ", tau)
    if plainly := _plain_decoding(report):
        facts.add_row("draft tree", plainly)
    facts.add_row("α by draft position", "  ".join(map(_fixed, report.alpha)))
    facts.add_row("tokens/s", rate)
    facts.add_row("speedup", ratio)
    facts.add_row("lossless", Text(badge.text, style=colour))
    facts.add_row("drafter", _drafter(report))
    if head:
        size = f"{_plain(head['parameters'])} parameters"
        share, coverage = _percent(head["share_of_target"]), _percent(head["coverage"])
        vocabulary = f"{_plain(head['draft_vocab_size'])} tokens"
        facts.add_row("head", f"{size}, {share} of the target")
        words = f"{vocabulary}, covering {coverage} of the supervised ones"
        facts.add_row("draft vocabulary", words)
    console.print(facts)
    if report.by_category:
        console.print(_category_table(report))


def _log_figures(report: EvalReport) -> None:
    head, badge = report.head, _badge(report)
    speedups = _timed(report.speedup)
    ratios = (f"{_fixed(ratio)}× over {_mode(mode)}" for mode, ratio in speedups.items())
    tau = f"τ {_fixed(report.acceptance_length)} tokens a round"
    notice(
        "eval",
        "; ".join((", ".join((tau, *ratios)), badge.text)),
        acceptance_length=report.acceptance_length,
        alpha=report.alpha,
        tokens_per_second=_timed(report.tokens_per_second),
        speedup=speedups,
        lossless=report.lossless,
        drafter=report.drafter,
        **(_logged_head(head) if head else {}),
        by_category=report.by_category,
    )


def _logged_head(head: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {key: head[key] for key in ("parameters", "share_of_target", "draft_vocab_size")}
    return {"head": sizes, "coverage": head["coverage"]}


def _category_table(report: EvalReport) -> Any:
    from rich.table import Table

    columns, cell = _columns(report), _cells(report)
    table = Table()
    table.add_column("category")
    for column in columns:
        table.add_column(_words(column), justify="right")
    for name, row in report.by_category.items():
        table.add_row(one_line(name, _LONGEST_NAME), *(cell(column, row) for column in columns))
    return table


def _charts(report: EvalReport) -> list[Chart]:
    """The figures that the report has numbers for."""
    drawn = []
    if report.alpha:
        title, svg = "Acceptance by draft position", charts.alpha_by_depth(report.alpha)
        drawn.append(Chart(title, svg, _alpha_caption(report.alpha)))
    tau = [
        (one_line(name, _LONGEST_NAME), row["acceptance_length"])
        for name, row in report.by_category.items()
    ]
    if tau:
        svg = charts.tau_by_category(tau, report.acceptance_length)
        drawn.append(Chart("Acceptance length by category", svg, _tau_caption(tau)))
    rates = _timed(report.tokens_per_second)
    if rates:
        caption = (
            "Plain is the same decoder without a drafter; HF generate is the transformers "
            "library's own, so that a slow baseline cannot flatter."
        )
        drawn.append(Chart("Speed by way of decoding", charts.tokens_per_second(rates), caption))
    points = _speedup_points(report)
    if points:
        faster = f"{sum(speedup > 1 for _, speedup in points)} of {len(points)}"
        caption = (
            f"Each dot is a prompt; {faster} are decoded faster with the drafter than without it."
        )
        drawn.append(Chart("What acceptance buys", charts.speedup_by_tau(points), caption))
    return drawn


def _alpha_caption(alpha: Sequence[float]) -> str:
    first, last = _fixed(alpha[0]), _fixed(alpha[-1])
    later = f"guess number {len(alpha)} with {last} if all before it were"
    return f"The first guess is confirmed with probability {first}, {later}."


def _tau_caption(tau: Sequence[tuple[str, float]]) -> str:
    best, worst = (pick(tau, key=lambda each: each[1]) for pick in (max, min))
    if len(tau) == 1:
        return f"All prompts are of the category {best[0]}."
    return f"Best on {best[0]} ({_fixed(best[1])}), worst on {worst[0]} ({_fixed(worst[1])})."


def _timed(figures: Mapping[str, float]) -> dict[str, float]:
    """The ways of decoding that were timed; a zero stands for one that was not."""
    return {mode: figure for mode, figure in figures.items() if figure > 0}


def _speedup_points(report: EvalReport) -> list[tuple[float, float]]:
    """(τ, speedup over plain) of each prompt that was timed both ways."""
    timed = [(prompt.acceptance_length, prompt.tokens_per_second) for prompt in report.prompts]
    return [
        (tau, rates["speculative"] / rates["plain"])
        for tau, rates in timed
        if rates.get("plain") and "speculative" in rates
    ]


def _columns(report: EvalReport) -> list[str]:
    """Keys of the category rows in order of first appearance."""
    return list(dict.fromkeys(key for row in report.by_category.values() for key in row))


def _cells(report: EvalReport) -> Callable[[str, Mapping[str, float]], str]:
    """How a category's value is written: counts whole, everything else with two decimals."""
    rows = report.by_category.values()
    counts = {
        column
        for column in _columns(report)
        if all(float(row[column]).is_integer() for row in rows if column in row)
        and column != "acceptance_length"
    }

    def cell(column: str, row: Mapping[str, float]) -> str:
        if column not in row:
            return "–"
        return f"{row[column]:,.0f}" if column in counts else f"{row[column]:,.2f}"

    return cell


def _badge(report: EvalReport) -> Badge:
    checked = report.lossless["prompts_checked"]
    if not checked:
        return Badge("none", "lossless: not checked")
    rival, prompts = "plain greedy decoding in fp32", f"{_plain(checked)} prompts checked"
    if report.lossless["greedy_fp32"]:
        return Badge("good", f"✓ lossless: token-identical to {rival} on all {prompts}")
    return Badge("bad", f"✗ not lossless: differs from {rival} ({prompts})")


def _plain_decoding(report: EvalReport) -> str | None:
    """Said where `tree: auto` chose one node; its own figures then stand in `drafter`."""
    apart = report.drafter
    if "acceptance_length" not in apart:
        return None
    tau, ratio = _fixed(apart["acceptance_length"]), _fixed(apart["speedup_plain"])
    shape = ", ".join(f"{key} {value}" for key, value in apart["tree"].items())
    judged = f"with the tree of {shape} the drafter reaches τ {tau} and {ratio}× plain decoding"
    return f"one node, plain decoding: no tree was predicted to be faster here; {judged}"


def _drafter(report: EvalReport) -> str:
    """Its name, and what `tree: auto` chose of it beside the tree."""
    chosen = (report.settings.get("tree_auto") or {}).get("settings") or {}
    return ", ".join([report.drafter["name"], *(f"{key} {value}" for key, value in chosen.items())])


def _fixed(value: float) -> str:
    return f"{value:.2f}"


def _rate(value: float) -> str:
    return f"{value:,.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _plain(value: Any) -> str:
    """Any scalar as people write it: thousands separated, three decimals, yes and no."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}" if 0 < abs(value) < 0.01 else f"{value:,.3f}".rstrip("0").rstrip(".")
    return str(value)


def _share(key: str, value: Any) -> Any:
    """Shares and coverages as percentages, everything else unchanged."""
    is_share = isinstance(value, float) and re.search("share|coverage", key)
    return _percent(value) if is_share else value


def _words(key: str) -> str:
    """`draft_vocab_size` → "draft vocab size"; a key with a shorter name among people gets that."""
    known = {
        "acceptance_length": "τ",
        "alpha": "α",
        "tokens_per_second": "tokens/s",
        "speedup_plain": "speedup over plain",
        "speedup_hf": "speedup over HF",
    }
    return known.get(key, key.replace("_", " "))


def _mode(name: str) -> str:
    return charts.MODE_NAMES.get(name, name)


def _is_hash(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{12,}", text) is not None


def _every_scalar(values: Iterable[Any]) -> bool:
    return all(value is None or isinstance(value, str | int | float | bool) for value in values)
