"""The endpoint pool: which endpoints of the target are healthy, and which has the fewest requests.

    healthy ──── a request fails, and a health check fails too ────▶ unhealthy
       ▲                                                                │
       └──────── a health check succeeds; tried ever less often ────────┘

A failed request alone says nothing: the prompt may be at fault. The health check, a short request
of our own, tells which.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from pipeline.errors import EndpointError, EndpointsUnavailable
from pipeline.telemetry import observe

_MAX_BACKOFF = 60.0

#: Whether an endpoint replies to a short request. Raises EndpointError when it refuses it: then the
#: configuration is at fault.
HealthCheck = Callable[[str], Awaitable[bool]]


@dataclass(eq=False)
class Endpoint:
    """A server."""

    url: str
    healthy: bool = True
    in_flight: int = 0
    last_check: float = float("-inf")  # when the last health check ended
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class EndpointPool:
    """All endpoints of a run, used in one event loop."""

    def __init__(
        self, urls: Sequence[str], health_check: HealthCheck, *, backoff: float, max_outage: float
    ) -> None:
        self._endpoints = [Endpoint(url) for url in urls]
        self._health_check, self._backoff, self._max_outage = health_check, backoff, max_outage
        self._recovered = asyncio.Condition()
        self._outage_start: float | None = None  # of failures since which nobody has replied
        self._recoveries: set[asyncio.Task[None]] = set()
        observe("endpoints_healthy", len(urls))

    async def pick(self, *, avoid: Endpoint | None) -> Endpoint:
        """The healthy endpoint with the fewest requests, another than `avoid` if there is one.

        Waits for one. Raises EndpointsUnavailable without one for longer than `max_outage`.
        """
        while not self._healthy():
            await self._wait_for_recovery()
        return min(self._healthy(), key=lambda endpoint: (endpoint is avoid, endpoint.in_flight))

    def mark_success(self) -> None:
        """An endpoint replied."""
        self._outage_start = None

    def mark_failure(self) -> None:
        """An endpoint did not reply. Raises EndpointsUnavailable after `max_outage` seconds."""
        now = time.monotonic()
        self._outage_start = now if self._outage_start is None else self._outage_start
        outage = now - self._outage_start
        if outage > self._max_outage:
            raise EndpointsUnavailable(
                f"none of {len(self._endpoints)} endpoints has answered for {outage:.1f} s",
                where="synth.generator.endpoints",
                fix="start the servers again and run the same command: finished shards are kept",
            )

    async def is_healthy(self, endpoint: Endpoint) -> bool:
        """Whether an endpoint on which a request has just failed passes a health check."""
        failed = time.monotonic()
        async with endpoint.lock:
            # Requests that fail together check once.
            if endpoint.healthy and endpoint.last_check < failed:
                endpoint.healthy = await self._health_check(endpoint.url)
                endpoint.last_check = time.monotonic()
                if endpoint.healthy:
                    self.mark_success()
                else:
                    self._start_recovery(endpoint)
                observe("endpoints_healthy", len(self._healthy()))
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
        delay = self._backoff
        while not endpoint.healthy:
            await asyncio.sleep(delay)
            delay = min(2 * delay, _MAX_BACKOFF)
            try:
                endpoint.healthy = await self._health_check(endpoint.url)
            except EndpointError:
                continue  # a server that starts may refuse what it takes later
        self.mark_success()
        observe("endpoints_healthy", len(self._healthy()))
        async with self._recovered:
            self._recovered.notify_all()

    async def _wait_for_recovery(self) -> None:
        self.mark_failure()
        assert self._outage_start is not None
        left = self._outage_start + self._max_outage - time.monotonic()
        async with self._recovered:
            try:
                async with asyncio.timeout(max(left, 0) + 0.01):
                    await self._recovered.wait_for(lambda: bool(self._healthy()))
            except TimeoutError:
                return  # the caller looks again, and after `max_outage` it gives up

    def _healthy(self) -> list[Endpoint]:
        return [endpoint for endpoint in self._endpoints if endpoint.healthy]
