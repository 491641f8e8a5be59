"""`eagle3 eval --server`: send the evaluation's prompts to a running server.

Only the target's tokenizer and template are needed, so that targets can be evaluated that the
decoder does not run. Every run is stored beside the stage's report, under a name of its own, once
it is complete:

    eval/servers/sglang-1.json   a ServerResult
    eval/servers/sglang-2.json   the next run; nothing is overwritten
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pipeline.config import RunConfig, prepare_process
from pipeline.console import long_step, notice, progress_bar
from pipeline.records import Prompt, sealed_json
from pipeline.reports import (
    SERVERS,
    EvalReport,
    LoadCurve,
    PromptResult,
    RoundCounters,
    ServerExpectation,
    ServerResult,
    ServerWorkload,
)
from pipeline.serve_eval.pages import renew_pages, report_of
from pipeline.serve_eval.questions import (
    Question,
    clock_of,
    evenly,
    first_question,
    load_evaluation_prompts,
    readable,
)
from pipeline.serve_eval.servers.client import LiveClient, ServerGone, gone, open_client
from pipeline.serve_eval.servers.findings import SeenServer, findings_of, print_server
from pipeline.serve_eval.servers.kinds import LiveServer, identify
from pipeline.serve_eval.servers.load import LiveMeasure, LiveReply, LoadRun
from pipeline.serve_eval.summary import context_digest, prompts_digest
from pipeline.store.location import Location
from pipeline.store.manifest import stage_location
from pipeline.target.open import open_template
from pipeline.target.template import ChatTemplate

#: Prompts that are also sent to the server's chat endpoint, to compare templates.
_TEMPLATE_PROMPTS = 3


def evaluate_server(config: RunConfig) -> ServerResult:
    """Measure, store, print, and renew the report's pages.

    Raises EndpointError, and EndpointsUnavailable when the server dies.
    """
    prepare_process(config.run)
    section = config.eval
    with long_step("eval", "loading the target's tokenizer"):
        template = open_template(config.target, system_prompt=section.system_prompt)
    if section.chat_template_kwargs:
        template = template.varied(kwargs=section.chat_template_kwargs, where="eval")
    prompts, _ = readable(load_evaluation_prompts(config)[0], [template])
    template.set_clock(clock_of(config, "eval", "synth"))  # as in the report
    questions = [first_question(prompt, template) for prompt in prompts]
    template.set_clock(None)  # the server's own template, with which it is compared, knows today's
    report = report_of(config)
    seen, failures = asyncio.run(_measure(config, template, prompts, questions, report))
    result = _result(config, questions, seen, failures)
    where = _store(stage_location(config.run.uri, "eval").child(SERVERS), result)
    print_server(result)
    notice("eval", f"server: {where}")
    renew_pages(config)
    return result


async def _measure(
    config: RunConfig,
    template: ChatTemplate,
    prompts: Sequence[Prompt],
    questions: Sequence[Question],
    report: EvalReport | None,
) -> tuple[SeenServer, dict[str, int]]:
    section, url = config.eval.server, str(config.eval.server.url)
    new, levels = config.eval.max_new_tokens, sorted(set(section.concurrency))
    async with open_client(section) as client:
        try:
            server = await identify(client, url, section.kind, section.model)
            checked = await _check_template(config, client, server, template, prompts)
        except ServerGone:
            raise gone(url) from None
        notice("eval", f"{server.kind} {server.version}: {server.model} at {url}")
        measure = LiveMeasure(client, server, url=url, new_tokens=new, stop_ids=template.stop_ids)
        runs: list[LoadRun] = []
        total = sum(measure.requests(questions, level) for level in levels)
        with progress_bar("eval", unit="requests", total=total) as bar:
            for level in levels:
                runs.append(await measure.run(questions, level, bar.advance))
        own = {} if section.plain else _own_counters(report, questions, new)
        seen = SeenServer(server, section, runs, new, checked, report, own)
        seen = replace(seen, leads=await measure.leads(seen.golden_prompts))
        failed = sum((run.failed for run in runs), start=client.failures)
        return seen, dict(failed)


def _own_counters(
    report: EvalReport | None, questions: Sequence[Question], new: int
) -> dict[str, RoundCounters]:
    """The decoder's counters of the same prompts, with the same limit of tokens."""
    if report is None or report.settings.max_new_tokens != new:
        return {}
    contexts = {each.request_id: each.context for each in questions}

    def same(result: PromptResult) -> bool:
        context = contexts.get(result.id)
        if context is None or len(context) != result.context_tokens:
            return False
        # Reports of older versions have no digest.
        return result.context_digest in ("", context_digest(context))

    return {
        each.id: each.counters
        for each in report.prompts
        if each.counters is not None and same(each)
    }


async def _check_template(
    config: RunConfig,
    client: LiveClient,
    server: LiveServer,
    template: ChatTemplate,
    prompts: Sequence[Prompt],
) -> list[tuple[str, int, int, bool]]:
    """Of a few prompts: its name, tokens of the server's template, ours, and whether they are the
    same; empty where the server has no chat endpoint."""
    # Servers take what a text spells for a control token; that is no matter of templates.
    usable = [
        prompt
        for prompt in prompts
        if not prompt.tools
        and not any(map(template.spells_control_token, (prompt.system or "", prompt.turns[0])))
    ]
    kwargs = {**config.target.chat_template_kwargs, **config.eval.chat_template_kwargs}
    checked = []
    for prompt in evenly(usable, _TEMPLATE_PROMPTS):
        system = prompt.system or config.eval.system_prompt
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt.turns[0]})
        body: dict[str, Any] = {
            "model": server.model,
            "messages": messages,
            "max_tokens": 1,
            "temperature": 0.0,
            **({"chat_template_kwargs": kwargs} if kwargs else {}),
            **({"return_token_ids": True} if server.kind != "sglang" else {}),
        }
        reply = await client.post("/v1/chat/completions", body)
        usage = reply.get("usage") if isinstance(reply, dict) else None
        theirs = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if not isinstance(theirs, int):
            break
        ours = list(first_question(prompt, template).context)
        choices = reply.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else {}
        ids = reply.get("prompt_token_ids")
        ids = ids or (choice.get("prompt_token_ids") if isinstance(choice, dict) else None)
        same = ids == ours if isinstance(ids, list) else theirs == len(ours)
        checked.append((f"{prompt.source}/{prompt.sample_id}", theirs, len(ours), same))
    return checked


def _result(
    config: RunConfig, questions: Sequence[Question], seen: SeenServer, failures: dict[str, int]
) -> ServerResult:
    server, paired, plain = seen.server, seen.paired, config.eval.server.plain
    settings = {"model": server.model, **({"plain": True} if plain else {})}
    points = tuple(run.point() for run in seen.runs)
    return ServerResult(
        url=str(config.eval.server.url),
        kind=server.kind,
        version=server.version,
        model=server.model,
        created=datetime.now(UTC).isoformat(),
        workload=ServerWorkload(
            prompts=len(questions),
            prompts_digest=prompts_digest([each.context for each in questions]),
            max_new_tokens=seen.new_tokens,
            temperature=0.0,
        ),
        server_settings=server.settings,
        curve=LoadCurve(name=server.kind, settings=settings, points=points),
        pooled=tuple(run.concurrency for run in seen.runs if run.pooled),
        failures=failures,
        expected=ServerExpectation(prompts=paired.prompts, acceptance_length=paired.decoder)
        if paired
        else None,
        prompts=tuple(_prompt_result(reply, server.kind) for reply in _each_once(seen.runs[0])),
        findings=findings_of(seen),
    )


def _each_once(run: LoadRun) -> list[LiveReply]:
    """The first reply to every prompt, in the order of their names."""
    first: dict[str, LiveReply] = {}
    for reply in run.replies:
        first.setdefault(reply.question.request_id, reply)
    return [first[name] for name in sorted(first)]


def _prompt_result(reply: LiveReply, kind: str) -> PromptResult:
    rounds, tpot = reply.rounds, reply.tpot_seconds
    return PromptResult(
        id=reply.question.request_id,
        category=reply.question.category,
        source=reply.question.source,
        context_tokens=len(reply.question.context),
        finish_reason=reply.finish_reason,
        rounds=rounds.rounds if rounds else 0,
        tokens=reply.tokens,
        acceptance_length=round(rounds.tokens / rounds.rounds, 4) if rounds else 0.0,
        tokens_per_second={kind: round(1 / tpot, 2)} if tpot else {},
        ttft_seconds={kind: reply.ttft_seconds},
        tpot_seconds={kind: tpot} if tpot is not None else {},
        counters=rounds.counters if rounds else None,
        identical_fp32=None,
    )


def _store(folder: Location, result: ServerResult) -> str:
    """Under the first free name; two processes at once take different ones."""
    data = sealed_json(result.model_dump(mode="json"))
    taken = set(folder.names())
    for number in range(1, len(taken) + 1000):
        name = f"{result.kind}-{number}.json"
        if name not in taken and folder.create(name, data) == data:
            return folder.where(name)
    raise AssertionError("a thousand others at once")
