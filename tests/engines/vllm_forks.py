"""Starts `vllm serve` many times and imports vLLM once; runs with the interpreter of .venvs/vllm.

Each server is a fork of this process, and so are its engine and its worker, where vLLM on a CPU
would start a new interpreter for each: three times 10 s of imports, for each of dozens of servers.
Nothing else of vLLM is changed. A line on stdin, {"arguments": [...], "log": FILE}, starts a
server; its process id is printed, and "ended" once it has. One server at a time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from importlib import import_module
from typing import Any


def serve(arguments: list[str], log: str) -> None:
    """`vllm` with these arguments, in this process."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["vllm", *arguments]
    sys.exit(import_module("vllm.entrypoints.cli.main").main())


def forked(method: str | None = None) -> Any:
    """For `multiprocessing.get_context`: whatever is asked for, a fork."""
    return _contexts("fork")


_contexts = multiprocessing.get_context

if __name__ == "__main__":
    for module in ("entrypoints.openai.api_server", "v1.engine.core", "v1.worker.cpu_worker"):
        import_module(f"vllm.{module}")
    multiprocessing.get_context = forked
    print("ready", flush=True)
    for line in sys.stdin:
        server = os.fork()
        if not server:
            serve(**json.loads(line))
        print(server, flush=True)
        os.waitpid(server, 0)
        print("ended", flush=True)
