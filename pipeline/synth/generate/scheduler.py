"""The scheduler: turns of many conversations in flight at once, batch by batch of prompts.

batches     shard 0              shard 1               …      opened when no turn is waiting
requests    0.0 0.1 0.2 … 0.0'   0.3 1.0 …                    ' is a second turn: it goes first
replies     in any order
finished    a batch is yielded once its last conversation has ended
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeline.decoder.request import Request
from pipeline.records import Prompt, Sample
from pipeline.synth.generate.backend import GeneratorBackend
from pipeline.synth.generate.conversations import Conversation, ConversationRunner


@dataclass
class PromptBatch:
    """Prompts that are stored together, and what became of them."""

    name: str
    unfinished: int  # conversations that have not ended
    by_position: dict[int, Sample] = field(default_factory=dict)  # position among the prompts
    rejected: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)  # why the kept conversations are no longer

    @property
    def samples(self) -> list[Sample]:
        """In the order of the prompts."""
        return [sample for _, sample in sorted(self.by_position.items())]


class _Turn(NamedTuple):
    """A conversation whose next reply is wanted."""

    batch: PromptBatch
    position: int  # of its prompt in the batch
    conversation: Conversation


class ConversationScheduler:
    """Runs the conversations of all batches. Every prompt becomes a sample or is counted.

    `across_shards`: open a batch while replies to others are still being generated. Otherwise a
    batch is generated alone, and its replies can be repeated even where the backend is not
    batch-invariant. `advance` is given how many conversations have ended since it was last called.
    """

    def __init__(
        self,
        runner: ConversationRunner,
        batches: Iterable[tuple[str, Sequence[Prompt]]],
        *,
        across_shards: bool = True,
        advance: Callable[[int], None] = lambda ended: None,
    ) -> None:
        self._runner, self._batches, self._across_shards = runner, iter(batches), across_shards
        self._advance = advance
        self._waiting: deque[_Turn] = deque()
        self._running: dict[str, _Turn] = {}  # by request id
        self._open_batches = 0
        self._finished: deque[PromptBatch] = deque()

    def run(self, backend: GeneratorBackend) -> Iterator[PromptBatch]:
        """Batches as they are finished, from the first request to the last reply."""
        for reply in backend.generate(self._next_request):
            turn = self._running.pop(reply.request_id)
            reason = self._runner.add_reply(turn.conversation, reply)
            if reason is None:
                self._waiting.appendleft(turn)  # older batches finish first
            else:
                self._close(turn, reason)
            yield from self._take_finished()
        yield from self._take_finished()
        assert not (self._running or self._waiting or self._open_batches), "a request got no reply"

    def _next_request(self) -> Request | None:
        while not self._waiting:
            if not self._open_batch():
                return None
        turn = self._waiting.popleft()
        request_id = f"{turn.batch.name}/{turn.position}/{len(turn.conversation.replies)}"
        self._running[request_id] = turn
        return self._runner.request(request_id, turn.conversation)

    def _open_batch(self) -> bool:
        """Queue the conversations of the next batch, if there is one and it may be opened now."""
        if self._open_batches and not self._across_shards:
            return False
        name, prompts = next(self._batches, (None, ()))
        if name is None:
            return False
        batch = PromptBatch(name, unfinished=len(prompts))
        self._open_batches += 1
        for position, prompt in enumerate(prompts):
            opened = self._runner.open(prompt)
            if isinstance(opened, str):
                self._end(batch, rejected=opened)
            else:
                self._waiting.append(_Turn(batch, position, opened))
        if not prompts:
            self._finish(batch)
        return True

    def _close(self, turn: _Turn, reason: str) -> None:
        batch, outcome = turn.batch, self._runner.close(turn.conversation, reason)
        if isinstance(outcome, str):
            self._end(batch, rejected=outcome)
        else:
            batch.by_position[turn.position] = outcome
            batch.ended[reason] += 1
            self._end(batch)

    def _end(self, batch: PromptBatch, *, rejected: str | None = None) -> None:
        """One conversation less is under way, or was not begun."""
        if rejected:
            batch.rejected[rejected] += 1
        batch.unfinished -= 1
        self._advance(1)
        if not batch.unfinished:
            self._finish(batch)

    def _finish(self, batch: PromptBatch) -> None:
        self._open_batches -= 1
        self._finished.append(batch)

    def _take_finished(self) -> Iterator[PromptBatch]:
        while self._finished:
            yield self._finished.popleft()
