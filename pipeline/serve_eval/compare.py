"""Two drafters on the same requests, and a verdict that respects noise.

    difference   own τ - rival's τ, of the same draws of prompts: what both find hard cancels out
    verdict      better or worse where 95 % of the draws leave out 0

From the report's own run, where both took turns on every request, or from two reports. Acceptance
is paired by request: the same prompt tokens, so the same plain reply, in fp32 at least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.config import RivalSection
from pipeline.errors import DataError, Regression
from pipeline.reports import (
    EvalReport,
    PairedComparison,
    PromptResult,
    RefreshVerdict,
    RoundCounters,
    Verdict,
)
from pipeline.serve_eval.intervals import drawn_sums, estimate

if TYPE_CHECKING:
    from pipeline.serve_eval.measure import Measured

#: With fewer, an interval from draws of prompts is too narrow for a verdict.
FEWEST_PROMPTS = 8


class Pair(NamedTuple):
    """One request, decoded by both."""

    prompt: str
    own: RoundCounters
    rival: RoundCounters
    speed_ratio: float | None  # own tokens per second over the rival's


def check_prompts(count: int, where: str = "eval.compare") -> None:
    """Raises DataError where so few prompts are no ground for a verdict."""
    if count < FEWEST_PROMPTS:
        problem = f"{count} prompts are decoded by both, a verdict needs {FEWEST_PROMPTS}"
        raise DataError(problem, where=where, fix="evaluate more prompts, the same for both")


def compare(
    pairs: Sequence[Pair], rival: str, settings: Mapping[str, Any], *, where: str
) -> PairedComparison:
    """Raises DataError with fewer than FEWEST_PROMPTS prompts that have rounds in both."""
    pairs = [pair for pair in pairs if pair.own.rounds and pair.rival.rounds]
    prompts = len({pair.prompt for pair in pairs})
    check_prompts(prompts, where)
    rows = np.array([[*_sums(pair.own), *_sums(pair.rival), *_speed(pair)] for pair in pairs])
    drawn = drawn_sums(rows, [pair.prompt for pair in pairs])  # [1 + DRAWS, 6]
    own, other = drawn[:, 0] / drawn[:, 1], drawn[:, 2] / drawn[:, 3]
    difference = estimate(own - other, prompts)
    timed = all(pair.speed_ratio is not None for pair in pairs)
    return PairedComparison(
        rival=rival,
        settings=dict(settings),
        requests=len(pairs),
        prompts=prompts,
        acceptance_length=estimate(other, prompts),
        difference=difference,
        speed_ratio=estimate(np.exp(drawn[:, 4] / drawn[:, 5]), prompts) if timed else None,
        verdict=_verdict(difference.low, difference.high),
        smallest_seen=(difference.high - difference.low) / 2,
    )


def compare_rivals(
    measured: Sequence[Measured], rivals: Sequence[RivalSection]
) -> tuple[PairedComparison, ...]:
    """Of each rival that took turns with the report's own drafter."""
    return tuple(
        compare(
            [_pair(item, rival.name) for item in measured],
            rival.name,
            rival.model_dump(mode="json", exclude={"name"}),
            where="eval.compare",
        )
        for rival in rivals
    )


def refresh_verdict(
    refreshed_to_old: Verdict, refreshed_to_scratch: Verdict, scratch_to_old: Verdict
) -> RefreshVerdict:
    """Of three paired verdicts on τ, each sure at 95 %."""
    if refreshed_to_old != "better" and scratch_to_old != "better":
        return "the old head suffices"
    if refreshed_to_old == "better" and refreshed_to_scratch != "worse":
        return "refresh is worth it"
    return "start anew"


def compare_two_rivals(
    measured: Sequence[Measured], own: RivalSection, rival: RivalSection
) -> PairedComparison:
    """Of two rivals; `own` stands where the report's own drafter does."""
    turns = [
        replace(
            item,
            speculative=item.rivals[own.name],
            rates={**item.rates, "speculative": item.rates[own.name]},
        )
        for item in measured
    ]
    return compare_rivals(turns, [rival])[0]


def _pair(item: Measured, name: str) -> Pair:
    own, rival = item.rates["speculative"], item.rates[name]
    return Pair(
        item.question.prompt,
        item.speculative.statistics.counters(),
        item.rivals[name].statistics.counters(),
        own / rival if own and rival else None,
    )


def compare_reports(own: EvalReport, earlier: EvalReport, *, where: str) -> PairedComparison:
    """The requests that both reports have. Speeds are of other moments, and are not compared.

    Raises DataError for reports of other targets or reply lengths, or with too few common requests.
    """
    for field, mine, theirs in _conditions(own, earlier):
        if mine != theirs:
            problem = f"{field} is {theirs}, in the other report {mine}"
            raise DataError(problem, where=where, fix="compare reports of the same conditions")
    before = {_request(each): each.counters for each in earlier.prompts if each.counters}
    pairs = [
        Pair(each.prompt, each.counters, before[_request(each)], None)
        for each in own.prompts
        if each.counters and _request(each) in before
    ]
    settings = {
        "report": where,
        "drafter": earlier.drafter.model_dump(),
        "tree": earlier.settings.model_dump(include={"tree"})["tree"],
        "head": earlier.head and earlier.head.model_dump(),
    }
    return compare(pairs, where, settings, where=where)


def check_regression(compared: PairedComparison, tolerance: float, *, where: str) -> None:
    """Raises Regression where even the best of the interval is worse than `tolerance` allows."""
    if compared.difference.high >= -tolerance:
        return
    allowed = f" by more than {tolerance:g}" if tolerance else ""
    problem = f"τ is worse{allowed}: {sentence(compared)}"
    raise Regression(problem, where=where, fix="look at what changed, or raise --tolerance")


def sentence(compared: PairedComparison) -> str:
    """The verdict in words."""
    own = compared.acceptance_length.value + compared.difference.value
    figures = f"τ {own:.3f} against {compared.acceptance_length.value:.3f} of {compared.rival}"
    change = compared.difference
    interval = f"{change.value:+.3f} ({change.low:+.3f} … {change.high:+.3f})"
    tried = f"{compared.requests} requests of {compared.prompts} prompts"
    shown = f"; a difference of {compared.smallest_seen:.3f} would have been seen"
    blind = shown if compared.verdict == "no difference seen" else ""
    return f"{compared.verdict}: {figures}, {interval}, on {tried}{blind}"


def _conditions(own: EvalReport, earlier: EvalReport) -> list[tuple[str, Any, Any]]:
    """What has to be equal for replies to be the same."""
    mine, theirs = own.contract, earlier.contract
    weights = mine.fingerprint if mine.has_weights_of(theirs) else theirs.fingerprint
    return [
        ("the target's weights", mine.fingerprint, weights),
        ("the chat template", mine.chat_template_hash, theirs.chat_template_hash),
        *(
            (f"settings.{key}", getattr(own.settings, key), getattr(earlier.settings, key))
            for key in ("max_new_tokens", "chat_template_kwargs")
        ),
    ]


def _request(result: PromptResult) -> tuple[str, int, str]:
    return result.id, result.context_tokens, result.context_digest


def _sums(counters: RoundCounters) -> tuple[float, float]:
    return counters.tokens, counters.rounds


def _speed(pair: Pair) -> tuple[float, float]:
    """log of the ratio, and 1."""
    return math.log(pair.speed_ratio) if pair.speed_ratio else 0.0, 1.0


def _verdict(low: float, high: float) -> Verdict:
    if low > 0:
        return "better"
    return "worse" if high < 0 else "no difference seen"
