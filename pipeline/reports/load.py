"""Speed against concurrency, through our engine or a running server, and what was seen of that."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pipeline.records import Record
from pipeline.reports.acceptance import AcceptanceFigures, PromptResult


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
