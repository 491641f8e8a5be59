"""Load a drafter for this target, decode prompts with it, check losslessness, write the report."""

from __future__ import annotations

import hashlib
from datetime import datetime
from functools import partial
from typing import Any

import torch

from pipeline.config import RunConfig, prepare_process
from pipeline.console import long_step, notice
from pipeline.errors import ConfigError, NotLossless, StageConflict, TakenOver, memory_explained
from pipeline.heads.base import DraftingHead
from pipeline.heads.checkpoint import WEIGHTS, HeadCard
from pipeline.heads.registry import open_head
from pipeline.prompts.sources import hub_commits, require_files
from pipeline.records import Manifest, Prompt, sealed_json, sealed_page
from pipeline.reports import EVIDENCE, PAGE, REPORT, EvalReport
from pipeline.serve_eval.compare import check_prompts
from pipeline.serve_eval.load import filled_length, measure_load
from pipeline.serve_eval.measure import Comparison, Measured, check_with_transformers
from pipeline.serve_eval.pages import print_table, restore_pages, write_html, write_pages
from pipeline.serve_eval.questions import (
    LeftOut,
    clock_of,
    evaluation_sources,
    load_evaluation_prompts,
    longest_context,
    readable,
)
from pipeline.serve_eval.shapes import replay_shapes
from pipeline.serve_eval.summary import Measurements, golden_figure, summarise
from pipeline.serve_eval.wording import refreshed
from pipeline.store.hub import HUB, commit_of
from pipeline.store.location import Location
from pipeline.store.manifest import (
    head_location,
    manifest_where,
    read_manifest,
    read_report,
    vouched_head,
)
from pipeline.store.stage_run import StageRun, open_stage
from pipeline.target.arithmetic import decoder_arithmetic, reason
from pipeline.target.open import Target, open_target
from pipeline.target.parallel import Group, joined, require_several
from pipeline.target.template import ChatTemplate
from pipeline.tuning.tune import Choice
from pipeline.tuning.verification import runners_up

_CLAIM = "evaluation"
#: Requests of each temperature of the load whose draws are compared in fp32.
_SAMPLED = 16


def run(config: RunConfig) -> Manifest:
    """Evaluate `eval.drafter`: the run's head, `eval.head`, or a drafter without a head.

    Raises NotLossless when speculation changes the output, LostProcess where several processes
    share the target.
    """
    with joined(config.eval.parallel, config.target, stage="eval") as group:
        if group.rank > 0:
            return _take_part(config, group)
        prepare_process(config.run)
        drafts = config.eval.drafter.needs_head
        parent = read_manifest(config.run.uri, "train") if drafts and not config.eval.head else None
        rivals, clock = _rival_weights(config), clock_of(config, "synth")
        opened = partial(open_stage, config, "eval", parent, made_with=rivals, clock=clock)
        stage_run = opened()
        if stage_run.manifest is None:
            try:
                stage_run.claim(_CLAIM, config.run.claim_seconds)
                if not stage_run.is_finished():
                    return group.broadcast(_evaluate(config, parent, stage_run, group))
            except TakenOver as error:
                stage_run.outlast(error)
            finally:
                stage_run.release()
            stage_run = opened()
        assert stage_run.manifest is not None, "another process has finished it"
        restore_pages(config)
        tau, where = read_report(config.run.uri).acceptance_length, stage_run.location.where(PAGE)
        notice("eval", f"complete: {tau:.2f} tokens a round; report at {where}")
        return group.broadcast(stage_run.manifest)


def _take_part(config: RunConfig, group: Group) -> Manifest:
    """What all processes of a group do but rank 0: measure what it measures, and report nothing.

    Rank 0 broadcasts what to measure with, and at the end the stage's manifest.
    """
    received: Any = None
    while not isinstance(received := group.broadcast(None), Manifest):
        prepare_process(config.run)
        expected, clock = received
        target = open_target(config.target, expected=expected, where="rank 0", decoded=True)
        evaluation = _Evaluation(config, target, _head(config, target), clock, group)
        evaluation.tune()
        evaluation.report(*evaluation.own.measure(evaluation.prompts, evaluation.hf))
    return received


def _rival_weights(config: RunConfig) -> dict[str, str]:
    """SHA-256 of the head of each rival that has one: trained anew, it is another rival."""
    heads = {each.name: Location(each.head) for each in config.eval.compare if each.head}
    return {
        f"eval.compare.{name}": head.sha256(WEIGHTS)
        for name, head in heads.items()
        if head.exists(WEIGHTS)
    }


def _evaluate(
    config: RunConfig, parent: Manifest | None, stage_run: StageRun, group: Group
) -> Manifest:
    """Measure and report as the only attempt. Raises TakenOver where it no longer is."""
    location = stage_run.location
    where, expected = manifest_where(config.run.uri, "train"), parent.contract if parent else None
    if not location.exists(REPORT):
        require_files(evaluation_sources(config))
    target = open_target(config.target, expected=expected, where=where, decoded=True)
    head = _head(config, target)
    if location.exists(REPORT):  # of a faster process, or of an attempt that was killed after it
        report = _parse(stage_run, location.read(REPORT))
    else:
        require_several(group, config.eval.parallel, stage="eval")
        group.broadcast((target.contract, stage_run.clock))
        evaluation = _Evaluation(config, target, head, stage_run.clock, group)
        arithmetic = evaluation.arithmetic
        stage_run.compute_with(arithmetic, why=reason(arithmetic, config.target.dtype))
        evaluation.tune()
        with memory_explained("eval"):
            measured, left_out = evaluation.own.measure(evaluation.prompts, evaluation.hf)
            report = evaluation.report(measured, left_out)
        report = report.model_copy(update={"work": stage_run.work, "commits": _commits(config)})
    if not report.is_lossless:
        raise _not_lossless(stage_run, report)
    stage_run.require_own()
    data = location.create(REPORT, _as_json(report))
    report = _parse(stage_run, data)
    write_pages(location, report, config.run.uri)
    print_table(report)
    if report.refresh:
        notice("eval", refreshed(report), verdict=report.refresh.verdict)
    notice("eval", f"report: {location.where(PAGE)}")
    return stage_run.finish(
        contract=target.contract,
        licenses=parent.licenses if parent else _counts(report, "licenses"),
        sources=parent.sources if parent else _counts(report, "sources"),
        details={
            "acceptance_length": report.acceptance_length,
            "speedup": report.speedup,
            "report_sha256": hashlib.sha256(data).hexdigest(),
        },
        files=(REPORT,),
    )


def _commits(config: RunConfig) -> dict[str, str]:
    """What this process has read from the Hub."""
    section = config.eval
    heads = [section.head, *(rival.head for rival in section.compare)]
    on_hub = [head for head in heads if head and head.startswith(HUB)]
    of_heads = {head: commit_of(head).rpartition("@")[2] for head in on_hub}
    return of_heads | hub_commits(each.as_source() for each in section.sources)


def _head(config: RunConfig, target: Target) -> tuple[DraftingHead, HeadCard] | None:
    """None for a drafter without."""
    if not config.eval.drafter.needs_head:
        return None
    return open_head(vouched_head(config.run.uri, config.eval.head), expected=target.contract)


class _Evaluation:
    """Everything loaded: the prompts, and the decoder in this machine's type."""

    def __init__(
        self,
        config: RunConfig,
        target: Target,
        head: tuple[DraftingHead, HeadCard] | None,
        clock: datetime | None,
        group: Group,
    ) -> None:
        """Load it; in `group`'s processes each its slice."""
        section = config.eval
        self._config, self._target, self._head, self._group = config, target, head, group
        template = target.template(system_prompt=section.system_prompt)
        template.set_clock(clock)
        if section.chat_template_kwargs:
            template = template.varied(kwargs=section.chat_template_kwargs, where="eval")
        modes = [{}, *section.load.modes.values()] if section.load.concurrency else [{}]
        templates = [template.varied(kwargs=mode, where="eval.load.modes") for mode in modes]
        prompts, others = load_evaluation_prompts(config)
        self._template = template
        self.prompts, self._unreadable = readable(prompts, templates)
        others, _ = readable(others, [template])
        if section.compare:
            check_prompts(len(self.prompts))
        tokens = max(_tokens(prompt, config, each) for prompt in self.prompts for each in templates)
        positions = head[0].shape.max_position_embeddings if head else target.positions
        self._max_length = min(positions, max(tokens, filled_length(section, positions)))
        with long_step("eval", "loading the target"):
            self.own = self._comparison(target.dtype)
            self.hf = target.load() if section.hf_prompts and group.rank == 0 else None
        model = self.own.model
        self.arithmetic = decoder_arithmetic(model.ops, model.dtype, model.device)
        self._others = others
        self._choice: Choice | None = None

    def _comparison(self, dtype: torch.dtype) -> Comparison:
        head = self._head[0] if self._head else None
        return Comparison(
            *(self._config, self._target, head, self._template),
            dtype=dtype,
            max_length=self._max_length,
            processes=self._group,
        )

    def tune(self) -> None:
        """Choose the tree where it is open, and let rivals take their turns."""
        section = self._config.eval
        if section.tree == "auto":
            # On prompts that are not measured, where there are any.
            self._choice = self.own.tune(self._others or self.prompts)
        self.own.add_rivals(section.compare)

    def report(self, measured: list[Measured], left_out: list[LeftOut]) -> EvalReport:
        """Measure shapes and load, then check losslessness in fp32; the decoder is used up."""
        if not measured:
            raise ConfigError(
                "no evaluation prompt fits the target's positions",
                where="eval.sources",
                fix="choose shorter prompts or lower eval.max_new_tokens",
            )
        config, section, own, choice = self._config, self._config.eval, self.own, self._choice
        tree, trees, questions = own.tree, own.trees, [item.question for item in measured]
        stop_ids, contract = self._template.stop_ids, self._target.contract
        replayed = replay_shapes(own, questions, stop_ids, section)
        golden = golden_figure(
            *(config, contract, measured, tree, replayed),
            runners_up=partial(runners_up, own.model),
            head_fingerprint=head_location(config.run.uri, section.head).sha256(WEIGHTS)
            if self._head
            else "",
            stop_ids=stop_ids,
        )
        load = measure_load(own, self.prompts, self._template, section)
        del own, self.own, self.hf  # the fp32 copy takes their memory
        with long_step("eval", "loading the target in fp32"):
            exact = self._comparison(torch.float32)
        exact.settle(tree, choice.settings if choice else {})
        identical = exact.check_lossless(questions)
        drawn = [each for each in section.load.temperatures if each and section.load.concurrency]
        sampled = {each: exact.check_lossless(questions[:_SAMPLED], each) for each in drawn}
        plain = exact.plain_replies(questions)
        del exact
        measurements = Measurements(
            measured=measured,
            identical=identical,
            left_out=[*self._unreadable, *left_out],
            tree=tree,
            choice=choice,
            arithmetic=self.arithmetic,
            tuned_apart=bool(self._others),
            replayed=replayed,
            load=load,
            sampled=sampled,
            reference=check_with_transformers(self._target, plain, self._group),
            trees=trees,
        )
        report = summarise(config, contract, self._head, measurements)
        return report.model_copy(update={"golden": golden}) if measurements.drafts else report


def _tokens(prompt: Prompt, config: RunConfig, template: ChatTemplate) -> int:
    """Tokens of a whole conversation, every reply at its longest."""
    turns = min(len(prompt.turns), config.eval.max_turns)
    return longest_context(prompt, turns, template) + config.eval.max_new_tokens * turns


def _counts(report: EvalReport, key: str) -> dict[str, int]:
    """Counts in the provenance of a head from elsewhere; {} without."""
    counts = report.provenance.get(key)
    items = counts.items() if isinstance(counts, dict) else ()
    return {name: count for name, count in items if isinstance(count, int)}


def _parse(stage_run: StageRun, data: bytes) -> EvalReport:
    """Raises StageConflict for one of work that `--force` has discarded, whose process went on."""
    where = stage_run.location.where(REPORT)
    report = EvalReport.parse(data, where=where, fix="run `eagle3 eval --force`")
    if report.work not in ("", stage_run.work):
        problem, fix = "is of other work", "delete it and run the same command again"
        raise StageConflict(problem, where=where, fix=fix)
    return report


def _as_json(report: EvalReport) -> bytes:
    return report.model_dump_json(indent=2).encode() + b"\n"


def _not_lossless(stage_run: StageRun, report: EvalReport) -> NotLossless:
    """The error, once its evidence is stored."""
    # Sealed, since no manifest names them: another attempt may have finished meanwhile.
    numbers, page = EVIDENCE
    stage_run.location.write(numbers, sealed_json(report.model_dump(mode="json")))
    stage_run.location.write(page, sealed_page(write_html(report)))
    print_table(report)
    different, reference = report.lossless.different, report.lossless.transformers
    problem = "sampled replies differ in fp32 with and without the drafter"
    if different:
        problem = "speculative output differs from plain output in fp32"
        problem += f" on {len(different)} prompts, first {different[0]}"
    elif report.speculation_is_lossless and reference is None:
        problem = "its report does not say whether plain decoding is the target's"
    if reference and not reference.same:
        problem = (
            f"plain decoding is not the target's: in fp32 {reference.wrong_tokens} of "
            f"{reference.tokens} tokens are not transformers' choice and logits differ by up to "
            f"{reference.logits_difference:.1%}, first in {reference.different[0]}"
        )
    fix = "do not ship this build of the decoder; report the prompt, the head and the target"
    where = stage_run.location.where(page)
    return NotLossless(problem, where=where, fix=fix)
