"""Runs the engine's rounds, on the thread that calls, while requests join and leave.

    connection   submit ─▶ inbox ─┐                      ┌─▶ Job: text, ids, outcome ─▶ connection
    connection   abort  ─▶ inbox ─┴▶ add, abort, step ───┘

Everything that touches the engine happens on that thread; connections and it share only the inbox
and the jobs, each under a lock. A job holds what its connection has not taken yet, as one piece
that grows: a slow reader delays nobody, and what waits for it is never more than one reply.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from pipeline.console import notice
from pipeline.decoder.engine import Engine
from pipeline.decoder.request import Completion, Emission, Problem, Request, Statistics
from pipeline.errors import brief
from pipeline.server.metrics import RequestTimes, ServerMetrics
from pipeline.server.protocol import ApiError
from pipeline.server.text import TextPieces


@dataclass
class ReplyPiece:
    """What a job has emitted since its connection last looked."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    completion: Completion | None = None  # with the last piece


class Job:
    """One request on its way between a connection and the engine."""

    def __init__(self, request: Request, pieces: TextPieces, arrived: Callable[[], None]) -> None:
        """`arrived` is called, on the thread of `run`, whenever there is something to take."""
        self.request, self.times = request, RequestTimes()
        self.stop_reason: int | str | None = None
        self._pieces, self._arrived = pieces, arrived
        self._lock, self._piece = threading.Lock(), ReplyPiece()
        self.tokens: list[int] = []
        self.completion: Completion | None = None

    def take(self) -> ReplyPiece:
        """All that has arrived and was not taken before."""
        with self._lock:
            piece, self._piece = self._piece, ReplyPiece()
            return piece

    def emit(self, emission: Emission) -> bool:
        """Take in tokens; True when a stop string ends the request before the engine does."""
        text, taken, matched = "", [], False
        for token in emission.token_ids:
            taken.append(token)
            if token in self.request.stop_ids:
                continue  # it ends the reply and is none of its text
            text += self._pieces.add(token)
            if matched := self._pieces.matched is not None:
                break
        self.tokens += taken
        if emission.completion is not None and not matched:
            text += self._pieces.end()
            matched = self._pieces.matched is not None  # cannot be before the end of a character
        with self._lock:
            self._piece.text += text
            self._piece.token_ids += taken
        return matched

    def end(self, completion: Completion) -> None:
        """The last that is heard of the request."""
        with self._lock:
            self.completion = self._piece.completion = completion
        self._arrived()

    def notify(self) -> None:
        self._arrived()

    def stopped(self, statistics: Statistics) -> Completion:
        """The completion of a request that a stop string has ended."""
        self.stop_reason = self._pieces.matched
        name, tokens = self.request.request_id, tuple(self.tokens)
        # The round that made the stop string may have gone on beyond it.
        statistics.round_tokens = max(len(tokens) - 1, 0)
        return Completion(name, tokens, "stop", statistics)


class EngineWorker:
    """Owns the engine."""

    def __init__(self, engine: Engine, metrics: ServerMetrics, *, max_waiting: int) -> None:
        self._engine, self._metrics = engine, metrics
        self._most = engine.slots + max_waiting
        self._changed = threading.Condition()
        self._arriving: list[Job] = []
        self._leaving: list[str] = []
        self._jobs: dict[str, Job] = {}
        self._open = 0  # jobs submitted and not ended
        self._closing = self._stopping = False
        self.failure: str | None = None
        self._ended = threading.Event()

    @property
    def open_jobs(self) -> int:
        return self._open

    @property
    def closing(self) -> bool:
        """Whether new requests are refused because the server is about to end."""
        return self._closing

    def submit(self, jobs: Sequence[Job]) -> None:
        """Let jobs wait for slots, all or none. Raises ApiError: 429, 503."""
        with self._changed:
            self.check(len(jobs))
            self._open += len(jobs)
            self._arriving += jobs
            self._changed.notify()

    def check(self, jobs: int = 0) -> None:
        """Raises ApiError: 503 while the server ends, or once the engine has failed; 400 and 429
        where there is no room for so many jobs."""
        if self.failure is not None:
            problem = f"the engine has failed: {self.failure}"
            raise ApiError(503, problem, kind="server_error", code="engine_failed")
        if self._closing:
            problem = "the server is shutting down"
            raise ApiError(503, problem, kind="server_error", code="shutting_down", retry_after=5)
        if jobs > self._most:
            problem = f"{jobs} prompts in one request, at most {self._most} are possible"
            raise ApiError(400, problem, param="prompt")
        if self._open + jobs > self._most:
            problem = "too many requests are waiting; try again later"
            raise ApiError(429, problem, kind="rate_limit_error", code="queue_full", retry_after=1)

    def abort(self, job: Job) -> None:
        """End a job whose connection is gone; nothing happens to one that has ended."""
        if job.completion is None:
            with self._changed:
                self._leaving.append(job.request.request_id)
                self._changed.notify()

    def close(self) -> None:
        """Refuse new requests; those that are here go on."""
        with self._changed:
            self._closing = True

    def stop(self) -> None:
        """End `run`, from another thread; requests that are here end with an error."""
        with self._changed:
            self._closing = self._stopping = True
            self._changed.notify()
        self._ended.wait()

    def run(self) -> None:
        """Rounds until `stop`, or until the engine's first error."""
        try:
            while self._work():
                pass
        except Exception as error:  # whatever it is, no client may wait for ever
            self.failure = f"{type(error).__name__}: {brief(error)}"
            notice("serve", f"the engine has failed, /health says so: {self.failure}")
            self._end_all("the engine has failed")
        else:
            self._end_all("the server has shut down")
        finally:
            with suppress(Exception):  # an engine that has failed may fail again
                self._engine.abandon()
            self._metrics.observe(self._engine, 0)
            self._ended.set()

    def _work(self) -> bool:
        """One step of the engine, or a wait for something to do; False when it is over."""
        with self._changed:
            while not (self._arriving or self._leaving or self._stopping or self._engine.busy):
                self._metrics.observe(self._engine, 0)
                if not self._changed.wait(self._engine.most_idle_seconds):
                    break  # the engine's other processes want to hear from it
            arriving, self._arriving = self._arriving, []
            leaving, self._leaving = self._leaving, []
        if self._stopping:
            self._jobs |= {job.request.request_id: job for job in arriving}
            return False
        for job in arriving:
            self._jobs[job.request.request_id] = job
            self._engine.add(job.request)
        for name in leaving:
            ended = self._engine.abort(name)
            if ended is not None:
                self._end(self._jobs[name], ended)
        for emission in self._engine.step():
            self._hand_out(emission)
        self._metrics.observe(self._engine, len(self._jobs) - self._engine.running)
        return True

    def _hand_out(self, emission: Emission) -> None:
        job = self._jobs.get(emission.request_id)
        if job is None:
            return  # a stop string has ended it in this very step
        if emission.token_ids:
            self._metrics.count_tokens(job.times)
        matched, completion = job.emit(emission), emission.completion
        if matched:
            ended = completion or self._engine.abort(emission.request_id)
            assert ended is not None, "it has just emitted tokens"
            completion = job.stopped(replace(ended.statistics))
        elif completion is not None and completion.finish_reason == "stop":
            job.stop_reason = completion.token_ids[-1]
        if completion is None:
            job.notify()
        else:
            self._end(job, completion)

    def _end(self, job: Job, completion: Completion) -> None:
        del self._jobs[job.request.request_id]
        self._metrics.count(job.times, len(job.request.prompt_ids), completion)
        with self._changed:
            self._open -= 1
        job.end(completion)

    def _end_all(self, why: str) -> None:
        with self._changed:
            self._closing = True
            arriving, self._arriving = self._arriving, []
        self._jobs |= {job.request.request_id: job for job in arriving}
        for job in list(self._jobs.values()):
            problem = Problem(why, "send the request again later")
            name, tokens = job.request.request_id, tuple(job.tokens)
            self._end(job, Completion(name, tokens, "error", Statistics(), problem))


def wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> Callable[[], None]:
    """What tells an event of a loop from another thread, also once the loop has ended."""

    def set_event() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(event.set)

    return set_event
