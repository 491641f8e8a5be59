"""What people read after an evaluation: report.html, report.md, a table on the terminal, and the
page of a decode plan.

All of it comes from the `EvalReport` or the `DecodePlan`; text from data is escaped, and a page
loads nothing from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import resources
from typing import Any, NamedTuple

from pipeline.config import RunConfig
from pipeline.console import console, logs_json, markdown_text, notice, one_line, visible
from pipeline.planning.decode import DecodePlan, PlannedDecoding
from pipeline.records import is_sealed_page, json_object, sealed_page, take_checksum
from pipeline.reports import MARKDOWN, PAGE, SERVERS, EvalReport, LoadPoint, ServerResult
from pipeline.serve_eval import wording
from pipeline.serve_eval.charts import MAX_NAME, charts_of, curve_name, is_plain, speedup_by_context
from pipeline.store.location import Location
from pipeline.store.manifest import find_manifest, read_report, stage_location


class Badge(NamedTuple):
    """The verdict on losslessness; `tone` is good, bad or none."""

    tone: str
    text: str


class LoadRow(NamedTuple):
    """A point of a curve."""

    name: str
    at: LoadPoint
    gain: float | None  # in throughput, over plain decoding of the same; None without
    tree: str  # steps/top_k/nodes where batch sizes have trees of their own


def write_pages(location: Location, report: EvalReport, run_uri: str) -> None:
    """Write both pages of the stage's report, with all servers that were evaluated so far."""
    results = None
    # Whoever writes last looks again: a result may have come while the page was made.
    while results != (results := read_results(run_uri)):
        shown = report.model_copy(update={"servers": results})
        location.write(PAGE, sealed_page(write_html(shown)))
        location.write(MARKDOWN, sealed_page(write_markdown(shown)))


def renew_pages(config: RunConfig) -> None:
    """After the evaluation of a server; nothing where the stage has no report yet."""
    if report := report_of(config):
        location = stage_location(config.run.uri, "eval")
        write_pages(location, report, config.run.uri)
        notice("eval", f"report: {location.where(PAGE)}")


def restore_pages(config: RunConfig) -> None:
    """Write pages that are missing or are not as they were written anew, of a finished stage."""
    location = stage_location(config.run.uri, "eval")
    pages = (location.read(name) if location.exists(name) else b"" for name in (PAGE, MARKDOWN))
    if not all(map(is_sealed_page, pages)):
        renew_pages(config)


def report_of(config: RunConfig) -> EvalReport | None:
    """The decoder's own report of this run; None before its stage is finished."""
    finished = find_manifest(config.run.uri, "eval") is not None
    return read_report(config.run.uri) if finished else None


def read_results(run_uri: str) -> tuple[ServerResult, ...]:
    """All results of servers of a run, by name. Raises CorruptShard for a file that is none."""
    folder, fix = stage_location(run_uri, "eval").child(SERVERS), "delete it and evaluate again"
    results = []
    for name in sorted(name for name in folder.names() if name.endswith(".json")):
        where = folder.where(name)
        data = folder.read(name)
        fields = json_object(data, where=where, fix=fix)
        take_checksum(fields, data, where=where, fix=fix)
        results.append(ServerResult.from_fields(fields, where=where, fix=fix))
    return tuple(results)


def write_html(report: EvalReport) -> str:
    """The report as one HTML page."""
    tables = {"contract", "drafter", "head", "names", "provenance", "settings"}
    return _render(
        "report.html.j2",
        **_shown(report),
        tables=report.model_dump(mode="json", include=tables),
        servers=[server.model_dump(mode="json") for server in report.servers],
        badge=_badge(report),
        charts=charts_of(report),
    )


def write_markdown(report: EvalReport) -> str:
    """The report for a pull request: verdict, and tables of what there is."""
    text = _render("report.md.j2", **_shown(report))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def write_plan(plan: DecodePlan) -> str:
    """A decode plan as one HTML page."""
    return _render(
        "decode_plan.html.j2",
        plan=plan,
        contexts=_contexts(plan),
        errors=_errors(plan),
        batches=[_batch(plan, batch) for batch in _batches(plan)],
    )


def _shown(report: EvalReport) -> dict[str, Any]:
    """What both pages show."""
    return {
        "report": report,
        "plainly": _plain_decoding(report),
        "load_rows": load_rows(report),
        "rates": wording.timed(report.tokens_per_second),
        "refresh_differences": wording.refresh_differences(report) if report.refresh else {},
        "speedup": wording.timed(report.speedup),
    }


def _render(template: str, **values: Any) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    folder = resources.files("pipeline.serve_eval").joinpath("templates")
    is_html = ".html." in template

    def shown(value: Any) -> Any:
        return visible(value) if type(value) is str and is_html else value

    environment = Environment(
        autoescape=is_html, undefined=StrictUndefined, trim_blocks=not is_html, finalize=shown
    )
    named = ("fixed", "rate", "percent", "plain", "estimated", "changed", "milliseconds", "share")
    environment.filters |= {name: getattr(wording, name) for name in (*named, "words", "mode")}
    environment.filters |= {
        "reference": wording.reference,
        "text": markdown_text,
        "is_hash": lambda text: re.fullmatch(r"[0-9a-f]{12,}", text) is not None,
        "every_scalar": _every_scalar,
    }
    style = Markup(folder.joinpath("page.css").read_text(encoding="utf-8"))
    source = folder.joinpath(template).read_text(encoding="utf-8")
    page = environment.from_string(source).render(style=style, **values)
    return "\n".join(map(visible, page.split("\n")))  # also in what is drawn


def _every_scalar(values: Iterable[Any]) -> bool:
    return all(value is None or isinstance(value, str | int | float | bool) for value in values)


def load_rows(report: EvalReport) -> list[LoadRow]:
    """All points, the decoder's first. A server is compared with one of its kind that got the same
    prompts without its drafter (eval.server.plain)."""
    curves = [(str(curve.settings), curve) for curve in report.load]
    curves += [(f"{each.kind} {each.workload}", each.curve) for each in report.servers]
    plain = {
        (case, at.concurrency): at.throughput
        for case, curve in curves
        if is_plain(curve)
        for at in curve.points
    }
    rows = []
    for case, curve in curves:
        drafts, trees = not is_plain(curve), curve.settings.get("trees", {})
        for at in curve.points:
            base = plain.get((case, at.concurrency)) if drafts else None
            tree = trees.get(str(at.concurrency), "") if drafts else ""
            rows.append(
                LoadRow(curve_name(curve), at, at.throughput / base if base else None, tree)
            )
    return rows


def print_table(report: EvalReport) -> None:
    """The figures and the categories as tables, or as one JSON object where logs are JSON."""
    badge, plainly = _badge(report), _plain_decoding(report)
    rates, speedups = wording.timed(report.tokens_per_second), wording.timed(report.speedup)
    ratios = [
        f"{wording.fixed(each)}× over {wording.mode(mode)}" for mode, each in speedups.items()
    ]
    tau = f"{wording.fixed(report.acceptance_length)} tokens a round"
    if logs_json():
        keys = {"acceptance_length", "alpha", "lossless", "drafter", "head", "by_category"}
        fields = report.model_dump(mode="json", include=keys)
        message = "; ".join((", ".join((f"τ {tau}", *ratios)), badge.text))
        notice("eval", message, **fields, tokens_per_second=rates, speedup=speedups)
        return
    from rich.table import Table
    from rich.text import Text

    facts = Table(title="eagle3 eval", title_justify="left", title_style="bold", show_header=False)
    facts.add_column(style="cyan", no_wrap=True)
    facts.add_column()
    facts.add_row("acceptance length τ", Text(tau, style="bold"))
    if plainly:
        facts.add_row("draft tree", plainly)
    facts.add_row("α by draft position", "  ".join(map(wording.fixed, report.alpha)))
    rate = [f"{wording.mode(mode)} {wording.rate(rate)}" for mode, rate in rates.items()]
    facts.add_row("tokens/s", "  ".join(rate))
    facts.add_row("speedup", "  ".join(ratios))
    colour = {"good": "green", "bad": "bold red"}.get(badge.tone, "")
    facts.add_row("lossless", Text(badge.text, style=colour))
    facts.add_row("drafter", _drafter(report))
    if head := report.head:
        size = f"{wording.plain(head.parameters)} parameters"
        facts.add_row("head", f"{size}, {wording.percent(head.share_of_target)} of the target")
        tokens = f"{wording.plain(head.draft_vocab_size)} tokens"
        covered = f"covering {wording.percent(head.coverage)} of the supervised ones"
        facts.add_row("draft vocabulary", f"{tokens}, {covered}")
    console.print(facts)
    if report.by_category:
        table = Table()
        table.add_column("category")
        for column in ("prompts", "τ", "tokens/s", "over plain"):
            table.add_column(column, justify="right")
        for name, row in report.by_category.items():
            figures = row.acceptance_length, row.tokens_per_second, row.speedup_plain
            cells = [f"{row.prompts:,}", *(f"{figure:,.2f}" for figure in figures)]
            table.add_row(one_line(name, MAX_NAME), *cells)
        console.print(table)


def _badge(report: EvalReport) -> Badge:
    checked, reference = report.lossless.prompts_checked, report.lossless.transformers
    if not checked:
        return Badge("none", "lossless: not checked")
    rival, requests = "plain greedy decoding in fp32", f"{wording.plain(checked)} requests"
    if reference and not reference.same:
        return Badge("bad", f"✗ not lossless: {wording.reference(reference)}")
    if not report.speculation_is_lossless:
        return Badge("bad", f"✗ not lossless: differs from {rival} ({requests} checked)")
    if reference is None:
        same = f"token-identical to {rival} on {requests} checked"
        return Badge("none", f"{same}; plain decoding was not compared with transformers")
    same = f"token-identical to {rival} on all {requests} checked"
    return Badge("good", f"✓ lossless: {same}; {wording.reference(reference)}")


def _plain_decoding(report: EvalReport) -> str | None:
    """Where `tree: auto` chose plain decoding: the drafter's own figures beside it."""
    if (unused := report.unused_tree) is None:
        return None
    tau, ratio = wording.fixed(unused.acceptance_length), wording.fixed(unused.speedup_plain)
    shape = f"top_k {unused.tree.top_k}, steps {unused.tree.steps}, nodes {unused.tree.nodes}"
    unused_figures = (
        f"with the tree of {shape} the drafter reaches τ {tau} and {ratio}× plain decoding"
    )
    return f"one node, plain decoding: no tree was predicted to be faster here; {unused_figures}"


def _drafter(report: EvalReport) -> str:
    """Its name, and the settings that `tree: auto` chose with the tree."""
    choice = report.settings.tree_auto
    chosen = choice.settings if choice else {}
    return ", ".join([report.drafter.label, *(f"{key} {value}" for key, value in chosen.items())])


def print_plan(plan: DecodePlan) -> None:
    """A table for each batch size: drafters by contexts."""
    from rich.table import Table
    from rich.text import Text

    for batch in _batches(plan):
        title = f"batch {batch}: speedup over plain decoding ({plan.basis})"
        table = Table(title=title, title_justify="left", title_style="bold")
        table.add_column("drafter", style="cyan", no_wrap=True)
        for context in _contexts(plan):
            table.add_column(f"{context:,}", justify="right")
        for name, cells in _rows(plan, batch).items():
            table.add_row(name, *(Text("\n".join(lines)) for lines in cells))
        console.print(table)
    for each in plan.crossings:
        where = "from" if each.pays_above else "up to"
        pays = f"pays {where} {each.context:,.0f} tokens"
        notice("plan-decode", f"{each.drafter}, batch {each.batch}: {pays}")
    if errors := _errors(plan):
        notice("plan-decode", f"error of the prediction: {errors}")


def _batch(plan: DecodePlan, batch: int) -> dict[str, Any]:
    own = sorted((c for c in plan.cells if c.batch == batch), key=lambda cell: cell.context)
    curves: dict[str, list[tuple[int, float]]] = {}
    for cell in own:
        curves.setdefault(cell.drafter, []).append((cell.context, cell.speedup))
    best = max(own, key=lambda cell: cell.speedup)
    where = f"at {best.context:,} tokens of context"
    caption = f"The most is {best.speedup:.2f}× with {best.drafter} {where}; the line is plain."
    rows, svg = _rows(plan, batch), speedup_by_context(curves)
    return {"size": batch, "svg": svg, "caption": caption, "rows": rows}


def _rows(plan: DecodePlan, batch: int) -> dict[str, list[list[str]]]:
    """Lines of each drafter's cells, by context."""
    cells = {(cell.drafter, cell.context): cell for cell in plan.cells if cell.batch == batch}
    names = dict.fromkeys(name for name, _ in cells)
    return {
        name: [_lines(cells.get((name, context))) for context in _contexts(plan)] for name in names
    }


def _lines(cell: PlannedDecoding | None) -> list[str]:
    if cell is None:
        return ["–"]
    shape = "/".join(str(cell.tree[key]) for key in ("steps", "top_k", "nodes"))
    lines = [f"{cell.speedup:.2f}×", f"τ {cell.acceptance_length:.2f}, {shape}"]
    lines += [f"{name.replace('_', ' ')} {value:,}" for name, value in cell.settings.items()]
    if cell.measured_speedup is not None:
        lines.append(f"measured {cell.measured_speedup:.2f}×")
    return lines


def _batches(plan: DecodePlan) -> list[int]:
    return sorted({cell.batch for cell in plan.cells})


def _contexts(plan: DecodePlan) -> list[int]:
    return sorted({cell.context for cell in plan.cells})


def _errors(plan: DecodePlan) -> str:
    """Of the predictions that were checked; empty without."""
    errors = [abs(cell.error) for cell in plan.cells if cell.error is not None]
    if not errors:
        return ""
    return f"{sum(errors) / len(errors):.1%} on average, {max(errors):.1%} at most"
