"""How `--plan` looks: a table a stage, and what a whole run comes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.config import RunConfig
from pipeline.console import readable_bytes, readable_duration
from pipeline.records import Plan, ZeroMemory

if TYPE_CHECKING:
    from rich.table import Table


def print_plans(plans: Sequence[Plan], config: RunConfig) -> None:
    """To standard output; of several stages a last line says what they come to."""
    from pipeline.console import console

    for plan in plans:
        console.print(_plan_table(plan))
        if plan.zero:
            console.print(_zero_table(plan.zero, config.train.zero_stage))
    if len(plans) > 1:
        hours = readable_duration(sum(plan.seconds for plan in plans))
        size = readable_bytes(sum(plan.storage_bytes for plan in plans))
        objects = sum(plan.objects for plan in plans)
        console.print(f"all stages: {hours}, {size} in {objects:,} objects", highlight=False)


def _plan_table(plan: Plan) -> Table:
    from rich.table import Table
    from rich.text import Text

    title = f"eagle3 {plan.stage} --plan"
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("state", Text(plan.state))
    if plan.device:
        table.add_row("device", Text(plan.device))
    table.add_row("records", f"{plan.records:,}")
    table.add_row("tokens", f"{plan.tokens:,}")
    table.add_row("storage", readable_bytes(plan.storage_bytes))
    if plan.objects:
        table.add_row("objects", f"{plan.objects:,}")
    table.add_row("time", readable_duration(plan.seconds))
    table.add_row("peak memory", readable_bytes(plan.peak_memory_bytes))
    sizes = {name: size for name, size in plan.memory.items() if size}
    parts = ", ".join(f"{name} {readable_bytes(size)}" for name, size in sizes.items())
    if parts:
        table.add_row("", Text(parts))
    for problem in plan.problems:
        table.add_row("problem", Text(problem, style="red"))
    for position, line in enumerate(plan.basis):
        table.add_row("based on" if position == 0 else "", Text(line))
    return table


def _zero_table(rows: Sequence[ZeroMemory], chosen: int) -> Table:
    from rich.table import Table

    title = "memory of one process by train.zero_stage, GiB"
    table = Table(title=title, title_justify="left", title_style="bold")
    names = ("weights", "gradients", "optimiser", "buffers", "frozen", "working", "peak")
    for name in ("ZeRO", *names):
        table.add_column(name, justify="right")
    for row in rows:
        sizes = row.weights, row.gradients, row.optimiser, row.buffers, row.frozen
        working = max(row.activations, row.stepping)
        cells = [f"{size / 2**30:,.1f}" for size in (*sizes, working, row.total)]
        mark = "bold" if row.stage == chosen else None
        table.add_row(str(row.stage), *cells, style=mark)
    return table
