"""Connections under a clock, and room for new ones: what uvicorn does not limit by itself.

    opened ──▶ head of a request ──▶ its body ──▶ reply ──▶ open for the next request
     └────── idle_seconds ──────┘  └─ start.py ─┘          └────── idle_seconds ─────

uvicorn limits the size of a head and the time between two requests. It waits for ever for the
first byte, for the rest of a head, and for the rest of a body to which it has replied already.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from pipeline.server.protocol import CROWDED

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol

#: Before one too many makes room: of those that come together, each has sent its request by then.
_GRACE_SECONDS = 0.1


def timed_connection() -> type[H11Protocol]:
    """The class of connections, over uvicorn's. Raises ImportError."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class TimedConnection(H11Protocol):
        """uvicorn's connection; its `limit_concurrency` counts clients that are replied to, and its
        `timeout_keep_alive` holds for a request's head too."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            # uvicorn itself would refuse every request at this limit, for the page /health too.
            self._most, self.limit_concurrency = self.limit_concurrency or 0, None
            self._served_app, self.app = self.app, self._answer
            self._clock: asyncio.TimerHandle | None = None
            self._waiting_since = self.loop.time()

        @property
        def waits_for_client(self) -> bool:
            """Whether there is no whole request that has no whole reply."""
            return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._start_clock()
            if len(self.connections) > self._most:
                self.loop.call_later(_GRACE_SECONDS, self._make_room)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_clock()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_clock()
            elif self._clock is None and not self.transport.is_closing():
                self._start_clock()  # half a head, or more of a body to which there is a reply

        def on_response_complete(self) -> None:
            self._waiting_since = self.loop.time()
            super().on_response_complete()

        def send_400_response(self, msg: str) -> None:
            """To what is not HTTP; where a reply has begun, no other can follow."""
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
            else:
                self.cut()

        def cut(self) -> None:
            """Close at once; a request that is here ends as if its client had gone."""
            self.connections.discard(self)
            self.transport.abort()

        def _make_room(self) -> None:
            """Cut off the client that has been waited for longest."""
            waiting = [each for each in self._timed() if each.waits_for_client]
            if len(self.connections) > self._most and waiting:
                min(waiting, key=lambda each: each._waiting_since).cut()

        def _timed(self) -> list[TimedConnection]:
            return [each for each in self.connections if isinstance(each, TimedConnection)]

        def _start_clock(self) -> None:
            self._clock = self.loop.call_later(self.timeout_keep_alive, self.cut)

        def _stop_clock(self) -> None:
            if self._clock is not None:
                self._clock.cancel()
                self._clock = None

        async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
            replying = [each for each in self._timed() if not each.waits_for_client]
            scope["state"][CROWDED] = len({*replying, self}) > self._most
            await self._served_app(scope, receive, send)

    return TimedConnection
