"""What generates replies, seen from the scheduler: a backend pulls requests and yields replies.

scheduler   next_request() ─▶ Request, Request, …, None      None: none now, perhaps after a reply
backend     generate()     ─▶ Reply, Reply, …                in any order, one for each request
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from pipeline.decoder.request import Request

#: The next request, or None while there is none. After more replies there may be some again.
NextRequest = Callable[[], Request | None]


@dataclass(frozen=True)
class Reply:
    """The outcome of one request: generated ids, a reason to leave it out, or an error."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: Literal["stop", "length"] = "stop"
    exact: bool = True  # False: the server gave text, which was tokenised again and checked
    rejected: str | None = None
    error: tuple[str, str] | None = None  # problem and fix; it stops the run


class GeneratorBackend(Protocol):
    """The bundled decoder, or servers of the target."""

    @property
    def batch_invariant(self) -> bool:
        """Whether a reply is the same bit for bit whatever is computed in the same batch."""

    def generate(self, next_request: NextRequest) -> Iterator[Reply]:
        """Replies as they are finished, until there is no request left and none is in flight."""
