"""What people read after an evaluation: a self-contained HTML page, and a table on the terminal.

    html = write_html(report)
    print_table(report)

Both take everything from the `EvalReport`. Of its open mappings they rely on these keys:
`by_category[name]["acceptance_length"]`, `head["parameters"]`, `head["share_of_target"]`,
`head["draft_vocab_size"]`, `head["coverage"]`, `lossless["greedy_fp32"]` and
`lossless["prompts_checked"]`; any other key is shown as it comes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from typing import Any, NamedTuple

from pipeline.console import console
from pipeline.records import EvalReport
from pipeline.serve_eval import charts


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
    """The report as one HTML page that loads nothing from elsewhere. All text from the report is escaped."""
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
    source = (
        resources.files("pipeline.serve_eval")
        .joinpath("report.html.j2")
        .read_text(encoding="utf-8")
    )
    return environment.from_string(source).render(
        report=report,
        contract=report.contract.model_dump(mode="json"),
        badge=_badge(report),
        charts=_charts(report),
        columns=_columns(report),
        cell=_cells(report),
        rates=_timed(report.tokens_per_second),
        speedup=_timed(report.speedup),
    )


def print_table(report: EvalReport) -> None:
    """The figures and the categories on the terminal."""
    from rich.table import Table
    from rich.text import Text

    facts = Table(title="eagle3 eval", title_justify="left", title_style="bold", show_header=False)
    facts.add_column(style="cyan", no_wrap=True)
    facts.add_column()
    head, badge = report.head, _badge(report)
    facts.add_row(
        "acceptance length τ", f"[bold]{_fixed(report.acceptance_length)}[/] tokens a round"
    )
    facts.add_row("α by draft position", "  ".join(map(_fixed, report.alpha)))
    facts.add_row(
        "tokens/s",
        Text(
            "  ".join(
                f"{_mode(mode)} {_rate(rate)}"
                for mode, rate in _timed(report.tokens_per_second).items()
            )
        ),
    )
    facts.add_row(
        "speedup",
        Text(
            "  ".join(
                f"{_fixed(ratio)}× over {_mode(mode)}"
                for mode, ratio in _timed(report.speedup).items()
            )
        ),
    )
    facts.add_row(
        "lossless", Text(badge.text, style={"good": "green", "bad": "bold red"}.get(badge.tone, ""))
    )
    facts.add_row(
        "head",
        f"{_plain(head['parameters'])} parameters, {_percent(head['share_of_target'])} of the target",
    )
    facts.add_row(
        "draft vocabulary",
        f"{_plain(head['draft_vocab_size'])} tokens, covering {_percent(head['coverage'])} of the supervised ones",
    )
    console.print(facts)
    if report.by_category:
        console.print(_category_table(report))


def _category_table(report: EvalReport) -> Any:
    from rich.table import Table
    from rich.text import Text

    columns, cell = _columns(report), _cells(report)
    table = Table()
    table.add_column("category")
    for column in columns:
        table.add_column(_words(column), justify="right")
    for name, row in report.by_category.items():
        table.add_row(Text(name), *(cell(column, row) for column in columns))
    return table


def _charts(report: EvalReport) -> list[Chart]:
    """The figures that the report has numbers for."""
    found = []
    if report.alpha:
        first, last = _fixed(report.alpha[0]), _fixed(report.alpha[-1])
        text = f"The first guess is confirmed with probability {first}, guess number {len(report.alpha)} with {last} if all before it were."
        found.append(
            Chart("Acceptance by draft position", charts.alpha_by_depth(report.alpha), text)
        )
    tau = {name: row["acceptance_length"] for name, row in report.by_category.items()}
    if tau:
        best, worst = max(tau, key=lambda name: tau[name]), min(tau, key=lambda name: tau[name])
        text = (
            f"Best on {best} ({_fixed(tau[best])}), worst on {worst} ({_fixed(tau[worst])})."
            if len(tau) > 1
            else f"All prompts are of the category {best}."
        )
        found.append(
            Chart(
                "Acceptance length by category",
                charts.tau_by_category(tau, report.acceptance_length),
                text,
            )
        )
    rates = _timed(report.tokens_per_second)
    if rates:
        text = "Plain is the same decoder without a head; HF generate is the transformers library's own, so that a slow baseline cannot flatter."
        found.append(Chart("Speed by way of decoding", charts.tokens_per_second(rates), text))
    points = _speedup_points(report)
    if points:
        faster = sum(speedup > 1 for _, speedup in points)
        text = f"Each dot is a prompt; {faster} of {len(points)} are decoded faster with the head than without it."
        found.append(Chart("What acceptance buys", charts.speedup_by_tau(points), text))
    return found


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
    """How a category's value is written: counts as whole numbers, everything else with two decimals in the whole column."""
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
    if report.lossless["greedy_fp32"]:
        return Badge(
            "good",
            f"✓ lossless: token-identical to plain greedy decoding in fp32 on all {_plain(checked)} prompts checked",
        )
    return Badge(
        "bad",
        f"✗ not lossless: differs from plain greedy decoding in fp32 ({_plain(checked)} prompts checked)",
    )


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
    return (
        _percent(value) if isinstance(value, float) and re.search("share|coverage", key) else value
    )


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
