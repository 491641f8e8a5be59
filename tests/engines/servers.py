"""Engines' own servers, started on a loopback port with a target and a head."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.engines.environments import LLAMA, ROOT, VLLM

#: Seconds until a server of 135 M parameters answers, on two busy cores.
_START = 300.0


@dataclass(frozen=True)
class EngineServer:
    """A server that answers."""

    url: str
    log: Path

    def complete(self, prompt_ids: Sequence[int], max_tokens: int, **options: Any) -> list[int]:
        """Token ids of the greedy reply."""
        body = {
            "prompt": list(prompt_ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            **options,
        }
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=600)
        assert response.status_code == 200, response.text
        return [int(token) for token in response.json()["choices"][0]["token_ids"]]

    def counters(self) -> dict[str, float]:
        """Rounds, drafted and accepted tokens since the start, as vLLM counts them."""
        totals = {"num_drafts": 0.0, "num_draft_tokens": 0.0, "num_accepted_tokens": 0.0}
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            for name in totals:
                if line.startswith(f"vllm:spec_decode_{name}_total{{"):
                    totals[name] += float(line.rsplit(" ", 1)[1])
        return totals


@contextmanager
def vllm_server(
    target: Path,
    head: Path | None,
    log: Path,
    *,
    dtype: str = "float32",
    drafts: int = 3,
    method: str = "eagle3",
    options: Sequence[str] = (),
) -> Iterator[EngineServer]:
    """`vllm serve` of `target` with the exported head `head`, which proposes `drafts` tokens.

    One thread, no compilation, no prefix cache: so that what differs from our decoder is the
    engine's arithmetic alone.
    """
    port = _free_port()
    command = [str(VLLM.make().with_name("vllm")), "serve", str(target), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", dtype, "--enforce-eager"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "4", "--no-enable-prefix-caching"]
    if head:
        speculative = {"method": method, "model": str(head), "num_speculative_tokens": drafts}
        command += ["--speculative-config", json.dumps(speculative)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_TARGET_DEVICE": "cpu",  # it looks for it in its version, which the wheel lacks
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with _running([*command, *options], port, log, environment) as server:
        yield server


@contextmanager
def llama_server(
    target: Path,
    head: Path | None,
    log: Path,
    *,
    drafts: int = 3,
    slots: int = 1,
    context: int = 1024,
    kv_type: str = "F32",
    backend_sampling: bool = True,
) -> Iterator[EngineServer]:
    """llama.cpp's server of the GGUF file `target` with the head `head`, a GGUF file too; keys and
    values are of `kv_type`, F32 or F16. `backend_sampling` of drafts is its default."""
    port = _free_port()
    settings = {
        **{"target": str(target), "head": head and str(head), "port": port, "drafts": drafts},
        **{"slots": slots, "context": context, "kv_type": kv_type},
        "backend_sampling": backend_sampling,
    }
    script = str(ROOT / "tests/engines/llama_server.py")
    command = [str(LLAMA.make()), script, json.dumps(settings)]
    with _running(command, port, log, dict(os.environ)) as server:
        yield server


@contextmanager
def _running(
    command: Sequence[str], port: int, log: Path, environment: dict[str, str]
) -> Iterator[EngineServer]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield _answering(process, EngineServer(f"http://127.0.0.1:{port}", log))
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answering(process: subprocess.Popen[bytes], server: EngineServer) -> EngineServer:
    until = time.monotonic() + _START
    while time.monotonic() < until:
        assert process.poll() is None, f"ended with {process.returncode}: {_end(server.log)}"
        try:
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return server
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"does not answer after {_START:g} s: {_end(server.log)}")


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
