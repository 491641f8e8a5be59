"""Measurements → EvalReport: all figures, in groups and under others' names, and the golden τ."""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch

from pipeline.config import OLD, SCRATCH, DrafterSection, RunConfig, TreeSection
from pipeline.decoder.request import Acceptance, pool_acceptance
from pipeline.heads.base import DraftingHead
from pipeline.heads.checkpoint import WEIGHTS, HeadCard
from pipeline.records import Arithmetic, TargetContract, digest
from pipeline.reports import (
    AcceptanceFigures,
    CategoryFigures,
    DrafterSettings,
    Estimate,
    EvalReport,
    GoldenFigure,
    GoldenPrompt,
    HeadFigures,
    LoadCurve,
    LosslessChecks,
    OtherNames,
    PairedComparison,
    PromptResult,
    ReferenceCheck,
    RefreshFigures,
    ReportSettings,
    RoundCounters,
    SglangNames,
    SpeedBenchNames,
    TrainedHead,
    TreeChoice,
    TreeFigures,
    VllmNames,
)
from pipeline.serve_eval.compare import compare_rivals, compare_two_rivals, refresh_verdict
from pipeline.serve_eval.intervals import acceptance_figures
from pipeline.serve_eval.measure import Measured
from pipeline.serve_eval.questions import LeftOut, evenly
from pipeline.serve_eval.shapes import ReplayedShapes, with_replay
from pipeline.store.manifest import head_location, read_manifest
from pipeline.tuning.tune import Choice

#: Prompts of a golden figure, and the tokens of the longest: a report stays readable.
_GOLDEN_PROMPTS, _GOLDEN_TOKENS = 16, 4096


class Measurements(NamedTuple):
    """What one evaluation measured."""

    measured: Sequence[Measured]
    identical: Sequence[bool]  # the losslessness verdict of each question
    left_out: Sequence[LeftOut]
    tree: TreeSection  # that the drafter was measured on
    choice: Choice | None  # of `tree: auto`
    arithmetic: Arithmetic  # of speed and acceptance; losslessness is checked in fp32
    tuned_apart: bool = False  # `tree: auto` tried the drafter on other prompts than these
    replayed: ReplayedShapes = ReplayedShapes((), {}, {})
    load: tuple[LoadCurve, ...] = ()
    sampled: Mapping[float, Sequence[bool]] = {}  # by temperature, as `identical`
    reference: ReferenceCheck | None = None  # plain decoding against transformers, in fp32
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
    drafted, unused = measured, None
    if not drafts:
        unused = TreeFigures(
            tree=tree,
            acceptance_length=_acceptance(measured).tau,
            speedup_plain=_median(_speedups(measured, "plain")),
        )
        measured = [_plainly(item) for item in measured]
    comparisons = compare_rivals(measurements.measured, config.eval.compare)
    results = tuple(_result(item, same) for item, same in zip(measured, identical, strict=True))
    return EvalReport(
        decoding="speculative" if drafts else "plain",
        acceptance_length=_acceptance(measured).tau,
        alpha=_acceptance(drafted).alpha,
        tokens_per_second={
            mode: _median(rate for item in measured if (rate := item.rates.get(mode)))
            for mode in ("speculative", "plain", "hf")
        },
        speedup={rival: _median(_speedups(measured, rival)) for rival in ("plain", "hf")},
        lossless=LosslessChecks(
            greedy_fp32=all(identical) and bool(identical),
            prompts_checked=len(identical),
            sampled_fp32={f"{each:g}": all(same) for each, same in measurements.sampled.items()},
            sampled_different=tuple(
                sorted(
                    item.question.request_id
                    for drawn in measurements.sampled.values()
                    for item, same in zip(measured, drawn, strict=False)
                    if not same
                )
            ),
            transformers=measurements.reference,
            different=tuple(sorted(each.id for each in results if not each.identical_fp32)),
            identical_in_run_dtype=sum(
                item.plain.token_ids == item.speculative.token_ids for item in drafted
            ),
            tokens_scored=sum(item.gaps.tokens for item in measured),
            near_ties=sum(item.gaps.near_ties for item in measured),
            worst_log_probability_gap=max(item.gaps.worst for item in measured),
        ),
        drafter=_drafter(config.eval.drafter, measurements.choice),
        head=_head(*loaded, contract) if loaded else None,
        unused_tree=unused,
        by_category=_by_category(measured),
        **grouped_acceptance(results)._asdict(),
        shapes=measurements.replayed.shapes,
        load=measurements.load,
        comparisons=comparisons,
        refresh=_refresh(config, measurements.measured, comparisons) if config.refresh else None,
        contract=contract,
        provenance=loaded[1].provenance if loaded else {},
        settings=ReportSettings(
            tree=tree if drafts else None,
            tree_auto=_predicted(measurements),
            dtype=arithmetic.dtype,
            arithmetic=arithmetic,
            device=_device_name(),
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            max_new_tokens=config.eval.max_new_tokens,
            chat_template_kwargs={
                **config.target.chat_template_kwargs,
                **config.eval.chat_template_kwargs,
            },
            prompts=len(measured),
            left_out={
                "prompt_too_long": 0,
                **Counter(each.reason for each in measurements.left_out),
            },
            shapes_left_out=measurements.replayed.left_out,
        ),
        prompts=results,
    )


def _refresh(
    config: RunConfig, measured: Sequence[Measured], comparisons: Sequence[PairedComparison]
) -> RefreshFigures:
    """Which of the three heads of a refresh the tuned target should get."""
    assert config.refresh is not None, "it is a refresh"
    rivals = {rival.name: rival for rival in config.eval.compare}
    verdicts = {each.rival: each.verdict for each in comparisons}
    scratch_to_old = compare_two_rivals(measured, rivals[SCRATCH], rivals[OLD])
    runs = {OLD: config.refresh.run, "refreshed": config.run.uri, SCRATCH: config.scratch_uri}
    own = acceptance_figures(
        [item.speculative.statistics.counters() for item in measured],
        [item.question.prompt for item in measured],
    )
    assert own is not None, "paired comparisons have rounds"
    lengths = {each.rival: each.acceptance_length for each in comparisons}
    lengths["refreshed"] = own.acceptance_length
    return RefreshFigures(
        verdict=refresh_verdict(verdicts[OLD], verdicts[SCRATCH], scratch_to_old.verdict),
        scratch_to_old=scratch_to_old,
        old_run=config.refresh.run.rstrip("/").rpartition("/")[2],
        old_target=read_manifest(config.refresh.run, "train").contract.fingerprint,
        share=config.synth.share if config.synth else 1.0,
        heads={name: _trained_head(uri, lengths[name]) for name, uri in runs.items()},
    )


def _trained_head(run_uri: str, acceptance_length: Estimate) -> TrainedHead:
    manifest = read_manifest(run_uri, "train")
    return TrainedHead(
        acceptance_length=acceptance_length,
        manifest=manifest.content_hash,
        weights_sha256=head_location(run_uri).sha256(WEIGHTS),
        steps=manifest.details["steps"],
        tokens=manifest.details["tokens"],
    )


def _drafter(section: DrafterSection, choice: Choice | None) -> DrafterSettings:
    """Its name with the settings that were configured, or chosen by `tree: auto`."""
    chosen = choice.settings if choice else {}
    return DrafterSettings.model_validate({**section.model_dump(mode="json"), **chosen})


def _head(head: DraftingHead, card: HeadCard, contract: TargetContract) -> HeadFigures:
    parameters = head.count_parameters()
    return HeadFigures(
        parameters=parameters,
        share_of_target=parameters / contract.parameters,
        draft_vocab_size=head.shape.draft_vocab_size,
        coverage=card.metrics.get("coverage", 0.0),
    )


def _plainly(item: Measured) -> Measured:
    """The question as plain decoding alone."""
    return replace(
        item, speculative=item.plain, rates={**item.rates, "speculative": item.rates["plain"]}
    )


def _predicted(measurements: Measurements) -> TreeChoice | None:
    """What `tree: auto` rests on: the fastest tree, and what was expected of it."""
    if (choice := measurements.choice) is None:
        return None
    return TreeChoice(
        fastest_tree=choice.shape,
        predicted_acceptance_length=choice.acceptance_length,
        predicted_speedup=choice.speedup,
        settings=choice.settings,
        tried_on_other_prompts=measurements.tuned_apart,
        by_batch={str(rows): tree for rows, tree in measurements.trees.items()},
    )


def _result(item: Measured, identical: bool) -> PromptResult:
    statistics = item.speculative.statistics
    timed = {"speculative": statistics, "plain": item.plain.statistics}
    return PromptResult(
        id=item.question.request_id,
        category=item.question.category,
        source=item.question.source,
        turn=item.question.turn,
        context_tokens=len(item.question.context),
        context_digest=context_digest(item.question.context),
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


def _by_category(measured: Sequence[Measured]) -> dict[str, CategoryFigures]:
    groups: defaultdict[str, list[Measured]] = defaultdict(list)
    for item in measured:
        groups[item.question.category].append(item)
    return {
        category: CategoryFigures(
            prompts=len(items),
            acceptance_length=_acceptance(items).tau,
            tokens_per_second=_median(
                rate for item in items if (rate := item.rates["speculative"])
            ),
            speedup_plain=_median(_speedups(items, "plain")),
        )
        for category, items in sorted(groups.items())
    }


def _speedups(measured: Sequence[Measured], rival: str) -> list[float]:
    """Speculative rate over the rival's, of each question that has both."""
    rates = [item.rates for item in measured if item.rates.get(rival) and item.rates["speculative"]]
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


class GroupedAcceptance(NamedTuple):
    """Acceptance of the requests with counters, under `EvalReport`'s names."""

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


def golden_figure(
    config: RunConfig,
    contract: TargetContract,
    measured: Sequence[Measured],
    tree: TreeSection,
    replayed: ReplayedShapes,
    *,
    runners_up: Callable[[Sequence[int], Sequence[int]], tuple[list[int], list[float]]],
    head_fingerprint: str,  # empty without a head
    stop_ids: Sequence[int],
) -> GoldenFigure | None:
    """τ on some first turns, evenly over them; None where nothing was decoded.

    Those with replayed shapes come first: a server may draft any of them.
    """
    usable = [
        item
        for item in measured
        if item.question.turn == 1
        and item.speculative.statistics.rounds
        and len(item.question.context) <= _GOLDEN_TOKENS
    ]
    with_shapes = [item for item in usable if item.question.request_id in replayed.replies]
    without = [item for item in usable if item.question.request_id not in replayed.replies]
    if config.eval.drafter.lookup is not None:  # no server has one: replays are without it
        with_shapes = [
            item
            for item in with_shapes
            if tree.label in replayed.replies[item.question.request_id].counters
        ]
        without = []
    picked = evenly(with_shapes, _GOLDEN_PROMPTS)
    picked += evenly(without, _GOLDEN_PROMPTS - len(picked))
    chosen = []
    for item in sorted(picked, key=usable.index):
        ids, counters = item.speculative.token_ids, item.speculative.statistics.counters()
        own = GoldenPrompt(
            id=item.question.request_id,
            prompt_ids=item.question.context,
            reply_ids=ids,
            counters=counters,
        )
        reply = replayed.replies.get(item.question.request_id)
        if reply and tree.label in reply.counters:
            # In bf16 the two may part at a near-tie; figures of one reply belong together.
            own = with_replay(own, reply).model_copy(
                update={"reply_ids": reply.token_ids, "counters": reply.counters[tree.label]}
            )
        others, gaps = runners_up(own.prompt_ids, own.reply_ids)
        chosen.append(
            own.model_copy(
                update={
                    "runner_up_ids": tuple(others),
                    "runner_up_gaps": tuple(round(gap, 4) for gap in gaps),
                }
            )
        )
    figures = acceptance_figures([each.counters for each in chosen], [each.id for each in chosen])
    if figures is None:
        return None
    return GoldenFigure(
        head_fingerprint=head_fingerprint,
        target_fingerprint=contract.fingerprint,
        drafter=config.eval.drafter.name,
        tree=tree,
        temperature=0.0,
        max_new_tokens=config.eval.max_new_tokens,
        stop_ids=tuple(stop_ids),
        prompts_digest=prompts_digest([each.prompt_ids for each in chosen]),
        acceptance_length=figures.acceptance_length,
        prompts=tuple(chosen),
    )


def context_digest(context: Sequence[int]) -> str:
    """As in PromptResult."""
    return digest(tuple(context))[:16]


def prompts_digest(prompts: Sequence[Sequence[int]]) -> str:
    """SHA-256 over token ids."""
    return digest([list(each) for each in prompts])
