"""Measurements → EvalReport."""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch

from pipeline.config import DrafterSection, RunConfig, TreeSection
from pipeline.decoder.request import Acceptance, pool_acceptance
from pipeline.heads.base import DraftingHead
from pipeline.heads.checkpoint import HeadCard
from pipeline.records import Arithmetic, TargetContract, digest
from pipeline.reports import EvalReport, LoadCurve, PromptResult
from pipeline.serve_eval.compare import compare_rivals
from pipeline.serve_eval.groups import grouped_acceptance
from pipeline.serve_eval.measure import Measured
from pipeline.serve_eval.questions import LeftOut
from pipeline.serve_eval.shapes import ReplayedShapes
from pipeline.tuning.tune import Choice


class Measurements(NamedTuple):
    """What one evaluation measured."""

    measured: Sequence[Measured]
    identical: Sequence[bool]  # the losslessness verdict of each question
    left_out: Sequence[LeftOut]
    tree: TreeSection  # that the drafter was measured on
    choice: Choice | None  # of `tree: auto`
    arithmetic: Arithmetic  # of speed and acceptance; losslessness is checked in fp32
    tuned_apart: bool = False  # `tree: auto` tried the drafter on other prompts than these
    replayed: ReplayedShapes = ReplayedShapes((), {})
    load: tuple[LoadCurve, ...] = ()
    sampled: Mapping[float, Sequence[bool]] = {}  # by temperature, as `identical`
    reference: Mapping[str, Any] = {}  # plain decoding against transformers, in fp32
    trees: Mapping[int, TreeSection | None] = {}  # of `tree: auto` by batch size; None: plain

    @property
    def drafts(self) -> bool:
        """Whether what is reported drafts; else it is plain decoding, as `tree: auto` chose."""
        return self.choice is None or self.choice.drafts


def summarise(
    config: RunConfig,
    contract: TargetContract,
    loaded: tuple[DraftingHead, HeadCard] | None,
    measurements: Measurements,
) -> EvalReport:
    """All figures of `report.json`; `loaded` is the head, of a drafter that has one."""
    measured, identical, tree = measurements.measured, measurements.identical, measurements.tree
    drafts, arithmetic = measurements.drafts, measurements.arithmetic
    drafted, apart = measured, {} if drafts else _judged_apart(measured, tree)
    if not drafts:
        measured = [_plainly(item) for item in measured]
    results = tuple(_result(item, same) for item, same in zip(measured, identical, strict=True))
    return EvalReport(
        acceptance_length=_acceptance(measured).tau,
        alpha=_acceptance(drafted).alpha,
        tokens_per_second={
            mode: _median(item.rates[mode] for item in measured if mode in item.rates)
            for mode in ("speculative", "plain", "hf")
        },
        speedup={rival: _median(_speedups(measured, rival)) for rival in ("plain", "hf")},
        lossless={
            "greedy_fp32": all(identical) and bool(identical),
            "prompts_checked": len(identical),
            "sampled_fp32": {f"{each:g}": all(same) for each, same in measurements.sampled.items()},
            "sampled_different": sorted(
                item.question.request_id
                for drawn in measurements.sampled.values()
                for item, same in zip(measured, drawn, strict=False)
                if not same
            ),
            "transformers": dict(measurements.reference),
            "different": sorted(each.id for each in results if not each.identical_fp32),
            "identical_in_run_dtype": sum(
                item.plain.token_ids == item.speculative.token_ids for item in drafted
            ),
            # Of the speculative replies in the run's own type, scored by the plain model.
            "tokens_scored": sum(item.gaps.tokens for item in measured),
            "near_ties": sum(item.gaps.near_ties for item in measured),
            "worst_log_probability_gap": max(item.gaps.worst for item in measured),
        },
        drafter=_drafter(config.eval.drafter, measurements.choice) | apart,
        head=_head(*loaded, contract) | apart if loaded else {},
        by_category=_by_category(measured),
        **grouped_acceptance(results)._asdict(),
        shapes=measurements.replayed.shapes,
        load=measurements.load,
        comparisons=compare_rivals(measurements.measured, config.eval.compare),
        contract=contract,
        provenance=loaded[1].provenance if loaded else {},
        settings={
            "tree": {"auto": False, **tree.model_dump()} if drafts else {"nodes": 1},
            "tree_auto": _predicted(measurements),
            "dtype": arithmetic.dtype,
            "arithmetic": arithmetic.model_dump(mode="json"),
            "device": _device_name(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "max_new_tokens": config.eval.max_new_tokens,
            "chat_template_kwargs": {
                **config.target.chat_template_kwargs,
                **config.eval.chat_template_kwargs,
            },
            "prompts": len(measured),
            "left_out": {
                "prompt_too_long": 0,
                **Counter(each.reason for each in measurements.left_out),
            },
            "shapes_left_out": measurements.replayed.left_out,
        },
        prompts=results,
    )


def _drafter(section: DrafterSection, choice: Choice | None) -> dict[str, Any]:
    """Its name, and what was set of it, or chosen."""
    return section.model_dump(mode="json") | (choice.settings if choice else {})


def _head(head: DraftingHead, card: HeadCard, contract: TargetContract) -> dict[str, Any]:
    parameters = head.count_parameters()
    return {
        "parameters": parameters,
        "share_of_target": parameters / contract.parameters,
        "draft_vocab_size": head.shape.draft_vocab_size,
        "coverage": card.metrics.get("coverage", 0.0),
    }


def _plainly(item: Measured) -> Measured:
    """The question as if nobody drafted."""
    return replace(
        item, speculative=item.plain, rates={**item.rates, "speculative": item.rates["plain"]}
    )


def _judged_apart(measured: Sequence[Measured], tree: TreeSection) -> dict[str, Any]:
    """What the drafter does on a tree that is not used, because plain decoding is faster."""
    return {
        "tree": tree.model_dump(),
        "acceptance_length": _acceptance(measured).tau,
        "speedup_plain": _median(_speedups(measured, "plain")),
    }


def _predicted(measurements: Measurements) -> dict[str, Any] | None:
    """What `tree: auto` rests on: the fastest tree, and what was expected of it."""
    if (choice := measurements.choice) is None:
        return None
    return {
        "fastest_tree": choice.shape.model_dump(),
        "predicted_acceptance_length": choice.acceptance_length,
        "predicted_speedup": choice.speedup,
        "settings": choice.settings,
        "tried_on_other_prompts": measurements.tuned_apart,
        "by_batch": {
            str(rows): tree and tree.model_dump() for rows, tree in measurements.trees.items()
        },
    }


def _result(item: Measured, identical: bool) -> PromptResult:
    statistics = item.speculative.statistics
    timed = {"speculative": statistics, "plain": item.plain.statistics}
    return PromptResult(
        id=item.question.request_id,
        category=item.question.category,
        source=item.question.source,
        turn=item.question.turn,
        context_tokens=len(item.question.context),
        context_digest=digest(item.question.context)[:16],
        finish_reason=item.speculative.finish_reason,
        rounds=statistics.rounds,
        tokens=len(item.speculative.token_ids),
        acceptance_length=round(statistics.acceptance_length, 4),
        tokens_per_second={mode: round(rate, 2) for mode, rate in item.rates.items()},
        ttft_seconds={name: each.first_token_seconds for name, each in timed.items()},
        tpot_seconds={
            name: each.seconds_per_token for name, each in timed.items() if each.round_tokens
        },
        counters=statistics.counters(),
        identical_fp32=identical,
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
