"""A server that sends whatever bytes a test wants, over real connections."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

#: Path and JSON body of a request → pieces of what is sent; a number is a pause in seconds.
Lie = Callable[[str, Any], Iterable[bytes | float]]


class LyingServer:
    """`with LyingServer(lie) as server:` then ask `server.url`; every connection takes one request.

    `sent` counts bytes that clients have taken, or the kernel for them.
    """

    def __init__(self, lie: Lie) -> None:
        self._lie, self._loop = lie, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._opened: list[asyncio.StreamWriter] = []
        self.sent = self.requests = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def __enter__(self) -> LyingServer:
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for writer in self._opened:  # what nobody reads would keep them open
            writer.transport.abort()
        await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._opened.append(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            _, _, length = head.partition("content-length: ")
            body = await reader.readexactly(int(length.split()[0])) if length else b"null"
            self.requests += 1
            for piece in self._lie(head.split()[1], json.loads(body)):
                if isinstance(piece, float):
                    await asyncio.sleep(piece)
                    continue
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)  # let the others in
                self.sent += len(piece)
        writer.close()


def reply(body: bytes, status: str = "200 OK", kind: str = "application/json", *more: str) -> bytes:
    """A whole reply."""
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *more]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


def unbounded(status: str = "200 OK", kind: str = "application/json", *more: str) -> bytes:
    """The head of a reply that ends with its connection."""
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Type: {kind}", *more, "", ""]).encode()
