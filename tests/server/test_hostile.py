"""Clients that mean harm, on real sockets: what they send is refused, and others are answered."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.server.conftest import Start, slow_down

JSON = {"content-type": "application/json"}
LOCAL = b"host: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n" + LOCAL


def ask_raw(port: int, data: bytes, seconds: float = 10) -> bytes:
    """All that comes back before the server closes, or is silent after a reply."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(seconds)
        connection.sendall(data)
        reply = b""
        try:
            while piece := connection.recv(65536):
                reply += piece
                connection.settimeout(0.3)
        except (TimeoutError, ConnectionError):
            pass
        return reply


def status_of(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1]) if reply.startswith(b"HTTP/1.1 ") else 0


def get(path: str, host: str, more: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{more}Connection: close\r\n\r\n".encode()


@contextmanager
def silent(port: int, count: int, data: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections on which `data` was sent, and nothing more."""
    opened = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for each in opened:
        each.sendall(data)
    try:
        yield opened
    finally:
        for each in opened:
            each.close()


def is_closed(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize(
    "host", ["x/y", "x?", "x#", "localhost/y?", "a@localhost", "localhost\\x", "x/health?a="]
)
def test_the_key_is_asked_for_whatever_host_is_sent(start: Start, host: str) -> None:
    """Old versions of Starlette make the path of a URL in which the header Host comes first."""
    served = start(key="se-cret")
    body = b'{"prompt": "a", "max_tokens": 2}'
    head = POST.replace(b"localhost", host.encode())
    reply = ask_raw(served.port, head + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert status_of(reply) in (400, 401) and b"choices" not in reply
    assert status_of(ask_raw(served.port, get("/v1/models", host))) in (400, 401)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models", 401),
        ("/v1/%6dodels", 401),
        ("/%76%31/models", 401),
        ("/v1/models?x=/health", 401),
        ("//v1/models", 404),
        ("/v1//models", 404),
        ("/v1/models/", 401),
        ("/v1/models/tiny", 401),
        ("/health/", 404),
        ("/health/../v1/models", 404),
        ("/health%2f..%2fv1/models", 404),
        ("http://localhost/v1/models", 404),
        ("/V1/models", 404),
        ("*", 404),
    ],
)
def test_no_spelling_of_a_path_passes_by_the_key(start: Start, path: str, status: int) -> None:
    served = start(key="se-cret")
    reply = ask_raw(served.port, get(path, "evil.example"))
    assert status_of(reply) == status and b"evil.example" not in reply.lower(), reply


def test_labels_of_metrics_are_from_fixed_sets(start: Start) -> None:
    served = start()
    before = len(served.metrics())
    for number in range(60):
        for data in (
            get(f"/no/{number}", "localhost"),
            get("/health", "localhost").replace(b"GET", b"M%d" % number),
            get("/health", f"evil{number}.example"),
            get(f"/v1/models?{number}", "localhost"),
            get("/metrics", f"127.0.0.{number + 1}:{number + 1}"),
        ):
            assert ask_raw(served.port, data)
        reply = served.post(prompt="a", model=f"m{number}", user=f"u{number}")
        assert reply.status_code == 404
    assert len(served.metrics()) - before <= 2 * 8  # as many answers of a kind, each with a date


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:1234", 200),
        ("localhost.", 200),
        ("127.0.0.1", 200),
        ("127.0.0.1:99", 200),
        ("127.8.8.8", 200),
        ("[::1]:8000", 200),
        ("[::ffff:127.0.0.1]", 200),
        ("gpu7.example", 200),
        ("GPU7.example:80", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("203.0.113.9", 403),
        ("[2001:db8::1]", 403),
        ("0.0.0.0", 403),
        ("::1", 403),
        ("evil.example@localhost", 403),
        ("localhost:80@evil.example", 403),
        ("localhost:", 403),
        ("localhost/", 403),
        ("localhost, evil.example", 403),
        ("", 403),
    ],
)
def test_without_a_key_only_names_of_this_server(start: Start, host: str, status: int) -> None:
    """DNS rebinding: a web page's own name that points to this machine."""
    served = start(allowed_hosts=("gpu7.example",))
    for path in ("/health", "/metrics", "/v1/models"):
        reply = ask_raw(served.port, get(path, host))
        assert status_of(reply) == status, (path, reply)
    assert status_of(ask_raw(served.port, get("/no", host))) == (404 if status == 200 else 403)
    forwarded = "X-Forwarded-Host: localhost\r\nForwarded: host=localhost\r\n"
    assert status_of(ask_raw(served.port, get("/health", host, forwarded))) == status


def test_other_ways_to_name_a_host(start: Start) -> None:
    served = start()
    assert status_of(ask_raw(served.port, b"GET /health HTTP/1.1\r\n\r\n")) == 400
    assert status_of(ask_raw(served.port, b"GET /health HTTP/1.0\r\n\r\n")) == 403
    two = get("/health", "localhost", "Host: evil.example\r\n")
    assert status_of(ask_raw(served.port, two)) == 400
    absolute = get("http://evil.example/v1/models", "localhost")
    assert status_of(ask_raw(served.port, absolute)) == 404
    with_key = start(key="se-cret")
    assert status_of(ask_raw(with_key.port, get("/health", "evil.example"))) == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 200),
        ("https://127.0.0.1", 200),
        ("http://evil.example", 403),
        ("https://localhost.evil.example", 403),
        ("http://localhost@evil.example", 403),
        ("null", 403),
        ("file://", 403),
        ("", 403),
    ],
)
def test_web_pages_of_others_may_not_ask(start: Start, origin: str, status: int) -> None:
    served = start()
    asked = {"origin": origin, **JSON}
    body = b'{"prompt": "a", "max_tokens": 2}'
    url = f"{served.url}/v1/completions"
    assert httpx.post(url, content=body, headers=asked).status_code == status
    for kind in ("text/plain", "text/plain;application/json", "application/json, text/plain", ""):
        reply = httpx.post(url, content=body, headers={**asked, "content-type": kind})
        assert reply.status_code in (403, 415), kind
    preflight = httpx.options(url, headers={"origin": origin})
    assert preflight.status_code in (403, 405)
    assert not [name for name in preflight.headers if name.startswith("access-control")]


#: What a client sends before it falls silent.
HALVES = {
    "nothing": b"",
    "half a line": b"GET /hea",
    "half a head": b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ",
    "half a body": POST + b"content-length: 50\r\n\r\n{",
    "half a chunk": POST + b"transfer-encoding: chunked\r\n\r\n5\r\n{",
    "a request, then half of one": get("/health", "localhost").replace(
        b"Connection: close\r\n", b""
    )
    + b"GET /hea",
    "a refused body": POST.replace(b"json", b"x") + b"content-length: 50\r\n\r\n{",
}


@pytest.mark.parametrize("half", HALVES)
def test_connections_that_wait_for_their_client_make_room(start: Start, half: str) -> None:
    """More of them than there may be, and everybody else is answered at once."""
    served = start(max_connections=5)
    with silent(served.port, 12, HALVES[half]) as opened:
        time.sleep(0.3)
        for _ in range(8):
            assert httpx.get(f"{served.url}/health", timeout=10).status_code == 200
        assert served.post(prompt="a", max_tokens=2).status_code == 200
        closed = sum(is_closed(each, 0.05) for each in opened)
        assert closed >= 7
    served.wait_idle()


@pytest.mark.parametrize("half", HALVES)
def test_connections_that_wait_too_long_are_closed(start: Start, half: str) -> None:
    served = start(idle_seconds=1)
    with silent(served.port, 3, HALVES[half]) as opened:
        begun = time.monotonic()
        assert all(is_closed(each, 10) for each in opened)
        assert time.monotonic() - begun < 10
    assert not served.server.server_state.connections


@pytest.mark.parametrize(
    "half",
    [
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ",
        POST + b"content-length: 500\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\n",
        POST.replace(b"json", b"x") + b"content-length: 500\r\n\r\n",
        b"POST /no HTTP/1.1\r\ncontent-length: 500\r\n" + LOCAL + b"\r\n",
    ],
)
def test_a_client_that_drips_is_cut_off(start: Start, half: bytes) -> None:
    """A byte now and then is no progress."""
    served = start(idle_seconds=1)
    drop = b"1\r\na\r\n" if b"chunked" in half else b"a"
    with silent(served.port, 1, half) as (connection,):
        begun = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - begun < 15:
                connection.sendall(drop)
                time.sleep(0.1)
        assert time.monotonic() - begun < 10
    assert not served.server.server_state.connections


def test_a_body_that_comes_slowly_enough_is_read(start: Start) -> None:
    """A second more for each 10,000 bytes: this one takes longer than idle_seconds."""
    served = start(idle_seconds=1)
    data = json.dumps({"prompt": "a", "max_tokens": 2, "user": "x" * 20_000}).encode()
    with silent(served.port, 1, POST + b"content-length: %d\r\n\r\n" % len(data)) as (connection,):
        for at in range(0, len(data), 2500):
            connection.sendall(data[at : at + 2500])
            time.sleep(0.2)
        connection.settimeout(10)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_replies_in_the_making_are_never_cut_off(start: Start) -> None:
    """At the limit further requests get 503, and /health is answered."""
    served = start(max_connections=3)
    slow_down(served.engine, 0.03)
    body = json.dumps({"prompt": "a", "max_tokens": 100, "ignore_eos": True}).encode()
    asked = POST + b"content-length: %d\r\n\r\n" % len(body) + body
    with silent(served.port, 3, asked) as opened:
        until = time.monotonic() + 10
        while served.app.worker.open_jobs < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        with silent(served.port, 25):
            assert httpx.get(f"{served.url}/health", timeout=10).status_code == 200
            refused = served.post(prompt="a")
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "too_many_connections"
        for each in opened:
            each.settimeout(20)
            assert each.recv(100).startswith(b"HTTP/1.1 200")
    served.wait_idle()


def test_a_client_that_never_reads_its_stream_is_cut_off(start: Start) -> None:
    served = start(stall_seconds=1, max_waiting=200)
    body = json.dumps({"prompt": ["a"] * 200, "max_tokens": 200, "stream": True}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", served.port))
    connection.sendall(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
    until = time.monotonic() + 20
    while served.server.server_state.connections:
        assert time.monotonic() < until
        time.sleep(0.05)
    connection.close()
    served.wait_idle()


def _body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


MESSAGE = {"role": "user", "content": "a"}
#: Path, body, and what is said of it. All are refused, and before anything is tokenised.
LONG: dict[str, tuple[str, bytes, str]] = {
    "prompt": ("completions", _body(prompt="a " * 400_000), "characters at most"),
    "one word": ("completions", _body(prompt="a" * 900_000), "characters at most"),
    "prompts": ("completions", _body(prompt=["a " * 9000] * 40), "characters at most"),
    "many prompts": ("completions", _body(prompt=["a"] * 190_000), "prompts in one request"),
    "many ids": ("completions", _body(prompt=[[1]] * 190_000), "prompts in one request"),
    "ids": ("completions", _body(prompt=[1] * 300_000), "context holds"),
    "stop": ("completions", _body(prompt="a", stop="x" * 900_000), "stop"),
    "stops": ("completions", _body(prompt="a", stop=["x"] * 190_000), "stop"),
    "stop ids": ("completions", _body(prompt="a", stop_token_ids=[1] * 300_000), "stop_token_ids"),
    "bias": ("completions", _body(prompt="a", logit_bias={str(n): 1 for n in range(80_000)}), "bi"),
    "name": ("completions", _body(prompt="a", **{"x" * 900_000: 1}), "xxx"),
    "content": (
        "chat/completions",
        _body(messages=[MESSAGE | {"content": "a " * 400_000}]),
        "characters at most",
    ),
    "contents": (
        "chat/completions",
        _body(messages=[MESSAGE | {"content": "a " * 40}] * 200),
        "characters at most",
    ),
    "parts": (
        "chat/completions",
        _body(messages=[MESSAGE | {"content": [{"type": "text", "text": "abc"}] * 20_000}]),
        "content",
    ),
    "messages": ("chat/completions", _body(messages=[MESSAGE] * 25_000), "context holds"),
    "tools": ("chat/completions", _body(messages=[MESSAGE], tools=[{}] * 100_000), "tools"),
    "variables": (
        "chat/completions",
        _body(messages=[MESSAGE], chat_template_kwargs={str(n): 1 for n in range(80_000)}),
        "chat_template_kwargs",
    ),
    "variable": (
        "chat/completions",
        _body(messages=[MESSAGE], chat_template_kwargs={"messages": "x" * 900_000}),
        "characters at most",
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_what_is_too_long_is_refused_before_it_is_tokenised(
    start: Start, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = start()
    tokenised: list[int] = []
    encode = type(served.app._template).encode

    def counting(template: Any, text: str, **options: Any) -> list[int]:
        tokenised.append(len(text))
        return encode(template, text, **options)

    monkeypatch.setattr(type(served.app._template), "encode", counting)
    path, data, said = LONG[name]
    reply = httpx.post(f"{served.url}/v1/{path}", content=data, headers=JSON, timeout=60)
    assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text
    assert len(reply.content) < 1000 and not tokenised
    served.wait_idle()


HALF = "\\ud800"
MESSAGES = '"messages": [{"role": "user", "content": "a"}]'
#: Bodies with half a surrogate pair somewhere.
SURROGATES = {
    "prompt": ("completions", f'{{"prompt": "{HALF}"}}'),
    "prompts": ("completions", f'{{"prompt": ["a", "{HALF}"]}}'),
    "model": ("completions", f'{{"prompt": "a", "model": "{HALF}"}}'),
    "stop": ("completions", f'{{"prompt": "a", "stop": ["a", "{HALF}"]}}'),
    "user": ("completions", f'{{"prompt": "a", "user": "{HALF}"}}'),
    "key": ("completions", f'{{"prompt": "a", "{HALF}": 1}}'),
    "content": ("chat/completions", '{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    "role": ("chat/completions", '{"messages": [{"role": "\\ud800", "content": "a"}]}'),
    "low half": ("chat/completions", '{"messages": [{"role": "user", "content": "\\udc00"}]}'),
    "wrong order": (
        "chat/completions",
        '{"messages": [{"role": "user", "content": "\\udc00\\ud800"}]}',
    ),
    "part": (
        "chat/completions",
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]}',
    ),
    "name": (
        "chat/completions",
        '{"messages": [{"role": "user", "content": "a", "name": "\\ud800"}]}',
    ),
    "variable": ("chat/completions", f'{{{MESSAGES}, "chat_template_kwargs": {{"a": "{HALF}"}}}}'),
    "variable's name": (
        "chat/completions",
        f'{{{MESSAGES}, "chat_template_kwargs": {{"{HALF}": 1}}}}',
    ),
    "tool": ("chat/completions", f'{{{MESSAGES}, "tools": [{{"name": "{HALF}"}}]}}'),
}


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("stream", [False, True])
def test_half_a_surrogate_pair_is_refused(start: Start, name: str, stream: bool) -> None:
    served = start()
    path, text = SURROGATES[name]
    data = text.replace("{", '{"stream": true, ', 1) if stream else text
    reply = httpx.post(f"{served.url}/v1/{path}", content=data.encode(), headers=JSON)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json"), reply.text
    served.wait_idle()


CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
WHOLE = b'{"prompt": "a", "max_tokens": 1}'


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}", 400),
        (POST + b"content-length: -5\r\n\r\n", 400),
        (POST + b"content-length: +5\r\n\r\n", 400),
        (POST + b"content-length: 5_0\r\n\r\n", 400),
        (POST + b"content-length: " + b"9" * 15 + b"\r\n\r\n", 413),
        (POST + b"content-length: " + b"9" * 5000 + b"\r\n\r\n", 400),
        (
            POST
            + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n20\r\n"
            + WHOLE
            + b"\r\n0\r\n\r\n",
            400,
        ),
        (POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"transfer-encoding: gzip\r\n\r\n", 400),
        (CHUNKED + b"zz\r\n", 400),
        (CHUNKED + b"-5\r\nabc", 400),
        (CHUNKED + b"f" * 30 + b"\r\n", 400),
        (
            POST + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(WHOLE) + WHOLE,
            415,
        ),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 200_000, 400),
        (b"GET /" + b"a" * 200_000, 400),
        (b"\x16\x03\x01" + b"\x00" * 100 + b"\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
        (b"CONNECT localhost:1 HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
        (b"BREW /health HTTP/1.1\r\nhost: localhost\r\n\r\n", 405),
        (b"TRACE /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n", 405),
        (b"HEAD /health HTTP/1.1\r\nhost: localhost\r\n\r\n", 200),
        (b"HEAD /v1/completions HTTP/1.1\r\nhost: localhost\r\n\r\n", 405),
    ],
)
def test_requests_that_are_none(
    start: Start, data: bytes, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    served = start()
    assert status_of(ask_raw(served.port, data)) == status
    assert httpx.get(f"{served.url}/health").status_code == 200
    served.wait_idle()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("after", [b"zz\r\n", b"f" * 40 + b"\r\n", b"5;" + b"x" * 100_000])
def test_rubbish_after_a_reply_leaves_no_traceback(
    start: Start, after: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """A body that was refused before it came, and then is none."""
    served = start(max_body_bytes=100)
    with silent(served.port, 1, CHUNKED.replace(b"json", b"x")) as (connection,):
        assert connection.recv(100).startswith(b"HTTP/1.1 415")
        connection.sendall(after)
        assert is_closed(connection, 5)
    assert httpx.get(f"{served.url}/health").status_code == 200
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "fields",
    [
        '"temperature": 5e-324',
        '"temperature": 1e308',
        '"top_p": 5e-324',
        '"temperature": 1e-300, "top_p": 1e-300',
        '"top_k": 9223372036854775807',
        '"seed": 9223372036854775807',
        '"stop": "\\u0000"',
        '"stop_token_ids": [0, 0, 0]',
    ],
)
def test_extreme_numbers_are_obeyed(start: Start, fields: str) -> None:
    served = start()
    data = f'{{"prompt": "Why?", "max_tokens": 5, {fields}}}'.encode()
    reply = httpx.post(f"{served.url}/v1/completions", content=data, headers=JSON, timeout=30)
    assert reply.status_code == 200, reply.text
    served.wait_idle()


@pytest.mark.parametrize(
    "fields",
    [
        '"max_tokens": 9223372036854775807',
        '"max_tokens": 1e3',
        '"max_tokens": true',
        '"max_tokens": 1' + "0" * 5000,
        '"temperature": "1"',
        '"temperature": -0.1',
        '"temperature": Infinity',
        '"top_p": 1e999',
        '"top_p": -5e-324',
        '"top_k": 1.5',
        '"seed": 9223372036854775808',
        '"stop": {"a": 1}',
        '"stop": 5',
        '"stop_token_ids": [-1]',
        '"stop_token_ids": [9223372036854775807]',
        '"stop_token_ids": ["1"]',
        '"stream": 1',
        '"stream_options": []',
        '"model": ["tiny"]',
        '"max_tokens": 5, "max_tokens": 6',
        '"user": ' + "[" * 5000 + "]" * 5000,
        '"logit_bias": {"1": NaN}',
    ],
)
def test_wrong_values_are_refused(start: Start, fields: str) -> None:
    served = start()
    data = f'{{"prompt": "Why?", {fields}}}'.encode()
    reply = httpx.post(f"{served.url}/v1/completions", content=data, headers=JSON)
    assert reply.status_code == 400, reply.text
    served.wait_idle()


def test_many_of_them_at_once_leave_nothing_behind(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every page comes back, and an honest client among them is answered."""
    served = start(max_connections=40, idle_seconds=2, max_waiting=40)
    whole = _body(prompt="Why?", max_tokens=60, ignore_eos=True)
    kinds: list[Callable[[], bytes]] = [
        lambda: POST + b"content-length: %d\r\n\r\n" % len(whole) + whole,  # and away
        lambda: POST + b"content-length: 500\r\n\r\n{",
        lambda: CHUNKED + b"5\r\n{",
        lambda: b"",
        lambda: get("/v1/models", "evil.example"),
        lambda: b"\x00" * 500 + b"\r\n\r\n",
        lambda: POST + b"content-length: 3\r\n\r\n[[[" + b"GET / HTTP/1.1\r\n\r\n" * 20,
    ]

    async def attack(number: int) -> None:
        await asyncio.sleep(number % 50 / 50)
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(kinds[number % len(kinds)]())
            await writer.drain()
            await asyncio.sleep(0.2)
            writer.close()
        except ConnectionError:
            pass

    async def honest() -> list[int]:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=30, limits=limits) as http:
            statuses = []
            for _ in range(10):
                statuses.append((await http.get(f"{served.url}/health")).status_code)
                await asyncio.sleep(0.1)
            return statuses

    async def all_of_them() -> list[int]:
        attacks = asyncio.gather(*map(attack, range(210)))
        statuses = await honest()
        await attacks
        return statuses

    assert asyncio.run(all_of_them()) == [200] * 10
    served.wait_idle()
    assert served.post(prompt="Why?", max_tokens=2).status_code == 200
    assert "Traceback" not in capfd.readouterr().err
