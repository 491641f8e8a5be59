"""The scheduler: requests wait, are admitted and prefilled, run in rounds, and are retired.

    engine = Engine(model, slots=32)                       # plain
    engine = Engine(model, drafter=Eagle3Drafter(…))       # speculative
    for completion in engine.generate(requests): …         # in order of completion
    for emission in engine.stream(requests): …             # token by token

Or by hand, for requests that come and go while others run, as a server has them:

    engine.add(request)
    while engine.busy:
        for emission in engine.step(): …                   # one round of all
    engine.abort(request.request_id)                       # its pages are free at once

A request's life:

    1  it waits for a slot and for all the pages that it can ever need, so it is never preempted
    2  its prompt is read between the others' rounds, in one forward with other prompts or in
       several chunks; the last one draws its first token
    3  it takes part in rounds until a stop token or its length limit
    4  its pages are freed and its row goes to the last running request

A request that cannot be run, or whose logits turn NaN, ends as a completion with an error; the
others go on undisturbed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from operator import attrgetter

import torch
from torch import Tensor

from pipeline.decoder.batch import DecodeBatch, TokenRows
from pipeline.decoder.drafter import Drafter
from pipeline.decoder.graphs import (
    PROMPT_LENGTHS,
    CaptureStream,
    PendingTokens,
    PromptGraphs,
    RoundLauncher,
    copy_to_host,
    default_buckets,
    planned_bytes,
)
from pipeline.decoder.kv import Planes, Pools, on_gpu, pages_for, pages_that_fit
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.layer import PAGE
from pipeline.decoder.ops.tree import HEADROOM
from pipeline.decoder.request import (
    Completion,
    Emission,
    Problem,
    Request,
    RunningRequest,
    Statistics,
)
from pipeline.decoder.round import Verify, prefill

#: A prefill or a round under way: the requests in its rows, and its tokens.
_Launch = tuple[list[RunningRequest], PendingTokens]

#: Prompt tokens read between two rounds: long enough for efficient matrix products, short enough
#: that the others' next tokens are not delayed much.
PREFILL_TOKENS = 512
#: The same where replies go to a file and nobody waits for a token.
OFFLINE_PREFILL_TOKENS = 4096
#: While nobody is decoding there is nobody to delay, but the first to arrive should not wait for
#: all: four times as many, but no more than offline.
_IDLE_FACTOR = 4
#: Tokens of a prompt that take every path of a long one.
_LONG = 256


class Engine:
    """Continuous batching over `slots` rows of static buffers and one pool of pages."""

    #: Longest time between two steps, also where there is nothing to do; None: any.
    most_idle_seconds: float | None = None

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
        """`pages` is the size of the pool; by default every slot can hold a request of full length,
        or fewer can where a share of the free memory does not hold as much. On a GPU what rounds
        and prompts take is counted first.

        `buckets` are the batch sizes that rounds run at, the largest being `slots` (default: exact
        on a CPU), `overlap` launches a round before the last one's tokens are read (default: on
        CUDA). `verify` takes the place of honest verification: completions are then marked as
        simulated. Raises ConfigError when no request of full length fits into memory, ValueError
        for buckets that do not fit.
        """
        captured, device = on_gpu(model.device), model.device
        self.model, self.drafter, self.slots = model, drafter, slots
        idle = min(_IDLE_FACTOR * prefill_tokens, OFFLINE_PREFILL_TOKENS)
        self.prefill_tokens, self._idle_tokens = prefill_tokens, max(prefill_tokens, idle)
        self._simulated = verify is not None
        overlap = captured if overlap is None else overlap
        self._max_unread = int(overlap)  # launches in flight whose tokens may still be unread
        emitted = drafter.depth + 1 if drafter else 1  # most tokens that a round emits
        tree = max(drafter.nodes, drafter.lookahead) if drafter else 1
        # Behind the last kept token stand what a round too many commits, for each round in flight,
        # and the tree on top.
        self._spare = emitted * (1 + self._max_unread) + tree
        assert self._spare <= HEADROOM, "rotary tables would end before the last round does"
        row_pages = pages_for(model.max_length + self._spare)
        shapes = model.plane_shape, *(drafter.planes if drafter else ())
        if buckets is None and captured:
            buckets = default_buckets(slots)
        if pages is None:
            least, most, reserved = row_pages + 1, slots * row_pages + 1, 0
            if captured:
                assert buckets is not None
                graphs = 2 * len(buckets) + len(PROMPT_LENGTHS)
                reserved = planned_bytes(
                    model, slots, tree, graphs=graphs, prefill_tokens=self._idle_tokens
                )
            pages = pages_that_fit(shapes, device, least=least, most=most, reserved=reserved)
            if model.group is not None:
                pages = model.group.least(pages, device)
        self.pools = Pools(model.plane_shape, drafter, pages=pages, rows=slots, device=model.device)
        planes = self.pools.planes
        self._drafter_pages = drafter.drafter_pages if drafter else 0  # of a request
        self._batch, prefill_batch = (
            DecodeBatch.empty(
                slots,
                pages=row_pages,
                emitted=emitted,
                device=device,
                drafter=drafter,
            )
            for _ in range(2)
        )
        self._prefill = Prefill(model, planes, drafter, prefill_batch)
        with torch.inference_mode():
            captures = CaptureStream(device) if captured else None
            if captures is not None:
                self._prefill.warm()
            memory = model, planes, drafter, self._batch
            self._rounds = RoundLauncher(*memory, buckets=buckets, verify=verify, captures=captures)
            if captures is not None:
                self._prefill.capture(captures)
        self._waiting = _WaitingQueue()
        self._running: list[RunningRequest] = []  # request r holds row r
        self._in_flight: deque[list[_Launch]] = deque()  # not yet read; a list for each step
        self._ready: deque[Emission] = deque()

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Completions as they finish; requests are taken from the iterable as slots become free."""
        return filter(None, map(attrgetter("completion"), self.stream(requests)))

    def stream(self, requests: Iterable[Request]) -> Iterator[Emission]:
        """Tokens as they are emitted, of all requests in turn."""
        self._waiting.read_from(requests)
        try:
            while self.busy:
                yield from self.step()
        finally:
            self.abandon()

    @property
    def busy(self) -> bool:
        """Whether there is anything to do: a request waits or runs, or tokens are unread."""
        return bool(self._waiting or self._prefill.requests or self._running or self._in_flight)

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running) + len(self._prefill.requests)

    def add(self, request: Request) -> None:
        """Let a request wait; `step` emits its tokens. Its id is no other open request's."""
        self._waiting.add(request)

    def step(self) -> list[Emission]:
        """Admit requests, read prompts, run a round; returns what this or an earlier pass emitted.

        Waits for tokens, but not for those of the round that it launches where rounds overlap.
        """
        with torch.inference_mode():
            launched, in_flight = self._launch_prefill(), self._in_flight
            if not self._max_unread:  # a request may end with its first token
                self._collect(launched)
                launched = []
            if rows := len(self._running):
                sampling = any(running.request.temperature > 0 for running in self._running)
                launch_round = self._rounds.launcher(rows, sampling=sampling)
                launch_round()
                launched.append((list(self._running), copy_to_host(self._batch.rows(0, rows))))
            in_flight.append(launched)
            while in_flight and (len(in_flight) > self._max_unread or not in_flight[-1]):
                self._collect(in_flight.popleft())
        emitted = list(self._ready)
        self._ready.clear()
        return emitted

    @torch.inference_mode()
    def abort(self, request_id: str) -> Completion | None:
        """End a request now: its slot and its pages are free, and it emits nothing any more.

        None for one that is not here, which may have ended by itself.
        """
        if self._waiting.remove(request_id):
            return Completion(request_id, (), "abort", Statistics())
        reading = self._prefill.requests
        for ended in (*self._running, *reading):
            if ended.request.request_id != request_id:
                continue
            ended.finish_reason = "abort"  # tokens in flight are not handed out
            if ended in reading:
                self._prefill.remove(reading.index(ended))
                self._free(ended)
            else:
                self._retire(ended)
            return ended.completion()
        return None

    @torch.inference_mode()
    def abandon(self) -> None:
        """Drop everything, for a caller that stopped listening."""
        self._waiting = _WaitingQueue()
        for running in list(self._running):
            self._retire(running)
        for reading in self._prefill.requests:
            self._free(reading)
        self._prefill.drop(len(self._prefill.requests))
        self._in_flight.clear()
        self._ready.clear()

    def problem(self, request: Request) -> Problem | None:
        """Why a request can never be run here; None when it can."""
        model, capacity = self.model, self.pools.shared.capacity
        problem = request.problem(vocabulary=model.vocabulary, max_length=model.max_length)
        if problem is None and (need := self._pages_of(request)) > capacity:
            what = f"needs {need} pages of key/value memory, the pool has {capacity}"
            return Problem(what, "give the engine more pages")
        return problem

    def _pages_of(self, request: Request) -> int:
        """Pages that a request can ever need."""
        return pages_for(len(request.prompt_ids) + request.max_new_tokens + self._spare)

    def _launch_prefill(self) -> list[_Launch]:
        """Admit requests, read prompts within the budget; those read whole join the rounds."""
        prefill, running = self._prefill, len(self._running)
        budget = self.prefill_tokens if running else self._idle_tokens
        self._admit_arrivals(budget)
        ended = prefill.read(budget)
        if not ended:
            return []
        rows = prefill.batch.rows(0, len(ended))
        launched = [(ended, copy_to_host(rows))]
        self._batch.copy_rows(running, rows)
        self._running += ended
        prefill.drop(len(ended))
        return launched

    def _admit_arrivals(self, budget: int) -> list[Request]:
        """Those whose prompts are read from now on, while fewer tokens than that are unread."""
        admitted = []
        while self._prefill.unread < budget and (arriving := self._admit()):
            self._prefill.add(arriving)
            admitted.append(arriving.request)
        return admitted

    def _admit(self) -> RunningRequest | None:
        """The next request that can run; None without one, a free slot or enough pages."""
        waiting = self._waiting
        while waiting and self.running < self.slots:
            request, since = waiting.first
            problem = self.problem(request)
            if problem is not None:
                waiting.pop()
                failed = Completion(request.request_id, (), "error", Statistics(), problem)
                self._ready.append(Emission(request.request_id, (), failed))
                continue
            pages = self.pools.shared.allocate(self._pages_of(request))
            if pages is None:
                return None
            drafter_pages = self.pools.drafter_pages.allocate(self._drafter_pages)
            assert drafter_pages is not None, "the drafter's pool has room for every slot"
            waiting.pop()
            now = time.perf_counter()
            statistics = Statistics(simulated=self._simulated, queued_seconds=now - since)
            return RunningRequest(request, pages, now, drafter_pages, statistics=statistics)
        return None

    def _collect(self, launched: list[_Launch]) -> None:
        """Hand out what launches emitted, and retire the requests that ended."""
        for requests, pending in launched:
            emitted, now = pending.wait(), time.perf_counter()
            for running, row in zip(requests, emitted, strict=True):
                if running.finish_reason is not None:
                    continue  # ended while this round was under way
                self._ready.append(running.take(row.tokens, now, row.drafted, row.deepest))
                if running.finish_reason is not None:
                    self._retire(running)

    def _retire(self, running: RunningRequest) -> None:
        """Free the pages; the last running request takes over the row."""
        row, last = self._running.index(running), self._running.pop()
        count = len(self._running)
        if last is not running:
            self._running[row] = last
            self._batch.copy_rows(row, self._batch.rows(count, count + 1))
        self._batch.clear_row(count)
        self._free(running)

    def _free(self, running: RunningRequest) -> None:
        self.pools.shared.free(running.pages)
        self.pools.drafter_pages.free(running.drafter_pages)


class _WaitingQueue:
    """Requests that wait to be admitted: those added, then a caller's iterable, read one ahead."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Request, float]] = deque()  # and when they were submitted
        self._source: Iterator[Request] = iter(())
        self._opened = 0.0

    def read_from(self, requests: Iterable[Request]) -> None:
        self._source, self._opened = iter(requests), time.perf_counter()

    def add(self, request: Request) -> None:
        self._waiting.append((request, time.perf_counter()))

    def remove(self, request_id: str) -> bool:
        """Whether the request waited here."""
        for entry in self._waiting:
            if entry[0].request_id == request_id:
                self._waiting.remove(entry)
                return True
        return False

    def __bool__(self) -> bool:
        if not self._waiting:
            self._waiting.extend((request, self._opened) for request in islice(self._source, 1))
        return bool(self._waiting)

    @property
    def first(self) -> tuple[Request, float]:
        return self._waiting[0]

    def pop(self) -> None:
        self._waiting.popleft()


class Prefill:
    """Requests whose prompts are being read, in the rows of a batch of their own, as they came.

        budget of 8 tokens   a0 a1 a2 | b0 | c0 c1 c2 c3    a and b have been read whole: their
        next pass            c4 c5 | d0 d1 d2 d3 d4 d5      first tokens are drawn; c goes on

    Which prompts share a forward changes nothing for any of them.
    """

    def __init__(
        self, model: DecoderModel, planes: Planes, drafter: Drafter | None, batch: DecodeBatch
    ) -> None:
        self._model, self._planes, self._drafter, self.batch = model, planes, drafter, batch
        self.requests: list[RunningRequest] = []  # request r holds row r
        self._opened = 0  # rows whose parameters are on the device
        self._ints = Staging(torch.int64, model.device)
        self._floats = Staging(torch.float32, model.device)
        self._graphs: PromptGraphs | None = None

    def capture(self, captures: CaptureStream) -> None:
        """Read short prompts that come alone by graphs from now on; no row is held."""
        memory = self._model, self._planes, self._drafter, self.batch.rows(0, 1)
        self._graphs = PromptGraphs(*memory, captures, limit=self._model.max_length)
        self.batch.clear_row(0)

    def warm(self) -> None:
        """Launch, on a row that nobody holds, all that reading prompts launches later.

        Kernels compile now and not in the middle of serving: those of short prompts, of more tokens
        than any kernel takes at once, and of chunks that are not the last of their prompt.
        """
        row, limit = self.batch.rows(0, 1), self._model.max_length
        short = [(each, 1) for each in self._model.ops.warm_up_lengths if each <= limit]
        for length, last in (*short, (min(_LONG, limit), 0)):
            ids = torch.zeros(length, dtype=torch.int64, device=self._model.device)
            rows = TokenRows.even(1, length, ids.device)
            prefill(self._model, self._planes, self._drafter, row, rows, ids, ids, last=last)
            self.batch.clear_row(0)

    @property
    def unread(self) -> int:
        """Tokens of the requests' prompts that have not been read."""
        return sum(len(each.request.prompt_ids) - each.prefilled for each in self.requests)

    def add(self, arriving: RunningRequest) -> None:
        """Take in a request that has its pages."""
        self.requests.append(arriving)

    def read(self, budget: int) -> list[RunningRequest]:
        """Read at most `budget` prompt tokens, the first requests' first.

        Returns those whose prompts have been read whole: they hold the first rows of `batch`, where
        their first tokens are.
        """
        tokens: list[int] = []
        next_tokens: list[int] = []  # of each token; anything after the last of a prompt
        counts: list[int] = []
        ended = 0
        for each in self.requests:
            if len(tokens) == budget:
                break
            prompt, first = each.request.prompt_ids, each.prefilled
            last = min(first + budget - len(tokens), len(prompt))
            tokens += prompt[first:last]
            next_tokens += prompt[first + 1 : last + 1]
            next_tokens += [0] * (len(tokens) - len(next_tokens))
            counts.append(last - first)
            each.prefilled = last
            ended += last == len(prompt)
        if tokens:
            self._launch(tokens, next_tokens, counts, ended)
        return self.requests[:ended]

    def drop(self, count: int) -> None:
        """Forget the first `count` requests; the others move up."""
        del self.requests[:count]
        self._opened = max(self._opened - count, 0)
        if count:
            for row in range(self._opened):
                self.batch.copy_rows(row, self.batch.rows(row + count, row + count + 1))

    def remove(self, index: int) -> None:
        """Forget one request; those after it move up."""
        # Whoever else a read has opened was read whole and dropped: no other row has to move.
        assert self._opened <= 1, "between two reads only the first request may hold a row"
        del self.requests[index]
        self._opened -= index < self._opened

    def _launch(
        self, tokens: list[int], next_tokens: list[int], counts: list[int], ended: int
    ) -> None:
        """Everything that the forward needs goes to the device in two copies."""
        first, last = self._opened, len(counts)
        pages, drafter_width = (
            self.batch.block_table.shape[1],
            self.batch.drafter_block_table.shape[1],
        )
        opened = self.requests[first:last]
        cu_seqlens = [0, *accumulate(counts)]
        tables = [[*each.pages, *[0] * (pages - len(each.pages))] for each in opened]
        tables += [each.drafter_pages for each in opened]
        requests = [each.request for each in opened]
        drawing = [value for each in requests for value in (each.top_k, each.seed)]
        parts = [tokens, next_tokens, cu_seqlens, drawing, *tables]
        ints = self._ints.send([value for part in parts for value in part])
        floats = self._floats.send(
            [value for each in requests for value in (each.temperature, each.top_p)]
        )
        by_request = [size * len(opened) for size in (2, pages, drafter_width)]
        sizes = [len(tokens), len(tokens), len(cu_seqlens), *by_request]
        ids, next_ids, cu_seqlens_q, integers, table, drafter_block_table = torch.split(ints, sizes)
        if opened:
            top_k, seeds = integers.view(-1, 2).unbind(1)
            temperature, top_p = floats.view(-1, 2).unbind(1)
            by_row = table.view(-1, pages), top_k, seeds, temperature, top_p
            self.batch.rows(first, last).open(
                *by_row, drafter_block_table.view(len(opened), drafter_width)
            )
            self._opened = last
        if self._graphs is not None and len(counts) == ended == 1:
            room = PAGE * pages - (self.requests[0].prefilled - len(tokens))
            if length := self._graphs.length_for(len(tokens), room):
                self._graphs.read(length, ids, next_ids)
                return
        prefill(
            self._model,
            self._planes,
            self._drafter,
            self.batch.rows(0, last),
            TokenRows.ragged(cu_seqlens_q, len(tokens), max(counts)),
            ids,
            next_ids,
            last=ended,
        )


class Staging:
    """Host memory from which values reach a device while the host goes on.

    A GPU copies by itself from pinned memory only. Until it has, the memory is not written again.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._device, self._pinned = device, on_gpu(device)
        self._host = torch.empty(0, dtype=dtype)
        self._copied: torch.cuda.Event | None = None

    def send(self, values: Sequence[float]) -> Tensor:
        """The values on the device [n]; a copy that is under way is waited for."""
        if self._copied is not None:
            self._copied.synchronize()
        count = len(values)
        if count > len(self._host):
            self._host = torch.empty(2 * count, dtype=self._host.dtype, pin_memory=self._pinned)
        self._host[:count] = torch.tensor(values, dtype=self._host.dtype)
        sent = torch.empty(count, dtype=self._host.dtype, device=self._device)
        sent.copy_(self._host[:count], non_blocking=True)
        if self._pinned:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return sent
