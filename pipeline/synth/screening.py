"""Screening beside generation: requests are handed out while processes of its own look at texts.

    caller's thread    read ─┐         ┌─▶ requests ─▶ replies ─┐
    processes                └▶ screen ┘                        └▶ screen ─┐
    threads                                                                └▶ commit

Prompts are screened a few shards ahead. A shard's texts are screened together, as they are without
processes, so that their number changes no byte. The processes end once this one's end of a pipe is
closed, which the kernel does when it is killed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache, partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, TypeVar

from pipeline.config import SynthSection
from pipeline.errors import WorkersDied
from pipeline.records import Prompt, Sample
from pipeline.synth.screen import Screen

Result = TypeVar("Result")
#: Kept prompts, dropped ones by reason, findings; and the same of samples.
ScreenedPrompts = tuple[list[Prompt], Counter[str], dict[str, Any]]
ScreenedSamples = tuple[list[Sample], Counter[str], dict[str, Any]]

#: Shards whose prompts are screened before generation asks for them, and processes by default.
_AHEAD, _MOST_PROCESSES = 2, 4


class Screening:
    """The work of `screen` in processes that each make their own; with none of them here, at once.

    Leaving it waits for the shards that are being committed, unless it is interrupted.
    """

    def __init__(self, screen: Screen, section: SynthSection, *, seed: int) -> None:
        self._screen, processes = screen, count_processes(section)
        self._ahead, self._most_commits = min(processes, _AHEAD), processes + 1
        self._commits: deque[Future[None]] = deque()
        self._processes: ProcessPoolExecutor | None = None
        if processes:
            context = get_context("spawn")  # a fork would copy the locks of running threads
            theirs, self._ours = context.Pipe(duplex=False)
            given = theirs, partial(Screen, section, seed=seed)
            self._processes = ProcessPoolExecutor(processes, context, _begin, given)
            self._threads = ThreadPoolExecutor(processes, thread_name_prefix="commit")

    def __enter__(self) -> Screening:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._processes is None:
            return
        if kind and not issubclass(kind, Exception):
            self._ours.close()
        try:
            while self._commits and not kind:
                self._commits.popleft().result()
        finally:
            self._threads.shutdown()
            self._ours.close()
            self._processes.shutdown(wait=False, cancel_futures=True)

    def prompts(
        self, shards: Iterable[tuple[str, Sequence[Prompt]]]
    ) -> Iterator[tuple[str, ScreenedPrompts]]:
        """Those of each named shard, in the same order."""
        started: deque[tuple[str, Callable[[], ScreenedPrompts]]] = deque()
        for name, prompts in shards:
            started.append((name, self._start(_screen_prompts, prompts)))
            if len(started) > self._ahead:
                name, result = started.popleft()
                yield name, result()
        for name, result in started:
            yield name, result()

    def samples(self, samples: Sequence[Sample]) -> ScreenedSamples:
        """Those of one shard."""
        return self._start(_screen_samples, samples)()

    def commit(self, task: Callable[[], None]) -> None:
        """Have `task` done in the background. Waits while there are too many; raises what they do.

        So memory and claims do not grow where screening is slower than generation.
        """
        if self._processes is None:
            task()
            return
        self._commits.append(self._threads.submit(task))
        while len(self._commits) > self._most_commits or (
            self._commits and self._commits[0].done()
        ):
            self._commits.popleft().result()

    def _start(self, work: Callable[[Screen, Any], Result], records: Any) -> Callable[[], Result]:
        """Returns what waits for the result."""
        if self._processes is None:
            screened = work(self._screen, records)
            return lambda: screened
        try:
            future = self._processes.submit(_work, work, records)
        except BrokenProcessPool:
            raise _died() from None
        return partial(_wait, future)


def count_processes(section: SynthSection) -> int:
    """How many the section wants on this machine.

    The bundled decoder keeps every core busy itself, and without recognisers there is little to do.
    """
    if section.screening_processes is not None:
        return section.screening_processes
    if section.generator.backend == "local" or not section.pii.enabled:
        return 0
    return max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) - 1))


def _screen_prompts(screen: Screen, prompts: Sequence[Prompt]) -> ScreenedPrompts:
    return *screen.prompts(prompts), screen.take_audit()


def _screen_samples(screen: Screen, samples: Sequence[Sample]) -> ScreenedSamples:
    return *screen.samples(samples), screen.take_audit()


def _wait(future: Future[Result]) -> Result:
    try:
        return future.result()
    except BrokenProcessPool:
        raise _died() from None


def _died() -> WorkersDied:
    return WorkersDied(
        "a screening process has ended early, perhaps for want of memory",
        where="synth.screening_processes",
        fix="run the same command again, with fewer of them or 0; a script of your own that calls "
        "the stage does so under `if __name__ == '__main__':`",
    )


def _work(work: Callable[[Screen, Any], Result], records: Any) -> Result:
    return work(_own_screen(), records)


@cache
def _own_screen() -> Screen:
    """Made by the first task and not before, so that an error is the task's."""
    return _make_screen()


_make_screen: Callable[[], Screen]


def _begin(parent: Connection, make_screen: Callable[[], Screen]) -> None:
    """A process's first call. Signals are its parent's business: it ends with it."""
    global _make_screen
    _make_screen = make_screen
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()


def _end_with(parent: Connection) -> None:
    parent.poll(None)  # nothing is ever sent
    os._exit(0)
