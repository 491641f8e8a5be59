"""Requests over slots: admit, run rounds, emit, retire.

    engine = Engine(model, slots=32)                      # plain
    engine = Engine(model, drafter=Eagle3Drafter(…))      # speculative, greedy
    for completion in engine.generate(requests): …        # in order of completion

A request joins as soon as a slot is free and leaves when it meets a stop token or its length
limit; the other requests go on undisturbed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from pipeline.decoder.drafters.base import Drafter
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.round import forward_tree, speculative_round
from pipeline.decoder.tree import causal_mask, root_only
from pipeline.decoder.verify import sample


@dataclass(frozen=True)
class Request:
    """What to generate. Temperature 0 is greedy."""

    id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclass
class Statistics:
    """Of one request. Prefill's token is in neither `rounds` nor `round_tokens`."""

    rounds: int = 0
    round_tokens: int = 0  # emitted by rounds, bonus included
    reached: list[int] = field(default_factory=list)  # [k]: rounds in which k drafted tokens were accepted, or more
    first_token_seconds: float = 0.0  # from admission
    decode_seconds: float = 0.0  # first token to last

    @property
    def acceptance_length(self) -> float:
        """τ; 1 for plain decoding, 0 when the first token was the last."""
        return self.round_tokens / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class Completion:
    """A finished request: generated ids, a stop token included."""

    id: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    statistics: Statistics


@dataclass
class _Slot:
    request: Request
    generator: torch.Generator | None
    started: float
    tokens: list[int] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    reason: Literal["stop", "length"] | None = None

    @property
    def cached(self) -> int:
        """Tokens in the target's cache: all but the last one, which is the next root."""
        return len(self.request.prompt_ids) + len(self.tokens) - 1

    def emit(self, tokens: Iterable[int]) -> int:
        """Append tokens up to a stop token or the limit; returns how many were taken."""
        taken = 0
        for token in tokens:
            self.tokens.append(token)
            taken += 1
            if token in self.request.stop_ids:
                self.reason = "stop"
            elif len(self.tokens) == self.request.max_new_tokens:
                self.reason = "length"
            if self.reason:
                break
        return taken


class Engine:
    """Continuous batching over `slots` rows of a static cache."""

    def __init__(self, model: DecoderModel, *, drafter: Drafter | None = None, slots: int = 1) -> None:
        self.model, self.drafter = model, drafter
        self.cache = model.new_cache(slots)
        self.nodes = drafter.nodes if drafter else 1
        self._slots: list[_Slot] = []
        if drafter:
            drafter.allocate(slots, model.max_length)

    @torch.inference_mode()
    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Completions as they finish. Raises ValueError for a request that cannot be run."""
        waiting = deque(self._checked(request) for request in requests)
        while waiting or self._slots:
            while waiting and len(self._slots) < self.cache.slots:
                self._admit(waiting.popleft())
            yield from self._retire()
            if self._slots:
                self._round()
                yield from self._retire()

    def _checked(self, request: Request) -> Request:
        # The last tree may reach past the last token that is kept.
        need = len(request.prompt_ids) + request.max_new_tokens + self.nodes
        if not request.prompt_ids or request.max_new_tokens < 1:
            raise ValueError(f"request {request.id}: needs a prompt and max_new_tokens of at least 1")
        if need > self.model.max_length:
            raise ValueError(f"request {request.id}: needs {need} cache entries, the engine has {self.model.max_length}")
        if self.drafter and request.temperature > 0:
            raise ValueError(f"request {request.id}: a drafter verifies greedily, temperature must be 0")
        return request

    def _admit(self, request: Request) -> None:
        """Prefill one prompt into the next free row and draw its first token."""
        started, row, device = time.perf_counter(), len(self._slots), self.model.device
        generator = torch.Generator(device).manual_seed(request.seed) if request.temperature > 0 else None
        slot = _Slot(request, generator, started)
        ids = torch.tensor([request.prompt_ids], device=device)  # [1, T]
        positions = torch.arange(ids.shape[1], device=device)[None]
        mask = causal_mask(ids.shape[1], 0, self.model.dtype, device)
        output = self.model.forward(ids, positions, positions, mask, self.cache.row(row))
        slot.emit([self._draw(slot, self.model.logits(output.final[0, -1]))])
        slot.statistics.first_token_seconds = time.perf_counter() - started
        if self.drafter and not slot.reason:
            root = torch.tensor(slot.tokens, device=device)
            self.drafter.prefill(row, torch.cat((ids[0], root)), output.aux[0])
        self._slots.append(slot)

    def _round(self) -> None:
        roots = torch.tensor([slot.tokens[-1] for slot in self._slots], device=self.model.device)
        starts = torch.tensor([slot.cached for slot in self._slots], device=self.model.device)
        emitted = self._speculate(roots, starts) if self.drafter else self._plain(roots, starts)
        now = time.perf_counter()
        for slot, tokens in zip(self._slots, emitted, strict=True):
            statistics = slot.statistics
            taken = slot.emit(tokens)
            statistics.rounds += 1
            statistics.round_tokens += taken
            for depth in range(len(tokens)):
                if depth == len(statistics.reached):
                    statistics.reached.append(0)
                statistics.reached[depth] += 1
            statistics.decode_seconds = now - slot.started - statistics.first_token_seconds

    def _plain(self, roots: Tensor, starts: Tensor) -> list[list[int]]:
        _, logits = forward_tree(self.model, self.cache, root_only(roots), starts)
        if all(slot.request.temperature == 0 for slot in self._slots):
            return [[token] for token in logits[:, 0].argmax(-1).tolist()]
        return [[self._draw(slot, logits[row, 0])] for row, slot in enumerate(self._slots)]

    def _speculate(self, roots: Tensor, starts: Tensor) -> list[list[int]]:
        assert self.drafter is not None
        accepted = speculative_round(self.model, self.cache, self.drafter, roots, starts)
        return [row[:count] for row, count in zip(accepted.tokens.tolist(), accepted.counts.tolist(), strict=True)]

    def _draw(self, slot: _Slot, logits: Tensor) -> int:
        request = slot.request
        return sample(logits, temperature=request.temperature, top_p=request.top_p, top_k=request.top_k, generator=slot.generator)

    def _retire(self) -> Iterator[Completion]:
        """Yield finished requests; the last active row takes each freed place."""
        row = 0
        while row < len(self._slots):
            slot = self._slots[row]
            if slot.reason is None:
                row += 1
                continue
            last = self._slots.pop()
            if last is not slot:
                self._slots[row] = last
                self.cache.move(len(self._slots), row, last.cached)
                if self.drafter and last.reason is None:
                    self.drafter.move(len(self._slots), row)
            yield Completion(slot.request.id, tuple(slot.tokens), slot.reason, slot.statistics)
