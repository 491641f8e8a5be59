"""`report.json`: what rounds did for every request, and all that is derived from it. No torch.

RoundCounters      of a request: counted by the engine or told by a server, never derived
AcceptanceFigures  of a group of requests: derived from counters alone
LoadPoint          requests at one concurrency, through our engine or a server
EvalReport         all of it, with the target, the head and the machine
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, zip_longest
from typing import Any, Literal

from pydantic import Field, model_validator

from pipeline.records import Record, TargetContract

#: The report in the directory of stage eval.
REPORT = "report.json"


class RoundCounters(Record):
    """What the rounds of one request drafted and accepted; prefill's token is in none of it.

    drafted      accepted    position  1  2  3        accepted tokens   0  1  2  3
    a b c        a b         proposed  2  2  1        accepted_lengths  1  0  1  0
    d e          none        accepted  1  1  0
    """

    rounds: int
    """Rounds of the decoder, each a draft and a verification, or a plain forward."""
    tokens: int
    """Tokens taken from rounds, bonus included; the last round may be cut by a stop or a limit."""
    drafted: int
    """Drafted tokens that were verified: all nodes of the trees but the roots."""
    accepted_lengths: tuple[int, ...]
    """Entry n: rounds that accepted n drafted tokens; a last round counts uncut."""
    proposed: tuple[int, ...]
    """Entry k - 1: rounds with a drafted token at position k."""

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
    """The figure over all requests."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""


class AcceptanceFigures(Record):
    """Acceptance of a group of requests."""

    requests: int
    """Those with rounds."""
    rounds: int
    """Of all of them."""
    acceptance_length: Estimate
    """τ: Σ tokens / Σ rounds; a long reply counts for more."""
    request_acceptance_length: Estimate
    """Mean over requests of each one's tokens / rounds."""
    conditional: tuple[Estimate, ...]
    """α_k, k = 1…: position k accepted, of the rounds that accepted k - 1."""
    joint: tuple[Estimate, ...]
    """Position k = 1… accepted, of all rounds."""
    accept_rate: float
    """Accepted / drafted tokens; 0 where nothing was drafted."""


class ShapeAcceptance(Record):
    """Acceptance with trees of one shape, greedy, on some prompts' first turns."""

    name: str
    """steps/top_k/nodes: the order of SGLang's steps, topk and num_draft_tokens."""
    own: bool
    """Whether it is the tree of the report."""
    steps: int
    """Draft depth."""
    top_k: int
    """Beams a step; 1 is a chain."""
    nodes: int
    """Tokens verified at once, root included."""
    acceptance: AcceptanceFigures
    """Of the replies it was tried on."""


class Percentiles(Record):
    """Of one measure over requests."""

    mean: float
    """Mean over requests."""
    p50: float
    """Median."""
    p90: float
    """90th percentile."""
    p99: float
    """99th percentile."""


class LoadPoint(Record):
    """Requests with so many of them open at a time: as one ends the next is sent."""

    concurrency: int
    """Requests that are open at a time."""
    temperature: float
    """Of the sampling; 0 is greedy."""
    requests: int
    """Requests that ended well; speed and acceptance are theirs."""
    failed: int
    """Requests that did not."""
    seconds: float
    """First request sent to last ended."""
    tokens: int
    """Generated tokens."""
    throughput: float
    """Generated tokens a second over all requests."""
    ttft_seconds: Percentiles
    """Sent to first token."""
    tpot_seconds: Percentiles
    """Mean time of a token behind the first, by request."""
    acceptance: AcceptanceFigures | None = None
    """None: nothing was drafted, or nobody told."""
    peak_memory_bytes: int | None = None
    """Of a GPU while it ran, the pool of the other way beside; None on a CPU or of a server."""
    cache_bytes: int | None = None
    """Keys and values at the fullest moment, the drafter's with them; None: nobody told."""
    round_seconds: dict[str, float] = Field({})
    """A round by part: draft, verify, extend."""
    efficiency: float | None = None
    """η: measured over the roofline's speedup."""


class LoadCurve(Record):
    """What the charts of TPOT and throughput against concurrency draw as a line."""

    name: str
    """Way of decoding, speculative or plain, or what a server is called."""
    settings: dict[str, Any]
    """What differs from the report's own."""
    points: tuple[LoadPoint, ...]
    """By concurrency, the smallest first."""


class PromptResult(Record):
    """One request: a turn of a prompt."""

    id: str
    """SOURCE/ID of the prompt; #TURN behind it from the second turn on."""
    category: str
    """Of the prompt."""
    source: str = ""
    """Data set of the prompt."""
    turn: int = 1
    """Number of the turn, from 1."""
    context_tokens: int = 0
    """Tokens before the reply, templates included."""
    context_digest: str = ""
    """Of these tokens: 16 digits of a SHA-256."""
    finish_reason: str = ""
    """Why the reply ended: stop, length, or what a server says."""
    rounds: int
    """Rounds of the reply."""
    tokens: int
    """Tokens of the reply."""
    acceptance_length: float
    """τ of this reply."""
    tokens_per_second: dict[str, float]
    """Decoding rate by way: speculative, plain, hf."""
    ttft_seconds: dict[str, float] = Field({})
    """Admitted or sent to first token, by way of decoding."""
    tpot_seconds: dict[str, float] = Field({})
    """Mean time of a token behind the first, by way of decoding."""
    counters: RoundCounters | None = None
    """None in a report that is older than they are, or where a server does not tell."""
    identical_fp32: bool | None
    """Whether speculative and plain decoding in fp32 gave the same tokens; None: not checked."""

    @property
    def prompt(self) -> str:
        """The id of the prompt that it is a turn of: that of its first turn."""
        return self.id.removesuffix(f"#{self.turn}") if self.turn > 1 else self.id


Verdict = Literal["better", "worse", "no difference seen"]


class PairedComparison(Record):
    """Two drafters on the same requests: the report's own, and a rival."""

    rival: str
    """What the rival is called."""
    settings: dict[str, Any]
    """The rival's head, drafter and tree, or the report that it was read from."""
    requests: int
    """That both decoded, from the same prompt tokens."""
    prompts: int
    """That these are turns of, and that are drawn for the intervals."""
    acceptance_length: Estimate
    """τ of the rival."""
    difference: Estimate
    """Own τ less the rival's, on the same draws of prompts."""
    speed_ratio: Estimate | None = None
    """Own tokens per second over the rival's: geometric mean over requests; None: not timed."""
    verdict: Verdict
    """Of the report's own drafter by τ: better or worse where the interval of `difference` leaves
    out 0."""
    smallest_seen: float
    """About the smallest difference of τ that so many prompts would have shown: half the width."""


class GoldenPrompt(Record):
    """A prompt and what the decoder's rounds did for it."""

    id: str
    """As in `prompts`."""
    prompt_ids: tuple[int, ...]
    """Token ids, to be sent as they are."""
    reply_ids: tuple[int, ...]
    """The greedy reply, end token included."""
    counters: RoundCounters
    """Of that reply."""


class GoldenFigure(Record):
    """τ that a right server has on these prompts: what `eagle3 check-serving` compares with."""

    head_fingerprint: str
    """SHA-256 of the head's weights; empty without a head."""
    target_fingerprint: str
    """Of the target, as in its contract."""
    drafter: str
    """Its name."""
    tree: dict[str, Any]
    """top_k, steps, nodes."""
    temperature: float
    """0: greedy, so that a right server's rounds are the same up to near-ties."""
    max_new_tokens: int
    """Length limit of a reply."""
    stop_ids: tuple[int, ...]
    """Tokens that end a reply."""
    prompts_digest: str
    """SHA-256 over the prompts' token ids."""
    acceptance_length: Estimate
    """τ on these prompts."""
    prompts: tuple[GoldenPrompt, ...]
    """Some first turns of the report, evenly over them."""


class ServerFinding(Record):
    """Something about a server that a person should know."""

    severity: Literal["error", "warning", "note"]
    """error: what the server does is not what the report stands for."""
    name: str
    """Short and constant, for machines."""
    text: str
    """What was seen."""
    fix: str
    """What to do."""


class ServerResult(Record):
    """One run of `eagle3 eval --server`: what a running server did with the evaluation prompts."""

    url: str
    """Where it was asked."""
    kind: Literal["sglang", "vllm", "eagle3"]
    """Whose server it is."""
    version: str
    """As it told; empty where it does not tell."""
    model: str
    """What it calls its model."""
    created: str
    """When the run ended, UTC."""
    asked: dict[str, Any]
    """Prompts, max_new_tokens, temperature and prompts_digest of what was sent."""
    told: dict[str, Any]
    """Settings that it told, speculative ones above all."""
    curve: LoadCurve
    """By concurrency. Acceptance that a server tells for all requests together has an interval of
    width 0 (see `pooled`)."""
    pooled: tuple[int, ...]
    """Concurrencies whose acceptance was told for all requests together."""
    failures: dict[str, int]
    """Attempts that failed, by reason; those that were repeated begin with retried_."""
    expected: dict[str, Any]
    """What it was compared with: τ of the decoder on the same prompts; {} without a report."""
    prompts: tuple[PromptResult, ...]
    """Requests at the lowest concurrency."""
    findings: tuple[ServerFinding, ...]
    """The gravest first."""

    @property
    def passed(self) -> bool:
        """No finding is an error."""
        return all(each.severity != "error" for each in self.findings)


class EvalReport(Record):
    """`report.json`. Later versions add keys and rename none."""

    acceptance_length: float
    """τ: tokens a round over all requests, bonus token included, prefill's excluded."""
    alpha: tuple[float, ...]
    """α_k, k = 1…: accepted at depth k, of the rounds that accepted at depth k - 1."""
    tokens_per_second: dict[str, float]
    """By way of decoding (speculative, plain, hf): medians over requests."""
    speedup: dict[str, float]
    """Over plain and over hf: medians of ratios on the same request."""
    lossless: dict[str, Any]
    """Whether greedy_fp32 holds, prompts_checked, and how far any token of the run's own type is
    from the plain model's best."""
    head: dict[str, Any]
    """Its parameters, share_of_target, draft_vocab_size, coverage; {} without a head."""
    drafter: dict[str, Any] = Field({"name": "eagle3"})
    """Its name, and what was set of it."""
    by_category: dict[str, dict[str, float]]
    """Of each category: prompts, acceptance_length, tokens_per_second, speedup_plain."""
    acceptance: AcceptanceFigures | None = None
    """Of all requests."""
    groups: dict[str, dict[str, AcceptanceFigures]] = Field({})
    """By kind (category, turn, context) and name; contexts are buckets such as 512-1023 tokens."""
    names: dict[str, dict[str, Any]] = Field({})
    """Acceptance under the names of vllm, sglang and speed_bench, as they define it."""
    shapes: tuple[ShapeAcceptance, ...] = ()
    """Acceptance with trees that servers draft, replayed exactly from one run."""
    comparisons: tuple[PairedComparison, ...] = ()
    """With what `eval.compare` names."""
    load: tuple[LoadCurve, ...] = ()
    """Speed against concurrency, a curve for each way of decoding."""
    golden: GoldenFigure | None = None
    """τ for `eagle3 check-serving`; None in an older report."""
    servers: tuple[ServerResult, ...] = ()
    """Running servers on the same prompts; in the stage they are files of their own, servers/."""
    contract: TargetContract
    """What target this is about."""
    provenance: dict[str, Any]
    """Of the head: manifests' hashes, licences, sources, rejected counts."""
    settings: dict[str, Any]
    """Tree, threads, type, prompts, machine."""
    prompts: tuple[PromptResult, ...]
    """Every request."""


def report_schema() -> dict[str, Any]:
    """The JSON schema of `report.json`, which docs/report-schema.json holds."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **EvalReport.model_json_schema(),
    }
