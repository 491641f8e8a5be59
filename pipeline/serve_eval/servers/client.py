"""HTTP to one server: pages, streams of server-sent events, and why an attempt failed.

429, 503                 retried after Retry-After, until the request's time is up
other statuses           failed, named after the status
an error in the stream   failed: stream_error
more than was asked for  failed: too_long
a stream without its end failed: truncated
nothing listens          ServerGone
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from pipeline.config import LiveServerSection
from pipeline.config.credentials import key_headers
from pipeline.documents import (
    LARGEST_REFUSAL,
    UNCOMPRESSED,
    BrokenDocument,
    HttpReply,
    check_url,
    fetch_reply,
    parse_json,
    read_content,
    read_lines,
)
from pipeline.errors import ConfigError, EndpointError, EndpointsUnavailable, MissingPackage

if TYPE_CHECKING:
    import httpx

_BUSY = frozenset({429, 503})
_CONNECT_SECONDS = 10.0
_LONGEST_WAIT = 10.0
#: Bytes of an event beside its tokens; of a token, with its id and its text escaped; of one that
#: an earlier event had.
_EVENT_BYTES, _TOKEN_BYTES, _REPEATED_BYTES = 64 << 10, 1 << 10, 32
#: Events beside those of tokens.
_MOST_OTHERS = 64


class AttemptFailed(Exception):
    """A request that failed; its text is a reason that can be counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.detail = detail


class ServerGone(Exception):
    """Nothing listens there."""


class LiveClient:
    """Requests to one server, and a count of those that failed."""

    def __init__(self, http: httpx.AsyncClient, section: LiveServerSection) -> None:
        self._http, self._timeout = http, section.timeout_seconds
        self.failures: Counter[str] = Counter()

    async def page(self, path: str) -> HttpReply | None:
        """A page; None where the server has none. Raises ServerGone."""
        import httpx

        try:
            reply = await fetch_reply(self._http, "GET", path, seconds=min(self._timeout, 30.0))
        except (TimeoutError, httpx.TransportError):
            raise ServerGone from None
        except BrokenDocument:
            return None
        if reply.status_code in (401, 403):
            raise _refused(str(self._http.base_url), reply.status_code)
        return reply if reply.status_code == 200 else None

    async def json_page(self, path: str) -> Any:
        """Its JSON; None where there is none."""
        reply = await self.page(path)
        try:
            return None if reply is None else parse_json(reply.content)
        except ValueError:
            return None

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON of a whole reply; None where the server does not give one. Raises ServerGone."""
        import httpx

        try:
            reply = await fetch_reply(self._http, "POST", path, seconds=self._timeout, json=body)
            return parse_json(reply.content) if reply.status_code == 200 else None
        except httpx.ConnectError:
            raise ServerGone from None
        except (TimeoutError, httpx.HTTPError, ValueError):
            return None

    async def events(
        self, path: str, body: dict[str, Any], headers: dict[str, str], *, prompt: int, new: int
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed reply of `new` tokens to a prompt of so many, in time.

        Raises AttemptFailed, ServerGone.
        """
        import httpx

        until = asyncio.get_running_loop().time() + self._timeout
        try:
            async with asyncio.timeout_at(until):
                async with self._opened(path, body, headers) as reply:
                    async for event in _read_events(reply, prompt, new):
                        yield event
        except BrokenDocument:
            raise AttemptFailed("too_long") from None
        except (TimeoutError, httpx.TimeoutException):
            raise AttemptFailed("timeout") from None
        except httpx.ConnectError:
            raise ServerGone from None
        except httpx.HTTPError:
            raise AttemptFailed("disconnected") from None

    @asynccontextmanager
    async def _opened(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> AsyncIterator[httpx.Response]:
        """A reply with status 200; a busy server is asked again."""
        while True:
            sent = {**UNCOMPRESSED, **headers}
            async with self._http.stream("POST", path, json=body, headers=sent) as reply:
                status = reply.status_code
                if status == 200:
                    yield reply
                    return
                refusal = await read_content(reply, LARGEST_REFUSAL)
                detail = " ".join(refusal.decode(errors="replace").split())[:200]
            if status in (401, 403):
                raise _refused(str(self._http.base_url), status)
            if status not in _BUSY:
                raise AttemptFailed(f"http_{status}", detail)
            self.failures[f"retried_{status}"] += 1
            await asyncio.sleep(_wait_seconds(reply))


async def _read_events(
    reply: httpx.Response, prompt: int, new: int
) -> AsyncIterator[dict[str, Any]]:
    """Raises AttemptFailed for a stream that reports an error, is not JSON, or lacks its end;
    BrokenDocument for one that is longer than such a reply can be.

    What follows the end is read too: the connection can then be used again.
    """
    most_line = _EVENT_BYTES + _TOKEN_BYTES * (prompt + new)
    # Some versions of SGLang repeat in each event all that came before.
    repeated = new * new // 2 * _REPEATED_BYTES
    most = 2 * most_line + _EVENT_BYTES // 16 * new + repeated
    ended, left = False, _MOST_OTHERS + 2 * new
    async for line in read_lines(reply, most=most, most_line=most_line):
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            ended = True
        if not data or ended:
            continue
        if (left := left - 1) < 0:
            raise AttemptFailed("too_long")
        try:
            event = parse_json(data)
        except ValueError:
            raise AttemptFailed("unreadable") from None
        if not isinstance(event, dict):
            raise AttemptFailed("unreadable")
        if event.get("error"):
            raise AttemptFailed("stream_error", str(event["error"])[:200])
        ended = event.get("stop") is True  # llama-server ends with this event
        yield event
    if not ended:
        raise AttemptFailed("truncated")


@asynccontextmanager
async def open_client(section: LiveServerSection) -> AsyncIterator[LiveClient]:
    """A client for one event loop. Raises ConfigError, MissingPackage."""
    try:
        import httpx
    except ImportError:
        problem, fix = "needs the pip package httpx", "pip install httpx"
        raise MissingPackage(problem, where="eval.server", fix=fix) from None
    if section.url is None:
        fix = "pass --server URL"
        raise ConfigError("no server is named", where="eval.server.url", fix=fix)
    check_url(section.url, "eval.server.url")
    async with httpx.AsyncClient(
        base_url=section.url.rstrip("/").removesuffix("/v1"),
        headers=key_headers(section.api_key_env, where="eval.server.api_key_env"),
        limits=httpx.Limits(max_connections=None),
        timeout=httpx.Timeout(section.timeout_seconds, connect=_CONNECT_SECONDS),
        trust_env=False,  # a proxy would be measured too
    ) as http:
        yield LiveClient(http, section)


def gone(url: str) -> EndpointsUnavailable:
    """The error of an address where nothing listens."""
    fix = "start the server, or correct the address"
    return EndpointsUnavailable("nothing answers there", where=url, fix=fix)


def _refused(url: str, status: int) -> EndpointError:
    fix = "name the variable that holds its key in eval.server.api_key_env"
    return EndpointError(f"the server refuses the key (HTTP {status})", where=url, fix=fix)


def _wait_seconds(reply: httpx.Response) -> float:
    """As Retry-After says, in seconds or as a date; a second without."""
    text, seconds = reply.headers.get("Retry-After", "").strip(), 1.0
    try:
        if text.isdecimal():
            seconds = float(text)
        elif text:
            seconds = parsedate_to_datetime(text).timestamp() - datetime.now(UTC).timestamp()
    except (ValueError, OverflowError):
        pass
    return min(max(seconds, 0.05), _LONGEST_WAIT)
