"""llama-server: what a real one answered, as it was and with planted faults.

The recording, recordings/llamacpp.json, is made by `python -m tests.engines.record_llama`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pipeline.config import LiveServerSection, TreeSection
from pipeline.reports import GoldenFigure, ServerFinding
from pipeline.serve_eval.servers.check import compare_golden
from pipeline.serve_eval.servers.findings import SeenServer
from pipeline.serve_eval.servers.kinds import rounds_of_timings
from tests.serve_eval.conftest import listening_app
from tests.serve_eval.test_pages import whole_report

RECORDING = Path(__file__).with_name("recordings") / "llamacpp.json"
Stream = list[dict[str, Any]]


@pytest.fixture
def recording() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(RECORDING.read_text())
    return loaded


def seen_of(
    recording: dict[str, Any], *, change: Callable[[Stream], None] = lambda stream: None
) -> tuple[SeenServer, dict[str, ServerFinding]]:
    """What check-serving sees of the recorded server, its streams changed in place."""
    golden = GoldenFigure.model_validate(recording["golden"])
    streams = {}
    for prompt, stream in zip(golden.prompts, copy.deepcopy(recording["streams"]), strict=True):
        change(stream)
        streams[prompt.prompt_ids] = stream

    async def models(request: Request) -> Response:
        return JSONResponse(recording["models"])

    async def props(request: Request) -> Response:
        return JSONResponse(recording["props"])

    async def complete(request: Request) -> Response:
        body = await request.json()
        assert body["temperature"] == 0 and body["timings_per_token"] and body["return_tokens"]
        assert request.headers["connection"] == "close"
        if not (stream := streams[tuple(body["prompt"])]):
            return JSONResponse(recording["refused"]["body"], recording["refused"]["status"])

        async def events() -> AsyncIterator[bytes]:
            for event in stream:
                yield f"data: {json.dumps(event)}\n\n".encode()

        return StreamingResponse(events(), media_type="text/event-stream")

    routes = [
        Route("/v1/models", models),
        Route("/props", props),
        Route("/completion", complete, methods=["POST"]),
    ]
    report = whole_report().model_copy(update={"golden": golden})
    settings = report.settings.model_copy(update={"dtype": "float32", "tree": golden.tree})
    report = report.model_copy(update={"settings": settings})
    with listening_app(Starlette(routes=routes)) as (url, _):
        seen, findings = compare_golden(report, LiveServerSection(url=url), where="the report")
    return seen, {each.name: each for each in findings}


def errors(findings: dict[str, ServerFinding]) -> set[str]:
    return {name for name, each in findings.items() if each.severity == "error"}


def test_a_real_one_takes_the_decoders_rounds(recording: dict[str, Any]) -> None:
    seen, findings = seen_of(recording)
    assert errors(findings) == set() and findings["tree_differs"].severity == "warning"
    assert (seen.server.kind, seen.server.version) == (
        *("llamacpp", recording["props"]["build_info"]),
    )
    assert seen.server.settings == {"context_length": 1024, "dtype": "all F32", "total_slots": 1}
    assert seen.shape == TreeSection.chain(3)
    for prompt in GoldenFigure.model_validate(recording["golden"]).prompts:
        (reply,) = (each for each in seen.runs[0].replies if each.question.request_id == prompt.id)
        ours, theirs = prompt.shapes["3/1/4"], seen.reported[prompt.id].counters
        assert reply.token_ids == prompt.reply_ids and reply.finish_reason == "length"
        assert reply.prompt_tokens == len(prompt.prompt_ids)
        assert theirs is not None
        assert (theirs.rounds, theirs.tokens) == (ours.rounds, ours.tokens)
        # It drafts nothing that the reply has no room for, and counts what it accepts uncut.
        assert ours.drafted - 6 <= theirs.drafted <= ours.drafted
        assert theirs.drafted == sum(theirs.proposed)
        assert theirs.accepted_tokens == theirs.tokens - theirs.rounds


def _without_drafts(stream: Stream) -> None:
    for event in stream:
        for name in ("draft_n", "draft_n_accepted"):
            event["timings"].pop(name, None)


def _nothing_accepted(stream: Stream) -> None:
    for index, event in enumerate(stream[:-1]):
        event["timings"] |= {"draft_n": 3 * index, "draft_n_accepted": 0}


def _without_end(stream: Stream) -> None:
    del stream[-1]


def _other_tokens(stream: Stream) -> None:
    for event in stream[5:-1]:
        event["tokens"] = [7]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_without_drafts, "no_acceptance"),
        (_nothing_accepted, "acceptance_differs"),
        (_nothing_accepted, "rounds_differ"),
        (_other_tokens, "replies_differ"),
    ],
)
def test_faults_are_named(
    recording: dict[str, Any], change: Callable[[Stream], None], named: str
) -> None:
    _, findings = seen_of(recording, change=change)
    assert named in errors(findings)


def test_a_stream_that_is_cut_is_no_reply(recording: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="truncated"):
        seen_of(recording, change=_without_end)


def test_a_refusal_is_quoted(recording: dict[str, Any]) -> None:
    recording["streams"][0].clear()
    _, findings = seen_of(recording)
    assert "exceeds the available context size (1024 tokens)" in findings["requests_failed"].text


def timed(*totals: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"draft_n": drafted, "draft_n_accepted": accepted} for drafted, accepted in totals]


def test_rounds_are_told_apart_by_what_was_drafted_so_far() -> None:
    first: list[dict[str, Any]] = [{}]  # prefill's token, before any draft
    rounds = rounds_of_timings(first + timed((3, 1), (3, 1), (6, 1), (8, 1), (8, 1)), 6)
    assert rounds is not None and rounds.counters is not None
    assert (rounds.rounds, rounds.tokens, rounds.drafted, rounds.accepted) == (4, 5, 8, 1)
    assert rounds.counters.accepted_lengths == (3, 1)
    assert rounds.counters.proposed == (3, 3, 2), "the last token was made plainly"


def test_a_stop_cuts_the_last_round() -> None:
    rounds = rounds_of_timings([{}, *timed((3, 3), (3, 3))], 3)
    assert rounds is not None and rounds.counters is not None
    assert (rounds.rounds, rounds.tokens) == (1, 2)
    assert rounds.counters.accepted_lengths == (0, 0, 0, 1)


def test_of_tokens_without_an_event_the_sums_are_known() -> None:
    rounds = rounds_of_timings([{}, *timed((3, 1), (6, 2))], 5)
    assert rounds is not None and rounds.counters is None
    assert (rounds.rounds, rounds.tokens, rounds.drafted, rounds.accepted) == (2, 4, 6, 2)
    assert rounds_of_timings([{}, {}], 2) is None, "a server without a drafter"
