"""Servers of the target as a generator: many requests at once, over several endpoints.

    what happens                                  what follows
    the response is read                          a reply, or a counted rejection (exact.py)
    429, 502, 503: busy                           the same again after a while
    timeout, cut connection, 5xx, no JSON         the endpoint is tried with a short request of ours:
        it fails too                                  set aside until it answers again; the prompt goes elsewhere
        it succeeds                                   the prompt is tried again, `retries` times, then counted
    400, 413, 422                                 the same question; if the short request succeeds, counted
    401, 403, 404 …                               the run stops: no prompt is at fault

The caller's thread hands out requests and takes replies; an event loop in another does the waiting.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from pipeline.config import GeneratorSection
from pipeline.console import notice
from pipeline.decoder.request import Request
from pipeline.errors import ConfigError, EndpointError, MissingPackage
from pipeline.synth.generate.conversations import Reply, Take
from pipeline.synth.generate.endpoints import Endpoint, Fleet
from pipeline.synth.generate.servers import Server, Unreadable, pick_server
from pipeline.synth.generate.token_ids import Reader
from pipeline.target.template import ChatTemplate

if TYPE_CHECKING:
    import httpx

_BUSY = frozenset({429, 502, 503})
_THIS_PROMPT = frozenset({400, 413, 422})
#: Rejections that no single prompt explains.
_MISUNDERSTANDINGS = frozenset(
    {"remote:other_prompt", "remote:too_long", "remote:other_vocabulary"}
)
_CONNECT_SECONDS, _PROBE_SECONDS, _LONGEST_DELAY = 10.0, 60.0, 60.0
_WHERE = "synth.generator.endpoints"


class _Failed(Exception):
    """A request that failed, and why; perhaps through the prompt, perhaps through the endpoint."""


class _Busy(Exception):
    """The endpoint asks to come back later."""


class _Refused(Exception):
    """The endpoint understood and said no."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(f"HTTP {status}: {' '.join(text.split())[:200]}")


class RemoteAnswer:
    """The servers that the section names."""

    ignores_neighbours = (
        True  # nobody promises more: a server batches with whatever else it is asked
    )

    def __init__(
        self, section: GeneratorSection, template: ChatTemplate, *, source: str, vocabulary: int
    ) -> None:
        self._section, self._template = section, template
        self._server: Server = pick_server(section, template, model=source)
        self._reader = Reader(template, vocabulary=vocabulary)
        self._headers = _headers(section)
        self._urls = [url.rstrip("/") for url in section.endpoints]

    def check(self) -> None:
        """Try every endpoint with a short request. Raises EndpointError when none is there, or one does not do as asked."""
        notes = asyncio.run(self._check())
        for note in notes:
            notice("synth", note)
        if len(notes) == len(self._urls):
            raise EndpointError(
                f"no endpoint answers: {notes[0]}",
                where=_WHERE,
                fix="start the servers, or correct their addresses",
            )

    def __call__(self, take: Take) -> Iterator[Reply]:
        """Replies as they come, in any order. Raises EndpointError when the servers are gone."""
        from anyio.from_thread import start_blocking_portal

        done: SimpleQueue[Future[Reply]] = SimpleQueue()
        under_way: set[Future[Reply]] = set()
        with (
            start_blocking_portal() as portal,
            portal.wrap_async_context_manager(_Session(self)) as session,
        ):
            try:
                while True:
                    while (
                        len(under_way) < self._section.concurrency
                        and (request := take()) is not None
                    ):
                        future = portal.start_task_soon(session.ask, request)
                        under_way.add(future)
                        future.add_done_callback(done.put)
                    if not under_way:
                        return
                    future = done.get()
                    under_way.discard(future)
                    yield future.result()
            finally:
                for future in under_way:
                    future.cancel()

    async def _check(self) -> list[str]:
        """What is wrong with the endpoints that do not answer now."""
        async with _Session(self) as session:
            return [
                note
                for note in await asyncio.gather(
                    *(session.first_contact(url) for url in self._urls)
                )
                if note
            ]


class _Session:
    """One event loop's client and fleet."""

    def __init__(self, owner: RemoteAnswer) -> None:
        self._section, self._server, self._reader = owner._section, owner._server, owner._reader
        self._headers, self._urls = owner._headers, owner._urls
        self._canary = Request(
            "canary", tuple(owner._template.start("Hello.")), 1, owner._template.stop_ids
        )

    async def __aenter__(self) -> _Session:
        import httpx

        section = self._section
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=section.concurrency)
        timeout = httpx.Timeout(section.timeout_seconds, connect=_CONNECT_SECONDS)
        self._stack = AsyncExitStack()
        self._client: httpx.AsyncClient = await self._stack.enter_async_context(
            httpx.AsyncClient(headers=self._headers, limits=limits, timeout=timeout)
        )
        self._fleet = Fleet(
            self._urls,
            self._probe,
            backoff=section.backoff_seconds,
            patience=section.patience_seconds,
        )
        self._stack.push_async_callback(self._fleet.close)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def ask(self, request: Request) -> Reply:
        """The reply to a request, however many attempts that takes."""
        if not self._server.can_send(request):
            return Reply(request.request_id, rejected="remote:prompt_not_text")
        failures, losses = 0, 0
        endpoint: Endpoint | None = None
        busy_since: float | None = None
        while True:
            endpoint = await self._fleet.pick(avoid=endpoint)
            try:
                return await self._attempt(endpoint, request)
            except _Busy:
                self._fleet.note_trouble()
                busy_since = busy_since or time.monotonic()
                if time.monotonic() - busy_since > self._section.patience_seconds:
                    return Reply(request.request_id, rejected="remote:busy")
                await asyncio.sleep(self._section.backoff_seconds)
            except _Refused as refused:
                if refused.status not in _THIS_PROMPT:
                    raise _misunderstood(endpoint.url, str(refused)) from None
                if await self._fleet.is_alive(endpoint):
                    return Reply(request.request_id, rejected=f"remote:refused_{refused.status}")
            except _Failed as failed:
                if await self._fleet.is_alive(endpoint):
                    failures += 1
                    await asyncio.sleep(
                        min(self._section.backoff_seconds * 2 ** (failures - 1), _LONGEST_DELAY)
                    )
                else:  # one prompt may lose some endpoints, but not take down one after the other for ever
                    losses += 1
                if failures > self._section.retries or losses > self._section.retries + 2 * len(
                    self._urls
                ):
                    return Reply(request.request_id, rejected=f"remote:{failed}")

    async def first_contact(self, url: str) -> str | None:
        """None when the endpoint does as asked, else why it does not answer. Raises EndpointError when it refuses."""
        try:
            reply = await self._post(
                url, self._canary, timeout=min(self._section.timeout_seconds, _PROBE_SECONDS)
            )
        except _Refused as refused:
            raise _misunderstood(url, str(refused)) from None
        except (_Failed, _Busy) as failed:
            return f"{url} is set aside for now: {failed or 'busy'}"
        if reply.rejected in _MISUNDERSTANDINGS:
            raise _misunderstood(
                url, f"its answer to a short request cannot be used ({reply.rejected})"
            )
        if not reply.exact and self._section.backend != "openai":
            notice("synth", f"{url} gives no token ids: its text is tokenised again and checked")
        return None

    async def _attempt(self, endpoint: Endpoint, request: Request) -> Reply:
        endpoint.under_way += 1
        try:
            reply = await self._post(endpoint.url, request, timeout=self._section.timeout_seconds)
        finally:
            endpoint.under_way -= 1
        self._fleet.heard()
        return reply

    async def _probe(self, url: str) -> bool:
        """Whether a request that any healthy server answers at once is answered."""
        try:
            await self._post(
                url, self._canary, timeout=min(self._section.timeout_seconds, _PROBE_SECONDS)
            )
        except _Refused as refused:
            raise _misunderstood(url, str(refused)) from None
        except (_Failed, _Busy):
            return False
        return True

    async def _post(self, url: str, request: Request, *, timeout: float) -> Reply:
        """One HTTP request. Raises _Busy, _Refused or _Failed."""
        import httpx

        payload = self._server.payload(request)
        try:
            # httpx limits the wait for each piece; a server that drips bytes needs a limit on the whole.
            async with asyncio.timeout(timeout):
                response = await self._client.post(url + self._server.path, json=payload)
        except (TimeoutError, httpx.TimeoutException):
            raise _Failed("timeout") from None
        except httpx.ConnectError:
            raise _Failed("unreachable") from None
        except (httpx.HTTPError, httpx.InvalidURL):
            raise _Failed("disconnected") from None
        if response.status_code in _BUSY:
            raise _Busy
        if response.status_code >= 500:
            raise _Failed(f"error_{response.status_code}")
        if response.status_code >= 300:
            raise _Refused(response.status_code, response.text)
        return self._read(request, response)

    def _read(self, request: Request, response: httpx.Response) -> Reply:
        try:
            body: Any = response.json()
            return self._reader.reply(request, self._server.read(body))
        except (ValueError, Unreadable):  # truncated JSON, or JSON of something else
            raise _Failed("unreadable") from None


def open_remote(
    section: GeneratorSection, template: ChatTemplate, *, source: str, vocabulary: int
) -> RemoteAnswer:
    """The section's servers, after a first contact. Raises EndpointError, ConfigError or MissingPackage."""
    try:
        import httpx  # noqa: F401
    except ImportError:
        raise MissingPackage(
            "needs the pip package httpx", where="synth.generator.backend", fix="pip install httpx"
        ) from None
    answer = RemoteAnswer(section, template, source=source, vocabulary=vocabulary)
    answer.check()
    return answer


def _headers(section: GeneratorSection) -> dict[str, str]:
    if section.api_key_env is None:
        return {}
    key = os.environ.get(section.api_key_env)
    if not key:
        raise ConfigError(
            f"the environment has no {section.api_key_env}",
            where="synth.generator.api_key_env",
            fix=f"export {section.api_key_env}=…",
        )
    return {"Authorization": f"Bearer {key}"}


def _misunderstood(url: str, problem: str) -> EndpointError:
    return EndpointError(
        f"does not do what is asked: {problem}",
        where=f"synth.generator.endpoints {url}",
        fix="check base URL, generator.model, generator.backend and the server's version; with prompt: text, also its tokenizer",
    )
