"""Servers of the target as a backend: many requests at once, over a pool of endpoints.

    what happens                             what follows
    200                                      a reply, or a counted rejection (token_ids.py)
    429, 502, 503: busy                      the same again, when the endpoint says or ever later;
                                                 nothing else for too long: the run stops
    timeout, cut connection, 5xx, no JSON    the endpoint gets a health check, a short request:
        it fails too                             unhealthy until it replies; another is asked
        it succeeds                              the prompt is tried `retries` times, then counted
        it finds it busy                         as busy
    400, 413, 422                            the same check; if it succeeds, the prompt is counted
    401, 403, 404 …                          the run stops: no prompt is at fault

The caller's thread hands out requests and takes replies; an event loop in another does the waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from queue import SimpleQueue

from pipeline.config import GeneratorSection
from pipeline.console import notice
from pipeline.decoder.request import Request
from pipeline.errors import EndpointError, EndpointsUnavailable, MissingPackage
from pipeline.synth.generate.backend import NextRequest, Reply
from pipeline.synth.generate.client import (
    EndpointBusy,
    EndpointClient,
    RequestFailed,
    RequestRefused,
    open_http,
)
from pipeline.synth.generate.endpoints import MAX_BACKOFF, Endpoint, EndpointPool
from pipeline.synth.generate.servers import ServerApi, pick_api
from pipeline.synth.generate.token_ids import TokenIdReader
from pipeline.target.template import ChatTemplate
from pipeline.telemetry import count

#: Statuses of a refusal that may be this prompt's fault.
_PROMPT_STATUSES = frozenset({400, 413, 422})
#: Rejections that no single prompt explains: the server is not what the configuration says.
_CONFIG_REJECTIONS = frozenset(
    {"remote:other_prompt", "remote:too_long", "remote:other_vocabulary"}
)
_HEALTH_CHECK_SECONDS = 60.0
_WHERE = "synth.generator.endpoints"


class RemoteBackend:
    """The servers that the section names."""

    batch_invariant = True  # nobody promises more: a server batches with whatever else it is asked

    def __init__(
        self, section: GeneratorSection, template: ChatTemplate, *, source: str, vocabulary: int
    ) -> None:
        self._section = section
        self._api = pick_api(section, template, model=source)
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
            retries, backoff = self._section.retries, self._section.backoff_seconds
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
) -> RemoteBackend:
    """The section's servers, checked once. Raises EndpointError, ConfigError or MissingPackage."""
    try:
        import httpx  # noqa: F401
    except ImportError:
        problem, fix = "needs the pip package httpx", "pip install httpx"
        raise MissingPackage(problem, where="synth.generator.backend", fix=fix) from None
    backend = RemoteBackend(section, template, source=source, vocabulary=vocabulary)
    backend.check()
    return backend


def _misconfigured(url: str, problem: str) -> EndpointError:
    return EndpointError(
        f"does not do what is asked: {problem}",
        where=f"{_WHERE} {url}",
        fix="check base URL, generator.model, generator.backend and the server's version; "
        "with prompt: text, also its tokenizer",
    )
