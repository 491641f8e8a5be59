"""All of `report.json`, with the target, the head and the machine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pipeline.records import Record, TargetContract
from pipeline.reports.acceptance import (
    AcceptanceFigures,
    Estimate,
    PromptResult,
    RoundCounters,
    ShapeAcceptance,
)
from pipeline.reports.load import LoadCurve, ServerResult

#: The report in the directory of stage eval.
REPORT = "report.json"

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
    """Whether greedy_fp32 holds, prompts_checked, what transformers says of plain replies
    (transformers: same, replies, tokens, near_ties, wrong_tokens, logits_difference, different),
    and how far any token of the run's own type is from the plain model's best."""
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

    @property
    def speculation_is_lossless(self) -> bool:
        """The first leg: speculative decoding gives plain decoding's tokens in fp32."""
        drawn = self.lossless.get("sampled_fp32", {})
        return bool(self.lossless["greedy_fp32"] and all(drawn.values()))

    @property
    def plain_is_the_target(self) -> bool | None:
        """The second leg: plain decoding gives transformers' tokens in fp32. None in a report of an
        older version, which did not look."""
        same: bool | None = self.lossless.get("transformers", {}).get("same")
        return same

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
