"""A proxy in front of an object store that misbehaves when told to.

gcsfs ──► FaultyProxy ──► fake-gcs-server
             │ answers 503, drops a body half-way, stays silent, flips a byte, …
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

#: What the proxy does with a request: None passes it on, a number is the status of the answer.
Fault = int | str | None
DROP, HANG = "drop the upload half-way", "never answer"
FLIP, CUT = "flip a byte of the body", "end the answer half-way"
LAG = "answer a listing as it was before"

#: Headers of requests and of answers.
_NOT_SENT_ON = ("host", "connection", "accept-encoding")
_PASSED_BACK = ("content-type", "content-range", "location", "range", "x-goog-hash")


def is_listing(path: str) -> bool:
    return "/o?" in path and "prefix=" in path


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on to `upstream`, unless `fault(method, path)` is one; records them all."""

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.fault: Callable[[str, str], Fault] = lambda method, path: None
        self.requests: list[tuple[str, str, Fault]] = []
        self.released = threading.Event()
        self.answered: dict[str, bytes] = {}  # the first answer to every path
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def injected(self) -> list[Fault]:
        return [fault for _, _, fault in self.requests if fault is not None]

    def close(self) -> None:
        self.released.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body of an answer leave together
    disable_nagle_algorithm = True
    server: FaultyProxy

    def _pass_on(self) -> None:
        fault = self.server.fault(self.command, self.path)
        self.server.requests.append((self.command, self.path, fault))
        length = int(self.headers.get("Content-Length") or 0)
        if fault == DROP:
            self.rfile.read(length // 2)
            self._hang_up()
            return
        body = self.rfile.read(length)
        if fault == HANG:
            self.server.released.wait()
            self._hang_up()
        elif isinstance(fault, int):
            error = json.dumps({"error": {"code": fault, "message": "injected"}})
            self._answer(fault, {"Content-Type": "application/json"}, error.encode())
        else:
            sent = _flipped(body) if fault == FLIP else body
            self._forward(sent, cut=fault == CUT, lag=fault == LAG)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _pass_on

    def _forward(self, body: bytes, *, cut: bool, lag: bool) -> None:
        target = urlsplit(self.server.upstream)
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
        try:
            sent = self.headers.items()
            headers = {name: value for name, value in sent if name.lower() not in _NOT_SENT_ON}
            connection.request(self.command, self.path, body=body or None, headers=headers)
            answer = connection.getresponse()
            data = answer.read()
            passed = {
                name: value.replace(self.server.upstream, self.server.url)
                for name, value in answer.getheaders()
                if name.lower() in _PASSED_BACK
            }
        except (OSError, http.client.HTTPException):
            self._hang_up()
            return
        finally:
            connection.close()
        before = self.server.answered.setdefault(self.path, data)
        self._answer(answer.status, passed, before if lag else data, cut=cut)

    def _answer(
        self, status: int, headers: dict[str, str], data: bytes, *, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.close()

    def log_message(self, format: str, *arguments: object) -> None:
        """Quiet."""


def _flipped(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
