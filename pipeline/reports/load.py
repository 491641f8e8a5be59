"""Speed against concurrency, through our engine or a running server, and findings about servers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, Field

from pipeline.records import Record
from pipeline.reports.acceptance import AcceptanceFigures, Estimate, OrNone, PromptResult


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
    """Mean time of a token after the first, by request."""
    acceptance: AcceptanceFigures | None = None
    """None: nothing was drafted, or the server reports none."""
    peak_memory_bytes: int | None = None
    """Of a GPU during the run, the other way's pool included; None on a CPU or of a server."""
    cache_bytes: int | None = None
    """Keys and values at the fullest moment, the drafter's included; None of a server."""
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


class ServerWorkload(Record):
    """What was sent to a server."""

    prompts: int
    """How many."""
    prompts_digest: str
    """SHA-256 over their token ids."""
    max_new_tokens: int
    """Length limit of a reply."""
    temperature: float
    """0: greedy."""


class ServerExpectation(Record):
    """The decoder on the prompts that both the report and the server have."""

    prompts: int
    """How many."""
    acceptance_length: Estimate
    """τ of the decoder."""


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
    """Its address."""
    kind: Literal["sglang", "vllm", "eagle3"]
    """Which server software it is."""
    version: str
    """As the server reports it; empty where it does not."""
    model: str
    """Its name for the model."""
    created: str
    """When the run ended, UTC."""
    workload: ServerWorkload = Field(validation_alias=AliasChoices("workload", "asked"))
    """What was sent."""
    server_settings: dict[str, Any] = Field(
        validation_alias=AliasChoices("server_settings", "told")
    )
    """Settings that the server reports, speculative ones above all."""
    curve: LoadCurve
    """By concurrency. Acceptance that a server reports for all requests together has an interval
    of width 0 (see `pooled`)."""
    pooled: tuple[int, ...]
    """Concurrencies whose acceptance was reported for all requests together."""
    failures: dict[str, int]
    """Attempts that failed, by reason; those that were retried begin with retried_."""
    expected: OrNone[ServerExpectation]
    """What it was compared with; None without a report."""
    prompts: tuple[PromptResult, ...]
    """Requests at the lowest concurrency."""
    findings: tuple[ServerFinding, ...]
    """The gravest first."""

    @property
    def passed(self) -> bool:
        """No finding is an error."""
        return all(each.severity != "error" for each in self.findings)
