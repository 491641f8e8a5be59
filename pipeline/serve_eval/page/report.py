"""What people read after an evaluation: a self-contained HTML page, and a table on the terminal.

    html = write_html(report)
    print_table(report)

Both take everything from the `EvalReport`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import resources
from typing import Any, NamedTuple

from pipeline.console import console, logs_json, notice, one_line
from pipeline.reports import EvalReport
from pipeline.serve_eval.page import wording
from pipeline.serve_eval.page.figures import LONGEST_NAME, charts_of, load_rows


class Badge(NamedTuple):
    """The verdict on losslessness; `tone` is good, bad or none."""

    tone: str
    text: str


def write_html(report: EvalReport) -> str:
    """The report as one HTML page that loads nothing from elsewhere; all its text is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters |= {
        "fixed": wording.fixed,
        "rate": wording.rate,
        "percent": wording.percent,
        "plain": wording.plain,
        "estimated": wording.estimated,
        "changed": wording.changed,
        "milliseconds": wording.milliseconds,
        "share": lambda value, key: wording.share(key, value),
        "words": wording.words,
        "mode": wording.mode,
        "is_hash": _is_hash,
        "every_scalar": _every_scalar,
    }
    return environment.from_string(page_source("report.html.j2")).render(
        style=page_style(),
        report=report,
        tables=report.model_dump(
            mode="json",
            include={"contract", "drafter", "head", "names", "provenance", "settings"},
        ),
        servers=[server.model_dump(mode="json") for server in report.servers],
        badge=_badge(report),
        plainly=_plain_decoding(report),
        charts=charts_of(report),
        load_rows=load_rows(report),
        rates=wording.timed(report.tokens_per_second),
        speedup=wording.timed(report.speedup),
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
    rates, speedups = wording.timed(report.tokens_per_second), wording.timed(report.speedup)
    tau = Text.assemble((wording.fixed(report.acceptance_length), "bold"), " tokens a round")
    rate = "  ".join(f"{wording.mode(mode)} {wording.rate(rate)}" for mode, rate in rates.items())
    ratio = "  ".join(
        f"{wording.fixed(ratio)}× over {wording.mode(mode)}" for mode, ratio in speedups.items()
    )
    colour = {"good": "green", "bad": "bold red"}.get(badge.tone, "")
    facts.add_row("acceptance length τ", tau)
    if plainly := _plain_decoding(report):
        facts.add_row("draft tree", plainly)
    facts.add_row("α by draft position", "  ".join(map(wording.fixed, report.alpha)))
    facts.add_row("tokens/s", rate)
    facts.add_row("speedup", ratio)
    facts.add_row("lossless", Text(badge.text, style=colour))
    facts.add_row("drafter", _drafter(report))
    if head:
        size = f"{wording.plain(head.parameters)} parameters"
        share, coverage = wording.percent(head.share_of_target), wording.percent(head.coverage)
        vocabulary = f"{wording.plain(head.draft_vocab_size)} tokens"
        facts.add_row("head", f"{size}, {share} of the target")
        words = f"{vocabulary}, covering {coverage} of the supervised ones"
        facts.add_row("draft vocabulary", words)
    console.print(facts)
    if report.by_category:
        console.print(_category_table(report))


def _log_figures(report: EvalReport) -> None:
    badge, speedups = _badge(report), wording.timed(report.speedup)
    ratios = (
        f"{wording.fixed(ratio)}× over {wording.mode(mode)}" for mode, ratio in speedups.items()
    )
    tau = f"τ {wording.fixed(report.acceptance_length)} tokens a round"
    notice(
        "eval",
        "; ".join((", ".join((tau, *ratios)), badge.text)),
        acceptance_length=report.acceptance_length,
        alpha=report.alpha,
        tokens_per_second=wording.timed(report.tokens_per_second),
        speedup=speedups,
        **report.model_dump(mode="json", include={"lossless", "drafter", "head", "by_category"}),
    )


def _category_table(report: EvalReport) -> Any:
    from rich.table import Table

    table = Table()
    table.add_column("category")
    for column in ("prompts", "τ", "tokens/s", "over plain"):
        table.add_column(column, justify="right")
    for name, row in report.by_category.items():
        figures = row.acceptance_length, row.tokens_per_second, row.speedup_plain
        cells = [f"{row.prompts:,}", *(f"{figure:,.2f}" for figure in figures)]
        table.add_row(one_line(name, LONGEST_NAME), *cells)
    return table


def _badge(report: EvalReport) -> Badge:
    checked, reference = report.lossless.prompts_checked, report.lossless.transformers
    if not checked:
        return Badge("none", "lossless: not checked")
    rival, requests = "plain greedy decoding in fp32", f"{wording.plain(checked)} requests checked"
    if reference and not reference.same:
        return Badge("bad", f"✗ not lossless: {wording.reference(reference)}")
    if reference and report.speculation_is_lossless:
        same = f"token-identical to {rival} on all {requests}"
        return Badge("good", f"✓ lossless: {same}; {wording.reference(reference)}")
    if report.speculation_is_lossless:
        same = f"token-identical to {rival} on {requests}"
        return Badge("none", f"{same}; plain decoding was not compared with transformers")
    return Badge("bad", f"✗ not lossless: differs from {rival} ({requests})")


def _plain_decoding(report: EvalReport) -> str | None:
    """Where `tree: auto` chose plain decoding: the drafter's own figures beside it."""
    if (unused := report.unused_tree) is None:
        return None
    tau, ratio = wording.fixed(unused.acceptance_length), wording.fixed(unused.speedup_plain)
    shape = f"top_k {unused.tree.top_k}, steps {unused.tree.steps}, nodes {unused.tree.nodes}"
    judged = f"with the tree of {shape} the drafter reaches τ {tau} and {ratio}× plain decoding"
    return f"one node, plain decoding: no tree was predicted to be faster here; {judged}"


def _drafter(report: EvalReport) -> str:
    """Its name, and what `tree: auto` chose of it beside the tree."""
    choice = report.settings.tree_auto
    chosen = choice.settings if choice else {}
    return ", ".join([report.drafter.name, *(f"{key} {value}" for key, value in chosen.items())])


def _is_hash(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{12,}", text) is not None


def _every_scalar(values: Iterable[Any]) -> bool:
    return all(value is None or isinstance(value, str | int | float | bool) for value in values)
