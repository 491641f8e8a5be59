"""A server as SGLang's without a model: `stub_sglang.py ACCEPTED … --port PORT …`.

A token takes 10 ms; every round accepts so many drafts.
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

ACCEPTED = int(sys.argv[1])


class StubSglang(BaseHTTPRequestHandler):
    """/health and /generate."""

    def do_GET(self) -> None:
        self._reply([])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        new = body["sampling_params"]["max_new_tokens"]
        time.sleep(0.01 * new)
        rounds = -(-(new - 1) // (ACCEPTED + 1))
        counted = {"spec_verify_ct": rounds, "spec_num_correct_drafts": rounds * ACCEPTED}
        replies = [{"meta_info": {"completion_tokens": new, **counted}} for _ in body["input_ids"]]
        self._reply(replies)

    def _reply(self, body: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None: ...


if __name__ == "__main__":
    port = int(sys.argv[sys.argv.index("--port") + 1])
    HTTPServer(("127.0.0.1", port), StubSglang).serve_forever()
