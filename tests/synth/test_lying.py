"""Endpoints that lie: their replies are rejected under a reason, soon, and the run goes on."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count, repeat
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.config import GeneratorSection
from pipeline.decoder.request import Request
from pipeline.errors import EndpointError
from pipeline.synth.generate.remote import (
    EndpointBusy,
    RemoteBackend,
    RequestRefused,
    _retry_after,
    identify,
)
from pipeline.target.template import ChatTemplate, load_template
from tests.lying_server import LyingServer, reply, unbounded

NEW = 16
VOCABULARY = 300


@pytest.fixture(scope="module")
def template(tiny_target: Path) -> ChatTemplate:
    return load_template(tiny_target, source="tiny", system_prompt=None)


def section(server: LyingServer, **fields: Any) -> GeneratorSection:
    return GeneratorSection.model_validate(
        {
            "backend": "vllm",
            "endpoints": (f"{server.url}/v1",),
            "timeout_seconds": 3.0,
            "retries": 0,
            **fields,
        }
    )


def body(prompt: list[int], **changes: Any) -> dict[str, Any]:
    """What an honest server sends, but for the changes of its choice."""
    choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None}
    choice |= {"token_ids": [5], "prompt_token_ids": prompt, "stop_reason": None} | changes
    usage = {"prompt_tokens": len(prompt), "completion_tokens": 1}
    return {"id": "x", "object": "text_completion", "choices": [choice], "usage": usage}


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def spoiled(**changes: Any) -> Callable[[list[int]], Iterable[bytes]]:
    return lambda prompt: [reply(as_json(body(prompt, **changes)))]


def counted(**usage: Any) -> Callable[[list[int]], Iterable[bytes]]:
    return lambda prompt: [reply(as_json(body(prompt) | {"usage": usage}))]


def raw(data: bytes, *more: str) -> Callable[[list[int]], Iterable[bytes]]:
    return lambda prompt: [reply(data, "200 OK", "application/json", *more)]


def drip(prompt: list[int]) -> Iterator[bytes | float]:
    for byte in reply(as_json(body(prompt))):
        yield bytes([byte])
        yield 0.1


#: Prompt ids → what is sent; and the reason under which it is counted.
LIES: dict[str, tuple[Callable[[list[int]], Iterable[bytes | float]], str]] = {
    "deep": (raw(b"[" * 20_000), "unreadable"),
    "deep and closed": (raw(b'{"a":' * 900 + b"1" + b"}" * 900), "unreadable"),
    "surrogate": (
        raw(rb'{"choices": [{"text": "\ud800", "finish_reason": "stop"}]}'),
        "unreadable",
    ),
    "surrogate in a field that is not read": (
        lambda prompt: [reply(as_json(body(prompt))[:-1] + rb', "x": "\udc00"}')],
        "unreadable",
    ),
    "endless": (lambda prompt: (unbounded(), *[b"["], *repeat(b" " * 65536, 10_000)), "unreadable"),
    "a terabyte": (
        lambda prompt: (
            unbounded("200 OK", "a/b", f"Content-Length: {10**12}"),
            *repeat(b" " * 65536, 6000),
        ),
        "unreadable",
    ),
    "endless chunks": (
        lambda prompt: (
            unbounded("200 OK", "a/b", "Transfer-Encoding: chunked"),
            *repeat(b"10000\r\n" + b" " * 65536 + b"\r\n", 6000),
        ),
        "unreadable",
    ),
    "endless header": (
        lambda prompt: (b"HTTP/1.1 200 OK\r\nx: ", *repeat(b"a" * 65536, 6000)),
        "disconnected",
    ),
    "endless headers": (
        lambda prompt: (b"HTTP/1.1 200 OK\r\n", *repeat(b"x: " + b"a" * 9000 + b"\r\n", 50_000)),
        "disconnected",
    ),
    "endless 100 Continue": (
        lambda prompt: (b"HTTP/1.1 100 Continue\r\n\r\n" for _ in count()),
        "timeout",
    ),
    "drip": (drip, "timeout"),
    "silence": (lambda prompt: [60.0], "timeout"),
    "no HTTP": (lambda prompt: [b"\x00" * 100], "disconnected"),
    "gzip bomb": (raw(gzip.compress(bytes(200 << 20), 9), "Content-Encoding: gzip"), "unreadable"),
    "small gzip": (
        lambda prompt: [
            reply(gzip.compress(as_json(body(prompt))), "200 OK", "a/b", "Content-Encoding: gzip")
        ],
        "unreadable",
    ),
    "deflate": (raw(b"x\x9c" * 10, "Content-Encoding: deflate"), "unreadable"),
    "brotli": (raw(b"\x00" * 10, "Content-Encoding: br"), "unreadable"),
    "zstd": (raw(b"\x28\xb5\x2f\xfd" * 4, "Content-Encoding: zstd"), "unreadable"),
    "two codings": (raw(b"{}", "Content-Encoding: gzip, gzip, gzip"), "unreadable"),
    "truncated": (lambda prompt: [reply(as_json(body(prompt))[:-9])], "unreadable"),
    "shorter than it says": (lambda prompt: [reply(as_json(body(prompt)))[:-9]], "disconnected"),
    "HTML": (lambda prompt: [reply(b"<html>", "200 OK", "text/html")], "unreadable"),
    "not UTF-8": (raw(b'{"choices": "\xff"}'), "unreadable"),
    "nothing": (raw(b""), "unreadable"),
    "null": (raw(b"null"), "unreadable"),
    "a list": (raw(b"[]"), "unreadable"),
    "an error": (raw(b'{"error": {"message": "no"}}'), "unreadable"),
    "a key twice": (
        lambda prompt: [reply(as_json(body(prompt))[:-1] + b', "choices": []}')],
        "unreadable",
    ),
    "no choice": (raw(b'{"choices": []}'), "unreadable"),
    "two choices": (
        lambda prompt: [reply(as_json({"choices": 2 * body(prompt)["choices"]}))],
        "unreadable",
    ),
    "choices are no list": (raw(b'{"choices": {"0": {}}}'), "unreadable"),
    "logprobs NaN": (spoiled(logprobs={"token_logprobs": [math.nan]}), "unreadable"),
    "logprobs infinite": (spoiled(logprobs={"token_logprobs": [-math.inf]}), "unreadable"),
    "a long integer": (raw(b'{"choices": ' + b"9" * 5000 + b"}"), "unreadable"),
    "ids are texts": (spoiled(token_ids=["5"]), "unreadable"),
    "ids are true": (spoiled(token_ids=[True]), "unreadable"),
    "ids are floats": (spoiled(token_ids=[5.0]), "unreadable"),
    "ids in ids": (spoiled(token_ids=[[5]]), "unreadable"),
    "prompt ids are texts": (spoiled(prompt_token_ids="5"), "unreadable"),
    "text is a number": (spoiled(text=5), "unreadable"),
    "another end": (spoiled(finish_reason="tool_calls"), "unreadable"),
    "ids beyond the vocabulary": (spoiled(token_ids=[VOCABULARY]), "other_vocabulary"),
    "a negative id": (spoiled(token_ids=[-1]), "other_vocabulary"),
    "an id of 63 bits": (spoiled(token_ids=[2**63 - 1]), "other_vocabulary"),
    "no ids": (spoiled(token_ids=[]), "empty"),
    "another prompt": (spoiled(prompt_token_ids=[1, 2]), "other_prompt"),
    "too many ids": (
        lambda prompt: [
            reply(
                as_json(
                    body(prompt, token_ids=[5] * 17)
                    | {"usage": {"completion_tokens": 17, "prompt_tokens": len(prompt)}}
                )
            )
        ],
        "too_long",
    ),
    "counts more": (counted(completion_tokens=9), "other_count"),
    "counts none": (counted(completion_tokens=0), "other_count"),
    "counts less than none": (counted(completion_tokens=-1), "other_count"),
    "counts in text": (counted(completion_tokens="1"), "unreadable"),
    "counts a fraction": (counted(completion_tokens=1.5), "unreadable"),
    "megabytes of text without ids": (spoiled(token_ids=None, text="a" * 80_000), "too_long"),
    "an endless error": (
        lambda prompt: (unbounded("500 No"), *repeat(b" " * 65536, 6000)),
        "error_500",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_counted_and_the_next_prompt_is_asked(template: ChatTemplate, name: str) -> None:
    """The health check is honest: so the prompt is at fault, and not the endpoint."""
    lie, reason = LIES[name]
    honest = list(template.start("Hello."))
    prompts = [list(template.start(text)) for text in ("a", "b")]
    with LyingServer(
        lambda path, asked: (
            [reply(as_json(body(honest)))]
            if asked["prompt"] == honest
            else [reply(as_json(body(prompts[1])))]
            if asked["prompt"] == prompts[1]
            else lie(asked["prompt"])
        )
    ) as server:
        backend = RemoteBackend(section(server), template, model="m", vocabulary=VOCABULARY)
        requests = [
            Request(str(number), tuple(ids), NEW, template.stop_ids)
            for number, ids in enumerate(prompts)
        ]
        left, started = iter(requests), time.monotonic()
        replies = {each.request_id: each for each in backend.generate(lambda: next(left, None))}
        assert time.monotonic() - started < 30
        assert server.sent < 24 << 20
    assert replies["0"].rejected == f"remote:{reason}"
    assert replies["1"].rejected is None and replies["1"].token_ids == (5,)


def post(template: ChatTemplate, *pieces: bytes) -> Any:
    """What one request meets."""
    with LyingServer(lambda path, asked: pieces) as server:
        backend = RemoteBackend(section(server), template, model="m", vocabulary=VOCABULARY)

        async def ask() -> Any:
            async with backend._session() as session:
                request = backend._health_check
                url = f"{server.url}/v1"
                return await session._client.post(url, request, timeout=10.0)

        return asyncio.run(ask())


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Again", "308 Again"])
def test_redirects_are_not_followed(template: ChatTemplate, status: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        post(template, reply(b"", status, "a/b", "Location: /v1/completions"))
    assert refused.value.status == int(status[:3])


@pytest.mark.parametrize("status", ["429 Busy", "503 Busy", "400 No"])
def test_of_a_refusal_little_is_read(template: ChatTemplate, status: str) -> None:
    with pytest.raises(EndpointBusy if "Busy" in status else RequestRefused) as refused:
        post(template, unbounded(status), *[b"x" * 65536] * 5000)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "-5",
            "-0",
            "nan",
            "NaN",
            "inf",
            "-inf",
            "1e9",
            "soon",
            "9" * 5000,
            "0x10",
            "1,5",
        ),
        *("Fri, 31 Dec 9999 23:59:59 GMT", "Fri, 31 Dec 99999 23:59:59 GMT"),
        *("Mon, 01 Jan 0001 00:00:00 GMT", "Mon, 01 Jan 0001 00:00:00 +2359"),
        *("Fri, 31 Dec 9999 23:59:59 -2359", "Fri, 32 Dec 2026 25:61:61 GMT", ", , ,", "GMT"),
        *("Fri, 27 Nov 2026 05:18:16 +999999999", "\t", "5;5", "٣", "²"),
    ],
)
@pytest.mark.parametrize("date", [None, "Mon, 01 Jan 0001 00:00:00 GMT", "never", ""])
def test_any_retry_after_is_a_wait_or_none(text: str, date: str | None) -> None:
    headers = [(b"Retry-After", text.encode()), *([(b"Date", date.encode())] if date else [])]
    seconds = _retry_after(httpx.Response(429, headers=headers))
    assert seconds is None or (seconds >= 0 and not math.isnan(seconds))


def models(rows: Any) -> Callable[[str, Any], Iterable[bytes]]:
    listed = as_json({"data": rows})
    return lambda path, asked: [reply(listed if path == "/v1/models" else b"{}")]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"id": f"model-{number}"} for number in range(1_000_000)], "lists no model"),
        (
            [{"id": f"m{number}"} for number in range(2000)],
            "lists the models m0, m1, m2, m3, m4, …",
        ),
        ([{"id": "x" * 100_000}], "lists no model"),
        ([{"id": "\x1b[2J"}], "lists no model"),
        ([{"id": {"a": 1}}], "lists no model"),
        ([{"id": 5}, {"id": True}], "lists no model"),
        ("tiny", "lists no model"),
        ([[]], "lists no model"),
        (None, "lists no model"),
    ],
)
def test_lists_of_models_that_are_none(rows: Any, said: str) -> None:
    with LyingServer(models(rows)) as server, pytest.raises(EndpointError) as refused:
        asyncio.run(identify(section(server), "source"))
    assert said in str(refused.value) and len(str(refused.value)) < 400


@pytest.mark.parametrize("version", [{"a": 1}, "1" * 10_000, 5, ["1"], "1\n2", None, True])
def test_versions_that_are_none(version: Any) -> None:
    """They would be in every manifest."""
    rows = [{"id": "tiny", "owned_by": "vllm"}]
    pages = {"/v1/models": {"data": rows}, "/version": {"version": version}}
    with LyingServer(lambda path, asked: [reply(as_json(pages[path]))]) as server:
        served = asyncio.run(identify(section(server), "source"))
    assert (served.software, served.version, served.model) == ("vllm", "", "tiny")


def test_a_page_that_drips_does_not_hold_the_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.synth.generate.remote._HEALTH_CHECK_SECONDS", 0.5)
    with LyingServer(
        lambda path, asked: (piece for _ in count() for piece in (b"H", 0.1))
    ) as server:
        started = time.monotonic()
        served = asyncio.run(identify(section(server, model="m"), "source"))
        assert served.model == "m" and time.monotonic() - started < 20
