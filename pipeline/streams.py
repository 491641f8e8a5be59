"""Standard output that stops no work when nobody takes it.

A reader may have gone (`eagle3 synth … | head`), a log's disk may be full, a launcher may have
closed it. What a stage prints is then dropped; its files and its exit code are what they would be.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any


class LastingOutput:
    """Whatever `sys.stdout` is at the moment; failures to write to it are not raised."""

    def __init__(self) -> None:
        self._lost = False  # something could not be written, and may be in a buffer still

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream(), name)

    def write(self, text: str) -> int:
        with self._going_on():
            self._stream().write(text)
        return len(text)

    def flush(self) -> None:
        with self._going_on():
            self._stream().flush()

    def isatty(self) -> bool:
        stream = self._stream()
        return not stream.closed and stream.isatty()

    def drop_unwritten(self) -> None:
        """At its exit Python writes what is buffered, and a failure changes the exit code."""
        try:
            if self._lost:
                self._stream().flush()
        except (OSError, ValueError):
            discard_output()

    def _stream(self) -> IO[str]:
        open_streams()
        # While a bar is drawn, rich's stand-in for it would write to us again.
        stream: IO[str] = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
        return stream

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            discard_output()  # for good: no reader comes back
        except (OSError, ValueError):  # ValueError: closed by somebody
            self._lost = True


def open_streams() -> None:
    """Take /dev/null for standard streams that are closed.

    Their numbers would otherwise go to the next files, and what is printed into those.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def discard_output() -> None:
    """Send standard output nowhere, and what it still holds."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
