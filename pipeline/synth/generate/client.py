"""One HTTP request to one endpoint: a reply, or one of three ways to fail.

EndpointBusy     429, 502, 503: come back later
RequestRefused   other 3xx and 4xx: the endpoint understood and said no
RequestFailed    timeout, cut connection, other 5xx, truncated or unexpected JSON
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from pipeline.config import GeneratorSection
from pipeline.config.credentials import key_headers
from pipeline.decoder.request import Request
from pipeline.synth.generate.backend import Reply
from pipeline.synth.generate.servers import ServerApi, Unreadable
from pipeline.synth.generate.token_ids import TokenIdReader

if TYPE_CHECKING:
    import httpx

_BUSY = frozenset({429, 502, 503})
_CONNECT_SECONDS = 10.0


class RequestFailed(Exception):
    """A request that failed, and why; perhaps through the prompt, perhaps through the endpoint."""


class EndpointBusy(Exception):
    """The endpoint asks to come back later, perhaps after so many seconds."""

    def __init__(self, retry_after: float | None) -> None:
        self.retry_after = retry_after
        super().__init__("busy")


class RequestRefused(Exception):
    """The endpoint understood and said no."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(f"HTTP {status}: {' '.join(text.split())[:200]}")


def open_http(section: GeneratorSection) -> httpx.AsyncClient:
    """The connections of one event loop. Raises ConfigError when the section's key is not set."""
    import httpx

    return httpx.AsyncClient(
        headers=key_headers(section.api_key_env, where="synth.generator.api_key_env"),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=section.concurrency),
        timeout=httpx.Timeout(section.timeout_seconds, connect=_CONNECT_SECONDS),
    )


class EndpointClient:
    """What is sent to any endpoint, and how its reply is read."""

    def __init__(self, http: httpx.AsyncClient, api: ServerApi, reader: TokenIdReader) -> None:
        self._http, self._api, self._reader = http, api, reader

    async def post(self, url: str, request: Request, *, timeout: float) -> Reply:
        """One HTTP request. Raises EndpointBusy, RequestRefused or RequestFailed."""
        response = await self._post(url, request, timeout)
        if response.status_code in _BUSY:
            raise EndpointBusy(_retry_after(response))
        if response.status_code >= 500:
            raise RequestFailed(f"error_{response.status_code}")
        if response.status_code >= 300:
            raise RequestRefused(response.status_code, self._without_key(response.text))
        try:
            return self._reader.reply(request, self._api.read(response.json()))
        except (ValueError, Unreadable):  # truncated JSON, or JSON of something else
            raise RequestFailed("unreadable") from None

    def _without_key(self, text: str) -> str:
        """A refusal may quote what it refuses."""
        key = self._http.headers.get("Authorization", "").removeprefix("Bearer ")
        return text.replace(key, "…") if key else text

    async def _post(self, url: str, request: Request, timeout: float) -> httpx.Response:
        import httpx

        payload = self._api.payload(request)
        try:
            # httpx limits the wait for each piece; a server that drips bytes needs one in all.
            async with asyncio.timeout(timeout):
                return await self._http.post(url + self._api.path, json=payload)
        except (TimeoutError, httpx.TimeoutException):
            raise RequestFailed("timeout") from None
        except httpx.ConnectError:
            raise RequestFailed("unreachable") from None
        except (httpx.HTTPError, httpx.InvalidURL):
            raise RequestFailed("disconnected") from None


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds from now, by the server's own clock where it gives a date."""
    text, sent = response.headers.get("Retry-After", ""), response.headers.get("Date")
    try:
        if text.strip().isdecimal():
            return float(text)
        now = parsedate_to_datetime(sent) if sent else datetime.now(UTC)
        return max(parsedate_to_datetime(text).timestamp() - now.timestamp(), 0.0)
    except (ValueError, OverflowError):
        return None
