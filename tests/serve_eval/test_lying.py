"""Servers that lie to `eval --server` and `check-serving`: every lie is a counted failure."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count, repeat
from typing import Any

import pytest

from pipeline.config import EngineSection, GeneratorSection, LiveServerSection
from pipeline.errors import ConfigError, EndpointError
from pipeline.features.engine import Servers
from pipeline.serve_eval.questions import Question
from pipeline.serve_eval.servers.client import open_client
from pipeline.serve_eval.servers.findings import drafted_shape
from pipeline.serve_eval.servers.kinds import LiveServer, identify, parse_metrics, read_metrics
from pipeline.serve_eval.servers.load import LiveMeasure, LoadRun
from pipeline.synth.generate.remote import open_http
from tests.lying_server import Lie, LyingServer, reply, unbounded

NEW = 8
STREAM = unbounded("200 OK", "text/event-stream")
SERVERS = {
    "vllm": LiveServer("vllm", "m"),
    "sglang": LiveServer("sglang", "m", settings={"speculative_num_steps": 3}),
    "llamacpp": LiveServer("llamacpp", "m"),
    "eagle3": LiveServer("eagle3", "m", settings={"speculative_num_steps": 3}),
}


def section(server: LyingServer) -> LiveServerSection:
    return LiveServerSection(url=server.url, timeout_seconds=3)


def measure(kind: str, lie: Lie) -> LoadRun:
    """One request to a server of a kind."""

    async def run(server: LyingServer) -> LoadRun:
        async with open_client(section(server)) as client:
            options: Any = {"url": server.url, "new_tokens": NEW, "stop_ids": ()}
            measured = LiveMeasure(client, SERVERS[kind], **options)
            return await measured.run([Question("q", "", (1, 2, 3))], 1, lambda amount: None)

    with LyingServer(lie) as server:
        started = time.monotonic()
        try:
            return asyncio.run(run(server))
        finally:
            assert time.monotonic() - started < 20 and server.sent < 24 << 20


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def drip(path: str, asked: Any) -> Iterator[bytes | float]:
    yield STREAM
    while True:
        yield b":"
        yield 0.05


def stream(*events: bytes) -> list[bytes]:
    return [STREAM, *events, DONE]


ONE = event(choices=[{"token_ids": [5], "text": "a"}])
STREAMS: dict[str, tuple[Iterable[bytes], str]] = {
    "endless events": (stream(*repeat(ONE, 500_000)), "too_long"),
    "endless empty events": (stream(*repeat(b"data: {}\n\n", 500_000)), "too_long"),
    "endless comments": (stream(*repeat(b": " + b"a" * 1000 + b"\n\n", 500_000)), "too_long"),
    "an endless line": (stream(b"data: ", *repeat(b"a" * 65536, 6000)), "too_long"),
    "a long line": (stream(event(choices=[], x="a" * 200_000)), "too_long"),
    "deep": (stream(b"data: " + b"[" * 20_000 + b"\n\n"), "unreadable"),
    "surrogate": (stream(b'data: {"x": "\\ud800"}\n\n'), "unreadable"),
    "NaN": (stream(b'data: {"metrics": {"a": NaN}}\n\n'), "unreadable"),
    "a long integer": (stream(b'data: {"a": ' + b"9" * 5000 + b"}\n\n"), "unreadable"),
    "a list": (stream(b"data: []\n\n"), "unreadable"),
    "not UTF-8": (stream(b'data: {"\xff": \xff}\n\n'), "unreadable"),
    "an error": (stream(event(error={"message": "no"})), "stream_error"),
    "gzip": (
        [reply(gzip.compress(bytes(200 << 20)), "200 OK", "a/b", "Content-Encoding: gzip")],
        "too_long",
    ),
    "HTML": ([reply(b"<html>", "200 OK", "text/html")], "truncated"),
    "JSON": ([reply(b'{"choices": []}')], "truncated"),
    "cut": ([STREAM, ONE], "truncated"),
    "a redirect": ([reply(b"", "302 Found", "a/b", "Location: /v1/completions")], "http_302"),
    "an endless error": ([unbounded("500 No"), *repeat(b"x" * 65536, 6000)], "http_500"),
    "endless headers": (
        [b"HTTP/1.1 200 OK\r\n", *repeat(b"x: " + b"a" * 9000 + b"\r\n", 50_000)],
        "disconnected",
    ),
    "no tokens": (stream(event(choices=[])), "empty"),
    "usage is a list": (stream(event(usage=[1])), "unreadable"),
    "choices are a number": (stream(event(choices=5)), "unreadable"),
    "a choice is a text": (stream(event(choices=["a"])), "unreadable"),
    "ids are a text": (stream(event(choices=[{"token_ids": "abc"}])), "unreadable"),
    "ids are negative": (stream(event(choices=[{"token_ids": [-5]}])), "unreadable"),
    "ids are true": (stream(event(choices=[{"token_ids": [True]}])), "unreadable"),
    "a count in text": (stream(ONE, event(usage={"completion_tokens": "5"})), "unreadable"),
    "a negative count": (stream(ONE, event(usage={"completion_tokens": -5})), "unreadable"),
    "a count too large": (stream(ONE, event(usage={"completion_tokens": 10**9})), "too_long"),
    "too many ids": (stream(event(choices=[{"token_ids": [5] * 9}])), "too_long"),
    "metrics are a list": (stream(event(metrics=[1])), "unreadable"),
    "a busy server for ever": ([reply(b"", "429 Busy", "a/b", "Retry-After: nan")], "timeout"),
    "busy until 9999": (
        [reply(b"", "503 Busy", "a/b", "Retry-After: Fri, 31 Dec 9999 23:59:59 GMT")],
        "timeout",
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_lies_is_a_failure(name: str) -> None:
    pieces, reason = STREAMS[name]
    with pytest.raises(EndpointError, match=rf"no request succeeded .*1 x {reason}"):
        measure("vllm", lambda path, asked: pieces if asked else [reply(b"")])


def test_a_stream_that_drips_is_given_up() -> None:
    with pytest.raises(EndpointError, match="1 x timeout"):
        measure("vllm", lambda path, asked: drip(path, asked) if asked else [reply(b"")])


def ended(**meta: Any) -> list[bytes]:
    """A reply of eight tokens with counters."""
    usage = {"prompt_tokens": 3, "completion_tokens": 8}
    return stream(event(choices=[{"token_ids": [5] * 8}], usage=usage, meta_info=meta))


def native(**meta: Any) -> list[bytes]:
    return stream(event(output_ids=[5] * 8, meta_info={"completion_tokens": 8, **meta}))


def timed(*timings: Any) -> list[bytes]:
    tokens = [event(tokens=[5], timings=each) for each in timings]
    return [STREAM, *tokens, event(stop=True, tokens_predicted=len(timings), stop_type="limit")]


def drafts(**metrics: Any) -> list[bytes]:
    usage = {"prompt_tokens": 3, "completion_tokens": 8}
    metrics = {"speculative_decoding": {"num_spec_steps": 1, **metrics}}
    return stream(event(choices=[{"token_ids": [5] * 8}], usage=usage, metrics=metrics))


COUNTERS: dict[str, tuple[str, list[bytes]]] = {
    "one round for all": ("eagle3", ended(spec_verify_ct=1)),
    "more rounds than tokens": ("eagle3", ended(spec_verify_ct=9)),
    "rounds without end": ("sglang", native(spec_verify_ct=2**62)),
    "accepted more than drafted": (
        "sglang",
        native(spec_verify_ct=3, spec_num_correct_drafts=5, spec_num_proposed_drafts=4),
    ),
    "accepted more than steps": (
        "sglang",
        native(spec_verify_ct=1, spec_num_correct_drafts=6, spec_num_proposed_drafts=9),
    ),
    "negative": ("sglang", native(spec_verify_ct=3, spec_num_correct_drafts=-4)),
    "histogram beyond the steps": (
        "sglang",
        native(spec_verify_ct=1, spec_correct_drafts_histogram=[0] * 6 + [1]),
    ),
    "drafted without end": (
        "sglang",
        native(spec_verify_ct=3, spec_num_correct_drafts=4, spec_num_proposed_drafts=2**60),
    ),
    "timings in text": ("llamacpp", timed({"draft_n": "x"}, {"draft_n": "y"})),
    "timings without end": (
        "llamacpp",
        timed({"draft_n": 2**60, "draft_n_accepted": 2**60}, {"draft_n": 2**61}),
    ),
    "timings that accept more": (
        "llamacpp",
        timed({}, {"draft_n": 1, "draft_n_accepted": 3}, *[{"draft_n": 4}] * 2),
    ),
    "timings that are true": ("llamacpp", timed({}, {"draft_n": True})),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_counters_that_cannot_be_are_a_failure(name: str) -> None:
    """Otherwise they would be the report's τ."""
    kind, pieces = COUNTERS[name]
    with pytest.raises(EndpointError, match=r"no request succeeded .*1 x impossible_counters"):
        measure(kind, lambda path, asked: pieces if asked else [reply(b"")])


@pytest.mark.parametrize(
    "pieces",
    [
        drafts(acceptance_histogram=[0, 1], num_draft_tokens=1, num_spec_tokens=2**60),
        drafts(acceptance_histogram=[0, 1], num_draft_tokens=1, num_spec_tokens="x"),
        drafts(acceptance_histogram=5, num_draft_tokens=1, num_spec_tokens=1),
        drafts(acceptance_histogram=[-1, 3], num_draft_tokens=1, num_spec_tokens=1),
    ],
)
def test_counters_that_are_none_are_not_read(pieces: list[bytes]) -> None:
    (only,) = measure("vllm", lambda path, asked: pieces if asked else [reply(b"")]).replies
    assert only.rounds is None and only.tokens == 8


def test_what_is_right_passes() -> None:
    pieces = ended(
        spec_verify_ct=3,
        spec_num_correct_drafts=4,
        spec_num_proposed_drafts=9,
        spec_correct_drafts_histogram=[1, 1, 0, 1],
    )
    (only,) = measure("eagle3", lambda path, asked: pieces if asked else [reply(b"")]).replies
    assert only.rounds is not None and only.rounds.tokens / only.rounds.rounds == 7 / 3


GENERATED = 'vllm:generation_tokens_total{model_name="m"} 5\n'
POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@pytest.mark.parametrize(
    "line",
    [
        f'{POSITION}{{model_name="m",position="{10**12}"}} 1',
        f'{POSITION}{{model_name="m",position="{"9" * 5000}"}} 1',
        f'{POSITION}{{model_name="m",position="-1"}} 1',
        f'{POSITION}{{model_name="m",position="x"}} 1',
        'vllm:generation_tokens_total{model_name="m"} NaN',
        'vllm:generation_tokens_total{model_name="m"} +Inf',
        'vllm:generation_tokens_total{model_name="m"} 1e300',
        'vllm:generation_tokens_total{model_name="m"} -5',
        'vllm:spec_decode_num_drafts_total{model_name="m"} NaN',
    ],
)
def test_metrics_that_are_none_are_not_counted(line: str) -> None:
    counts = parse_metrics(GENERATED + line, "m")
    assert counts is not None and counts.generated == 5
    assert counts.drafts is None and counts.by_position == ()


def identified(pages: dict[str, Any], kind: str = "auto") -> LiveServer:
    async def ask(server: LyingServer) -> LiveServer:
        async with open_client(section(server)) as client:
            return await identify(client, server.url, kind, None)

    def lie(path: str, asked: Any) -> list[bytes]:
        if path not in pages:
            return [reply(b"", "404 No")]
        page = pages[path]
        return [reply(page if isinstance(page, bytes) else json.dumps(page).encode())]

    with LyingServer(lie) as server:
        return asyncio.run(ask(server))


@pytest.mark.parametrize(
    "pages",
    [
        {"/v1/models": b'{"data": [' + b'{"id": "m"}, ' * 1_000_000 + b"1]}"},
        {"/v1/models": b"[" * 100_000},
        {"/v1/models": {"data": {"0": {}}}},
        {"/v1/models": {"data": [{"owned_by": ["vllm"], "id": 5}]}},
        {"/v1/models": None, "/metrics": b"x" * (5 << 20)},
    ],
)
def test_pages_that_say_nothing(pages: dict[str, Any]) -> None:
    with pytest.raises(EndpointError, match="not recognised"):
        identified(pages)


def test_what_a_server_says_of_itself_is_short_or_left_out() -> None:
    row: dict[str, Any] = {
        "id": "\x1b[2J",
        "owned_by": "vllm",
        "max_model_len": "9" * 10_000,
        "root": "r",
    }
    row |= {f"speculative_{number}": [0] * 1000 for number in range(10)}
    pages = {"/v1/models": {"data": [row]}, "/version": {"version": ["1"] * 1000}}
    assert identified(pages) == LiveServer("vllm", "", "", {"root": "r"})
    llama = {"id": "m", "owned_by": "llamacpp", "meta": [1]}
    pages = {"/v1/models": {"data": [llama]}, "/props": {"total_slots": 2, "build_info": {}}}
    assert identified(pages) == LiveServer("llamacpp", "m", "", {"total_slots": 2})


@pytest.mark.parametrize("steps", [2**60, -1, "3", True, math.pi, None])
def test_a_depth_that_cannot_be_is_unknown(steps: Any) -> None:
    names = {"num_steps": steps, "eagle_topk": -5, "num_draft_tokens": 2**60}
    settings = {f"speculative_{name}": value for name, value in names.items()}
    server = LiveServer("sglang", "m", settings=settings)
    assert server.depth is None
    nothing = LoadRun(1, (), Counter(), 0.0, None, None)
    assert drafted_shape(server, nothing) is None


@pytest.mark.parametrize("url", ["http://☃.net:1", "http://xn--a", "http://127.0.0.1:1\n"])
def test_an_address_that_is_none(url: str) -> None:
    async def ask() -> None:
        async with open_client(LiveServerSection(url=url)):
            pass

    with pytest.raises(ConfigError, match=r"eval\.server\.url: is no server.s address"):
        asyncio.run(ask())
    with pytest.raises(ConfigError, match=r"synth\.generator\.endpoints: is no server.s address"):
        open_http(GeneratorSection(backend="vllm", endpoints=(url,)))
    servers = Servers(EngineSection(endpoints=(url,)))
    with pytest.raises(ConfigError, match=r"features\.engine\.endpoints: is no server.s address"):
        asyncio.run(servers._ask_all([], []))


def test_metrics_that_drip_are_none() -> None:
    async def ask(server: LyingServer) -> Any:
        async with open_client(section(server)) as client:
            return await read_metrics(client, "m")

    def lie(path: str, asked: Any) -> Iterator[bytes | float]:
        yield unbounded()
        for _ in count():
            yield b"x"
            yield 0.05

    with LyingServer(lie) as server:
        started = time.monotonic()
        assert asyncio.run(ask(server)) is None
        assert time.monotonic() - started < 20
