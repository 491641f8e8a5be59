"""`eagle3 check-serving`: whether a running server does what a report says of its head.

The report's golden prompts are sent as they are, one after the other. Neither the target nor its
tokenizer is needed, unless the server drafts a shape that the report does not know: with the run's
configuration the decoder's rounds with it are then replayed on the spot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from pipeline.config import (
    LiveServerSection,
    RunConfig,
    TreeSection,
    overridden,
    prepare_process,
)
from pipeline.console import long_step, notice
from pipeline.errors import ConfigError
from pipeline.reports import REPORT, EvalReport, GoldenFigure, ServerFinding
from pipeline.serve_eval.pages import report_of
from pipeline.serve_eval.questions import Question, evenly
from pipeline.serve_eval.servers.client import ServerGone, gone, open_client
from pipeline.serve_eval.servers.findings import (
    SeenServer,
    against_report,
    failures,
    finding,
    print_finding,
    texts,
)
from pipeline.serve_eval.servers.kinds import identify
from pipeline.serve_eval.servers.load import LiveMeasure, LiveReply
from pipeline.store.manifest import read_report, stage_location

#: Adds to a golden figure the decoder's rounds with a shape.
Replay = Callable[[GoldenFigure, TreeSection], GoldenFigure]


def check_run(config: RunConfig) -> bool:
    """Against the run's own report. Raises ConfigError without one."""
    where = stage_location(config.run.uri, "eval").where(REPORT)
    report = report_of(config)
    if report is None:
        raise ConfigError("there is no report", where=where, fix="run `eagle3 eval` first")
    return check(report, config.eval.server, where=where, replay=partial(replay_rounds, config))


def check_report(file: str, overrides: Sequence[str]) -> bool:
    """Against a report.json, or that of a run. Raises as `read_report`, ConfigError."""
    report = read_report(file)
    config = overridden({"target": {"source": report.contract.source}}, overrides)
    return check(report, config.eval.server, where=file)


def check(
    report: EvalReport,
    section: LiveServerSection,
    *,
    where: str,
    replay: Replay | None = None,
) -> bool:
    """Send, compare and print: whether no finding is an error; otherwise as `compare_golden`."""
    seen, findings = compare_golden(report, section, where=where, replay=replay)
    for each in findings:
        print_finding(each)
    passed, run = all(each.severity != "error" for each in findings), seen.runs[0]
    tau = "unknown" if run.acceptance_length is None else f"{run.acceptance_length:.3f}"
    verdict = "passed" if passed else "FAILED"
    notice("check", f"{verdict}: τ {tau} on {len(run.replies)} prompts; report {where}")
    return passed


def compare_golden(
    report: EvalReport,
    section: LiveServerSection,
    *,
    where: str,
    replay: Replay | None = None,
) -> tuple[SeenServer, list[ServerFinding]]:
    """Send the golden prompts; `replay` adds the decoder's rounds with a shape that the report does
    not know. Raises ConfigError for a report without a golden τ."""
    golden = report.golden
    if golden is None:
        fix = "evaluate again: `eagle3 eval --force`, with a drafter that drafts"
        raise ConfigError("the report has no golden τ", where=where, fix=fix)
    seen = asyncio.run(_send(report, golden, section))
    if replay and (shape := seen.shape) and not seen.expected:
        golden = replay(golden, shape)
        seen = replace(seen, report=report.model_copy(update={"golden": golden}))
    return seen, [*failures(seen), *_acceptance(seen), *texts(seen)]


async def _send(report: EvalReport, golden: GoldenFigure, section: LiveServerSection) -> SeenServer:
    url = str(section.url)
    own = {each.id: each.counters for each in golden.prompts}
    chosen = evenly(golden.prompts, section.check_prompts)
    questions = [Question(each.id, "", each.prompt_ids) for each in chosen]
    async with open_client(section) as client:
        try:
            server = await identify(client, url, section.kind, section.model)
        except ServerGone:
            raise gone(url) from None
        measure = partial(LiveMeasure, client, server, url=url, stop_ids=golden.stop_ids)
        limit = golden.max_new_tokens
        run = await measure(new_tokens=limit).run(questions, 1, lambda amount: None)
        seen = SeenServer(server, section, [run], limit, report=report, own=own)
        leads = await measure(new_tokens=limit).leads(seen.golden_prompts)
        return replace(seen, leads=leads, cut=await _cut(seen, measure))


async def _cut(seen: SeenServer, measure: Callable[..., LiveMeasure]) -> dict[str, LiveReply]:
    """Replies that part from the decoder's, once more and only up to there: of these the server's
    counters can be held against the decoder's rounds."""
    first = {each.question.request_id: each for each in seen.runs[0].replies}
    cut = {}
    for parting in seen.partings:
        reply, limit = first[parting.prompt], parting.position
        if limit < 2 or reply.rounds is None or reply.rounds.in_order or seen.exact:
            continue
        run = await measure(new_tokens=limit).run([reply.question], 1, lambda amount: None)
        (again,) = run.replies
        if again.token_ids == (reply.token_ids or ())[:limit]:
            cut[parting.prompt] = again
    return cut


def replay_rounds(config: RunConfig, golden: GoldenFigure, shape: TreeSection) -> GoldenFigure:
    """With the run's target and head: what its report does not know of a shape."""
    from pipeline.heads.registry import open_head
    from pipeline.serve_eval.measure import Comparison
    from pipeline.serve_eval.shapes import replay_group, with_replay
    from pipeline.store.manifest import vouched_head
    from pipeline.target.open import open_target

    prepare_process(config.run)
    target = open_target(config.target, decoded=True)
    location = vouched_head(config.run.uri, config.eval.head)
    needs_head = config.eval.drafter.needs_head
    questions = [Question(each.id, "", each.prompt_ids) for each in golden.prompts]
    most_tokens = max(len(each.context) for each in questions)
    own = Comparison(
        *(config, target, open_head(location, expected=target.contract)[0] if needs_head else None),
        target.template(),
        dtype=target.dtype,
        max_length=most_tokens + golden.max_new_tokens,
    )
    with long_step("check", f"replaying {shape.label} on {len(questions)} prompts"):
        replies = replay_group(own, questions, golden.stop_ids, golden.max_new_tokens, [shape])
    prompts = [
        with_replay(each, reply)
        if (reply := replies.get(each.id)) and reply.token_ids == each.reply_ids
        else each
        for each in golden.prompts
    ]
    return golden.model_copy(update={"prompts": tuple(prompts)})


def _acceptance(seen: SeenServer) -> Iterator[ServerFinding]:
    if seen.paired is None and not seen.reported:
        text = "the server reports no acceptance of single requests: it decodes plainly, or others "
        fix = "start it with its speculative options, and send it nothing else meanwhile"
        yield finding("error", "no_acceptance", f"{text}use it now", fix)
        return
    yield from against_report(seen)
    if paired := seen.paired:
        text = f"the server's {paired.text}; {100 * seen.section.tolerance:g} % are allowed"
        yield finding("note", "acceptance", text, "nothing")
