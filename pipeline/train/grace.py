"""SIGTERM, as schedulers send before they kill: training ends with a checkpoint, not at once.

SIGTERM ──► the step ends ──► all processes agree ──► checkpoint ──► KeyboardInterrupt
   └──────── grace seconds later, or at a second signal: KeyboardInterrupt at once
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from pipeline.config import is_launched
from pipeline.console import notice

#: A launcher passes a SIGTERM on that its processes may have got as well, from the scheduler or a
#: terminal; within this time it is the same one.
_SAME_SIGNAL = 5.0


class Grace:
    """While it is open, the first SIGTERM only sets `begun`. Only a main thread gets signals."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._since, self._expired = seconds, 0.0, False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def begun(self) -> bool:
        """Whether this process was asked to end."""
        return self._since > 0

    def __enter__(self) -> Grace:
        if threading.current_thread() is threading.main_thread():
            handlers = {signal.SIGTERM: self._end_soon, signal.SIGALRM: self._end_now}
            self._before = {number: signal.signal(number, handlers[number]) for number in handlers}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in self._before.items():
                signal.signal(number, handler or signal.SIG_DFL)
        if self._expired:
            left = "the newest checkpoint before it stands"
            notice("train", f"no checkpoint within train.grace_seconds={self._seconds:g}: {left}")

    def _end_soon(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.begun:
            self._since = now
            signal.setitimer(signal.ITIMER_REAL, self._seconds)
        elif not is_launched() or now - self._since > _SAME_SIGNAL:
            raise KeyboardInterrupt

    def _end_now(self, number: int, frame: FrameType | None) -> None:
        self._expired = True
        raise KeyboardInterrupt
