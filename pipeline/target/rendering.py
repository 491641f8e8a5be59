"""Chat templates, rendered in a process of their own: a template is a program by a stranger.

    render(template, messages, variables) ─▶ request ─▶ transformers' renderer ─▶ text or reason
                                             └ this file as a program, started once ┘

transformers' environment is a sandbox, which keeps a template from attributes and files and not
from time and memory. Here it has SECONDS of a processor and MEMORY bytes, and its text is limited
by what goes in. What draws at random is not there: the same messages have the same ids.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import IO, Any

#: Of processor time for one rendering: a conversation of a million tokens takes 0.1.
SECONDS = 10
#: What a rendering may take, beside the interpreter.
MEMORY = 512 << 20
#: Bytes of the text: so many, and so many for each byte of messages, template and variables.
LEAST_TEXT, TEXT_PER_BYTE = 1 << 20, 8
_LENGTH_BYTES = 8


class CannotRender(Exception):
    """The template fails on these messages; says why."""


class TooCostly(Exception):
    """It takes more time or memory than any template needs; says which."""


def render(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """The text that transformers renders, with the opening of the next reply.

    Raises CannotRender and TooCostly.
    """
    request = [SECONDS, template, [dict(message) for message in messages], dict(variables)]
    return _renderer.render(json.dumps(request).encode())


class _Renderer:
    """The process, started at the first rendering and again after it was killed."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it: a fork does not share its pipes
        atexit.register(self.close)

    def render(self, request: bytes) -> str:
        with self._lock:
            process = self._process
            if process is None or self._owner != os.getpid() or process.poll() is not None:
                process = self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                _send(process.stdin, request)
                answer = _receive(process.stdout)
            except (OSError, EOFError):
                self._process = None
                raise _why_it_ended(process) from None
        text, problem, costly = json.loads(answer)
        if problem is not None:
            raise TooCostly(problem) if costly else CannotRender(problem)
        return str(text)

    def close(self) -> None:
        """End the process, which would end with this one in any case."""
        if self._process is not None and self._owner == os.getpid():
            _why_it_ended(self._process)
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(each for each in sys.path if each)
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._owner = os.getpid()
        return self._process


def _why_it_ended(process: subprocess.Popen[bytes]) -> TooCostly:
    process.kill()
    with suppress(OSError):
        process.communicate()
    if process.returncode == -signal.SIGPROF:
        return TooCostly(f"takes more than {SECONDS} seconds")
    return TooCostly(f"ends its process ({process.returncode})")


def _send(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    """Raises EOFError where the other side has ended."""
    length = stream.read(_LENGTH_BYTES)
    data = stream.read(int.from_bytes(length, "little"))
    if len(length) < _LENGTH_BYTES or len(data) < int.from_bytes(length, "little"):
        raise EOFError
    return data


def _serve() -> None:
    """Render what is asked on standard input until that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that is for the process which asks
    replies, sys.stdout = sys.stdout.buffer, sys.stderr
    renderer = _load()
    _limit_memory()
    with suppress(EOFError, BrokenPipeError):
        while request := _receive(sys.stdin.buffer):
            seconds, *question = json.loads(request)
            # Its default action ends this process, also where one operation takes all the time.
            signal.setitimer(signal.ITIMER_PROF, seconds)
            answer = _answer(renderer, *question, size=len(request))
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(replies, json.dumps(answer).encode())


def _load() -> Any:
    """transformers' module alone: the whole package takes seconds to import."""
    from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_NAMESPACE  # type: ignore[attr-defined]

    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    sys.modules["torch"] = None  # type: ignore[assignment]
    packages = {"transformers": root, "transformers.utils": root / "utils"}
    for name, folder in packages.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(folder)]
    try:
        from transformers.utils import chat_template_utils
    except ImportError:  # a version in which it needs more of the package
        for name in [each for each in sys.modules if each.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        from transformers.utils import chat_template_utils
    del DEFAULT_FILTERS["random"], DEFAULT_NAMESPACE["lipsum"]
    return chat_template_utils


def _limit_memory() -> None:
    with suppress(OSError, ValueError):  # a system without /proc has no such limit
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(
    renderer: Any,
    template: str,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    *,
    size: int,
) -> tuple[str | None, str | None, bool]:
    """The text, or why there is none and whether that is for its cost."""
    costly = f"takes more than {MEMORY >> 20} MiB of memory"
    most = LEAST_TEXT + TEXT_PER_BYTE * size
    random.seed(0)
    try:
        (text,), _ = renderer.render_jinja_template(
            conversations=[messages],
            chat_template=template,
            add_generation_prompt=True,
            **variables,
        )
        if len(text) > most:
            return None, f"writes {len(text):,} characters for {size:,} bytes", True
        text.encode()
    except MemoryError:
        return None, costly, True
    except Exception as error:  # a template is a program, which may fail in any way
        problem = " ".join(str(error)[:10_000].split())[:160] or type(error).__name__
        return None, problem, False
    address = re.search(r"<[^<>]* at 0x[0-9a-f]+>", text)
    if address and address[0] not in json.dumps(messages, ensure_ascii=False):
        shown = address[0][:80]
        return None, f"the template writes an address of memory, another each time: {shown}", False
    return text, None, False


_renderer = _Renderer()

if __name__ == "__main__":
    _serve()
