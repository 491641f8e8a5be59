"""What is printed of a server."""

from __future__ import annotations

from pipeline.console import console, logs_json, notice, printable
from pipeline.reports import LoadPoint, ServerFinding, ServerResult

_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def print_server(result: ServerResult) -> None:
    """A row for each concurrency, then the findings; or one JSON object where logs are JSON."""
    if logs_json():
        fields = result.model_dump(mode="json", include={"url", "kind", "model", "findings"})
        fields["acceptance_length"] = [_tau(point) for point in result.curve.points]
        notice("eval", f"server {result.url}", **fields)
        return
    from rich.table import Table

    title = f"eagle3 eval --server {result.url} ({result.kind} {result.version})"
    table = Table(title=printable(title), title_justify="left", title_style="bold")
    names = ("at a time", "requests", "failed", "τ", "tokens/s", "TTFT p50", "TPOT p50")
    for name in names:
        table.add_column(name, justify="right")
    for point in result.curve.points:
        table.add_row(
            str(point.concurrency),
            str(point.requests),
            str(point.failed),
            _tau(point),
            f"{point.throughput:,.1f}",
            f"{1000 * point.ttft_seconds.p50:,.1f} ms",
            f"{1000 * point.tpot_seconds.p50:,.2f} ms",
        )
    console.print(table)
    for finding in result.findings:
        print_finding(finding)


def print_finding(finding: ServerFinding) -> None:
    """On a line of its own."""
    from rich.text import Text

    words = printable(f"{finding.text} (fix: {finding.fix})")
    console.print(Text.assemble((f"{finding.severity}: ", _COLOURS[finding.severity]), words))


def _tau(point: LoadPoint) -> str:
    """With its interval, where it has one."""
    if point.acceptance is None:
        return "–"
    tau = point.acceptance.acceptance_length
    wide = tau.high > tau.low
    return f"{tau.value:.2f}" + (f" ({tau.low:.2f} to {tau.high:.2f})" if wide else "")
