"""Servers of the target as a backend: many requests at once, over a pool of endpoints.

    outcome                                  consequence
    200                                      a reply, or a counted rejection (servers.py)
    more bytes than the reply can have       as no JSON
    429, 502, 503: busy                      the same again, when the endpoint says or ever later;
                                                 no reply for an hour: the run stops
    timeout, cut connection, 5xx, no JSON    the endpoint gets a health check, a short request:
        it fails too                             unhealthy until it replies; another is used
        it succeeds                              the prompt is tried `retries` times, then counted
        it finds it busy                         as busy
    400, 413, 422                            the same check; if it succeeds, the prompt is counted
    401, 403, 404 …                          the run stops: no prompt is at fault

    healthy ──── a request fails, and a health check fails too ────▶ unhealthy
       ▲                                                                │
       └──────── a health check succeeds; tried ever less often ────────┘

A busy endpoint stays healthy: it gets no requests for a while, then half as many as before, one
more for every reply. The caller's thread hands out requests and takes replies; an event loop in
another thread does the waiting.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from pipeline.config import OWNER, GeneratorSection
from pipeline.config.credentials import key_headers, without_key
from pipeline.console import notice, readable_duration
from pipeline.decoder.request import Request
from pipeline.documents import (
    BrokenDocument,
    HttpReply,
    check_url,
    fetch_reply,
    name_in,
    parse_json,
    rows_in,
)
from pipeline.errors import EndpointError, EndpointsUnavailable, MissingPackage
from pipeline.synth.generate.backend import NextRequest, Reply
from pipeline.synth.generate.servers import ServerApi, TokenIdReader, Unreadable, pick_api
from pipeline.target.template import ChatTemplate
from pipeline.telemetry import count, observe

#: Statuses of a refusal that may be this prompt's fault.
_PROMPT_STATUSES = frozenset({400, 413, 422})
#: Rejections that no single prompt explains: the server is not what the configuration says.
_CONFIG_REJECTIONS = frozenset(
    {"remote:other_prompt", "remote:too_long", "remote:other_vocabulary"}
)
_HEALTH_CHECK_SECONDS = 60.0
_WHERE = "synth.generator.endpoints"


@dataclass(frozen=True)
class Served:
    """What servers say they are. Endpoints that say so at the same time say the same."""

    software: str  # by its own word, else the backend's name
    version: str  # "": not said
    model: str

    def __str__(self) -> str:
        version = self.version and f" {self.version}"
        return f"{self.software}{version} server of {self.model}"

    def made_with(self) -> dict[str, str]:
        """What may not change while a stage is being made: other versions give other replies."""
        known = {"software": self.software, "version": self.version, "model": self.model}
        return {f"server.{name}": value for name, value in known.items() if value}


class RemoteBackend:
    """The servers that the section names, which know the target as `model`."""

    batch_invariant = True  # nobody promises more: a server batches with whatever else it is asked

    def __init__(
        self, section: GeneratorSection, template: ChatTemplate, *, model: str, vocabulary: int
    ) -> None:
        self._section = section
        self._api = pick_api(section, template, model=model)
        self._reader = TokenIdReader(template, vocabulary=vocabulary)
        prompt_ids = tuple(template.start("Hello."))
        self._health_check = Request("health check", prompt_ids, 1, template.stop_ids)

    def check(self) -> None:
        """Send every endpoint a short request.

        Raises EndpointsUnavailable when none replies, EndpointError when one does otherwise.
        """
        problems = asyncio.run(self._check())
        for problem in problems:
            notice("synth", problem)
        if len(problems) == len(self._section.endpoints):
            problem = f"no endpoint answers: {problems[0]}"
            fix = "start the servers, or correct their addresses"
            raise EndpointsUnavailable(problem, where=_WHERE, fix=fix)

    async def _check(self) -> list[str]:
        async with self._session() as session:
            return await session.check_endpoints()

    def generate(self, next_request: NextRequest) -> Iterator[Reply]:
        """Replies as they come, in any order. Raises EndpointError when the servers are gone."""
        from anyio.from_thread import start_blocking_portal

        done: SimpleQueue[Future[Reply]] = SimpleQueue()
        in_flight: set[Future[Reply]] = set()
        with (
            start_blocking_portal() as portal,
            portal.wrap_async_context_manager(self._session()) as session,
        ):
            try:
                while True:
                    while len(in_flight) < self._section.concurrency and (
                        request := next_request()
                    ):
                        future = portal.start_task_soon(session.generate, request)
                        in_flight.add(future)
                        future.add_done_callback(done.put)
                    if not in_flight:
                        return
                    future = done.get()
                    in_flight.discard(future)
                    yield future.result()
            finally:
                for future in in_flight:
                    future.cancel()

    def _session(self) -> _Session:
        return _Session(self._section, self._api, self._reader, self._health_check)


@dataclass
class _Tried:
    """Why a request has no reply yet."""

    failures: int = 0  # on endpoints that reply to others
    lost: int = 0  # endpoints that reply to nobody since


class _Session:
    """One event loop's client and endpoint pool."""

    def __init__(
        self,
        section: GeneratorSection,
        api: ServerApi,
        reader: TokenIdReader,
        health_check: Request,
    ) -> None:
        self._section, self._api, self._reader = section, api, reader
        self._health_check = health_check
        self._urls = [url.rstrip("/") for url in section.endpoints]

    async def __aenter__(self) -> _Session:
        section = self._section
        self._stack = AsyncExitStack()
        http = await self._stack.enter_async_context(open_http(section))
        self._client = EndpointClient(http, self._api, self._reader)
        self._pool = EndpointPool(self._urls, self._is_healthy, section)
        self._stack.push_async_callback(self._pool.close)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def check_endpoints(self) -> list[str]:
        """Why endpoints do not reply now. Raises EndpointError when one does not do as asked."""
        problems = await asyncio.gather(*map(self._check_endpoint, self._urls))
        return [problem for problem in problems if problem]

    async def generate(self, request: Request) -> Reply:
        """The reply to a request, however many attempts that takes."""
        if not self._api.can_send(request):
            return Reply(request.request_id, rejected="remote:prompt_not_text")
        tried, endpoint = _Tried(), None
        while True:
            endpoint = await self._pool.pick(avoid=endpoint)
            sent = time.monotonic()
            try:
                if reply := await self._attempt(endpoint, request, tried):
                    return reply
            except EndpointBusy as busy:
                self._pool.mark_busy(endpoint, busy.retry_after, sent=sent)
            count("retries", of="endpoint")

    async def _attempt(self, endpoint: Endpoint, request: Request, tried: _Tried) -> Reply | None:
        """The reply or its rejection; None when it has to be asked for again."""
        try:
            return await self._post(endpoint, request)
        except RequestRefused as refused:
            if refused.status not in _PROMPT_STATUSES:
                raise _misconfigured(endpoint.url, str(refused)) from None
            if await self._pool.is_healthy(endpoint):
                return Reply(request.request_id, rejected=f"remote:refused_{refused.status}")
        except RequestFailed as failed:
            retries, backoff = self._section.retries, BACKOFF_SECONDS
            if await self._pool.is_healthy(endpoint):
                tried.failures += 1
                await asyncio.sleep(min(backoff * 2 ** (tried.failures - 1), MAX_BACKOFF))
            else:
                tried.lost += 1
            # One prompt may lose some endpoints, but not take down one after the other for ever.
            if tried.failures > retries or tried.lost > retries + 2 * len(self._urls):
                return Reply(request.request_id, rejected=f"remote:{failed}")
        return None

    async def _post(self, endpoint: Endpoint, request: Request) -> Reply:
        try:
            timeout = self._section.timeout_seconds
            reply = await self._client.post(endpoint.url, request, timeout=timeout)
        finally:
            self._pool.release(endpoint)
        self._pool.mark_success(endpoint)
        return reply

    async def _check_endpoint(self, url: str) -> str | None:
        """Why the endpoint does not reply, if so. Raises EndpointError when it refuses."""
        try:
            reply = await self._post_health_check(url)
        except RequestFailed as failed:
            return f"{url} is set aside for now: {failed}"
        except EndpointBusy:
            notice("synth", f"{url} is busy now (HTTP 429, 502 or 503): it is asked again")
            return None
        if reply.rejected in _CONFIG_REJECTIONS:
            problem = f"its reply to a short request cannot be used ({reply.rejected})"
            raise _misconfigured(url, problem)
        if not reply.exact and self._section.backend != "openai":
            notice("synth", f"{url} gives no token ids: its text is tokenised again and checked")
        return None

    async def _is_healthy(self, url: str) -> bool:
        """Whether a request that any healthy server replies to at once gets its reply.

        Raises EndpointBusy.
        """
        try:
            await self._post_health_check(url)
        except RequestFailed:
            return False
        return True

    async def _post_health_check(self, url: str) -> Reply:
        timeout = min(self._section.timeout_seconds, _HEALTH_CHECK_SECONDS)
        try:
            return await self._client.post(url, self._health_check, timeout=timeout)
        except RequestRefused as refused:
            raise _misconfigured(url, str(refused)) from None


def open_remote(
    section: GeneratorSection, template: ChatTemplate, *, source: str, vocabulary: int
) -> tuple[RemoteBackend, Served]:
    """The section's servers, checked once, and what they are. `source` names the target where no
    request does. Raises EndpointError, ConfigError or MissingPackage.
    """
    try:
        import httpx  # noqa: F401
    except ImportError:
        problem, fix = "needs the pip package httpx", "pip install httpx"
        raise MissingPackage(problem, where="synth.generator.backend", fix=fix) from None
    served = asyncio.run(identify(section, source))
    backend = RemoteBackend(section, template, model=served.model, vocabulary=vocabulary)
    backend.check()
    return backend, served


async def identify(section: GeneratorSection, source: str) -> Served:
    """What the endpoints that answer say they are.

    Raises EndpointError where they list no model or several and the section names none, where they
    differ, or where one refuses the key.
    """
    async with open_http(section) as http:
        urls = [url.rstrip("/") for url in section.endpoints]
        said = await asyncio.gather(*(_identify(http, section, url, source) for url in urls))
    servers = {url: each for url, each in zip(urls, said, strict=True) if each}
    if not servers:  # nobody will be asked for a reply either
        return Served(section.backend, "", section.model or source)
    (first, served), *others = servers.items()
    for url, other in others:
        if other != served:
            problem = f"{url} is a {other}, and {first} a {served}"
            fix = "serve the same model with one version, or list only servers of one"
            raise EndpointError(problem, where=_WHERE, fix=fix)
    return served


#: Names that an error lists.
_MOST_NAMES = 5
#: Bytes of a reply beside its tokens, and for each token of prompt and reply: its id, and its text
#: escaped.
_REPLY_BYTES, _TOKEN_BYTES = 64 << 10, 1 << 10

#: Where a server's software says its version. SGLang's second page is that of older versions.
_VERSION_PAGES = {"vllm": ("/version",), "sglang": ("/server_info", "/get_server_info")}


async def _identify(
    http: httpx.AsyncClient, section: GeneratorSection, url: str, source: str
) -> Served | None:
    """What one endpoint says it is; None where it does not answer."""
    import httpx

    root = url.removesuffix("/v1")
    try:
        models = rows_in(await _page(http, f"{root}/v1/models"))
        row = models[0] if models else {}
        owner = name_in(row.get("owned_by"))
        software = owner if owner in (OWNER, *_VERSION_PAGES) else section.backend
        version = name_in(row.get("version")) if software == OWNER else ""
        for page in _VERSION_PAGES.get(software, ()):
            version = version or name_in((await _page(http, root + page)).get("version"))
    except (TimeoutError, httpx.HTTPError, httpx.InvalidURL):
        return None
    model = section.model or (source if section.backend == "sglang" else None)
    return Served(software, version, model or _only_model(models, f"{root}/v1/models"))


async def _page(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """A page's JSON object, empty where there is none. Raises EndpointError for a refused key."""
    try:
        response = await fetch_reply(http, "GET", url, seconds=_HEALTH_CHECK_SECONDS)
    except BrokenDocument:
        return {}
    if response.status_code == 401:
        raise _misconfigured(url, "HTTP 401")
    try:
        body = parse_json(response.content) if response.status_code == 200 else {}
    except ValueError:
        body = {}
    return body if isinstance(body, dict) else {}


def _only_model(models: Sequence[dict[str, Any]], page: str) -> str:
    """The one model that a server lists. Raises EndpointError."""
    names = [name for row in models if (name := name_in(row.get("id")))]
    if len(names) == 1:
        return names[0]
    listed = ", ".join(names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")
    problem = f"lists the models {listed}" if names else "lists no model"
    fix = "set synth.generator.model to the name under which the servers know the target"
    raise EndpointError(problem, where=page, fix=fix)


def _misconfigured(url: str, problem: str) -> EndpointError:
    return EndpointError(
        f"does not do what is asked: {problem}",
        where=f"{_WHERE} {url}",
        fix="check base URL, generator.model, generator.backend and the server's version; "
        "with prompt: text, also its tokenizer",
    )


#: Longest wait between two attempts, and longest that a server may ask for, in seconds.
#: Seconds before the first further attempt; they double each time. A busy server's Retry-After
#: takes their place.
BACKOFF_SECONDS, MAX_BACKOFF, _MAX_RETRY_AFTER = 1.0, 60.0, 600.0
#: Seconds of nothing but 429, 502 or 503 after which the stage stops: a quota by the hour is over.
BUSY_SECONDS = 3600.0
#: Shorter waits for busy endpoints are nobody's business.
_NOTICE_SECONDS = 10.0
#: Whether an endpoint replies to a short request. Raises EndpointError when it refuses it: then the
#: configuration is at fault; EndpointBusy when it cannot be told now.
HealthCheck = Callable[[str], Awaitable[bool]]


@dataclass(eq=False)
class Endpoint:
    """A server."""

    url: str
    healthy: bool = True
    in_flight: int = 0
    limit: float = float("inf")  # most requests at once
    busy_in_a_row: int = 0
    busy_since: float = float("-inf")  # when it last said so to a request sent after the pause
    paused_until: float = float("-inf")
    last_check: float = float("-inf")  # when the last health check ended
    busy_at_check: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def slow_down(self, retry_after: float | None, *, sent: float, backoff: float) -> None:
        """It was busy for a request that was `sent` at that time.

        Requests that were under way together count once. Other processes wait too: none comes back
        at the same instant.
        """
        now, delay = time.monotonic(), 0.0
        if sent > self.busy_since:
            self.busy_since, self.busy_in_a_row = now, self.busy_in_a_row + 1
            self.limit = max(1.0, min(self.limit, self.in_flight + 1) / 2)
            delay = min(backoff * 2.0 ** min(self.busy_in_a_row - 1, 30), MAX_BACKOFF)
            delay *= random.uniform(0.5, 1)
        if retry_after is not None:
            delay = min(retry_after, _MAX_RETRY_AFTER) + random.uniform(0, backoff)
        self.paused_until = max(self.paused_until, now + delay)


class EndpointPool:
    """All endpoints of a run, used in one event loop."""

    def __init__(
        self, urls: Sequence[str], health_check: HealthCheck, section: GeneratorSection
    ) -> None:
        self._endpoints = [Endpoint(url) for url in urls]
        self._health_check, self._section = health_check, section
        self._changed = asyncio.Event()
        self._outage_start: float | None = None  # of failures since which nobody has answered
        self._busy_start: float | None = None  # of refusals since which nobody has replied
        self._is_noticed = False
        self._recoveries: set[asyncio.Task[None]] = set()
        observe("endpoints_healthy", len(urls))

    async def pick(self, *, avoid: Endpoint | None) -> Endpoint:
        """The one with the fewest requests, another than `avoid` if there is one; `release` it.

        Waits for one that may be asked. Raises EndpointsUnavailable when none answers for longer
        than the section's `outage_seconds`.
        """
        while not (ready := self._ready()):
            await self._wait()
        endpoint = min(ready, key=lambda endpoint: (endpoint is avoid, endpoint.in_flight))
        endpoint.in_flight += 1
        return endpoint

    def release(self, endpoint: Endpoint) -> None:
        """A request to it has ended."""
        endpoint.in_flight -= 1
        self._wake()

    def mark_success(self, endpoint: Endpoint) -> None:
        """It replied."""
        if self._is_noticed and self._busy_start is not None:
            waited = readable_duration(time.monotonic() - self._busy_start)
            notice("synth", f"endpoints reply again, after {waited}")
        self._outage_start = self._busy_start = None
        self._is_noticed = False
        endpoint.busy_in_a_row = 0
        endpoint.limit += 1
        self._wake()

    def mark_busy(self, endpoint: Endpoint, retry_after: float | None, *, sent: float) -> None:
        """It asked to come back later.

        Raises EndpointsUnavailable when none has replied for BUSY_SECONDS.
        """
        now, busy_seconds = time.monotonic(), BUSY_SECONDS
        self._outage_start = None
        self._busy_start = now if self._busy_start is None else self._busy_start
        end = self._busy_start + busy_seconds
        if now >= end:
            raise EndpointsUnavailable(
                f"too busy, or the quota is used up, for {busy_seconds:g} s (HTTP 429, 502 or 503)",
                where=_WHERE,
                fix="run the same command later, finished shards are kept; or lower "
                "generator.concurrency",
            )
        endpoint.slow_down(retry_after, sent=sent, backoff=BACKOFF_SECONDS)
        endpoint.paused_until = min(endpoint.paused_until, end)
        until = min((endpoint.paused_until for endpoint in self._healthy()), default=now)
        if until - self._busy_start >= _NOTICE_SECONDS and not self._is_noticed:
            self._is_noticed = True
            most = readable_duration(busy_seconds)
            busy = "all endpoints are busy, or the quota is used up (HTTP 429, 502 or 503)"
            notice("synth", f"{busy}: waiting for them, {most} at most")

    async def is_healthy(self, endpoint: Endpoint) -> bool:
        """Whether an endpoint on which a request has just failed passes a health check.

        Raises EndpointBusy when it is too busy to tell.
        """
        failed = time.monotonic()
        async with endpoint.lock:
            # Requests that fail together check once.
            if endpoint.healthy and endpoint.last_check < failed:
                endpoint.busy_at_check = False
                try:
                    endpoint.healthy = await self._health_check(endpoint.url)
                except EndpointBusy as busy:
                    endpoint.busy_at_check = True
                    self.mark_busy(endpoint, busy.retry_after, sent=failed)
                endpoint.last_check = time.monotonic()
                if not endpoint.healthy:
                    self._start_recovery(endpoint)
                elif not endpoint.busy_at_check:
                    self.mark_success(endpoint)
                observe("endpoints_healthy", len(self._healthy()))
            if endpoint.busy_at_check:
                raise EndpointBusy(None)
        return endpoint.healthy

    async def close(self) -> None:
        """Stop checking unhealthy endpoints."""
        for task in self._recoveries:
            task.cancel()
        await asyncio.gather(*self._recoveries, return_exceptions=True)

    def _start_recovery(self, endpoint: Endpoint) -> None:
        task = asyncio.create_task(self._recover(endpoint))
        self._recoveries.add(task)
        task.add_done_callback(self._recoveries.discard)

    async def _recover(self, endpoint: Endpoint) -> None:
        """Check an unhealthy endpoint until it is healthy again."""
        delay = BACKOFF_SECONDS
        while not endpoint.healthy:
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_BACKOFF)
            try:
                endpoint.healthy = await self._health_check(endpoint.url)
            except EndpointBusy:
                endpoint.healthy = True  # the next request will be told for how long
            except EndpointError:
                continue  # a server that starts may refuse what it takes later
        self._outage_start = None
        observe("endpoints_healthy", len(self._healthy()))
        self._wake()

    async def _wait(self) -> None:
        """Until another endpoint may be ready."""
        now = time.monotonic()
        if healthy := self._healthy():
            pauses = [endpoint.paused_until for endpoint in healthy if endpoint.paused_until > now]
            until = min(pauses, default=now + MAX_BACKOFF)
        else:
            until = self._outage_end(now)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(until - now, 0) + 0.01):
                await self._changed.wait()

    def _outage_end(self, now: float) -> float:
        """When nobody is waited for any more. Raises EndpointsUnavailable behind it."""
        self._outage_start = now if self._outage_start is None else self._outage_start
        outage = now - self._outage_start
        if outage > self._section.outage_seconds:
            raise EndpointsUnavailable(
                f"none of {len(self._endpoints)} endpoints has answered for {outage:.1f} s",
                where=_WHERE,
                fix="start the servers again and run the same command: finished shards are kept",
            )
        return self._outage_start + self._section.outage_seconds

    def _wake(self) -> None:
        """Let all who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _ready(self) -> list[Endpoint]:
        now = time.monotonic()
        return [
            endpoint
            for endpoint in self._healthy()
            if endpoint.paused_until <= now and endpoint.in_flight < endpoint.limit
        ]

    def _healthy(self) -> list[Endpoint]:
        return [endpoint for endpoint in self._endpoints if endpoint.healthy]


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
    """The connections of one event loop. Raises ConfigError when the section's key is not set, or
    an endpoint is no address."""
    import httpx

    for url in section.endpoints:
        check_url(url, "synth.generator.endpoints")
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
            refusal = without_key(response.text, self._http.headers)
            raise RequestRefused(response.status_code, refusal)
        try:
            return self._reader.reply(request, self._api.read(parse_json(response.content)))
        except (ValueError, Unreadable):  # truncated JSON, or JSON of something else
            raise RequestFailed("unreadable") from None

    async def _post(self, url: str, request: Request, timeout: float) -> HttpReply:
        import httpx

        payload = self._api.payload(request)
        try:
            path, tokens = url + self._api.path, len(request.prompt_ids) + request.max_new_tokens
            most = _REPLY_BYTES + _TOKEN_BYTES * tokens
            return await fetch_reply(
                self._http, "POST", path, seconds=timeout, most=most, json=payload
            )
        except BrokenDocument:
            raise RequestFailed("unreadable") from None
        except (TimeoutError, httpx.TimeoutException):
            raise RequestFailed("timeout") from None
        except httpx.ConnectError:
            raise RequestFailed("unreachable") from None
        except (httpx.HTTPError, httpx.InvalidURL):
            raise RequestFailed("disconnected") from None


def _retry_after(response: HttpReply | httpx.Response) -> float | None:
    """Seconds from now, by the server's own clock where it gives a date."""
    text, sent = response.headers.get("Retry-After", ""), response.headers.get("Date")
    try:
        if text.strip().isdecimal():
            return float(text)
        now = parsedate_to_datetime(sent) if sent else datetime.now(UTC)
        return max(parsedate_to_datetime(text).timestamp() - now.timestamp(), 0.0)
    except (ValueError, OverflowError):
        return None
