"""Measurements → EvalReport."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch

from pipeline.config import RunConfig, TreeSection
from pipeline.decoder.request import Acceptance, pool_acceptance
from pipeline.eagle3.checkpoint import HeadCard
from pipeline.eagle3.head import Eagle3Head
from pipeline.records import EvalReport, PromptResult, TargetContract
from pipeline.serve_eval.measure import Measured
from pipeline.tuning.tune import Choice


class Measurements(NamedTuple):
    """What one evaluation measured."""

    measured: Sequence[Measured]
    identical: Mapping[str, bool]  # the losslessness verdict of each question
    left_out: Sequence[str]  # questions without room for a reply
    tree: TreeSection
    choice: Choice | None  # what `tree: auto` predicted for `tree`


def summarise(
    config: RunConfig,
    contract: TargetContract,
    head: Eagle3Head,
    card: HeadCard,
    measurements: Measurements,
) -> EvalReport:
    """All figures of `report.json`."""
    measured, identical, left_out, tree, choice = measurements
    predicted = choice and {
        "predicted_acceptance_length": choice.acceptance_length,
        "predicted_speedup": choice.speedup,
    }
    results = tuple(_result(item, identical) for item in measured)
    parameters, pooled = head.count_parameters(), _acceptance(measured)
    return EvalReport(
        acceptance_length=pooled.tau,
        alpha=pooled.alpha,
        tokens_per_second={
            mode: _median(item.rates[mode] for item in measured if mode in item.rates)
            for mode in ("speculative", "plain", "hf")
        },
        speedup={rival: _median(_speedups(measured, rival)) for rival in ("plain", "hf")},
        lossless={
            "greedy_fp32": all(identical.values()) and bool(identical),
            "prompts_checked": len(identical),
            "different": sorted(name for name, same in identical.items() if not same),
            "identical_in_run_dtype": sum(
                item.plain.token_ids == item.speculative.token_ids for item in measured
            ),
            # Of the speculative replies in the run's own type, scored by the plain model.
            "tokens_scored": sum(item.gaps.tokens for item in measured),
            "near_ties": sum(item.gaps.near_ties for item in measured),
            "worst_log_probability_gap": max(item.gaps.worst for item in measured),
        },
        head={
            "parameters": parameters,
            "share_of_target": parameters / contract.parameters,
            "draft_vocab_size": head.shape.draft_vocab_size,
            "coverage": card.metrics.get("coverage", 0.0),
        },
        by_category=_by_category(measured),
        contract=contract,
        provenance=card.provenance,
        settings={
            "tree": tree.model_dump(),
            "tree_auto": predicted,
            "dtype": contract.dtype,
            "device": _device_name(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "max_new_tokens": config.eval.max_new_tokens,
            "prompts": len(measured),
            "left_out": {"prompt_too_long": len(left_out)},
        },
        prompts=results,
    )


def _result(item: Measured, identical: Mapping[str, bool]) -> PromptResult:
    statistics = item.speculative.statistics
    return PromptResult(
        id=item.question.request_id,
        category=item.question.category,
        rounds=statistics.rounds,
        tokens=len(item.speculative.token_ids),
        acceptance_length=round(statistics.acceptance_length, 4),
        tokens_per_second={mode: round(rate, 2) for mode, rate in item.rates.items()},
        identical_fp32=identical.get(item.question.request_id),
    )


def _acceptance(measured: Sequence[Measured]) -> Acceptance:
    return pool_acceptance(item.speculative.statistics for item in measured)


def _by_category(measured: Sequence[Measured]) -> dict[str, dict[str, float]]:
    groups: defaultdict[str, list[Measured]] = defaultdict(list)
    for item in measured:
        groups[item.question.category].append(item)
    return {
        category: {
            "prompts": len(items),
            "acceptance_length": _acceptance(items).tau,
            "tokens_per_second": _median(item.rates["speculative"] for item in items),
            "speedup_plain": _median(_speedups(items, "plain")),
        }
        for category, items in sorted(groups.items())
    }


def _speedups(measured: Sequence[Measured], rival: str) -> list[float]:
    """Speculative rate over the rival's, of each question that both decoded."""
    rates = [item.rates for item in measured if item.rates.get(rival)]
    return [each["speculative"] / each[rival] for each in rates]


def _median(values: Iterable[float]) -> float:
    numbers = list(values)
    return median(numbers) if numbers else 0.0


def _device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next((line for line in lines if line.startswith("model name")), "")
    except OSError:
        name = ""
    return name.partition(":")[2].strip() or platform.processor() or platform.machine()
