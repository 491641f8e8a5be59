"""`report.json`: what rounds did for every request, and all that is derived from it. No torch.

Counters of a request, and acceptance of a group of requests, also under the names of other tools,
are in acceptance.py.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, ConfigDict, Field, JsonValue

from pipeline.config import TreeSection
from pipeline.records import Arithmetic, Record, TargetContract
from pipeline.reports.acceptance import (
    AcceptanceFigures,
    Estimate,
    OrNone,
    OtherNames,
    PromptResult,
    RoundCounters,
    SglangNames,
    ShapeAcceptance,
    SpeedBenchNames,
    VllmNames,
)

__all__ = [
    "MARKDOWN",
    "PAGE",
    "REPORT",
    "SERVERS",
    "AcceptanceFigures",
    "CategoryFigures",
    "DrafterSettings",
    "Estimate",
    "EvalReport",
    "GoldenFigure",
    "GoldenPrompt",
    "HeadFigures",
    "LoadCurve",
    "LoadPoint",
    "LosslessChecks",
    "OtherNames",
    "PairedComparison",
    "Percentiles",
    "PromptResult",
    "ReferenceCheck",
    "RefreshFigures",
    "ReportSettings",
    "RoundCounters",
    "ServerExpectation",
    "ServerFinding",
    "ServerResult",
    "ServerWorkload",
    "SglangNames",
    "ShapeAcceptance",
    "SpeedBenchNames",
    "TrainedHead",
    "TreeChoice",
    "TreeFigures",
    "Verdict",
    "VllmNames",
    "report_schema",
]

#: The report in the directory of stage eval, and the pages that are made of it: again after every
#: evaluation of a server, of which a folder beside them has a file each.
REPORT = "report.json"
PAGE, MARKDOWN = "report.html", "report.md"
SERVERS = "servers"
#: What a failed check of losslessness leaves, which is no report of the stage.
EVIDENCE = "not-lossless.json", "not-lossless.html"

Verdict = Literal["better", "worse", "no difference seen"]
RefreshVerdict = Literal["refresh is worth it", "the old head suffices", "start anew"]


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
    kind: Literal["sglang", "vllm", "llamacpp", "eagle3"]
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


class PairedComparison(Record):
    """Two drafters on the same requests: the report's own, and a rival."""

    rival: str
    """Its name."""
    settings: dict[str, Any]
    """The rival's head, drafter and tree, or the report that it was read from."""
    requests: int
    """Requests that both decoded, from the same prompt tokens."""
    prompts: int
    """Prompts of these requests; intervals draw them with replacement."""
    acceptance_length: Estimate
    """τ of the rival."""
    difference: Estimate
    """Own τ less the rival's, on the same draws of prompts."""
    speed_ratio: Estimate | None = None
    """Own tokens per second over the rival's: geometric mean over requests; None: not timed."""
    verdict: Verdict
    """On the report's own drafter by τ: better or worse where the interval of `difference` excludes
    0."""
    smallest_seen: float
    """About the smallest difference of τ that this many prompts could show: half the width."""


class TrainedHead(Record):
    """A head of `eagle3 refresh`: what it accepts of the tuned target, and what it cost."""

    acceptance_length: Estimate
    """τ, with the same tree for all three."""

    manifest: str
    """Content hash of the manifest of its training."""
    weights_sha256: str
    """Of its model.safetensors."""
    steps: int
    """Optimiser steps."""
    tokens: int
    """Tokens trained on, over all passes."""


class RefreshFigures(Record):
    """Of `eagle3 refresh`: which head the tuned target should get. The report's own is refreshed,
    and `comparisons` has it beside the other two."""

    verdict: RefreshVerdict
    """refresh is worth it: surely better than the old head, and the one from scratch is not surely
    better still. start anew: the one from scratch is. the old head suffices: neither is surely
    better than it."""
    scratch_to_old: PairedComparison
    """The head from scratch beside the old one."""
    old_run: str
    """Name of the earlier run."""
    old_target: str
    """Fingerprint of the target that it was for."""
    share: float
    """Of the prompts that the tuned target answered, as synth.share."""
    heads: dict[str, TrainedHead]
    """By name: old, refreshed, scratch. The last two have the same steps, tokens and states."""


class GoldenPrompt(Record):
    """A prompt and what the decoder's rounds did for it."""

    id: str
    """As in `prompts`."""
    prompt_ids: tuple[int, ...]
    """Token ids, sent as they are."""
    reply_ids: tuple[int, ...]
    """The greedy reply, end token included."""
    counters: RoundCounters
    """Of that reply."""
    runner_up_ids: tuple[int, ...] = ()
    """For each token of the reply the likeliest other one."""
    runner_up_gaps: tuple[float, ...] = ()
    """How far that one lies below, in nats: where a right server's text may part from this one."""
    shapes: dict[str, RoundCounters] = Field({})
    """Of the same reply with other trees, by name as in `shapes`, replayed: chains of every depth,
    and `eval.shapes`."""
    accepted_at: dict[str, tuple[int, ...]] = Field({})
    """For each of them, how many drafted tokens a round that begins at each token of the reply but
    the last accepts, whatever the rounds before it did."""
    chain_margins: tuple[tuple[float, ...], ...] = ()
    """For each token of the reply but the last, and each further token up to the first that a chain
    drafts wrong: by how much the drafted one leads, in nats, over the likeliest other, or over the
    right one. Where it is small, another arithmetic may draft the other; it counts as 0 where it is
    not known."""


class GoldenFigure(Record):
    """τ that a correct server reaches on these prompts; `eagle3 check-serving` compares with it."""

    head_fingerprint: str
    """SHA-256 of the head's weights; empty without a head."""
    target_fingerprint: str
    """Of the target, as in its contract."""
    drafter: str
    """Its name."""
    tree: TreeSection
    """The draft tree."""
    temperature: float
    """0: greedy, so that a correct server's rounds are the same up to near-ties."""
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


class TreeFigures(Record):
    """A drafter on a tree that is not used, because plain decoding is predicted to be faster."""

    tree: TreeSection
    """The tree."""
    acceptance_length: float
    """τ with it."""
    speedup_plain: float
    """Over plain decoding: median of ratios on the same request."""


class ReferenceCheck(Record):
    """Plain decoding in fp32 against transformers, on a few replies."""

    same: bool
    """Every token is transformers' choice and logits agree."""
    replies: int
    """Replies that were read."""
    tokens: int
    """Their tokens."""
    near_ties: int
    """Tokens within rounding of transformers' choice."""
    wrong_tokens: int
    """Tokens that are not its choice."""
    logits_difference: float
    """Largest relative difference of the logits before a token."""
    different: tuple[str, ...]
    """Requests with a difference."""


class LosslessChecks(Record):
    """Whether speculative decoding gives the target's own tokens."""

    greedy_fp32: bool
    """Speculative replies are plain decoding's, token for token."""
    prompts_checked: int
    """Requests of this check."""
    sampled_fp32: dict[str, bool] = Field({})
    """The same of sampled replies, by temperature."""
    sampled_different: tuple[str, ...] = ()
    """Requests whose sampled replies differ."""
    transformers: OrNone[ReferenceCheck] = None
    """Whether plain decoding is the target's; None in an older report."""
    different: tuple[str, ...] = ()
    """Requests whose greedy replies differ."""
    identical_in_run_dtype: int
    """Requests whose replies are identical in the run's own type, too."""
    tokens_scored: int
    """Tokens of the speculative replies, scored by the plain model in the run's own type."""
    near_ties: int
    """Of those, tokens that are not the best one."""
    worst_log_probability_gap: float
    """How far the worst of those lies below the best token."""


class HeadFigures(Record):
    """The head that drafted."""

    parameters: int
    """Trained parameters."""
    share_of_target: float
    """Of the target's parameters."""
    draft_vocab_size: int
    """Tokens that it can propose."""
    coverage: float
    """Share of its training labels that these tokens cover."""


class DrafterSettings(Record):
    """The drafter: its name, and its own settings, each under its own key."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    name: str
    """As `drafter.name`."""
    lookup: dict[str, JsonValue] | None = None
    """Settings of the lookup beside it; null: none. Golden rounds and `shapes` are without it, as
    no server has one."""

    @property
    def label(self) -> str:
        """Both by name."""
        return self.name if self.lookup is None else f"{self.name} and lookup"


class CategoryFigures(Record):
    """One category of prompts."""

    prompts: int
    """Requests."""
    acceptance_length: float
    """τ over all of them."""
    tokens_per_second: float
    """Speculative decoding, median over requests."""
    speedup_plain: float
    """Over plain decoding: median of ratios on the same request."""


class TreeChoice(Record):
    """What `tree: auto` predicted and chose."""

    fastest_tree: TreeSection
    """For a batch of one."""
    predicted_acceptance_length: float
    """τ with it, on the prompts that it was tried on."""
    predicted_speedup: float
    """Over plain decoding; at most 1: plain decoding is used."""
    settings: dict[str, int]
    """Settings of the drafter that were chosen with it, such as a budget."""
    tried_on_other_prompts: bool
    """Whether the measured prompts were left out of the trial."""
    by_batch: dict[str, TreeSection | None]
    """From each batch size upward; None: plain decoding."""


class ReportSettings(Record):
    """How the report was measured."""

    tree: TreeSection | None
    """Draft tree; None: plain decoding."""
    tree_auto: TreeChoice | None = None
    """Of `tree: auto`."""
    dtype: str
    """Of speed and acceptance; losslessness is checked in fp32."""
    arithmetic: Arithmetic
    """What the numbers were computed with."""
    device: str
    """Name of the GPU or CPU."""
    threads: int
    """Of torch."""
    torch: str
    """Its version."""
    max_new_tokens: int
    """Length limit of a reply."""
    chat_template_kwargs: dict[str, str | int | float | bool]
    """Variables of the chat template."""
    prompts: int
    """Requests that were measured."""
    left_out: dict[str, int]
    """Requests that were not, by reason."""
    shapes_left_out: dict[str, str] = Field({})
    """Trees of `eval.shapes` that were not replayed, with the reason."""


class EvalReport(Record):
    """`report.json`. Later versions add keys and rename none."""

    decoding: Literal["speculative", "plain"] = "speculative"
    """plain: `tree: auto` predicted no tree to be faster, so that all figures but `alpha` and
    `unused_tree` are plain decoding's."""
    acceptance_length: float
    """τ: tokens a round over all requests, bonus token included, prefill's excluded."""
    alpha: tuple[float, ...]
    """α_k, k = 1…: accepted at depth k, of the rounds that accepted at depth k - 1."""
    tokens_per_second: dict[str, float]
    """By way of decoding (speculative, plain, hf): medians over requests."""
    speedup: dict[str, float]
    """Over plain and over hf: medians of ratios on the same request."""
    lossless: LosslessChecks
    """Whether the output is the target's."""
    head: OrNone[HeadFigures]
    """None: the drafter has no head."""
    drafter: DrafterSettings = DrafterSettings(name="eagle3")
    """What drafted."""
    unused_tree: TreeFigures | None = None
    """The drafter on the default tree, where plain decoding was chosen."""
    by_category: dict[str, CategoryFigures]
    """Of each category of prompts."""
    acceptance: AcceptanceFigures | None = None
    """Of all requests."""
    groups: dict[str, dict[str, AcceptanceFigures]] = Field({})
    """By kind (category, turn, context) and name; contexts are buckets such as 512-1023 tokens."""
    names: OtherNames | None = None
    """Acceptance under the names of other tools, as they define them."""
    shapes: tuple[ShapeAcceptance, ...] = ()
    """Acceptance with trees that servers draft, replayed exactly from one run."""
    comparisons: tuple[PairedComparison, ...] = ()
    """With the drafters of `eval.compare`."""
    refresh: RefreshFigures | None = None
    """Of `eagle3 refresh`."""
    load: tuple[LoadCurve, ...] = ()
    """Speed against concurrency, a curve for each way of decoding."""
    golden: GoldenFigure | None = None
    """τ for `eagle3 check-serving`; None in an older report, and of plain decoding."""
    servers: tuple[ServerResult, ...] = ()
    """Running servers on the same prompts; the stage stores them as files of their own, servers/.
    """
    contract: TargetContract
    """The target."""
    provenance: dict[str, JsonValue]
    """A copy of the head's own (docs/head-format.md): manifests, licences, sources, rejections."""
    settings: ReportSettings
    """How it was measured."""
    work: str = ""
    """Hash of the configuration and the head's manifest that it was made for; "" in older ones."""
    commits: dict[str, str] = Field({})
    """Of heads and prompts on the Hub (hub:org/name in the configuration) the commit that was read.
    """
    prompts: tuple[PromptResult, ...]
    """Every request."""

    @property
    def subject(self) -> str:
        """What was evaluated, for headings."""
        if not self.head:
            return self.drafter.label
        return "Draft head" if self.drafter.lookup is None else "Draft head and lookup"

    @property
    def of_drafter_alone(self) -> AcceptanceFigures | None:
        """Its acceptance without a lookup: where there was one, as `shapes` replay it. None where
        that is not known."""
        if self.drafter.lookup is None:
            return self.acceptance
        return next((each.acceptance for each in self.shapes if each.own), None)

    @property
    def speculation_is_lossless(self) -> bool:
        """Speculative decoding gives plain decoding's tokens in fp32."""
        return self.lossless.greedy_fp32 and all(self.lossless.sampled_fp32.values())

    @property
    def plain_is_the_target(self) -> bool | None:
        """Plain decoding gives transformers' tokens in fp32. None in an older report, which did not
        check it."""
        check = self.lossless.transformers
        return check.same if check else None

    @property
    def is_lossless(self) -> bool:
        """Both."""
        return self.speculation_is_lossless and self.plain_is_the_target is True


def report_schema() -> dict[str, Any]:
    """The JSON schema of `report.json`, which docs/report-schema.json holds."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **EvalReport.model_json_schema(),
    }
