"""A real HTTP server that speaks vLLM's, SGLang's or OpenAI's API, with a target's own replies.

The ids come from the decoder, so a pipeline that asks this server ends with the samples of one that
decodes by itself. Faults are chosen by the test, request by request.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Completion, Request
from pipeline.target.template import ChatTemplate, load_template

#: (prompt ids, how often they were asked before) → what goes wrong, or None. A status may have a
#: header: "429 Retry-After: 1".
Fault = Callable[[tuple[int, ...], int], str | None]


class ServedTarget:
    """A target in bfloat16, one request at a time, whoever asks; replies are cached."""

    def __init__(self, target: Path) -> None:
        self.template: ChatTemplate = load_template(target, source="tiny", system_prompt=None)
        self.model = DecoderModel.load(
            target, (1, 3, 4), device=torch.device("cpu"), dtype=torch.bfloat16, max_length=500
        )
        self._engine, self._lock = Engine(self.model), threading.Lock()
        self._cache: dict[Request, Completion] = {}

    def reply(self, request: Request) -> Completion:
        with self._lock:
            if request not in self._cache:
                [self._cache[request]] = self._engine.generate([request])
            completion = self._cache[request]
        assert completion.error is None, completion.error
        return completion


class _QuietServer(ThreadingHTTPServer):
    """Clients that give up leave no traceback."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class TargetServer:
    """`with TargetServer(target) as server:` then ask `server.url`."""

    def __init__(
        self, target: ServedTarget, *, kind: str = "vllm", fault: Fault | None = None
    ) -> None:
        self.kind, self.fault = kind, fault or (lambda ids, before: None)
        self.asked: Counter[tuple[int, ...]] = Counter()  # by prompt ids
        self.headers: dict[str, str] = {}
        self.payloads: list[dict[str, Any]] = []
        self.dead = threading.Event()  # set: every request is cut off
        self.version = "1.2.3"
        self.models = ["tiny"]
        self._target, self._lock, self._closing = target, threading.Lock(), threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                owner._handle(self)

            def do_GET(self) -> None:
                owner._show(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = _QuietServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.01}
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}" + (
            "" if self.kind == "sglang" else "/v1"
        )

    def __enter__(self) -> TargetServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _show(self, http: BaseHTTPRequestHandler) -> None:
        """Pages about the server."""
        version = "/server_info" if self.kind == "sglang" else "/version"
        models = [{"id": name, "owned_by": self.kind} for name in self.models]
        pages = {"/v1/models": {"data": models}, version: {"version": self.version}}
        if self.dead.is_set():
            http.close_connection = True
            return
        data = json.dumps(pages.get(http.path, {})).encode()
        http.send_response(200 if http.path in pages else 404)
        http.send_header("Content-Length", str(len(data)))
        http.end_headers()
        http.wfile.write(data)

    def _handle(self, http: BaseHTTPRequestHandler) -> None:
        payload = json.loads(http.rfile.read(int(http.headers["Content-Length"])))
        request = self._request(payload)
        with self._lock:
            before = self.asked[request.prompt_ids]
            self.asked[request.prompt_ids] += 1
            self.headers = dict(http.headers)
            self.payloads.append(payload)
        fault = "cut" if self.dead.is_set() else self.fault(request.prompt_ids, before)
        with suppress(ConnectionError):
            self._respond(http, request, fault)

    def _respond(self, http: BaseHTTPRequestHandler, request: Request, fault: str | None) -> None:
        if fault == "hang":
            self._closing.wait(20)
        if fault in ("cut", "hang"):
            http.close_connection = True
            return
        code, _, header = (fault or "").partition(" ")
        status = int(code) if code.isdigit() else 200
        body = self._body(request) if status == 200 else {"error": {"message": f"no: {fault}"}}
        data = json.dumps(self._spoil(body, fault)).encode()
        if fault == "truncated":
            data = data[: len(data) // 2]
        http.send_response(status)
        http.send_header("Content-Type", "application/json")
        http.send_header("Content-Length", str(len(data)))
        if header:
            http.send_header(*header.split(": ", 1))
        http.end_headers()
        for start in range(0, len(data), 16):
            http.wfile.write(data[start : start + 16])
            if fault == "drip":
                http.wfile.flush()
                time.sleep(0.1)

    def _request(self, payload: dict[str, Any]) -> Request:
        if self.kind == "sglang":
            sampling, prompt = payload["sampling_params"], payload["input_ids"]
            limit, seed = sampling["max_new_tokens"], sampling.get("sampling_seed", 0)
        else:
            sampling, prompt, limit, seed = (
                payload,
                payload["prompt"],
                payload["max_tokens"],
                payload["seed"],
            )
        ids = self._target.template.encode(prompt) if isinstance(prompt, str) else prompt
        stops = tuple(sampling.get("stop_token_ids", self._target.template.stop_ids))
        top_k = max(0, sampling.get("top_k", 0))
        return Request(
            "r",
            tuple(ids),
            limit,
            stops,
            temperature=sampling["temperature"],
            top_p=sampling["top_p"],
            top_k=top_k,
            seed=seed,
        )

    def _body(self, request: Request) -> dict[str, Any]:
        done = self._target.reply(request)
        ended = done.finish_reason == "stop"
        said = self._target.template.text(
            done.token_ids[:-1] if ended else done.token_ids, special=True
        )
        counts = {
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": len(done.token_ids),
        }
        if self.kind == "sglang":
            finish = (
                {"type": "stop", "matched": done.token_ids[-1]}
                if ended
                else {"type": "length", "length": len(done.token_ids)}
            )
            return {
                "text": said,
                "output_ids": list(done.token_ids),
                "meta_info": {"id": "x", "finish_reason": finish, **counts},
            }
        choice: dict[str, Any] = {
            "index": 0,
            "text": said,
            "finish_reason": done.finish_reason,
            "logprobs": None,
        }
        if self.kind == "vllm":
            choice |= {
                "token_ids": list(done.token_ids),
                "prompt_token_ids": list(request.prompt_ids),
                "stop_reason": None,
            }
        return {
            "id": "cmpl-x",
            "object": "text_completion",
            "created": 0,
            "model": "tiny",
            "choices": [choice],
            "usage": counts,
        }

    def _spoil(self, body: dict[str, Any], fault: str | None) -> dict[str, Any]:
        """Bodies that are JSON, but not what was asked for."""
        if fault == "no_choice":
            return {**body, "choices": []}
        if fault == "aborted":
            return {**body, "choices": [{**body["choices"][0], "finish_reason": "abort"}]}
        if fault == "other_prompt":
            return {
                **body,
                "choices": [{**body["choices"][0], "prompt_token_ids": [0, 1]}],
                "usage": {},
            }
        if fault == "other_count":
            return {**body, "usage": {"completion_tokens": body["usage"]["completion_tokens"] + 3}}
        return body
