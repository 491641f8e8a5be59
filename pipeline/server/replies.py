"""What is sent: bodies and server-sent events of both APIs, usage, acceptance; and to whom.

A client that goes away, or takes nothing for `stall_seconds`, ends its requests: their pages are
free after the engine's next step.

Acceptance is beside `usage`, in `meta_info`, under SGLang's names; times are in `metrics`, under
vLLM's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pipeline.decoder.request import Completion, Statistics
from pipeline.reports import SglangNames
from pipeline.server.protocol import ApiError
from pipeline.server.worker import EngineWorker, Job, ReplyPiece

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

#: ASGI: a callable that answers one request.
Answer = Callable[["Scope", "Receive", "Send"], Awaitable[None]]

JSON = "application/json"


@dataclass(frozen=True)
class ReplyStyle:
    """How one request's replies are written."""

    chat: bool
    model: str
    drafts: bool  # not plain decoding
    with_ids: bool  # return_token_ids
    with_usage: bool  # stream_options.include_usage
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = field(default_factory=lambda: uuid4().hex)

    @property
    def reply_id(self) -> str:
        return f"{'chatcmpl' if self.chat else 'cmpl'}-{self.name}"

    def body(self, jobs: Sequence[Job]) -> dict[str, Any]:
        """A whole reply. Raises ApiError where a request has ended with an error."""
        for job in jobs:
            if (problem := problem_of(job)) is not None:
                raise problem
        choices = [self._choice(index, job) for index, job in enumerate(jobs)]
        return self._head(streamed=False) | {"choices": choices} | self._totals(jobs)

    def opening(self, jobs: Sequence[Job]) -> Iterator[bytes]:
        """What a stream begins with."""
        for index, job in enumerate(jobs if self.chat else ()):
            ids = {"prompt_token_ids": list(job.request.prompt_ids)} if self.with_ids else {}
            yield self._event([self._delta(index, {"role": "assistant", "content": ""})], ids)

    def events(self, index: int, job: Job, piece: ReplyPiece) -> Iterator[bytes]:
        """What one piece adds to a stream."""
        ended = piece.completion
        ids = {"token_ids": piece.token_ids} if self.with_ids else {}
        if not (piece.text or ended or (self.with_ids and piece.token_ids)):
            return
        if self.chat:
            choice = self._delta(index, {"content": piece.text} if piece.text else {})
        else:
            choice = {"index": index, "text": piece.text, "logprobs": None, "finish_reason": None}
        yield self._event([choice | ids | (_finish(job, ended) if ended else {})])

    def closing(self, jobs: Sequence[Job]) -> Iterator[bytes]:
        """What a stream ends with."""
        if self.with_usage:
            yield self._event([], self._totals(jobs))
        yield DONE

    def _head(self, *, streamed: bool) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        kind += ".chunk" if streamed and self.chat else ""
        return {"id": self.reply_id, "object": kind, "created": self.created, "model": self.model}

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any] | None = None) -> bytes:
        return event(self._head(streamed=True) | {"choices": choices} | (more or {}))

    @staticmethod
    def _delta(index: int, delta: dict[str, str]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _choice(self, index: int, job: Job) -> dict[str, Any]:
        assert job.completion is not None
        piece = job.take()
        choice: dict[str, Any] = {"index": index, "logprobs": None}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": piece.text}
        else:
            choice["text"] = piece.text
        if self.with_ids:
            choice["token_ids"] = list(job.completion.token_ids)
            choice["prompt_token_ids"] = list(job.request.prompt_ids)
        return choice | _finish(job, job.completion)

    def _totals(self, jobs: Sequence[Job]) -> dict[str, Any]:
        prompt_tokens = sum(len(job.request.prompt_ids) for job in jobs)
        done = [job.completion for job in jobs if job.completion]
        made = sum(len(each.token_ids) for each in done)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": made,
            "total_tokens": prompt_tokens + made,
        }
        statistics = [each.statistics for each in done]
        times = {"metrics": _times(statistics[0])} if len(done) == 1 else {}
        acceptance = SglangNames.of([each.counters() for each in statistics])
        meta_info = acceptance.model_dump() if self.drafts else {}
        return {"usage": usage, "meta_info": meta_info, **times}


DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def problem_of(job: Job) -> ApiError | None:
    """Why a request has ended without a whole reply."""
    ended = job.completion
    if ended is None or ended.finish_reason in ("stop", "length"):
        return None
    what = ended.error.what if ended.error else "the request was aborted"
    return ApiError(500, what, kind="server_error", code=ended.finish_reason)


def _finish(job: Job, completion: Completion) -> dict[str, Any]:
    return {"finish_reason": completion.finish_reason, "stop_reason": job.stop_reason}


def _times(statistics: Statistics) -> dict[str, float]:
    """Milliseconds."""
    return {
        "queue_time_ms": 1000 * statistics.queued_seconds,
        "time_to_first_token_ms": 1000 * statistics.first_token_seconds,
        "generation_time_ms": 1000 * statistics.decode_seconds,
        "mean_itl_ms": 1000 * statistics.seconds_per_token,
    }


class Exchange:
    """The jobs of one HTTP request, and the connection that waits for them."""

    def __init__(
        self,
        worker: EngineWorker,
        jobs: Sequence[Job],
        changed: asyncio.Event,
        style: ReplyStyle,
        stall_seconds: float,
    ) -> None:
        self._worker, self._jobs, self._changed = worker, jobs, changed
        self._style, self._stall = style, stall_seconds

    async def whole(self, request: Request) -> Answer:
        """The reply once all of it is there. Raises ApiError."""
        await self._unless_gone(self._finished(), request.receive)
        return as_json(self._style.body(self._jobs))

    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The reply as it grows, as server-sent events."""
        with suppress(ApiError):  # nobody is there to be told
            await self._unless_gone(self._write(send), receive)

    async def _unless_gone(self, work: Coroutine[Any, Any, None], receive: Receive) -> None:
        """Work for a client; where it goes away first, that ends. The jobs end in any case."""
        working, leaving = asyncio.create_task(work), asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ApiError(499, "the client has gone")
            await working
        finally:
            for job in self._jobs:
                self._worker.abort(job)
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def _finished(self) -> None:
        while any(job.completion is None for job in self._jobs):
            await self._changed.wait()
            self._changed.clear()

    async def _write(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for data in self._style.opening(self._jobs):
            await self._send(send, data)
        left = dict(enumerate(self._jobs))
        while left:
            await self._changed.wait()
            self._changed.clear()
            for index, job in list(left.items()):
                piece = job.take()
                if piece.completion is not None:
                    del left[index]
                    if (problem := problem_of(job)) is not None:
                        return await self._send(send, event(problem.body) + DONE, more=False)
                for data in self._style.events(index, job, piece):
                    await self._send(send, data)
        await self._send(send, b"".join(self._style.closing(self._jobs)), more=False)
        return None

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        """Waits while the client reads too slowly. Raises ApiError when it reads nothing."""
        try:
            async with asyncio.timeout(self._stall):
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise ApiError(499, "the client has stopped reading") from None


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def as_json(
    body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A response with a JSON body."""
    from starlette.responses import Response

    data = json.dumps(body, ensure_ascii=False).encode()
    return Response(data, status_code=status, headers=headers, media_type=JSON)


def refusal(error: ApiError) -> Response:
    """A response that says what was wrong."""
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else None
    return as_json(error.body, error.status, headers)
