"""A closed loop: so many requests are open at a time, and as one ends the next is sent.

Times are the client's: sent to first token, and the mean time of each token after it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationError

from pipeline.errors import EndpointError, EndpointsUnavailable
from pipeline.reports import AcceptanceFigures, GoldenPrompt, LoadPoint
from pipeline.serve_eval.intervals import acceptance_figures, drawn_sums, estimate, percentiles
from pipeline.serve_eval.questions import Question
from pipeline.serve_eval.servers.client import AttemptFailed, LiveClient, ServerGone, gone
from pipeline.serve_eval.servers.kinds import (
    ImpossibleRounds,
    LiveServer,
    MetricCounts,
    ServerPart,
    ServerRounds,
    read_leads,
    read_metrics,
    rounds_of,
    rounds_of_timings,
)

#: How long to wait for counters: vLLM counts a step after it has sent the step's tokens.
_SETTLE_SECONDS = 2.0
#: Characters of why a reply ended.
_LONGEST_REASON = 40
_CUT = frozenset({"disconnected", "truncated"})
#: Why a reply of llama-server ended, in an OpenAI API's words.
_STOPS = {"limit": "length", "eos": "stop", "word": "stop"}


@dataclass(frozen=True)
class LiveReply:
    """A reply that ended well."""

    question: Question
    tokens: int
    token_ids: tuple[int, ...] | None  # None: the server does not give them
    prompt_tokens: int | None
    finish_reason: str
    ttft_seconds: float
    tpot_seconds: float | None  # None: no token after the first
    rounds: ServerRounds | None


@dataclass(frozen=True)
class LoadRun:
    """All requests at one concurrency."""

    concurrency: int
    replies: tuple[LiveReply, ...]
    failed: Counter[str]
    seconds: float
    counted: MetricCounts | None  # by the server meanwhile
    pooled: ServerRounds | None  # only where its replies report nothing
    detail: str = ""  # the server's own words of the first failure

    @property
    def tokens(self) -> int:
        return sum(reply.tokens for reply in self.replies)

    @property
    def rounds(self) -> list[ServerRounds]:
        """By request, else of all together; empty where the server reports none."""
        each = [reply.rounds for reply in self.replies if reply.rounds is not None]
        return each or ([self.pooled] if self.pooled else [])

    @property
    def acceptance_length(self) -> float | None:
        """τ over all requests; None where the server reports no rounds."""
        rounds = sum(each.rounds for each in self.rounds)
        return sum(each.tokens for each in self.rounds) / rounds if rounds else None

    def point(self) -> LoadPoint:
        """As reports have it."""
        names = [each.question.request_id for each in self.replies if each.rounds is not None]
        tpots = [each.tpot_seconds for each in self.replies if each.tpot_seconds is not None]
        return LoadPoint(
            concurrency=self.concurrency,
            temperature=0.0,
            requests=len(self.replies),
            failed=self.failed.total(),
            seconds=self.seconds,
            tokens=self.tokens,
            throughput=self.tokens / self.seconds if self.seconds else 0.0,
            ttft_seconds=percentiles([each.ttft_seconds for each in self.replies]),
            tpot_seconds=percentiles(tpots),
            acceptance=_figures(self.rounds, names or ["all"]) if self.rounds else None,
        )


def _figures(reported: Sequence[ServerRounds], prompts: Sequence[str]) -> AcceptanceFigures | None:
    """τ alone, without α, where the server does not report what each round accepted."""
    counters = [each.counters for each in reported if each.counters is not None]
    if len(counters) == len(reported):
        return acceptance_figures(counters, prompts)
    table = np.array(
        [[each.rounds, each.tokens, 1, each.tokens / each.rounds] for each in reported]
    )
    rounds, tokens, requests, ratios = drawn_sums(table.astype(float), prompts).T
    drafted = sum(each.drafted for each in reported)
    return AcceptanceFigures(
        requests=len(reported),
        rounds=int(rounds[0]),
        acceptance_length=estimate(tokens / rounds, len(set(prompts))),
        request_acceptance_length=estimate(ratios / requests, len(set(prompts))),
        conditional=(),
        joint=(),
        accept_rate=sum(each.accepted for each in reported) / drafted if drafted else 0.0,
    )


class LiveMeasure:
    """The prompts, and the server that they go to."""

    def __init__(
        self,
        client: LiveClient,
        server: LiveServer,
        *,
        url: str,
        new_tokens: int,
        stop_ids: Sequence[int],
    ) -> None:
        self._client, self._server, self._url = client, server, url
        self._new, self._stop = new_tokens, tuple(stop_ids)

    @staticmethod
    def requests(questions: Sequence[Question], concurrency: int) -> int:
        """How many are sent: every prompt once, or more of them for a steady state."""
        return max(len(questions), 2 * concurrency if concurrency > 1 else 1)

    async def run(
        self, questions: Sequence[Question], concurrency: int, advance: Callable[[float], None]
    ) -> LoadRun:
        """Send every prompt, and some again where they are fewer than twice the concurrency.

        Raises EndpointsUnavailable when the server dies, EndpointError when no request succeeds.
        """
        total = self.requests(questions, concurrency)
        left, done = islice(cycle(questions), total), list[LiveReply]()
        failed: Counter[str] = Counter()
        detail = ""
        before = await self._metrics()
        start = time.perf_counter()

        async def work() -> None:
            nonlocal detail
            for question in left:
                try:
                    done.append(await self._send(question, alone=concurrency == 1))
                except AttemptFailed as failure:
                    failed[str(failure)] += 1
                    detail = detail or failure.detail
                    await self._check_alive(str(failure) in _CUT, len(done), total, concurrency)
                except ServerGone:
                    failed["unreachable"] += 1
                    await self._check_alive(True, len(done), total, concurrency)
                advance(1)

        await _all_of(work() for _ in range(concurrency))
        seconds = time.perf_counter() - start
        if not done:
            reasons = ", ".join(f"{count} x {name}" for name, count in failed.most_common())
            problem = (
                f"no request succeeded at concurrency {concurrency}: {reasons} {detail}".strip()
            )
            fix = "look at the server's log; raise eval.server.timeout_seconds if it is only slow"
            raise EndpointError(problem, where=self._url, fix=fix)
        counted = await self._counted(before, sum(reply.tokens for reply in done))
        reported = any(reply.rounds for reply in done)
        pooled = counted.rounds() if counted and not reported else None
        return LoadRun(concurrency, tuple(done), failed, seconds, counted, pooled, detail)

    async def _send(self, question: Question, *, alone: bool) -> LiveReply:
        """One request; `alone`: all that the server counts meanwhile is this one's."""
        counts = alone and not self._server.reports_requests
        before = await self._metrics() if counts else None
        body = self._server.body(question.context, self._new, self._stop)
        reading = _Reading(self._server, self._new)
        start = last = first = time.perf_counter()
        server = self._server
        events = self._client.events(
            *(server.path, body, server.headers), prompt=len(question.context), new=self._new
        )
        async with aclosing(events):
            async for event in events:
                now, before_it = time.perf_counter(), reading.tokens_so_far
                reading.take(event)
                if reading.tokens_so_far > before_it:
                    first, last = (first if before_it else now), now
        tokens = reading.completion
        if not tokens:
            raise AttemptFailed("empty")
        try:
            rounds = reading.rounds
        except (ImpossibleRounds, ValidationError):  # RoundCounters do not add up
            raise AttemptFailed("impossible_counters") from None
        if counts and rounds is None:
            counted = await self._counted(before, tokens)
            if counted and counted.generated == tokens:
                rounds = counted.rounds()
        return LiveReply(
            question,
            tokens,
            reading.token_ids,
            reading.prompt_tokens,
            reading.finish_reason,
            first - start,
            (last - first) / (tokens - 1) if tokens > 1 else None,
            rounds,
        )

    async def leads(self, prompts: Sequence[GoldenPrompt]) -> dict[str, tuple[float, ...]]:
        """Of the tokens of the decoder's replies, by prompt, as `read_leads`; {} of a server that
        does not say. The last is not sent, so that there is room for one of the server's.

        Raises EndpointsUnavailable when it dies.
        """
        scored: dict[str, tuple[float, ...]] = {}
        for each in prompts:
            try:
                ids = each.prompt_ids, each.reply_ids[:-1]
                leads = await read_leads(self._client, self._server, *ids)
            except ServerGone:
                raise gone(self._url) from None
            if leads is None:
                return {}
            scored[each.id] = leads
        return scored

    async def _metrics(self) -> MetricCounts | None:
        if self._server.kind in ("sglang", "llamacpp"):
            return None
        return await read_metrics(self._client, self._server.model)

    async def _counted(self, before: MetricCounts | None, tokens: int) -> MetricCounts | None:
        """What was counted since, once it holds all that came back."""
        until = time.monotonic() + _SETTLE_SECONDS
        while before is not None:
            now = await self._metrics()
            if now is None:
                return None
            counted = now.since(before)
            if counted.generated >= tokens or time.monotonic() > until:
                return counted
            await asyncio.sleep(0.02)
        return None

    async def _check_alive(self, cut: bool, done: int, total: int, concurrency: int) -> None:
        """Raises EndpointsUnavailable where a cut connection was the server's end."""
        if not cut:
            return
        try:
            await self._client.page("/v1/models")
        except ServerGone:
            problem = f"the server is gone after {done} of {total} requests"
            problem += f" at concurrency {concurrency}; nothing is stored"
            fix = "look at its log, start it again, and run the same command"
            raise EndpointsUnavailable(problem, where=self._url, fix=fix) from None


_Count = Annotated[int, Field(ge=0)]


class _StreamedChoice(ServerPart):
    token_ids: list[_Count] | None = None
    text: str | None = None
    finish_reason: str | None = None


class _StreamedUsage(ServerPart):
    completion_tokens: _Count | None = None
    prompt_tokens: _Count | None = None


class _StreamedMeta(_StreamedUsage):
    finish_reason: dict[str, Any] | str | None = None


class _StreamEvent(ServerPart):
    """What is read of an event of any kind of server."""

    choices: list[_StreamedChoice] | None = None
    usage: _StreamedUsage | None = None
    metrics: dict[str, Any] | None = None
    meta_info: dict[str, Any] | None = None
    output_ids: list[_Count] | None = None
    tokens: list[_Count] | None = None
    timings: dict[str, Any] | None = None
    tokens_predicted: _Count | None = None
    tokens_evaluated: _Count | None = None
    stop_type: str | None = None


class _Reading:
    """A stream of events, read into a reply of at most `new` tokens."""

    def __init__(self, server: LiveServer, new: int) -> None:
        self._server, self._new = server, new
        self._native = server.kind == "sglang"
        self._timings: list[dict[str, Any]] = []
        self._pieces: list[list[int]] = []
        self._texts = self._completion = 0
        self.meta: dict[str, Any] = {}
        self.prompt_tokens: int | None = None
        self.finish_reason = ""

    def take(self, event: dict[str, Any]) -> None:
        """Raises AttemptFailed for what is no event, and for more tokens than there may be."""
        try:
            sent = _StreamEvent.model_validate(event)
            if self._native:
                self._take_native(sent)
            elif self._server.kind == "llamacpp":
                self._take_token(sent)
            else:
                self._take_choices(sent)
        except ValidationError:
            raise AttemptFailed("unreadable") from None
        pieces = self._pieces[-1:] if self._native else self._pieces  # its own may be cumulative
        if max(self._completion, sum(map(len, pieces))) > self._new:
            raise AttemptFailed("too_long")
        self.finish_reason = self.finish_reason[:_LONGEST_REASON]

    def _take_choices(self, event: _StreamEvent) -> None:
        rounds = (event.metrics or {}).get("speculative_decoding")
        self.meta = event.meta_info or (rounds if isinstance(rounds, dict) else {}) or self.meta
        usage = event.usage or _StreamedUsage()
        self._completion = usage.completion_tokens or self._completion
        self.prompt_tokens = usage.prompt_tokens or self.prompt_tokens
        for choice in event.choices or ():
            self._pieces.append(choice.token_ids or [])
            self._texts += bool(choice.text)
            self.finish_reason = choice.finish_reason or self.finish_reason

    def _take_native(self, event: _StreamEvent) -> None:
        self.meta = event.meta_info or self.meta
        meta = _StreamedMeta.model_validate(self.meta)
        self._pieces.append(event.output_ids or [])
        self._completion = meta.completion_tokens or self._completion
        self.prompt_tokens = meta.prompt_tokens
        reason = meta.finish_reason if isinstance(meta.finish_reason, dict) else {}
        self.finish_reason = str(reason.get("type", ""))
        if self.finish_reason == "abort":
            raise AttemptFailed("aborted", str(reason.get("message", ""))[:200])

    def _take_token(self, event: _StreamEvent) -> None:
        if event.tokens:
            self._pieces.append(event.tokens)
            self._timings.append(event.timings or {})
        self._completion = event.tokens_predicted or self._completion
        self.prompt_tokens = event.tokens_evaluated or self.prompt_tokens
        self.finish_reason = _STOPS.get(event.stop_type or "", self.finish_reason)

    @property
    def rounds(self) -> ServerRounds | None:
        """As the reply reports them. Raises ImpossibleRounds, ValidationError."""
        depth = self._server.depth
        if self._server.kind == "llamacpp":
            rounds = rounds_of_timings(self._timings, self.completion)
        else:
            rounds = rounds_of(self.meta, self.completion, depth)
        if rounds is not None:
            rounds.check(self.completion, depth)
        return rounds

    @property
    def tokens_so_far(self) -> int:
        """Grows whenever a token arrives; texts are counted where the server gives no ids."""
        if self._native:
            return self._completion
        return sum(map(len, self._pieces)) or self._texts

    @property
    def completion(self) -> int:
        """Tokens of the whole reply, as the server counts them."""
        return self._completion or sum(map(len, self._pieces))

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """Events hold new tokens, or, of some versions of SGLang, all tokens so far."""
        together = [token for piece in self._pieces for token in piece]
        last = next((piece for piece in reversed(self._pieces) if piece), [])
        for ids in (together, last):
            if ids and len(ids) == self.completion:
                return tuple(ids)
        return None


async def _all_of(workers: Iterator[Any]) -> None:
    """Until all are done; the first error ends the others."""
    tasks = [asyncio.create_task(worker) for worker in workers]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
