"""Engines' own servers, started on a loopback port with a target and a head."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from pipeline.heads.registry import algorithms
from tests.engines.environments import ROOT, SGLANG, VLLM

#: Seconds until a server of 135 M parameters answers, on two busy cores.
_START = 600.0


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
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *options], env=environment, stdout=output, stderr=subprocess.STDOUT
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


@contextmanager
def sglang_server(
    target: Path,
    head: Path | None,
    log: Path,
    *,
    shape: tuple[int, int, int] = (3, 1, 4),
    options: Sequence[str] = (),
) -> Iterator[EngineServer]:
    """`sglang serve` of `target` in fp32 with the exported head `head`, which drafts trees of
    `shape`: steps, top-k, tokens.

    The command and all that it starts are SGLang's own: server, scheduler, worker, model classes,
    loader and attention backend. Plain torch in tests/engines/sglang_cpu/ takes the place of its
    compiled operations. One choice is made for it: on a CPU without AMX it falls back to the
    backend `torch_native`, which cannot draft. It keeps `intel_amx`, which calls those operations
    alone, where that is named for prefill and for decoding.
    """
    port = _free_port()
    program = str(SGLANG.make().with_name("sglang"))
    command = [program, "serve", "--model-path", str(target)]
    if head:
        # As the model card has it.
        served = algorithms()["eagle3"].serve_command("sglang", str(target), shape, 0)
        assert served is not None
        words = shlex.split(served.command.replace("\\\n", " "))
        assert words[0] == "sglang"
        command = [program, *(str(head) if word == "HEAD" else word for word in words[1:])]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--context-length", "1024", "--max-total-tokens", "16384"]
    command += ["--max-running-requests", "16", "--disable-radix-cache", "--skip-server-warmup"]
    command += ["--prefill-attention-backend", "intel_amx", "--sleep-on-idle"]
    command += ["--decode-attention-backend", "intel_amx"]
    environment = {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": str(ROOT / "tests/engines/sglang_cpu"),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # it would compile one function, of a tree's best beams
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *options],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield _answering(process, EngineServer(f"http://127.0.0.1:{port}", log))
        finally:
            # Its scheduler and detokenizer are of its group.
            os.killpg(process.pid, signal.SIGKILL)
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
