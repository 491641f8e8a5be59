"""Endpoints of one target: which are alive, and who has the fewest requests.

    available ──a failure, and a short request of our own fails too──▶ set aside
        ▲                                                                 │
        └────────────── a short request succeeds, tried ever less often ──┘

A failed request alone says nothing: the prompt may be at fault. The short request tells which.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from pipeline.errors import EndpointError

_LONGEST_DELAY = 60.0

#: Whether an endpoint answers a short request. Raises EndpointError when it refuses it: then ours is at fault.
Probe = Callable[[str], Awaitable[bool]]


@dataclass(eq=False)
class Endpoint:
    """A server."""

    url: str
    available: bool = True
    under_way: int = 0
    probed: float = float("-inf")  # when it was last tried with a short request
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Fleet:
    """All endpoints of a run. Lives in one event loop."""

    def __init__(
        self, urls: Sequence[str], probe: Probe, *, backoff: float, patience: float
    ) -> None:
        self._endpoints = [Endpoint(url) for url in urls]
        self._probe, self._backoff, self._patience = probe, backoff, patience
        self._changed = asyncio.Condition()
        self._troubled: float | None = None  # since when there is trouble and nobody has answered
        self._reviving: set[asyncio.Task[None]] = set()

    async def pick(self, *, avoid: Endpoint | None) -> Endpoint:
        """An available endpoint with few requests, another than `avoid` if there is one; waits for one.

        Raises EndpointError when there is none for longer than the run's patience.
        """
        while not self._available():
            await self._wait_for_change()
        return min(self._available(), key=lambda endpoint: (endpoint is avoid, endpoint.under_way))

    def heard(self) -> None:
        """An endpoint answered."""
        self._troubled = None

    def note_trouble(self) -> None:
        """An endpoint could not answer. Raises EndpointError when that has been so, everywhere, for longer than the run's patience."""
        now = time.monotonic()
        self._troubled = now if self._troubled is None else self._troubled
        if now - self._troubled > self._patience:
            raise EndpointError(
                f"none of {len(self._endpoints)} endpoints has answered for {now - self._troubled:.1f} s",
                where="synth.generator.endpoints",
                fix="start the servers again and run the same command: finished shards are kept",
            )

    async def is_alive(self, endpoint: Endpoint) -> bool:
        """Whether an endpoint on which a request has just failed answers others; if not, it is set aside."""
        failed = time.monotonic()
        async with endpoint.lock:
            if (
                endpoint.available and endpoint.probed < failed
            ):  # requests that fail together ask once
                alive = await self._probe(endpoint.url)
                endpoint.probed = time.monotonic()
                if alive:
                    self.heard()
                else:
                    self._set_aside(endpoint)
        return endpoint.available

    async def close(self) -> None:
        """Stop looking after endpoints that were set aside."""
        for task in self._reviving:
            task.cancel()
        await asyncio.gather(*self._reviving, return_exceptions=True)

    def _set_aside(self, endpoint: Endpoint) -> None:
        endpoint.available = False
        task = asyncio.create_task(self._revive(endpoint))
        self._reviving.add(task)
        task.add_done_callback(self._reviving.discard)

    async def _revive(self, endpoint: Endpoint) -> None:
        delay = self._backoff
        while not endpoint.available:
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY)
            try:
                endpoint.available = await self._probe(endpoint.url)
            except EndpointError:
                continue  # a server that starts may refuse what it takes later
        self.heard()
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for_change(self) -> None:
        """Wait for an endpoint to come back."""
        self.note_trouble()
        assert self._troubled is not None
        left = self._troubled + self._patience - time.monotonic()
        async with self._changed:
            try:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: bool(self._available())),
                    timeout=max(left, 0) + 0.01,
                )
            except TimeoutError:
                return  # the caller looks again, and out of patience it gives up

    def _available(self) -> list[Endpoint]:
        return [endpoint for endpoint in self._endpoints if endpoint.available]
