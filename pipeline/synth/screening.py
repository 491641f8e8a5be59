"""Screening beside generation: requests are handed out while processes of its own look at texts.

    caller's thread    read ─┐         ┌─▶ requests ─▶ replies ─┐
    processes                └▶ screen ┘                        └▶ screen ─┐
    threads                                                                └▶ commit

Prompts are screened a few shards ahead; by this process while the others load their recognisers,
which takes seconds. A shard's texts are screened together, as they are without
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
from functools import partial
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, TypeVar

from pipeline.config import SynthSection
from pipeline.errors import Eagle3Error, WorkersDied
from pipeline.records import Prompt, Sample
from pipeline.synth.screen import Screen

Result = TypeVar("Result")
#: Kept prompts, dropped ones by reason, findings; and the same of samples.
ScreenedPrompts = tuple[list[Prompt], Counter[str], dict[str, Any]]
ScreenedSamples = tuple[list[Sample], Counter[str], dict[str, Any]]

#: Shards whose prompts are screened before generation asks for them, and processes by default.
_AHEAD, _MOST_PROCESSES = 2, 4
_ENDED_BY = (signal.SIGINT, signal.SIGTERM)


class Screening:
    """The work of `screen` in processes that each make their own; with none of them here, at once.

    Leaving it waits for the shards that are being committed, unless it is interrupted.
    """

    def __init__(self, screen: Screen, section: SynthSection, *, seed: int) -> None:
        self._screen, self._lock = screen, threading.Lock()
        self._make_screen = partial(Screen, section, seed=seed)
        self._count = count_processes(section)
        self._ahead, self._most_commits = min(self._count, _AHEAD), self._count + 1
        self._commits: deque[Future[None]] = deque()
        self._processes: ProcessPoolExecutor | None = None
        self._children: list[BaseProcess] = []

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
            for child in self._children:  # one that still loads would be waited for
                child.kill()
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
            if self._count and self._processes is None:
                self._launch()  # not before: there may be no shard left for this process
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

    def _launch(self) -> None:
        context = get_context("spawn")  # a fork would copy the locks of running threads
        theirs, self._ours = context.Pipe(duplex=False)
        given = theirs, self._make_screen
        self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="commit")
        self._processes = ProcessPoolExecutor(self._count, context, _begin, given)
        # What is blocked here is blocked there from the first instruction on: an interruption while
        # they load is the parent's to tell.
        mask, others = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDED_BY), active_children()
        try:
            self._loaded: Future[None] = self._processes.submit(_nothing)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._children = [child for child in active_children() if child not in others]

    def _start(self, work: Callable[[Screen, Any], Result], records: Any) -> Callable[[], Result]:
        """Returns what waits for the result."""
        if self._processes is None or self._is_loading():
            with self._lock:  # its ledger is taken after each shard
                screened = work(self._screen, records)
            return lambda: screened
        try:
            future = self._processes.submit(_work, work, records)
        except BrokenProcessPool:
            raise _died() from None
        return partial(_wait, future)

    def _is_loading(self) -> bool:
        return not self._loaded.done()


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


def _nothing() -> None:
    """For a process to take as soon as it has begun."""


_own: Screen | Eagle3Error


def _own_screen() -> Screen:
    if isinstance(_own, Eagle3Error):
        raise _own
    return _own


def _begin(parent: Connection, make_screen: Callable[[], Screen]) -> None:
    """What a process does first. Signals are its parent's business: it ends with it."""
    global _own
    for number in _ENDED_BY:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()
    try:
        _own = make_screen()
    except Eagle3Error as error:  # a task's error crosses to the parent, this function's does not
        _own = error


def _end_with(parent: Connection) -> None:
    parent.poll(None)  # nothing is ever sent
    os._exit(0)
