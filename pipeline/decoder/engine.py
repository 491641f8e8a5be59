"""Requests over slots: admit, prefill in chunks, run rounds, emit, retire.

    engine = Engine(model, slots=32)                       # plain
    engine = Engine(model, drafter=Eagle3Drafter(…))       # speculative
    for completion in engine.generate(requests): …         # in order of completion
    for emission in engine.stream(requests): …             # token by token

A request's life:

    1  waits for a slot and for all the pages that it can ever need, so that it never has to stop again
    2  its prompt is read in chunks between the others' rounds; the last chunk draws its first token
    3  it takes part in rounds until a stop token or its length limit
    4  its pages are freed and the last active row moves into its place

A request that cannot be run, or whose logits turn NaN, ends as a completion with an error; the others
go on undisturbed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch

from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.drafters.base import Drafter
from pipeline.decoder.graphs import PendingTokens, RoundRunner, default_buckets, send
from pipeline.decoder.kv import PagedPool, pages_for
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Completion, Emission, Problem, Request, Slot, Statistics
from pipeline.decoder.round import prefill_chunk
from pipeline.decoder.tuning.simulate import ImposedAcceptance

#: A prefill or a round under way: the slots of its rows, and its tokens.
_Launch = tuple[list[Slot], PendingTokens]

#: Prompt tokens read between two rounds: long enough for efficient matrix products, short enough that
#: the others' next tokens are not delayed much. While nobody is decoding there is nobody to delay, but
#: the first to arrive should not wait for all: four times as many.
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
        impose: Sequence[int] | None = None,
    ) -> None:
        """`pages` limits the pool (default: enough for every slot at full length), `buckets` the batch sizes
        that rounds run at (default: exact on a CPU), `overlap` launches a round before the last one's tokens
        are read (default: on CUDA). `impose` accepts that many drafted tokens in each round, in turn, instead
        of verifying: completions are then marked as simulated."""
        cuda = model.device.type == "cuda"
        self.model, self.drafter, self.slots = model, drafter, slots
        self._behind = int(cuda if overlap is None else overlap)
        self._prefill_tokens = prefill_tokens
        width = drafter.depth + 1 if drafter else 1  # most tokens that a round emits
        # Behind the last kept token: what one round too many commits for each round in flight, and the tree on top.
        self._spare = width * (1 + self._behind) + (
            max(drafter.nodes, drafter.lookahead) if drafter else 1
        )
        table = pages_for(model.max_length + self._spare)
        self.pool = PagedPool(slots * table + 1 if pages is None else pages, device=model.device)
        self._plane = model.plane(self.pool)
        if drafter:
            drafter.allocate(self.pool)
        memory = drafter.memory if drafter else 0
        self._batch, self._prefill_batch = (
            DecodeBatch.empty(
                rows,
                pages=table,
                memory=memory,
                emitted=width,
                dtype=model.dtype,
                device=model.device,
            )
            for rows in (slots, 1)
        )
        if buckets is None and cuda:
            buckets = default_buckets(slots)
        with torch.inference_mode():
            judge = ImposedAcceptance(impose, model.device) if impose else None
            self._runner = RoundRunner(
                model, self._plane, drafter, self._batch, buckets=buckets, judge=judge
            )
        self._simulated = impose is not None
        self._active: list[Slot] = []  # slot r holds row r
        self._arriving: Slot | None = None  # being prefilled in the lobby
        self._ready: deque[Emission] = deque()

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Completions as they finish; requests are taken from the iterable as slots become free."""
        for emission in self.stream(requests):
            if emission.completion is not None:
                yield emission.completion

    @torch.inference_mode()
    def stream(self, requests: Iterable[Request]) -> Iterator[Emission]:
        """Tokens as they are emitted, of all requests in turn."""
        source = _Queue(requests)
        flying: deque[list[_Launch]] = (
            deque()
        )  # launched, not yet read; a list for each pass of this loop
        try:
            while source or self._arriving or self._active or flying:
                flying.append(self._launch(source))
                while flying and (len(flying) > self._behind or not flying[-1]):
                    self._collect(flying.popleft())
                while self._ready:
                    yield self._ready.popleft()
        finally:
            self._abandon()

    def _launch(self, source: _Queue) -> list[_Launch]:
        """Read prompts, within the budget, and run one round of the requests that are decoding."""
        launched = self._prefill(source)
        if not self._behind:  # a request may end with its first token
            self._collect(launched)
            launched = []
        if self._active:
            rows = len(self._active)
            self._runner.run(
                rows, sampling=any(slot.request.temperature > 0 for slot in self._active)
            )
            launched.append((list(self._active), send(self._batch.rows(0, rows))))
        return launched

    def _prefill(self, source: _Queue) -> list[_Launch]:
        launched: list[_Launch] = []
        budget = self._prefill_tokens * (1 if self._active else _IDLE_FACTOR)
        while budget > 0 and (slot := self._arriving or self._admit(source)):
            prompt = slot.request.prompt_ids
            end = min(slot.prefilled + budget, len(prompt))
            budget -= end - slot.prefilled
            chunk = torch.tensor([prompt[slot.prefilled : end]], device=self.model.device)  # [1, n]
            following = (
                torch.tensor([prompt[end]], device=self.model.device) if end < len(prompt) else None
            )
            prefill_chunk(
                self.model, self._plane, self.drafter, self._prefill_batch, chunk, following
            )
            slot.prefilled, self._arriving = end, slot
            if following is None:
                launched.append(([slot], send(self._prefill_batch)))
                self._batch.copy_row(len(self._active), self._prefill_batch, 0)
                self._active.append(slot)
                self._arriving = None
        return launched

    def _admit(self, source: _Queue) -> Slot | None:
        """The next request that can run, with its pages, in the lobby; None while there is no room or no request."""
        while source and len(self._active) < self.slots:
            request = source.first
            need = pages_for(len(request.prompt_ids) + request.max_new_tokens + self._spare)
            problem = request.problem(
                vocabulary=self.model.vocabulary, max_length=self.model.max_length
            )
            if problem is None and need > self.pool.capacity:
                problem = Problem(
                    f"needs {need} pages of key/value memory, the pool has {self.pool.capacity}",
                    "give the engine more pages",
                )
            if problem is not None:
                source.pop()
                failed = Completion(request.request_id, (), "error", Statistics(), problem)
                self._ready.append(Emission(request.request_id, (), failed))
                continue
            pages = self.pool.take(need)
            if pages is None:
                return None
            source.pop()
            now = time.perf_counter()
            self._prefill_batch.open_row(
                0,
                pages,
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                seed=request.seed,
            )
            return Slot(
                request,
                pages,
                now,
                statistics=Statistics(
                    simulated=self._simulated, queued_seconds=now - source.opened
                ),
            )
        return None

    def _collect(self, launched: list[_Launch]) -> None:
        """Hand out what launches emitted, and retire the requests that ended."""
        for slots, parcel in launched:
            emitted, now = parcel.open(), time.perf_counter()
            for slot, tokens in zip(slots, emitted, strict=True):
                if slot.reason is not None:
                    continue  # ended while this round was under way
                taken = slot.take(tokens, now)
                if slot.reason is not None:
                    self._retire(slot)
                self._ready.append(
                    Emission(
                        slot.request.request_id, taken, slot.completion() if slot.reason else None
                    )
                )

    def _retire(self, slot: Slot) -> None:
        """Free the pages; the last active row takes the place."""
        row, last = self._active.index(slot), self._active.pop()
        if last is not slot:
            self._active[row] = last
            self._batch.copy_row(row, self._batch, len(self._active))
        self._batch.clear_row(len(self._active))
        self.pool.give(slot.pages)

    def _abandon(self) -> None:
        """Drop everything, for a caller that stopped listening."""
        for slot in list(self._active):
            self._retire(slot)
        if self._arriving is not None:
            self.pool.give(self._arriving.pages)
            self._arriving = None
        self._ready.clear()


class _Queue:
    """Requests that wait, read from the caller's iterable one ahead."""

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
