"""Serves plans by a real vLLM and keeps what came back: `python -m tests.engines.record [NAME …]`.

The recordings are judged by `make test`, which needs no engine. Each kind of machine has a file, as
their arithmetics differ; a plan that is recorded in it already is left as it is. All of them take
about an hour on two cores.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.config import LiveServerSection
from pipeline.config.isa import machine_levels
from pipeline.serve_eval.questions import Question
from pipeline.serve_eval.servers.client import open_client
from pipeline.serve_eval.servers.kinds import LiveServer, identify
from pipeline.serve_eval.servers.load import LiveMeasure, LoadRun
from tests.engines.lines import Line, make_line
from tests.engines.plans import FAULTS, RIGHT, Plan
from tests.engines.servers import EngineServer, vllm_server
from tests.serve_eval.recorded_runs import (
    FOLDER,
    Leads,
    RecordedReply,
    RecordedRun,
    Recording,
    Recordings,
)


def main() -> None:
    """Record what is missing, of the plans that are named, or of all."""
    line, file = make_line(), FOLDER / f"vllm-{machine_levels()[-1]}.json.gz"
    known = Recordings.read(file) if file.is_file() else Recordings(reports={}, servers=())
    if known.reports != line.reports:
        known = Recordings(reports=line.reports, servers=())
    for plan in (*RIGHT, *FAULTS):
        is_known = plan.name in {each.name for each in known.servers}
        if not is_known and plan.name in (sys.argv[1:] or [plan.name]):
            recording = record(plan, line)
            known = known.model_copy(update={"servers": (*known.servers, recording)})
            known.write(file)
            print(plan.name, file=sys.stderr)


def record(plan: Plan, line: Line) -> Recording:
    """Serve it, and send the golden prompts at each of its concurrencies."""
    with TemporaryDirectory() as folder:
        target, head = plan.plant(line.target, line.head, Path(folder))
        log = Path(folder) / "log"
        served = vllm_server(
            target,
            head if plan.drafter else None,
            log,
            dtype=plan.dtype,
            drafts=plan.drafts,
            speculative=dict(plan.speculative),
            options=plan.options,
        )
        with served as server:
            seen, runs, leads = asyncio.run(_send(plan, line, server))
    return Recording(
        name=plan.name,
        found=plan.found,
        server={**asdict(seen), "model": "SmolLM2"},
        drafts=plan.drafts,
        runs=tuple(map(_recorded, runs)),
        leads=leads,
    )


async def _send(
    plan: Plan, line: Line, server: EngineServer
) -> tuple[LiveServer, list[LoadRun], dict[str, Leads]]:
    golden = line.report.golden
    assert golden
    section = LiveServerSection.model_validate({"url": server.url})
    questions = [Question(each.id, "", each.prompt_ids) for each in golden.prompts]
    async with open_client(section) as client:
        seen = await identify(client, server.url, section.kind, section.model)
        measure = LiveMeasure(
            client,
            seen,
            url=server.url,
            new_tokens=golden.max_new_tokens,
            stop_ids=golden.stop_ids,
        )
        runs = [await measure.run(questions, each, lambda _: None) for each in plan.concurrency]
        leads = {
            dtype: await measure.leads(report.golden.prompts)
            for dtype, report in line.reports.items()
            if report.golden
        }
    return seen, runs, leads


def _recorded(run: LoadRun) -> RecordedRun:
    replies: dict[str, RecordedReply] = {}
    for each in run.replies:
        rounds = each.rounds.in_order if each.rounds else None
        reply = RecordedReply(each.token_ids or (), each.finish_reason, rounds)
        replies.setdefault(each.question.request_id, reply)
    failed = dict(run.failed)
    return RecordedRun(run.concurrency, replies, failed, run.detail)


if __name__ == "__main__":
    main()
