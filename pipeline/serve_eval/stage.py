"""Load a head for this target, decode the evaluation prompts, check losslessness, write the report."""

from __future__ import annotations

import hashlib

import torch

from pipeline.config import RunConfig
from pipeline.console import console, notice, progress_bar
from pipeline.eagle3.checkpoint import HEAD_FILES, HeadCard, load_head
from pipeline.eagle3.head import Eagle3Head
from pipeline.errors import ConfigError, NotLossless
from pipeline.records import EvalReport, Manifest, Prompt
from pipeline.serve_eval.measure import Measured, Workbench
from pipeline.serve_eval.questions import Question, read_prompts
from pipeline.serve_eval.report import print_table, write_html
from pipeline.serve_eval.summary import summarise
from pipeline.store.fetch import as_directory
from pipeline.store.location import Location
from pipeline.store.stage_run import StageRun, open_stage, read_manifest, stage_location
from pipeline.target.load import pick_device
from pipeline.target.open import Target, open_target
from pipeline.target.template import ChatTemplate

REPORT, PAGE = "report.json", "report.html"


def run(config: RunConfig) -> Manifest:
    """Evaluate the run's head, or `eval.head`. Raises NotLossless when speculation changes the output."""
    parent = None if config.eval.head else read_manifest(config.run.uri, "train")
    stage = open_stage(config, "eval", parent)
    if stage.manifest:
        notice(
            "eval",
            f"complete: {stage.manifest.details['acceptance_length']:.2f} tokens a round; report at {_page(stage)}",
        )
        return stage.manifest
    torch.set_num_threads(config.run.threads)
    where = f"{stage_location(config.run.uri, 'train').uri}/manifest.json"
    target = open_target(config.target, expected=parent.contract if parent else None, where=where)
    contract = target.contract
    with as_directory(_head_location(config), HEAD_FILES) as directory:
        head, card = load_head(directory, expected=contract)
    report = _evaluate(config, target, head, card)
    _write(stage, report)
    print_table(report)
    console.print(f"report: {_page(stage)}")
    if not report.lossless["greedy_fp32"]:
        raise NotLossless(
            f"speculative output differs from plain output in fp32 on {len(report.lossless['different'])} prompts, first {report.lossless['different'][0]}",
            where=str(_page(stage)),
            fix="do not ship this build of the decoder; report the prompt, the head and the target",
        )
    return stage.finish(
        contract=contract,
        licenses=parent.licenses if parent else card.provenance.get("licenses", {}),
        sources=parent.sources if parent else card.provenance.get("sources", {}),
        details=_details(stage, report),
    )


def _evaluate(config: RunConfig, target: Target, head: Eagle3Head, card: HeadCard) -> EvalReport:
    """Speed and acceptance in the target's own type, then losslessness in fp32."""
    section, device = config.eval, pick_device(config.target.device)
    prompts = read_prompts(config)
    template = target.template(system_prompt=section.system_prompt)
    length = min(
        head.shape.max_position_embeddings,
        max(_tokens(prompt, config, template) for prompt in prompts),
    )

    def workbench(dtype: torch.dtype) -> Workbench:
        return Workbench(
            config,
            target.directory,
            target.contract,
            head,
            template,
            dtype=dtype,
            device=device,
            length=length,
        )

    bench = workbench(getattr(torch, config.target.dtype))
    choice = bench.tune(prompts) if section.tree.auto else None
    hf = target.load() if section.hf_prompts else None
    measured: list[Measured] = []
    left_out: list[str] = []
    turns = sum(min(len(prompt.turns), section.max_turns) for prompt in prompts)
    with progress_bar("eval", unit="turns", total=turns) as bar:
        for item in bench.measure(prompts, hf, section.hf_prompts):
            if isinstance(item, str):
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
    exact = workbench(torch.float32)
    exact.tree = bench.tree
    del hf, bench
    identical = _check_lossless(exact, [item.question for item in measured])
    return summarise(
        config, target.contract, head, card, measured, identical, left_out, exact.tree, choice
    )


def _check_lossless(bench: Workbench, questions: list[Question]) -> dict[str, bool]:
    verdicts: dict[str, bool] = {}
    with progress_bar("lossless", unit="prompts", total=len(questions)) as bar:
        for name, same in bench.check_lossless(questions):
            verdicts[name] = same
            bar.advance(1)
    return verdicts


def _tokens(prompt: Prompt, config: RunConfig, template: ChatTemplate) -> int:
    """Tokens of a whole conversation, every reply at its longest."""
    first, *others = prompt.turns[: config.eval.max_turns]
    asked = len(template.start(first)) + sum(
        len(template.follow(turn, closed=False)) for turn in others
    )
    return asked + config.eval.max_new_tokens * (1 + len(others))


def _head_location(config: RunConfig) -> Location:
    """`eval.head`, or the run's own head."""
    return (
        Location(config.eval.head)
        if config.eval.head
        else stage_location(config.run.uri, "train").child("head")
    )


def _write(stage: StageRun, report: EvalReport) -> None:
    stage.location.write(REPORT, report.model_dump_json(indent=2).encode() + b"\n")
    stage.location.write(PAGE, write_html(report).encode())


def _page(stage: StageRun) -> str:
    return f"{stage.location.uri.rstrip('/')}/{PAGE}"


def _details(stage: StageRun, report: EvalReport) -> dict[str, object]:
    return {
        "acceptance_length": report.acceptance_length,
        "speedup": report.speedup,
        "report_sha256": hashlib.sha256(stage.location.read(REPORT)).hexdigest(),
    }
