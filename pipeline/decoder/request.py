"""What goes into the engine and what comes out of it."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any, Literal, NamedTuple

from pipeline.reports import RoundCounters

FinishReason = Literal["stop", "length", "error", "abort"]


@dataclass(frozen=True)
class Problem:
    """Why a request ended as an error, and what to do."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what} (fix: {self.fix})"


@dataclass(frozen=True)
class Request:
    """What to generate. Temperature 0 is greedy."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0  # not negative; draws the same tokens in any batch and with any drafter

    def problem(self, *, vocabulary: int, max_length: int) -> Problem | None:
        """Why this request cannot be run; None when it can.

        What the engine's tensors cannot hold would end every request of the batch.
        """
        if not self.prompt_ids:
            return Problem("prompt_ids is empty", "send at least one token")
        for name, whole, least in (
            ("max_new_tokens", self.max_new_tokens, 1),
            ("top_k", self.top_k, 0),
            ("seed", self.seed, 0),
        ):
            if not _is_whole(whole, least, _MOST):
                what = f"{name} is {_shown(whole)}"
                return Problem(what, f"give an integer of at least {least}, below 2**63")
        for name, number, fits, fix in (
            ("temperature", self.temperature, _is_in(self.temperature, 0, _HOTTEST), "0 or more"),
            ("top_p", self.top_p, _is_in(self.top_p, 0, 1) and self.top_p > 0, "in (0, 1]"),
        ):
            if not fits:
                return Problem(f"{name} is {_shown(number)}", f"give a finite number {fix}")
        last = vocabulary - 1
        outside = [token for token in self.prompt_ids if not _is_whole(token, 0, last)]
        if outside:
            what = f"prompt_ids has token {_shown(outside[0])}, the vocabulary has {vocabulary}"
            return Problem(what, "encode with the target's own tokenizer")
        length = len(self.prompt_ids) + int(self.max_new_tokens)  # numpy's would wrap around
        if length > max_length:
            what = f"prompt_ids + max_new_tokens are {length} tokens, the engine holds {max_length}"
            return Problem(f"{what} a request", "shorten one of them")
        return None


_MOST = 2**63 - 1
_HOTTEST = sys.float_info.max


def _is_whole(value: Any, least: int, most: int) -> bool:
    """Whether it is an integer in that range: Python's, numpy's or torch's."""
    try:
        return least <= operator.index(value) <= most
    except TypeError:
        return False


def _is_in(value: Any, least: float, most: float) -> bool:
    """Whether it is a number in that range; NaN is in none."""
    try:
        return not isinstance(value, str) and least <= float(value) <= most
    except (TypeError, ValueError, OverflowError):
        return False


def _shown(value: object) -> str:
    """As Python writes it, but for integers of so many digits that it refuses to."""
    is_large = isinstance(value, int) and value.bit_length() > 64
    return "an integer of more than 64 bits" if is_large else repr(value)


@dataclass
class Statistics:
    """Of one request. Prefill's token is in neither `rounds` nor `round_tokens`."""

    simulated: bool = False  # acceptance was imposed: the speed means something, the tokens do not
    rounds: int = 0
    round_tokens: int = 0  # emitted by rounds, bonus included
    #: Entry k: rounds in which k drafted tokens were accepted, or more.
    reached: list[int] = field(default_factory=list)
    drafted: int = 0  # tokens that were proposed, and verified
    #: Entry k - 1: rounds that proposed a token at depth k.
    proposed: list[int] = field(default_factory=list)
    queued_seconds: float = 0.0  # submitted to admitted
    first_token_seconds: float = 0.0  # admitted to first token
    decode_seconds: float = 0.0  # first token to last

    @property
    def acceptance_length(self) -> float:
        """τ; 1 for plain decoding, 0 when the first token was the last."""
        return self.round_tokens / self.rounds if self.rounds else 0.0

    @property
    def seconds_per_token(self) -> float:
        """TPOT: mean time between two tokens after the first."""
        return self.decode_seconds / self.round_tokens if self.round_tokens else 0.0

    def counters(self) -> RoundCounters:
        """What reports and servers tell of it."""
        return RoundCounters(
            rounds=self.rounds,
            tokens=self.round_tokens,
            drafted=self.drafted,
            accepted_lengths=tuple(more - less for more, less in pairwise([*self.reached, 0])),
            proposed=tuple(self.proposed),
        )

    def count_round(self, emitted: int, taken: int, drafted: int = 0, deepest: int = 0) -> None:
        """A round drafted `drafted` tokens, `deepest` deep, and emitted `emitted`, of which the
        request took `taken` before it ended."""
        self.rounds += 1
        self.round_tokens += taken
        self.drafted += drafted
        _count_up_to(emitted, self.reached)
        _count_up_to(deepest, self.proposed)


def _count_up_to(depth: int, counts: list[int]) -> None:
    """One more in each of the first `depth` entries."""
    counts.extend([0] * (depth - len(counts)))
    for entry in range(depth):
        counts[entry] += 1


class Acceptance(NamedTuple):
    """Acceptance pooled over rounds: a long reply counts for more than a short one."""

    tau: float  # τ: tokens a round, bonus included, prefill's token excluded; 0 without rounds
    alpha: tuple[float, ...]  # α_k, k = 1…: position k accepted, given that all before it were

    def named(self) -> dict[str, float]:
        """tau, alpha_1, alpha_2, …: as metrics name them."""
        return {"tau": self.tau, **{f"alpha_{k}": value for k, value in enumerate(self.alpha, 1)}}


def pool_acceptance(statistics: Iterable[Statistics]) -> Acceptance:
    """τ and α over all rounds of some requests."""
    done = list(statistics)
    rounds = sum(each.rounds for each in done)
    tau = sum(each.round_tokens for each in done) / rounds if rounds else 0.0
    reached = [sum(depth) for depth in zip_longest(*(each.reached for each in done), fillvalue=0)]
    return Acceptance(tau, tuple(after / before for before, after in pairwise(reached)))


@dataclass(frozen=True)
class Completion:
    """A finished request: generated ids, a stop token included."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    statistics: Statistics
    error: Problem | None = None  # when finish_reason is "error"


@dataclass(frozen=True)
class Emission:
    """Tokens of one request as they come; the last one carries the completion."""

    request_id: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None


@dataclass
class RunningRequest:
    """A request on its way through the engine."""

    request: Request
    pages: list[int]
    admitted: float
    drafter_pages: list[int] = field(default_factory=list)  # of the drafter's own pool
    prefilled: int = 0  # prompt tokens in the cache
    tokens: list[int] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    finish_reason: FinishReason | None = None
    error: Problem | None = None

    def take(
        self, emitted: Sequence[int], now: float, drafted: int = 0, deepest: int = 0
    ) -> Emission:
        """Append what a round (or prefill) emitted, up to a stop token or the limit.

        The round had drafted `drafted` tokens, `deepest` deep.
        """
        first, taken = not self.tokens, []
        for token in emitted:
            if token < 0:
                what = f"the target's logits were NaN after {len(self.tokens)} generated tokens"
                self.error = Problem(what, "check the target's weights and target.dtype")
                self.finish_reason = "error"
                break
            taken.append(token)
            self.tokens.append(token)
            if token in self.request.stop_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) == self.request.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        since = now - self.admitted
        if first:
            self.statistics.first_token_seconds = since
        else:
            self.statistics.count_round(len(emitted), len(taken), drafted, deepest)
            self.statistics.decode_seconds = since - self.statistics.first_token_seconds
        return Emission(self.request.request_id, tuple(taken), self.completion())

    def completion(self) -> Completion | None:
        """What has become of it; None while it runs."""
        reason, error = self.finish_reason, self.error
        if reason is None:
            return None
        return Completion(
            self.request.request_id, tuple(self.tokens), reason, self.statistics, error
        )
