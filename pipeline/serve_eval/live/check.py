"""`eagle3 check-serving`: whether a running server does what a report says of its head.

The report's golden prompts are sent as they are, one after the other: neither the target nor its
tokenizer is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.config import LiveServerSection, RunConfig, overridden
from pipeline.console import notice
from pipeline.errors import ConfigError, DataError
from pipeline.reports import REPORT, EvalReport, GoldenFigure, ServerFinding
from pipeline.serve_eval.live.client import ServerGone, open_client
from pipeline.serve_eval.live.golden import compare, evenly, parted
from pipeline.serve_eval.live.measure import LiveMeasure, LoadRun
from pipeline.serve_eval.live.servers import LiveServer, identify
from pipeline.serve_eval.live.stage import gone, report_of
from pipeline.serve_eval.live.table import print_finding
from pipeline.serve_eval.questions import Question
from pipeline.store.manifest import stage_location


def check_run(config: RunConfig) -> bool:
    """Against the run's own report. Raises ConfigError without one."""
    where = stage_location(config.run.uri, "eval").where(REPORT)
    report = report_of(config)
    if report is None:
        raise ConfigError("there is no report", where=where, fix="run `eagle3 eval` first")
    return check(report, config.eval.server, where=where)


def check_report(file: str, overrides: Sequence[str]) -> bool:
    """Against a report.json. Raises DataError, ConfigError."""
    fix = "pass a report.json that `eagle3 eval` wrote"
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=file, fix=fix) from None
    report = EvalReport.parse(data, where=file, fix=fix)
    config = overridden({"target": {"source": report.contract.source}}, overrides)
    return check(report, config.eval.server, where=file)


def check(report: EvalReport, section: LiveServerSection, *, where: str) -> bool:
    """Ask, compare and say it. Raises ConfigError for a report without a golden τ."""
    golden = report.golden
    if golden is None:
        fix = "evaluate again: `eagle3 eval --force`, with a drafter that drafts"
        raise ConfigError("the report has no golden τ", where=where, fix=fix)
    server, run = asyncio.run(_ask(golden, section))
    passed = True
    for finding in _findings(golden, section, server, run):
        print_finding(finding)
        passed = passed and finding.severity != "error"
    verdict = "passed" if passed else "FAILED"
    told = "unknown" if run.acceptance_length is None else f"{run.acceptance_length:.3f}"
    notice("check", f"{verdict}: τ {told} on {len(run.replies)} prompts; report {where}")
    return passed


async def _ask(golden: GoldenFigure, section: LiveServerSection) -> tuple[LiveServer, LoadRun]:
    url = str(section.url)
    chosen = evenly(golden.prompts, section.check_prompts)
    questions = [Question(each.id, "", each.prompt_ids) for each in chosen]
    async with open_client(section) as client:
        try:
            server = await identify(client, url, section.kind, section.model)
        except ServerGone:
            raise gone(url) from None
        measure = LiveMeasure(
            client, server, url=url, new_tokens=golden.max_new_tokens, stop_ids=golden.stop_ids
        )
        return server, await measure.run(questions, 1, lambda amount: None)


def _findings(
    golden: GoldenFigure, section: LiveServerSection, server: LiveServer, run: LoadRun
) -> Iterator[ServerFinding]:
    if run.failed:
        reasons = ", ".join(f"{count} x {name}" for name, count in run.failed.most_common())
        text, fix = f"requests failed: {reasons}", "look at the server's log"
        yield ServerFinding(severity="error", name="requests_failed", text=text, fix=fix)
    told = {each.question.request_id: each.told for each in run.replies if each.told}
    expected = {each.id: each.counters for each in golden.prompts}
    paired = compare(told, expected, drafts_only=server.kind == "vllm")
    if paired is None:
        text = "the server tells no acceptance of single requests: it decodes plainly, or others "
        fix = "start it with its speculative options, and ask it while nobody else does"
        yield ServerFinding(
            severity="error", name="no_acceptance", text=f"{text}use it now", fix=fix
        )
    else:
        wrong = paired.differs(section.tolerance)
        allowed = f"; {100 * section.tolerance:g} % are allowed"
        fix = "the report stands for another head, tree, target or arithmetic than the server runs"
        yield ServerFinding(
            severity="error" if wrong else "note",
            name="acceptance_differs" if wrong else "acceptance",
            text=f"the server's {paired.text}{allowed}",
            fix=fix if wrong else "nothing",
        )
    ids = {each.question.request_id: each.token_ids for each in run.replies if each.token_ids}
    compared, differing = parted(ids, golden)
    if differing:
        text = f"replies differ from the decoder's on {len(differing)} of {len(compared)} prompts"
        fix = "a few part at near-ties; if most do, compare the weights and their type"
        yield ServerFinding(severity="warning", name="replies_differ", text=text, fix=fix)
