"""Engines of one target over several processes: rank 0's decides what is run, the others follow.

    rank 0    requests ─ admits ─ broadcast ─► reads prompts, a round ─ tokens ─► whoever asked
    others                        wait ──────► the same

Everything behind the broadcast follows from what was admitted and ended before: all ranks have the
same requests in the same rows and pages. What waits is rank 0's alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Completion, Request
from pipeline.target.parallel import Group

#: Rank 0 is heard of at least so often, in seconds: a group takes longer silence for a failure.
_MOST_IDLE = 300.0


class Orders(NamedTuple):
    """What rank 0's engine has done since its last step."""

    ended: tuple[str | None, ...]  # ids of requests, in turn; None: all that there were
    admitted: tuple[Request, ...]
    last: bool = False  # nothing follows


class LeadingEngine(Engine):
    """Rank 0's, for whoever has requests."""

    most_idle_seconds = _MOST_IDLE

    def __init__(self, model: DecoderModel, *, processes: Group, **options: Any) -> None:
        """`options` are those of an Engine, the same on all ranks."""
        self._processes, self._ended = processes, list[str | None]()
        super().__init__(model, **options)

    def abort(self, request_id: str) -> Completion | None:
        self._ended.append(request_id)
        return super().abort(request_id)

    def abandon(self) -> None:
        self._ended.append(None)
        super().abandon()

    def close(self) -> None:
        """Let the others go."""
        self._processes.broadcast(Orders((), (), last=True))

    def _admit_arrivals(self, budget: int) -> list[Request]:
        admitted = super()._admit_arrivals(budget)
        news = self._ended or admitted
        self._processes.broadcast(Orders(tuple(self._ended), tuple(admitted)) if news else None)
        self._ended.clear()
        return admitted


class FollowingEngine(Engine):
    """Of any other rank."""

    def __init__(self, model: DecoderModel, *, processes: Group, **options: Any) -> None:
        """As rank 0's."""
        self._processes = processes
        super().__init__(model, **options)

    def follow(self) -> None:
        """Do what rank 0's engine does, until it is closed."""
        while True:
            orders: Orders | None = self._processes.broadcast(None)
            if orders is not None:
                if orders.last:
                    return
                for request_id in orders.ended:
                    if request_id is None:
                        self.abandon()
                    else:
                        self.abort(request_id)
                for request in orders.admitted:
                    self.add(request)
            self.step()


def engine_among(processes: Group, model: DecoderModel, **options: Any) -> Engine:
    """This process's engine, of `options` as an Engine has them."""
    if processes.size == 1:
        return Engine(model, **options)
    kind = LeadingEngine if processes.rank == 0 else FollowingEngine
    return kind(model, processes=processes, **options)
