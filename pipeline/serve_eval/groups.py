"""Requests → acceptance of all, and of each category, turn and context length; others' names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipeline.reports import (
    AcceptanceFigures,
    OtherNames,
    PromptResult,
    RoundCounters,
    SglangNames,
    SpeedBenchNames,
    VllmNames,
)
from pipeline.serve_eval.acceptance import acceptance_figures


class GroupedAcceptance(NamedTuple):
    """What `EvalReport` has of its requests, under the same names; those without counters are in
    none of it."""

    acceptance: AcceptanceFigures | None
    groups: dict[str, dict[str, AcceptanceFigures]]
    names: OtherNames


def grouped_acceptance(results: Sequence[PromptResult]) -> GroupedAcceptance:
    """Turns of a prompt are drawn together: see `acceptance_figures`."""
    counters = _counters(results)
    counted = [each for each in results if each.counters]
    prompts, categories = _prompts(results), [each.category for each in counted]
    by_context = sorted(results, key=lambda each: each.context_tokens)
    return GroupedAcceptance(
        acceptance=acceptance_figures(counters, prompts),
        groups={
            "category": _grouped(results, lambda each: each.category),
            "turn": _grouped(results, lambda each: str(each.turn)),
            "context": _grouped(by_context, lambda each: context_bucket(each.context_tokens)),
        },
        names=OtherNames(
            vllm=VllmNames.of(counters),
            sglang=SglangNames.of(counters),
            speed_bench=SpeedBenchNames.of(counters, prompts, categories),
        ),
    )


def context_bucket(tokens: int) -> str:
    """Between two powers of two: "512-1023"."""
    least = 1 << max(tokens, 1).bit_length() - 1
    return f"{least}-{2 * least - 1}" if least > 1 else "0-1"


def _grouped(
    results: Sequence[PromptResult], name_of: Callable[[PromptResult], str]
) -> dict[str, AcceptanceFigures]:
    """Groups in the order of their first requests; those without rounds are left out."""
    members: defaultdict[str, list[PromptResult]] = defaultdict(list)
    for each in results:
        members[name_of(each)].append(each)
    figures = {
        name: acceptance_figures(_counters(some), _prompts(some)) for name, some in members.items()
    }
    return {name: each for name, each in figures.items() if each}


def _counters(results: Sequence[PromptResult]) -> list[RoundCounters]:
    return [each.counters for each in results if each.counters]


def _prompts(results: Sequence[PromptResult]) -> list[str]:
    return [each.prompt for each in results if each.counters]
