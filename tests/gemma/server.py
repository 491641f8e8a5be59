"""transformers' own `generate` as a server that speaks vLLM's or OpenAI's completions API.

The referee itself answers: what it generates is by definition the target's. Faults are planted by
the test: other weights in `model`, or a `temperature` that takes the place of the request's.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import torch


class GenerateServer:
    """`with GenerateServer(directory) as server:` then ask `server.url`."""

    temperature: float | None = None

    def __init__(self, directory: Path, *, kind: Literal["vllm", "openai"] = "vllm") -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.kind = kind
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.model.requires_grad_(False)
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with owner._lock:  # one seed, one reply
                    self._send(owner._reply(asked))

            def do_GET(self) -> None:
                """/v1/models, whatever is asked for."""
                self._send({"data": [{"id": "the target"}]})

            def _send(self, reply: dict[str, Any]) -> None:
                body = json.dumps(reply).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def __enter__(self) -> GenerateServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    @torch.inference_mode()
    def _reply(self, asked: dict[str, Any]) -> dict[str, Any]:
        prompt, stops = asked["prompt"], asked.get("stop_token_ids")
        stops = stops or [self.model.generation_config.eos_token_id]
        hot = asked["temperature"] if self.temperature is None else self.temperature
        drawn = {"do_sample": False} if hot == 0 else {"do_sample": True, "temperature": hot}
        if hot:
            drawn |= {"top_p": asked["top_p"], "top_k": max(0, asked.get("top_k", 0))}
        torch.manual_seed(asked["seed"])
        ids = torch.tensor([prompt])
        made = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=asked["max_tokens"],
            eos_token_id=stops,
            pad_token_id=stops[0],
            **drawn,
        )[0, len(prompt) :].tolist()
        stopped = made[-1] in stops
        choice = {
            "index": 0,
            "text": self.tokenizer.decode(made, skip_special_tokens=True),
            "finish_reason": "stop" if stopped else "length",
        }
        if self.kind == "vllm":
            choice |= {"token_ids": made, "prompt_token_ids": prompt}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(made)}
        return {"choices": [choice], "usage": usage}
