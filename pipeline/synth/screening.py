"""Screening beside generation: requests are handed out while processes of its own look at texts.

    caller's thread    read ─┐         ┌─▶ requests ─▶ replies ─┐
    processes                └▶ screen ┘                        └▶ screen ─┐
    threads                                                                └▶ commit

Prompts are screened a few shards ahead; by this process while the others load their recognisers,
which takes seconds. A shard's texts are screened together, as they are without
processes, so that their number changes no byte. The processes are killed at the end, and end by
themselves when this one is killed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
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
_ENDED_BY = (signal.SIGINT, signal.SIGTERM)


class Screening:
    """The work of `screen` in processes that each make their own; with none of them here, at once.

    Leaving it waits for the shards that are being committed, unless something went wrong.
    """

    def __init__(self, screen: Screen, section: SynthSection, *, seed: int) -> None:
        self._screen = screen
        self._make_screen = partial(Screen, section, seed=seed)
        self._count = count_processes(section)
        self._ahead, self._most_commits = min(self._count, _AHEAD), self._count + 1
        self._commits: deque[Future[None]] = deque()
        self._processes: tuple[_Process, ...] = ()
        self._idle: SimpleQueue[_Process] = SimpleQueue()

    def __enter__(self) -> Screening:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._processes:
            return
        try:
            while self._commits and not kind:
                self._commits.popleft().result()
        finally:
            for process in self._processes:
                process.kill()
            for threads in (self._here, self._asking, self._committing):
                threads.shutdown(cancel_futures=True)

    def prompts(
        self, shards: Iterable[tuple[str, Sequence[Prompt]]]
    ) -> Iterator[tuple[str, ScreenedPrompts]]:
        """Those of each named shard, in the same order."""
        started: deque[tuple[str, Callable[[], ScreenedPrompts]]] = deque()
        for name, prompts in shards:
            if self._count and not self._processes:
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
        if not self._processes:
            task()
            return
        self._commits.append(self._committing.submit(task))
        while len(self._commits) > self._most_commits or (
            self._commits and self._commits[0].done()
        ):
            self._commits.popleft().result()

    def _launch(self) -> None:
        # Not in the caller's thread, where an interruption may be lost in a recogniser's C code;
        # one at a time, as the ledger is taken after each shard.
        self._here = ThreadPoolExecutor(1, thread_name_prefix="screen")
        self._asking = ThreadPoolExecutor(self._count, thread_name_prefix="ask")
        self._committing = ThreadPoolExecutor(self._count, thread_name_prefix="commit")
        resource_tracker.ensure_running()  # which would lift the block below
        # What is blocked here is blocked there from the first instruction on: an interruption while
        # they load is the parent's to tell.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDED_BY)
        try:
            for _ in range(self._count):
                self._processes = (*self._processes, _Process(self._make_screen))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for process in self._processes:
            self._idle.put(process)

    def _start(self, work: Callable[[Screen, Any], Result], records: Any) -> Callable[[], Result]:
        """Returns what waits for the result."""
        if not self._processes:
            screened = work(self._screen, records)
            return lambda: screened
        if self._is_loading():
            return self._here.submit(work, self._screen, records).result
        return self._asking.submit(self._ask, work, records).result

    def _ask(self, work: Callable[[Screen, Any], Result], records: Any) -> Result:
        process = self._idle.get()
        try:
            return process.do(work, records)
        finally:
            self._idle.put(process)

    def _is_loading(self) -> bool:
        return not any(process.has_loaded() for process in self._processes)


class _Process:
    """A screening process and this end of its pipe: one task at a time."""

    def __init__(self, make_screen: Callable[[], Screen]) -> None:
        context = get_context("spawn")  # a fork would copy the locks of running threads
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make_screen))
        self._process.start()
        theirs.close()
        self._loaded = False

    def has_loaded(self) -> bool:
        """Or has died, or found an error: the next task will tell."""
        return self._loaded or self._pipe.poll()

    def do(self, work: Callable[[Screen, Any], Result], records: Any) -> Result:
        """Raises what `work` raises there, and WorkersDied."""
        try:
            if not self._loaded:
                self._take()
                self._loaded = True
            self._pipe.send((work, records))
            result: Result = self._take()
        except (EOFError, OSError):
            raise _died() from None
        return result

    def _take(self) -> Any:
        outcome = self._pipe.recv()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def kill(self) -> None:
        """It has nothing to write, and may still load."""
        self._process.kill()
        self._process.join()


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


def _died() -> WorkersDied:
    return WorkersDied(
        "a screening process has ended early, perhaps for want of memory",
        where="synth.screening_processes",
        fix="run the same command again, with fewer of them or 0; a script of your own that calls "
        "the stage does so under `if __name__ == '__main__':`",
    )


def _serve(pipe: Connection, make_screen: Callable[[], Screen]) -> None:
    """What a process does, until its parent ends. Signals are the parent's business."""
    for number in _ENDED_BY:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    try:
        screen = make_screen()
        pipe.send(None)
        while True:
            work, records = pipe.recv()
            pipe.send(work(screen, records))
    except EOFError:
        pass
    except Exception as error:  # crosses to the parent, who raises it
        pipe.send(error)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(0)
