"""Engines' own servers, started on a loopback port with a target and a head."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from signal import SIGKILL, SIGTERM
from threading import Thread
from types import MappingProxyType
from typing import Any

import httpx

from tests.engines.environments import VLLM

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
    speculative: Mapping[str, Any] = MappingProxyType({}),
    options: Sequence[str] = (),
) -> Iterator[EngineServer]:
    """`vllm serve` of `target` with the exported head `head`, which proposes `drafts` tokens.

    One thread, no compilation, no prefix cache: so that what differs from our decoder is the
    engine's arithmetic alone.
    """
    port = free_port()
    command = ["serve", str(target), "--port", str(port), "--host", "127.0.0.1"]
    command += ["--dtype", dtype, "--enforce-eager", "--max-model-len", "1024"]
    command += ["--max-num-seqs", "16", "--per-request-spec-decode-metrics", "detailed"]
    if "--enable-prefix-caching" not in options:
        command.append("--no-enable-prefix-caching")
    if head:
        settings = {"method": "eagle3", "model": str(head), "num_speculative_tokens": drafts}
        settings |= speculative
        given = {key: value for key, value in settings.items() if value is not None}
        command += ["--speculative-config", json.dumps(given)]
    with Forks.of_vllm().start([*command, *options], log) as alive:
        yield _answering(alive, EngineServer(f"http://127.0.0.1:{port}", log))


class Forks:
    """The process that `vllm_forks` is, and the servers that it starts."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @staticmethod
    @cache
    def of_vllm() -> Forks:
        """One for all tests; it ends with them."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "VLLM_TARGET_DEVICE": "cpu",  # it looks for it in its version, which the wheel lacks
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        process = subprocess.Popen(
            [str(VLLM.make()), str(Path(__file__).with_name("vllm_forks.py"))],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        forks = Forks(process)
        while (line := forks._line()) != "ready":
            assert line, "ended before it had imported vLLM"
        return forks

    @contextmanager
    def start(self, arguments: Sequence[str], log: Path) -> Iterator[Callable[[], bool]]:
        """`vllm` with these arguments; gives a check whether it is alive. One at a time."""
        log.unlink(missing_ok=True)
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"arguments": [*arguments], "log": str(log)}) + "\n")
        self._process.stdin.flush()
        server = int(self._line())
        ended = Thread(target=self._line)  # of "ended"
        ended.start()
        try:
            yield ended.is_alive
        finally:
            for signal in (SIGTERM, SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(server, signal)
                ended.join(30)
            # Its engine and worker are of its group, and may outlive it.
            with suppress(ProcessLookupError):
                os.killpg(server, SIGKILL)

    def _line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()


def _answering(alive: Callable[[], bool], server: EngineServer) -> EngineServer:
    until = time.monotonic() + _START
    while time.monotonic() < until:
        assert alive(), f"ended: {_end(server.log)}"
        try:
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return server
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"does not answer after {_START:g} s: {_end(server.log)}")


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def free_port() -> int:
    """That nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
