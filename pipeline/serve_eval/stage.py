"""Load a drafter for this target, decode prompts with it, check losslessness, write the report."""

from __future__ import annotations

import hashlib

import torch

from pipeline.config import RunConfig, prepare_process
from pipeline.console import long_step, notice, progress_bar
from pipeline.errors import ConfigError, NotLossless
from pipeline.heads.base import DraftingHead
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.registry import open_head
from pipeline.heads.tensors import WEIGHTS
from pipeline.records import Manifest, Prompt
from pipeline.reports import REPORT, EvalReport, GoldenPrompt
from pipeline.serve_eval.compare import check_prompts
from pipeline.serve_eval.live.golden import golden_figure
from pipeline.serve_eval.load import filled_length, measure_load
from pipeline.serve_eval.measure import Comparison, Measured
from pipeline.serve_eval.page.report import print_table, write_html
from pipeline.serve_eval.pages import PAGE, write_pages
from pipeline.serve_eval.questions import (
    LeftOut,
    Question,
    clock_of,
    load_evaluation_prompts,
    longest_context,
    readable,
)
from pipeline.serve_eval.reference import check_with_transformers, chosen
from pipeline.serve_eval.shapes import replay_shapes
from pipeline.serve_eval.summary import Measurements, summarise
from pipeline.store.location import Location
from pipeline.store.manifest import manifest_where, read_manifest, stage_location
from pipeline.store.stage_run import StageRun, open_stage
from pipeline.target.arithmetic import decoder_arithmetic, reason
from pipeline.target.open import Target, open_target
from pipeline.target.template import ChatTemplate

#: Replies of plain decoding that transformers reads.
_WITH_TRANSFORMERS = 4
#: Where the measurements go that the stage does not stand for.
NOT_LOSSLESS = "not-lossless"
#: Requests of each temperature of the load whose draws are compared in fp32.
_SAMPLED = 16


def run(config: RunConfig) -> Manifest:
    """Evaluate `eval.drafter`: the run's head, `eval.head`, or what needs none.

    Raises NotLossless when speculation changes the output.
    """
    prepare_process(config.run)
    drafts = config.eval.drafter.needs_head
    parent = read_manifest(config.run.uri, "train") if drafts and not config.eval.head else None
    stage_run = open_stage(config, "eval", parent, clock=clock_of(config, "synth"))
    if stage_run.manifest:
        tau = stage_run.manifest.details["acceptance_length"]
        notice(
            "eval",
            f"complete: {tau:.2f} tokens a round; report at {stage_run.location.where(PAGE)}",
        )
        return stage_run.manifest
    where = manifest_where(config.run.uri, "train")
    expected = parent.contract if parent else None
    target = open_target(config.target, expected=expected, where=where, decoded=True)
    contract = target.contract
    loaded: tuple[DraftingHead, HeadCard] | None = None
    if drafts:
        loaded = open_head(_head_location(config), expected=contract)
    # The one that is there is a faster process's, or of an attempt that was killed after it.
    report = _committed(stage_run) or _evaluate(config, stage_run, target, loaded)
    if not report.is_lossless:
        raise _not_lossless(stage_run, report)
    data = stage_run.location.create(REPORT, _as_json(report))
    report = _parse(stage_run, data)
    write_pages(stage_run.location, report, config.run.uri)
    print_table(report)
    notice("eval", f"report: {stage_run.location.where(PAGE)}")
    return stage_run.finish(
        contract=contract,
        licenses=parent.licenses if parent else report.provenance.get("licenses", {}),
        sources=parent.sources if parent else report.provenance.get("sources", {}),
        details={
            "acceptance_length": report.acceptance_length,
            "speedup": report.speedup,
            "report_sha256": hashlib.sha256(data).hexdigest(),
        },
    )


def _evaluate(
    config: RunConfig,
    stage_run: StageRun,
    target: Target,
    loaded: tuple[DraftingHead, HeadCard] | None,
) -> EvalReport:
    """Speed and acceptance in this machine's type, then losslessness in fp32."""
    section = config.eval
    template = target.template(system_prompt=section.system_prompt)
    template.set_clock(stage_run.clock)
    if section.chat_template_kwargs:
        template = template.varied(kwargs=section.chat_template_kwargs, where="eval")
    modes = [{}, *section.load.modes.values()] if section.load.concurrency else [{}]
    varied = [template.varied(kwargs=mode, where="eval.load.modes") for mode in modes]
    prompts, others = load_evaluation_prompts(config)
    prompts, unreadable = readable(prompts, varied)
    others, _ = readable(others, [template])
    if section.compare:
        check_prompts(len(prompts))
    longest = max(_tokens(prompt, config, each) for prompt in prompts for each in varied)
    head = loaded[0] if loaded else None
    positions = head.shape.max_position_embeddings if head else target.positions
    max_length = min(positions, max(longest, filled_length(section, positions)))

    def comparison(dtype: torch.dtype) -> Comparison:
        return Comparison(config, target, head, template, dtype=dtype, max_length=max_length)

    with long_step("eval", "loading the target"):
        own = comparison(target.dtype)
        hf = target.load() if section.hf_prompts else None
    model = own.model
    arithmetic = decoder_arithmetic(model.ops, model.dtype, model.device)
    stage_run.compute_with(arithmetic, why=reason(arithmetic, config.target.dtype))
    # What is measured should not have chosen how it is measured.
    choice = own.tune(others or prompts) if section.tree == "auto" else None
    own.add_rivals(section.compare)
    measured: list[Measured] = []
    left_out = list[LeftOut](unreadable)
    turns = sum(min(len(prompt.turns), section.max_turns) for prompt in prompts)
    with progress_bar("eval", unit="turns", total=turns) as bar:
        for item in own.measure(prompts, hf, section.hf_prompts):
            if isinstance(item, LeftOut):
                left_out.append(item)
            else:
                measured.append(item)
            bar.advance(1)
    if not measured:
        raise ConfigError(
            "no evaluation prompt fits the target's positions",
            where="eval.sources",
            fix="choose shorter prompts or lower eval.max_new_tokens",
        )
    tree, trees, questions = own.tree, own.trees, [item.question for item in measured]
    replayed = replay_shapes(own, questions, template.stop_ids, section)
    load = measure_load(own, prompts, template, section)
    del hf, own, model  # the fp32 copy takes their memory
    with long_step("eval", "loading the target in fp32"):
        exact = comparison(torch.float32)
    exact.settle(tree, choice.settings if choice else {})
    identical = _check_lossless(exact, questions)
    drawn = [each for each in section.load.temperatures if each and section.load.concurrency]
    sampled = {each: _check_lossless(exact, questions[:_SAMPLED], each) for each in drawn}
    read = chosen(questions, _WITH_TRANSFORMERS)
    plain = exact.plain_replies(read)
    del exact
    note = "plain decoding is transformers'?"
    with progress_bar("eval", unit="replies", total=len(read), note=note) as bar:
        reference = check_with_transformers(target, plain, bar.advance)
    measurements = Measurements(
        *(measured, identical, left_out, tree, choice, arithmetic),
        tuned_apart=bool(others),
        replayed=replayed,
        load=load,
        sampled=sampled,
        reference=reference,
        trees=trees,
    )
    report = summarise(config, target.contract, loaded, measurements)
    if not measurements.drafts:
        return report
    golden = golden_figure(
        [_golden(item) for item in measured if item.question.turn == 1],
        head=_head_location(config).sha256(WEIGHTS) if loaded else "",
        target=target.contract.fingerprint,
        drafter=section.drafter.name,
        tree=tree,
        max_new_tokens=section.max_new_tokens,
        stop_ids=template.stop_ids,
    )
    return report.model_copy(update={"golden": golden})


def _golden(item: Measured) -> GoldenPrompt:
    return GoldenPrompt(
        id=item.question.request_id,
        prompt_ids=item.question.context,
        reply_ids=item.speculative.token_ids,
        counters=item.speculative.statistics.counters(),
    )


def _check_lossless(
    comparison: Comparison, questions: list[Question], temperature: float = 0.0
) -> list[bool]:
    """Of each question: whether speculative and plain decoding in fp32 give the same tokens."""
    note, replies = "lossless in fp32?", 2 * len(questions)
    note = f"{note} temperature {temperature:g}" if temperature else note
    with progress_bar("eval", unit="replies", total=replies, note=note) as bar:
        return comparison.check_lossless(questions, bar.advance, temperature)


def _tokens(prompt: Prompt, config: RunConfig, template: ChatTemplate) -> int:
    """Tokens of a whole conversation, every reply at its longest."""
    turns = min(len(prompt.turns), config.eval.max_turns)
    return longest_context(prompt, turns, template) + config.eval.max_new_tokens * turns


def _head_location(config: RunConfig) -> Location:
    """`eval.head`, or the run's own head."""
    if config.eval.head:
        return Location(config.eval.head)
    return stage_location(config.run.uri, "train").child("head")


def _committed(stage_run: StageRun) -> EvalReport | None:
    """The report that is there. It is created exclusively: no two processes measure the same."""
    if not stage_run.location.exists(REPORT):
        return None
    return _parse(stage_run, stage_run.location.read(REPORT))


def _parse(stage_run: StageRun, data: bytes) -> EvalReport:
    where = stage_run.location.where(REPORT)
    return EvalReport.parse(data, where=where, fix="run `eagle3 eval --force`")


def _as_json(report: EvalReport) -> bytes:
    return report.model_dump_json(indent=2).encode() + b"\n"


def _not_lossless(stage_run: StageRun, report: EvalReport) -> NotLossless:
    """The error, once its evidence is stored, which is no report of this stage."""
    stage_run.location.write(f"{NOT_LOSSLESS}.json", _as_json(report))
    stage_run.location.write(f"{NOT_LOSSLESS}.html", write_html(report).encode())
    print_table(report)
    different = report.lossless["different"]
    problem = f"speculative output differs from plain output in fp32 on {len(different)} prompts"
    problem = (
        f"{problem}, first {different[0]}" if different else "draws differ in fp32 by drafting"
    )
    reference = report.lossless.get("transformers", {})
    if report.speculation_is_lossless and not reference:
        problem = "its report does not say whether plain decoding is the target's"
    elif not report.plain_is_the_target:
        problem = (
            f"plain decoding is not the target's: in fp32 {reference['wrong_tokens']} of "
            f"{reference['tokens']} tokens are not transformers' choice and logits differ by up to "
            f"{reference['logits_difference']:.1%}, first in {reference['different'][0]}"
        )
    fix = "do not ship this build of the decoder; report the prompt, the head and the target"
    where = stage_run.location.where(f"{NOT_LOSSLESS}.html")
    return NotLossless(problem, where=where, fix=fix)
