"""A decode plan on the terminal, and as a self-contained page with a picture of each batch size."""

from __future__ import annotations

from typing import Any

from pipeline.console import console, notice
from pipeline.planning.decode import DecodePlan, PlannedDecoding
from pipeline.serve_eval.page import charts
from pipeline.serve_eval.page.report import page_source, page_style


def print_plan(plan: DecodePlan) -> None:
    """A table a batch size: drafters by contexts."""
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
        text = f"{errors['mean']} on average, {errors['worst']} at most"
        notice("plan-decode", f"error of the prediction: {text}")


def write_page(plan: DecodePlan) -> str:
    """The plan as one HTML page that loads nothing from elsewhere; all its text is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(page_source("decode_plan.html.j2")).render(
        style=page_style(),
        plan=plan,
        contexts=_contexts(plan),
        errors=_errors(plan),
        batches=[_batch(plan, batch) for batch in _batches(plan)],
    )


def _batch(plan: DecodePlan, batch: int) -> dict[str, Any]:
    own = [cell for cell in plan.cells if cell.batch == batch]
    curves: dict[str, list[tuple[int, float]]] = {}
    for cell in sorted(own, key=lambda cell: cell.context):
        curves.setdefault(cell.drafter, []).append((cell.context, cell.speedup))
    best = max(own, key=lambda cell: cell.speedup)
    where = f"at {best.context:,} tokens of context"
    caption = f"The most is {best.speedup:.2f}× with {best.drafter} {where}; the line is plain."
    return {
        "size": batch,
        "svg": charts.speedup_by_context(curves),
        "caption": caption,
        "rows": _rows(plan, batch),
    }


def _rows(plan: DecodePlan, batch: int) -> dict[str, list[list[str]]]:
    """Of each drafter, what its cells say, by context."""
    cells = {(cell.drafter, cell.context): cell for cell in plan.cells if cell.batch == batch}
    names = dict.fromkeys(name for name, _ in cells)
    return {
        name: [_shown(cells.get((name, context))) for context in _contexts(plan)] for name in names
    }


def _shown(cell: PlannedDecoding | None) -> list[str]:
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


def _errors(plan: DecodePlan) -> dict[str, str]:
    """Of the predictions that were checked."""
    errors = [abs(cell.error) for cell in plan.cells if cell.error is not None]
    if not errors:
        return {}
    return {"mean": f"{sum(errors) / len(errors):.1%}", "worst": f"{max(errors):.1%}"}
