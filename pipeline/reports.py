"""`report.json`: what rounds did for every request, and all that is derived from it. No torch.

RoundCounters      of a request: counted by the engine or told by a server, never derived
AcceptanceFigures  of a group of requests: derived from counters alone
LoadPoint          requests at one concurrency, through our engine or a server
EvalReport         all of it, with the target, the head and the machine
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, zip_longest
from typing import Any

from pydantic import Field, model_validator

from pipeline.records import Record, TargetContract


class RoundCounters(Record):
    """What the rounds of one request drafted and accepted; prefill's token is in none of it.

    drafted      accepted    position  1  2  3        accepted tokens   0  1  2  3
    a b c        a b         proposed  2  2  1        accepted_lengths  1  0  1  0
    d e          none        accepted  1  1  0
    """

    rounds: int
    tokens: int  # taken from rounds, bonus included; the last round may be cut by a stop or limit
    drafted: int  # drafted tokens that were verified: all nodes of the trees but the roots
    accepted_lengths: tuple[int, ...]  # entry n: rounds that accepted n drafted tokens
    proposed: tuple[int, ...]  # entry k - 1: rounds with a drafted token at position k

    @model_validator(mode="after")
    def _adds_up(self) -> RoundCounters:
        accepted = self.accepted
        if sum(self.accepted_lengths) != self.rounds:
            raise ValueError("accepted_lengths does not add up to rounds")
        if len(accepted) > len(self.proposed) or any(
            kept > offered for kept, offered in zip(accepted, self.proposed, strict=False)
        ):
            raise ValueError("a position is accepted more often than it was proposed")
        return self

    @classmethod
    def total(cls, counters: Iterable[RoundCounters]) -> RoundCounters:
        """Of all requests together."""
        each = list(counters)
        return cls(
            rounds=sum(one.rounds for one in each),
            tokens=sum(one.tokens for one in each),
            drafted=sum(one.drafted for one in each),
            accepted_lengths=_added(one.accepted_lengths for one in each),
            proposed=_added(one.proposed for one in each),
        )

    @property
    def accepted(self) -> tuple[int, ...]:
        """Entry k - 1: rounds that accepted position k, and so all before it."""
        kept = list(accumulate(reversed(self.accepted_lengths[1:])))[::-1]
        while kept and not kept[-1]:
            kept.pop()
        return tuple(kept)

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens that were accepted."""
        return sum(self.accepted)

    @property
    def acceptance_length(self) -> float:
        """τ; 0 without rounds."""
        return self.tokens / self.rounds if self.rounds else 0.0


def _added(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Entry by entry; shorter rows end in zeros."""
    return tuple(map(sum, zip_longest(*rows, fillvalue=0)))


class Estimate(Record):
    """A figure and its 95 % interval, by drawing prompts with replacement."""

    value: float
    low: float
    high: float


class AcceptanceFigures(Record):
    """Acceptance of a group of requests."""

    requests: int
    rounds: int
    acceptance_length: Estimate  # τ: Σ tokens / Σ rounds, a long reply counts for more
    request_acceptance_length: Estimate  # mean over requests of each one's tokens / rounds
    conditional: tuple[Estimate, ...]  # α_k, k = 1…: position k accepted, given k - 1 was
    joint: tuple[Estimate, ...]  # position k accepted, of all rounds
    accept_rate: float  # accepted / drafted tokens; 0 where nothing was drafted


class ShapeAcceptance(Record):
    """Acceptance with trees of one shape, greedy, on some prompts' first turns."""

    name: str  # steps/top_k/nodes, which is SGLang's order
    own: bool  # the tree of the report
    steps: int  # draft depth
    top_k: int  # beams a step; 1: a chain
    nodes: int  # verified at once, root included
    acceptance: AcceptanceFigures


class Percentiles(Record):
    """Of one measure over requests."""

    mean: float
    p50: float
    p90: float
    p99: float


class LoadPoint(Record):
    """Requests with so many of them open at a time: as one ends the next is sent."""

    concurrency: int
    temperature: float
    requests: int  # that ended well; speed and acceptance are theirs
    failed: int
    seconds: float  # first sent to last ended
    tokens: int  # generated
    throughput: float  # tokens a second over all requests
    ttft_seconds: Percentiles  # sent to first token
    tpot_seconds: Percentiles  # mean time of a token behind the first, by request
    acceptance: AcceptanceFigures | None = None  # None: nothing was drafted, or nobody told
    peak_memory_bytes: int | None = None
    round_seconds: dict[str, float] = Field({})  # a round by part: draft, verify, extend
    efficiency: float | None = None  # η: measured over the roofline's speedup


class LoadCurve(Record):
    """What the charts of TPOT and throughput against concurrency draw as a line."""

    name: str  # "speculative", "plain", or what a server is called
    settings: dict[str, Any]  # what differs from the report's own
    points: tuple[LoadPoint, ...]


class PromptResult(Record):
    """One request: a turn of a prompt."""

    id: str
    category: str
    source: str = ""
    turn: int = 1
    context_tokens: int = 0
    finish_reason: str = ""
    rounds: int
    tokens: int  # of the reply
    acceptance_length: float
    tokens_per_second: dict[str, float]  # speculative, plain, hf
    ttft_seconds: dict[str, float] = Field({})  # by way of decoding, as tokens_per_second
    tpot_seconds: dict[str, float] = Field({})
    counters: RoundCounters | None = None  # None: of a report that is older than they are
    identical_fp32: bool | None  # None: not checked

    @property
    def prompt(self) -> str:
        """The id of the prompt that it is a turn of: that of its first turn."""
        return self.id.removesuffix(f"#{self.turn}") if self.turn > 1 else self.id


class EvalReport(Record):
    """`report.json`. Later versions add keys and rename none."""

    acceptance_length: float  # τ: tokens a round, bonus token included, prefill's excluded
    alpha: tuple[float, ...]  # α_k, k = 1…: accepted at depth k given accepted at k-1
    tokens_per_second: dict[str, float]  # speculative, plain, hf: medians over prompts
    speedup: dict[str, float]  # over plain, over hf
    lossless: dict[str, Any]  # greedy_fp32: bool, prompts_checked: int
    head: dict[str, Any]  # parameters, share_of_target, draft_vocab_size, coverage; {}: no head
    drafter: dict[str, Any] = Field({"name": "eagle3"})  # its name, and what was set of it
    by_category: dict[str, dict[str, float]]
    acceptance: AcceptanceFigures | None = None  # of all requests
    groups: dict[str, dict[str, AcceptanceFigures]] = Field({})  # by category, turn and context
    names: dict[str, dict[str, Any]] = Field({})  # vllm, sglang, speed_bench: as they define theirs
    shapes: tuple[ShapeAcceptance, ...] = ()  # what servers draft, replayed from one run
    load: tuple[LoadCurve, ...] = ()
    contract: TargetContract
    provenance: dict[str, Any]  # manifests' hashes, licences, sources, rejected counts
    settings: dict[str, Any]  # tree shape, threads, dtype, prompts, machine
    prompts: tuple[PromptResult, ...]
