"""`python -m pipeline.cli` as forks of an interpreter that has imported what a stage imports.

A new interpreter takes about five seconds of CPU time for that; this one is started once by each
process of pytest, and has computed nothing when it forks.

    pytest ──► fork server: torch, transformers, DeepSpeed, pipeline
                  ├── fork ──► train -c …, in an environment of its own
                  └── fork ──► features -c …
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_IMPORTED = [
    "deepspeed",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "pipeline.cli",
    "pipeline.features.stage",
    "pipeline.synth.stage",
    "pipeline.train.stage",
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_IMPORTED)


class Command:
    """A running command, as far as tests need subprocess.Popen; both streams go to `printed`."""

    def __init__(
        self, words: Sequence[str], printed: Path, *, environment: Mapping[str, str] | None = None
    ) -> None:
        own = {**os.environ, **(environment or {})}
        self._process = _context.Process(target=_run, args=(list(words), str(printed), own))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """As `poll`."""
        return self.poll()

    def poll(self) -> int | None:
        """The exit code, the negative number of the signal that ended it, or None."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def kill_at(run: Path, moment: str, words: Sequence[str], printed: Path) -> str:
    """Start a command and kill it once the run has what matches `moment`; what it printed."""
    return kill_once(lambda: any(run.glob(moment)), Command(words, printed), printed)


def kill_once(reached: Callable[[], bool], process: Command, printed: Path) -> str:
    """Kill a command, -9, at a moment that it must come to; what it printed."""
    deadline = time.monotonic() + 180
    while not reached() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL, printed.read_text()
    return printed.read_text()


def group(
    words: Sequence[str], size: int, printed: Path, *, environment: Mapping[str, str]
) -> list[Command]:
    """One command by a group of processes, as a launcher starts them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    where |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), **environment}
    return [
        Command(words, printed, environment={**where, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]


def _run(words: list[str], printed: str, environment: dict[str, str]) -> None:
    """In the fork, as a new interpreter would."""
    os.environ.clear()
    os.environ.update(environment)
    out = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(out, stream)
    warnings.simplefilter("ignore")
    sys.argv = ["eagle3", *words]
    runpy.run_module("pipeline.cli.__main__", run_name="__main__")
