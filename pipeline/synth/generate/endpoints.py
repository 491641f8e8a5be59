"""The endpoint pool: which endpoints of the target may be asked, and which has the fewest requests.

    healthy ──── a request fails, and a health check fails too ────▶ unhealthy
       ▲                                                                │
       └──────── a health check succeeds; tried ever less often ────────┘

    busy (429, 502, 503)   alive, so it stays healthy: nobody is sent there for a while, then half
                           as many as before, one more for every reply

A failed request alone says nothing: the prompt may be at fault. The health check, a short request
of our own, tells which.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pipeline.config import GeneratorSection
from pipeline.console import notice, readable_duration
from pipeline.errors import EndpointError, EndpointsUnavailable
from pipeline.synth.generate.client import EndpointBusy
from pipeline.telemetry import observe

#: Longest wait between two attempts, and longest that a server may ask for, in seconds.
MAX_BACKOFF, _MAX_RETRY_AFTER = 60.0, 600.0
#: Shorter waits for busy endpoints are nobody's business.
_TOLD_SECONDS = 10.0
_WHERE = "synth.generator.endpoints"

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
        self._is_told = False
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
        if self._is_told and self._busy_start is not None:
            waited = readable_duration(time.monotonic() - self._busy_start)
            notice("synth", f"endpoints reply again, after {waited}")
        self._outage_start = self._busy_start = None
        self._is_told = False
        endpoint.busy_in_a_row = 0
        endpoint.limit += 1
        self._wake()

    def mark_busy(self, endpoint: Endpoint, retry_after: float | None, *, sent: float) -> None:
        """It asked to come back later.

        Raises EndpointsUnavailable when none has replied for the section's `busy_seconds`.
        """
        now, longest = time.monotonic(), self._section.busy_seconds
        self._outage_start = None
        self._busy_start = now if self._busy_start is None else self._busy_start
        end = self._busy_start + longest
        if now >= end:
            raise EndpointsUnavailable(
                f"too busy, or the quota is used up, for {longest:g} s (HTTP 429, 502 or 503)",
                where=_WHERE,
                fix="run the same command later, finished shards are kept; or lower "
                "generator.concurrency, or raise generator.busy_seconds",
            )
        endpoint.slow_down(retry_after, sent=sent, backoff=self._section.backoff_seconds)
        endpoint.paused_until = min(endpoint.paused_until, end)
        until = min((endpoint.paused_until for endpoint in self._healthy()), default=now)
        if until - self._busy_start >= _TOLD_SECONDS and not self._is_told:
            self._is_told = True
            most = readable_duration(longest)
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
        delay = self._section.backoff_seconds
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
