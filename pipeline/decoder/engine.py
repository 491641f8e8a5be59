"""The scheduler: requests wait, are admitted and prefilled, run in rounds, and are retired.

    engine = Engine(model, slots=32)                       # plain
    engine = Engine(model, drafter=Eagle3Drafter(…))       # speculative
    for completion in engine.generate(requests): …         # in order of completion
    for emission in engine.stream(requests): …             # token by token

A request's life:

    1  it waits for a slot and for all the pages that it can ever need, so it is never preempted
    2  its prompt is read in chunks between the others' rounds; the last chunk draws its first token
    3  it takes part in rounds until a stop token or its length limit
    4  its pages are freed and its row goes to the last running request

A request that cannot be run, or whose logits turn NaN, ends as a completion with an error; the
others go on undisturbed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch

from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.drafters.base import Drafter
from pipeline.decoder.graphs import PendingTokens, RoundRunner, copy_to_host, default_buckets
from pipeline.decoder.kv import PageAllocator, pages_for
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import (
    Completion,
    Emission,
    Problem,
    Request,
    RunningRequest,
    Statistics,
)
from pipeline.decoder.round import Verify, prefill_chunk

#: A prefill or a round under way: the requests in its rows, and its tokens.
_Launch = tuple[list[RunningRequest], PendingTokens]

#: Prompt tokens read between two rounds: long enough for efficient matrix products, short enough
#: that the others' next tokens are not delayed much. While nobody is decoding there is nobody to
#: delay, but the first to arrive should not wait for all: four times as many.
PREFILL_TOKENS = 512
_IDLE_FACTOR = 4


class Engine:
    """Continuous batching over `slots` rows of static buffers and one pool of pages."""

    def __init__(
        self,
        model: DecoderModel,
        *,
        drafter: Drafter | None = None,
        slots: int = 1,
        pages: int | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
        buckets: Sequence[int] | None = None,
        overlap: bool | None = None,
        verify: Verify | None = None,
    ) -> None:
        """`pages` limits the pool; by default every slot can hold a request of full length.

        `buckets` are the batch sizes that rounds run at (default: exact on a CPU), `overlap`
        launches a round before the last one's tokens are read (default: on CUDA). `verify` takes
        the place of honest verification: completions are then marked as simulated.
        """
        cuda, device = model.device.type == "cuda", model.device
        self.model, self.drafter, self.slots = model, drafter, slots
        self._prefill_tokens, self._simulated = prefill_tokens, verify is not None
        overlap = cuda if overlap is None else overlap
        self._max_unread = int(overlap)  # launches in flight whose tokens may still be unread
        emitted = drafter.depth + 1 if drafter else 1  # most tokens that a round emits
        tree = max(drafter.nodes, drafter.lookahead) if drafter else 1
        # Behind the last kept token stand what a round too many commits, for each round in flight,
        # and the tree on top.
        self._spare = emitted * (1 + self._max_unread) + tree
        row_pages = pages_for(model.max_length + self._spare)
        pages = slots * row_pages + 1 if pages is None else pages
        self.allocator = PageAllocator(pages, device=device)
        self._plane = model.plane(self.allocator)
        if drafter:
            drafter.make_plane(self.allocator)
        self._batch, self._prefill_batch = (
            DecodeBatch.empty(
                rows,
                pages=row_pages,
                state_size=drafter.state_size if drafter else 0,
                emitted=emitted,
                dtype=model.dtype,
                device=device,
            )
            for rows in (slots, 1)
        )
        if buckets is None and cuda:
            buckets = default_buckets(slots)
        with torch.inference_mode():
            self._runner = RoundRunner(
                model, self._plane, drafter, self._batch, buckets=buckets, verify=verify
            )
        self._running: list[RunningRequest] = []  # request r holds row r
        self._prefilling: RunningRequest | None = None  # holds the row of the prefill batch
        self._ready: deque[Emission] = deque()

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Completions as they finish; requests are taken from the iterable as slots become free."""
        for emission in self.stream(requests):
            if emission.completion is not None:
                yield emission.completion

    @torch.inference_mode()
    def stream(self, requests: Iterable[Request]) -> Iterator[Emission]:
        """Tokens as they are emitted, of all requests in turn."""
        waiting = _WaitingQueue(requests)
        in_flight: deque[list[_Launch]] = deque()  # not yet read; a list for each pass of this loop
        try:
            while waiting or self._prefilling or self._running or in_flight:
                in_flight.append(self._launch(waiting))
                while in_flight and (len(in_flight) > self._max_unread or not in_flight[-1]):
                    self._collect(in_flight.popleft())
                while self._ready:
                    yield self._ready.popleft()
        finally:
            self._abandon()

    def _launch(self, waiting: _WaitingQueue) -> list[_Launch]:
        """Read prompts, within the budget, and run one round of the running requests."""
        launched = self._prefill(waiting)
        if not self._max_unread:  # a request may end with its first token
            self._collect(launched)
            launched = []
        if self._running:
            rows = len(self._running)
            sampling = any(running.request.temperature > 0 for running in self._running)
            self._runner.run(rows, sampling=sampling)
            launched.append((list(self._running), copy_to_host(self._batch.rows(0, rows))))
        return launched

    def _prefill(self, waiting: _WaitingQueue) -> list[_Launch]:
        """Read chunks of prompts within the budget; a request joins the rounds after its last."""
        launched: list[_Launch] = []
        budget = self._prefill_tokens * (1 if self._running else _IDLE_FACTOR)
        while budget > 0 and (arriving := self._prefilling or self._admit(waiting)):
            prompt = arriving.request.prompt_ids
            end = min(arriving.prefilled + budget, len(prompt))
            budget -= end - arriving.prefilled
            chunk = self._tensor(prompt[arriving.prefilled : end])[None]  # [1, n]
            following = self._tensor(prompt[end : end + 1]) if end < len(prompt) else None
            prefill_chunk(
                self.model, self._plane, self.drafter, self._prefill_batch, chunk, following
            )
            arriving.prefilled, self._prefilling = end, arriving
            if following is None:
                launched.append(([arriving], copy_to_host(self._prefill_batch)))
                self._batch.copy_row(len(self._running), self._prefill_batch, 0)
                self._running.append(arriving)
                self._prefilling = None
        return launched

    def _admit(self, waiting: _WaitingQueue) -> RunningRequest | None:
        """The next request that can run; None without one, a free slot or enough pages."""
        while waiting and len(self._running) < self.slots:
            request = waiting.first
            need = pages_for(len(request.prompt_ids) + request.max_new_tokens + self._spare)
            problem = self._problem(request, need)
            if problem is not None:
                waiting.pop()
                failed = Completion(request.request_id, (), "error", Statistics(), problem)
                self._ready.append(Emission(request.request_id, (), failed))
                continue
            pages = self.allocator.allocate(need)
            if pages is None:
                return None
            waiting.pop()
            return self._open(request, pages, waiting.opened)
        return None

    def _open(self, request: Request, pages: list[int], submitted: float) -> RunningRequest:
        """Give an admitted request the row of the prefill batch."""
        now = time.perf_counter()
        self._prefill_batch.open_row(
            0,
            pages,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
        )
        statistics = Statistics(simulated=self._simulated, queued_seconds=now - submitted)
        return RunningRequest(request, pages, now, statistics=statistics)

    def _problem(self, request: Request, need: int) -> Problem | None:
        """Why a request that needs so many pages can never be run here."""
        model, capacity = self.model, self.allocator.capacity
        problem = request.problem(vocabulary=model.vocabulary, max_length=model.max_length)
        if problem is None and need > capacity:
            what = f"needs {need} pages of key/value memory, the pool has {capacity}"
            return Problem(what, "give the engine more pages")
        return problem

    def _collect(self, launched: list[_Launch]) -> None:
        """Hand out what launches emitted, and retire the requests that ended."""
        for requests, pending in launched:
            emitted, now = pending.wait(), time.perf_counter()
            for running, tokens in zip(requests, emitted, strict=True):
                if running.finish_reason is not None:
                    continue  # ended while this round was under way
                self._ready.append(running.take(tokens, now))
                if running.finish_reason is not None:
                    self._retire(running)

    def _retire(self, running: RunningRequest) -> None:
        """Free the pages; the last running request takes over the row."""
        row, last = self._running.index(running), self._running.pop()
        if last is not running:
            self._running[row] = last
            self._batch.copy_row(row, self._batch, len(self._running))
        self._batch.clear_row(len(self._running))
        self.allocator.free(running.pages)

    def _abandon(self) -> None:
        """Drop everything, for a caller that stopped listening."""
        for running in list(self._running):
            self._retire(running)
        if self._prefilling is not None:
            self.allocator.free(self._prefilling.pages)
            self._prefilling = None
        self._ready.clear()

    def _tensor(self, token_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(token_ids, device=self.model.device)


class _WaitingQueue:
    """Requests that wait to be admitted, read from the caller's iterable one ahead."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._source = iter(requests)
        self.opened = time.perf_counter()
        self.pop()

    def __bool__(self) -> bool:
        return self._first is not None

    @property
    def first(self) -> Request:
        assert self._first is not None
        return self._first

    def pop(self) -> None:
        self._first = next(self._source, None)
