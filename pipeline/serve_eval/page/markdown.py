"""report.md: what a reviewer of a pull request needs, as GitHub and GitLab render it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeline.console import markdown_text
from pipeline.reports import EvalReport
from pipeline.serve_eval.page.figures import load_rows
from pipeline.serve_eval.page.wording import (
    changed,
    estimated,
    fixed,
    milliseconds,
    mode,
    rate,
    reference,
    timed,
)


def write_markdown(report: EvalReport) -> str:
    """Verdict, categories, shapes, comparisons, load and findings; what there is of them."""
    parts = [
        _verdict(report),
        _table(
            ("category", "prompts", "τ", "over plain"),
            (
                (
                    name,
                    str(row.prompts),
                    fixed(row.acceptance_length),
                    f"{fixed(row.speedup_plain)}×" if row.speedup_plain else "–",
                )
                for name, row in report.by_category.items()
            ),
        ),
        _table(
            ("drafts of servers: steps/top-k/tokens", "τ on first turns", "prompts"),
            (
                (
                    each.name,
                    estimated(each.acceptance.acceptance_length),
                    str(each.acceptance.requests),
                )
                for each in report.shapes
            ),
        ),
        _table(
            ("rival", "its τ", "own τ less it", "verdict on the own"),
            (
                (
                    each.rival,
                    fixed(each.acceptance_length.value),
                    changed(each.difference),
                    each.verdict,
                )
                for each in report.comparisons
            ),
        ),
        _table(
            ("way", "at a time", "tokens/s", "over plain", "TTFT p50 ms", "TPOT p50 ms", "τ"),
            (
                (
                    row.name,
                    str(row.at.concurrency),
                    rate(row.at.throughput),
                    f"{fixed(row.gain)}×" if row.gain else "–",
                    milliseconds(row.at.ttft_seconds.p50),
                    milliseconds(row.at.tpot_seconds.p50),
                    fixed(row.at.acceptance.acceptance_length.value) if row.at.acceptance else "–",
                )
                for row in load_rows(report)
            ),
        ),
        *(
            f"* **{finding.severity}** at {markdown_text(server.url)}: "
            f"{markdown_text(finding.text)} ({markdown_text(finding.fix)})"
            for server in report.servers
            for finding in server.findings
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict(report: EvalReport) -> str:
    named = "Draft head" if report.head else report.drafter.name
    lines = [f"### {markdown_text(named)} for {markdown_text(report.contract.source)}", ""]
    figures, interval = report.acceptance, ""
    if figures:
        low, high = figures.acceptance_length.low, figures.acceptance_length.high
        interval = f" ({fixed(low)} … {fixed(high)})"
    lines.append(f"* τ **{fixed(report.acceptance_length)}**{interval} tokens a round")
    speedups = (
        f"**{fixed(ratio)}×** over {mode(name)}" for name, ratio in timed(report.speedup).items()
    )
    lines.append(f"* speed: {', '.join(speedups) or 'not timed'}")
    checked, exact = report.lossless.prompts_checked, report.speculation_is_lossless
    verdict = "token-identical to plain decoding in fp32" if exact else "**NOT lossless in fp32**"
    lines.append(f"* {verdict if checked else 'losslessness was not checked'}, {checked} requests")
    if report.lossless.transformers:
        lines.append(f"* {reference(report.lossless.transformers)}")
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Nothing without rows; the first column is text, all others are figures."""
    body = [f"| {' | '.join(map(markdown_text, row))} |" for row in rows]
    if not body:
        return ""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join([f"| {' | '.join(head)} |", f"|{'|'.join(rule)}|", *body])
