"""Engines' own servers, started on a loopback port with a target and a head."""

from __future__ import annotations

import json
import os
import shlex
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

from pipeline.heads.registry import algorithm_of, open_head
from tests.engines.environments import LLAMA, ROOT, SGLANG, VLLM

#: Seconds until a server of 135 M parameters answers, on two busy cores.
_START = 600.0
#: Of vLLM on a CPU, with one thread.
VLLM_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "VLLM_TARGET_DEVICE": "cpu",  # it looks for it in its version, which the wheel lacks
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # Without AMX its latent attention (DeepSeek's) takes pages of 16 tokens alone, and the cache
    # that hands out states multiples of 32. With this it attends as other models do.
    "VLLM_MLA_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class NoAnswer(Exception):
    """A server has ended, does not answer, or answers something else."""


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
    command += ["--max-num-seqs", "16"]
    if "--enable-prefix-caching" not in options:
        command.append("--no-enable-prefix-caching")
    if head:
        settings = {"method": "eagle3", "model": str(head), "num_speculative_tokens": drafts}
        settings |= speculative
        given = {key: value for key, value in settings.items() if value is not None}
        command += ["--speculative-config", json.dumps(given)]
        command += ["--per-request-spec-decode-metrics", "detailed"]
    with Forks.of_vllm().start([*command, *options], log) as alive:
        yield answering(alive, EngineServer(f"http://127.0.0.1:{port}", log))


class Forks:
    """The process that `vllm_forks` is, and the servers that it starts."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @staticmethod
    @cache
    def of_vllm() -> Forks:
        """One for all tests; it ends with them."""
        process = subprocess.Popen(
            [str(VLLM.make()), str(Path(__file__).with_name("vllm_forks.py"))],
            env={**os.environ, **VLLM_VARIABLES, "PYTHONPATH": str(ROOT)},
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


@contextmanager
def sglang_server(
    target: Path,
    head: Path | None,
    log: Path,
    *,
    card: Path | None = None,
    shape: tuple[int, int, int] = (3, 1, 4),
    dtype: str = "float32",
    options: Sequence[str] = (),
) -> Iterator[EngineServer]:
    """`sglang serve` of `target` with the exported head `head`, which drafts trees of
    `shape`: steps, top-k, tokens. `card` is the head whose card has the command, where `head` is
    one that our own loader refuses.

    The command and all that it starts are SGLang's own: server, scheduler, worker, model classes,
    loader and attention backend. Plain torch in tests/engines/sglang_cpu/ takes the place of its
    compiled operations. One choice is made for it: on a CPU without AMX it falls back to the
    backend `torch_native`, which cannot draft. It keeps `intel_amx`, which calls those operations
    alone, where that is named for prefill and for decoding.
    """
    port = free_port()
    program = str(SGLANG.make().with_name("sglang"))
    command = [program, "serve", "--model-path", str(target)]
    if head:
        # As the model card has it.
        opened, _ = open_head(str(card or head))
        served = algorithm_of(opened).serve_command(opened.shape, "sglang", str(target), shape, 0)
        assert served is not None
        words = shlex.split(served.command.replace("\\\n", " "))
        assert words[0] == "sglang"
        command = [program, *(str(head) if word == "HEAD" else word for word in words[1:])]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
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
    with running([*command, *options], environment, log) as process:
        yield answering(
            lambda: process.poll() is None, EngineServer(f"http://127.0.0.1:{port}", log)
        )


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
    port = free_port()
    settings = {
        **{"target": str(target), "head": head and str(head), "port": port, "drafts": drafts},
        **{"slots": slots, "context": context, "kv_type": kv_type},
        "backend_sampling": backend_sampling,
    }
    script = str(ROOT / "tests/engines/llama_server.py")
    command = [str(LLAMA.make()), script, json.dumps(settings)]
    with running(command, os.environ, log) as process:
        yield answering(
            lambda: process.poll() is None, EngineServer(f"http://127.0.0.1:{port}", log)
        )


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its own group, which is killed at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, SIGKILL)
        process.wait()


def answering(
    alive: Callable[[], bool], server: EngineServer, within: float = _START
) -> EngineServer:
    """The server, once it answers. Raises NoAnswer where it ends, or is silent for so long."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        if not alive():
            raise NoAnswer(f"ended: {_end(server.log)}")
        try:
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return server
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise NoAnswer(f"does not answer after {within:g} s: {_end(server.log)}")


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def free_port() -> int:
    """That nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
