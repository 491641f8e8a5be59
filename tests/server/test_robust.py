"""Clients that go away, read slowly or come in crowds; an engine that fails; a server that ends."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.server.start import _handling_signals
from tests.server.conftest import PROMPTS, Running, Start, drafting_engine, slow_down

LONG: dict[str, Any] = {"prompt": "Why?", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


def wait_for(condition: Any, seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def raw_request(port: int, body: dict[str, Any]) -> socket.socket:
    """A connection on which a completion was asked for, and nothing was read."""
    data = json.dumps(body).encode()
    head = f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{head}".encode() + data
    )
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_leaves_its_pages_at_once(start: Start, stream: bool) -> None:
    served = start()
    slow_down(served.engine, 0.05)
    connections = [raw_request(served.port, LONG | {"stream": stream}) for _ in range(6)]
    wait_for(lambda: served.engine.running == 4 and served.app.worker.open_jobs == 6)
    for connection in connections:
        if stream and connection is connections[0]:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.close()
    served.wait_idle(3)  # two seconds of work would be left
    counted = served.metrics()
    assert counted['vllm:request_success_total{finished_reason="abort"}'] == 6
    assert counted["vllm:generation_tokens_total"] < 6 * 50


def test_a_slow_reader_delays_nobody(start: Start) -> None:
    served = start(engine=None)
    lazy = raw_request(served.port, LONG | {"stream": True})
    wait_for(lambda: served.app.worker.open_jobs == 1)
    assert served.post(prompt="Why?", temperature=0).status_code == 200
    served.wait_idle()  # its reply is made, though it has read nothing
    data = b""
    while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        data += lazy.recv(65536)
    lazy.close()
    whole = served.post(**LONG).json()["choices"][0]["text"]
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == whole


def _ask(app: Any, body: dict[str, Any], send: Any) -> Any:
    """The application's answer to a connection that is ours, without a socket."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("x", 1),
        "client": ("x", 1),
    }
    sent = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        if sent:
            return sent.pop()
        await asyncio.sleep(60)
        raise AssertionError

    return app.routes()(scope, receive, send)


def test_what_waits_for_a_slow_reader_is_one_piece(start: Start) -> None:
    served, bodies = start(), list[bytes]()

    async def slow_send(message: MutableMapping[str, Any]) -> None:
        bodies.append(message.get("body", b""))
        await asyncio.sleep(0.3)

    whole = served.post(**LONG).json()["choices"][0]["text"]
    asyncio.run(_ask(served.app, LONG | {"stream": True}, slow_send))
    events = [json.loads(each[6:]) for each in bodies if each.startswith(b"data: {")]
    assert "".join(each["choices"][0]["text"] for each in events) == whole
    assert len(events) < 8, "pieces are joined while the reader is busy"


def test_a_reader_that_has_stopped_is_cut_off(start: Start) -> None:
    served = start(stall_seconds=0.3)
    slow_down(served.engine, 0.02)

    async def stuck(message: MutableMapping[str, Any]) -> None:
        if message.get("body"):
            await asyncio.sleep(60)

    begun = time.monotonic()
    asyncio.run(_ask(served.app, LONG | {"stream": True}, stuck))
    assert 0.3 <= time.monotonic() - begun < 30, "not when the reader has slept"
    served.wait_idle(1)


def test_a_body_that_does_not_arrive_is_given_up(start: Start) -> None:
    served = start(stall_seconds=0.3)
    connection = socket.create_connection(("127.0.0.1", served.port))
    head = "content-type: application/json\r\ncontent-length: 50\r\n\r\n{"
    connection.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{head}".encode())
    connection.settimeout(10)
    assert connection.recv(100).startswith(b"HTTP/1.1 408")
    connection.close()


def test_an_engine_that_fails_ends_every_request(start: Start) -> None:
    served = start()
    slow_down(served.engine, 0.02)
    replies: list[httpx.Response] = []

    def ask(stream: bool) -> None:
        replies.append(served.post(**LONG, stream=stream))

    clients = [threading.Thread(target=ask, args=(number % 2 == 0,)) for number in range(6)]
    for client in clients:
        client.start()
    wait_for(lambda: served.app.worker.open_jobs == 6 and served.engine.running == 4)

    def broken() -> Any:
        raise RuntimeError("the device is gone")

    served.engine.step = broken  # type: ignore[method-assign]
    for client in clients:
        client.join(10)
        assert not client.is_alive()
    assert all("the engine has failed" in reply.text for reply in replies)
    assert sorted(reply.status_code for reply in replies) == [200] * 3 + [500] * 3
    assert all(r.text.endswith("data: [DONE]\n\n") for r in replies if r.status_code == 200)
    health = httpx.get(f"{served.url}/health")
    assert health.status_code == 503 and "the device is gone" in health.text
    assert served.post(prompt="a").status_code == 503
    served.wait_idle()


def test_a_request_whose_logits_are_nan_fails_alone(start: Start, model: DecoderModel) -> None:
    broken = model.embedding.clone()
    broken[50] = float("nan")
    served = start(Engine(model, slots=2))
    before, model.embedding = model.embedding, broken
    try:
        reply = served.post(prompt=[50, 3], max_tokens=5)
    finally:
        model.embedding = before
    assert reply.status_code == 500 and "NaN" in reply.json()["error"]["message"]
    assert served.post(prompt=[3], max_tokens=5).status_code == 200


def test_rounds_run_on_the_thread_that_serves(start: Start) -> None:
    """Which has loaded the model: a second team of OpenMP threads would slow both down."""
    served, threads = start(), set[int | None]()
    step = served.engine.step

    def noting() -> Any:
        threads.add(threading.get_ident())
        return step()

    served.engine.step = noting  # type: ignore[method-assign]
    assert served.post(prompt="Why?", max_tokens=8).status_code == 200
    assert threads == {served.thread.ident}


def test_signals_are_ours_only_while_it_serves() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with _handling_signals(lambda number, frame: None):
        assert all(signal.getsignal(number) is not own for number, own in before.items())
    assert before == {number: signal.getsignal(number) for number in before}


def test_while_it_ends_running_requests_go_on_and_new_ones_are_refused(start: Start) -> None:
    served = start()
    slow_down(served.engine, 0.02)
    replies: list[httpx.Response] = []
    client = threading.Thread(target=lambda: replies.append(served.post(**LONG)))
    client.start()
    wait_for(lambda: served.engine.running == 1)
    served.app.worker.close()
    refused = served.post(prompt="a")
    assert refused.status_code == 503 and "shutting down" in refused.text
    assert httpx.get(f"{served.url}/health").status_code == 503
    client.join(20)
    assert replies[0].json()["usage"]["completion_tokens"] == 200
    served.wait_idle()


CLIENTS = 250


async def _crowd(served: Running) -> Counter[str]:
    """Clients of every kind, all at once."""
    draw, seen = random.Random(5), Counter[str]()
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=f"{served.url}/v1", limits=limits, timeout=60) as http:

        async def ask(number: int) -> None:
            kind = number % 5
            body: dict[str, Any] = {"prompt": PROMPTS[number % 3], "max_tokens": 4 + number % 20}
            await asyncio.sleep(draw.random() * 3)
            headers = {"content-type": "application/json"}
            if kind == 0:
                reply = await http.post("/completions", content=b'{"prompt": ', headers=headers)
            elif kind == 1:
                big = json.dumps(body | {"user": "x" * 30_000})
                reply = await http.post("/completions", content=big, headers=headers)
            elif kind == 2:
                body |= {"max_tokens": 200, "stream": True, "ignore_eos": True}
                async with http.stream("POST", "/completions", json=body) as reply:
                    if reply.status_code == 200:
                        await anext(reply.aiter_raw())  # and away
                    else:
                        await reply.aread()
            else:
                while True:
                    reply = await http.post("/completions", json=body | {"stream": kind == 3})
                    if reply.status_code != 429:
                        break
                    seen["429"] += 1
                    await asyncio.sleep(0.2 + draw.random())
                if kind == 4:
                    seen["tokens"] += reply.json()["usage"]["completion_tokens"]
                else:
                    assert reply.text.endswith("data: [DONE]\n\n")
                    seen["streamed"] += 1
            seen[str(reply.status_code)] += 1

        await asyncio.gather(*map(ask, range(CLIENTS)))
    return seen


def test_a_crowd_leaves_nothing_behind(start: Start) -> None:
    served = start(max_waiting=12, max_body_bytes=20_000)
    seen = asyncio.run(_crowd(served))
    served.wait_idle()
    share = CLIENTS // 5
    assert (seen["400"], seen["413"], seen["streamed"]) == (share, share, share)
    counted = served.metrics()
    answers = {
        status: counted.get(
            f'http_requests_total{{handler="/v1/completions",method="POST",status="{status}"}}', 0
        )
        for status in ("200", "400", "413", "429")
    }
    assert answers == {status: seen[status] for status in answers}
    ended = {
        reason: counted.get(f'vllm:request_success_total{{finished_reason="{reason}"}}', 0)
        for reason in ("stop", "length", "abort", "error")
    }
    assert sum(ended.values()) == seen["200"]
    assert ended["error"] == 0 and ended["stop"] + ended["length"] >= 2 * share
    assert counted["vllm:num_requests_running"] == counted["vllm:num_requests_waiting"] == 0
    assert threading.active_count() < 60
    assert served.post(prompt="Why?").status_code == 200


@contextmanager
def command_serving(target: Path, folder: Path, **section: Any) -> Iterator[tuple[Any, str]]:
    """`eagle3 serve` as a process, and its URL, once it answers."""
    tree: dict[str, Any] = {
        "run": {"uri": str(folder / "run"), "threads": 1},
        "target": {"source": str(target), "dtype": "float32", "device": "cpu"},
        "eval": {"drafter": {"name": "ngram"}, "tree": {"top_k": 1, "steps": 3, "nodes": 4}},
        "serve": {"model": "tiny", "slots": 2, **section},
    }
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "pipeline.cli", "serve", "-c", str(config), "--port", "0"]
    environment = os.environ | {"EAGLE3_LOG": "json", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        listening = next(line for line in process.stdout if "listening" in line)
        url = f"http://127.0.0.1:{json.loads(listening)['port']}"
        until = time.monotonic() + 20
        while True:
            try:
                assert httpx.get(f"{url}/health").status_code == 200
                break
            except httpx.ConnectError:
                assert time.monotonic() < until
                time.sleep(0.02)
        yield process, url
    finally:
        process.kill()
        process.communicate()


def test_the_command_serves_and_ends_by_sigterm(tiny_target: Path, tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": "Why?", "max_tokens": 300, "ignore_eos": True}
    with command_serving(tiny_target, tmp_path, grace_seconds=20) as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as reply:
            parts = reply.iter_text()
            text = next(parts)
            process.send_signal(signal.SIGTERM)
            text += "".join(parts)
        assert text.endswith("data: [DONE]\n\n") and '"finish_reason": "length"' in text
        assert process.wait(20) == 0
        assert "Traceback" not in process.stderr.read()


def test_a_second_signal_does_not_wait_for_replies(tiny_target: Path, tmp_path: Path) -> None:
    """A thousand replies of 400 tokens take minutes, and there are ten of grace."""
    body = {"model": "tiny", "prompt": ["Why?"] * 1000, "max_tokens": 400, "ignore_eos": True}
    limits = {"grace_seconds": 600, "max_waiting": 1000}
    with (
        command_serving(tiny_target, tmp_path, **limits) as (process, url),
        httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as reply,
    ):
        parts = reply.iter_text()  # which closes the connection when it is dropped
        assert '"finish_reason": null' in next(parts)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["serve.host=0.0.0.0"], "no key is asked for"),
        (["serve.api_key_env=NO_SUCH_KEY"], "NO_SUCH_KEY is not set"),
        (["serve.port=1", "serve.host=203.0.113.9", "serve.allow_anonymous=true"], "cannot listen"),
        (["eval.tree=auto"], "has not finished in this run"),
        (["serve.max_length=999999"], "were made for"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(
    tiny_target: Path,
    tmp_path: Path,
    settings: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from pipeline.cli import main

    config = tmp_path / "run.yaml"
    config.write_text(
        f"target: {{source: {tiny_target}, device: cpu, dtype: float32}}\n"
        "serve: {port: 0}\neval: {drafter: {name: ngram}}\n"
    )
    assert main(["serve", "-c", str(config), *settings]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("error: ") and said in line and "(fix: " in line


def test_an_engine_of_several_processes_is_stepped_while_nobody_asks(
    start: Start, model: DecoderModel
) -> None:
    """Silence would be a failure to the others; a usual engine is left alone."""
    steps = Counter[float | None]()
    for most in (None, 0.02):
        engine = drafting_engine(model)
        engine.most_idle_seconds, step = most, engine.step

        def counted(step: Any = step, most: float | None = most) -> Any:
            steps[most] += 1
            return step()

        engine.step = counted  # type: ignore[method-assign]
        start(engine)
    wait_for(lambda: steps[0.02] > 2)
    assert steps[None] == 0
