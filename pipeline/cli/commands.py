"""What each command does, once its arguments are parsed.

Whatever a command needs is imported when it is asked for, so that `--help`, `--plan`, `show` and
`schema` answer without torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Sequence
from typing import cast

from pipeline.cli.plans import print_plans
from pipeline.config import DRAFTERS, DrafterSection, PiiSection, RunConfig, Section, load
from pipeline.console import fail, readable_bytes
from pipeline.errors import ConfigError, Eagle3Error
from pipeline.planning.decode import DecodePlan
from pipeline.records import STAGES, Plan, Stage
from pipeline.reports import report_schema
from pipeline.runtime import ROOMS, run
from pipeline.store.manifest import find_manifest

#: Stages whose plan rests on that of the one before.
_READING: tuple[Stage, ...] = ("features", "train")


def run_stages(arguments: argparse.Namespace) -> int:
    """`eagle3 synth|features|train|eval|run`, or their plans."""
    if vars(arguments).get("server"):
        return _evaluate_server(arguments)
    options = {"force": arguments.force, "shard": arguments.shard}
    config = load(arguments.config, _overrides(arguments), **options)
    stages = STAGES if arguments.command == "run" else (cast(Stage, arguments.command),)
    if arguments.plan:
        print_plans(make_plans(config, stages), config)
        return 0
    if len(stages) > 1 and find_manifest(config.run.uri, "train") is None:
        from pipeline.train.plan import check_size

        check_size(config)
    for stage in stages:
        arguments.stage = stage  # for what is said of an error
        run(config, stage)
    return 0


def _evaluate_server(arguments: argparse.Namespace) -> int:
    if arguments.plan or arguments.force or arguments.shard:
        problem = "a running server has no --plan, --force or --shard"
        raise ConfigError(problem, where="--server", fix="leave them out")
    config = load(arguments.config, [*arguments.overrides, _server(arguments)])
    from pipeline.serve_eval.live.stage import evaluate_server
    from pipeline.serve_eval.pages import renew_pages

    result = evaluate_server(config)
    renew_pages(config)
    return 0 if result.passed else 1


def _check_serving(arguments: argparse.Namespace) -> int:
    overrides = [*arguments.overrides, _server(arguments)]
    config = load(arguments.config, overrides) if arguments.config else None
    from pipeline.serve_eval.live.check import check_report, check_run

    if config is not None:
        return 0 if check_run(config) else 1
    return 0 if check_report(arguments.report, overrides) else 1


def _server(arguments: argparse.Namespace) -> str:
    return f"eval.server.url={json.dumps(arguments.server)}"


def _overrides(arguments: argparse.Namespace) -> list[str]:
    """Those of the command line, `--device` and `--workers` among them."""
    asked = {"device": arguments.device, "workers": arguments.workers}
    options = [f"plan.{key}={value}" for key, value in asked.items() if value is not None]
    return [*arguments.overrides, *options]


def make_plans(config: RunConfig, stages: Sequence[Stage]) -> list[Plan]:
    """One of each stage; where its parent is not finished, made from the parent's plan."""
    plans: dict[Stage, Plan] = {}

    def plan(stage: Stage) -> Plan:
        if stage not in plans:
            plans[stage] = plan_of(stage)(config, parent_of(stage))
        return plans[stage]

    def parent_of(stage: Stage) -> Plan | None:
        before = STAGES[STAGES.index(stage) - 1] if stage in _READING else None
        return plan(before) if before and not find_manifest(config.run.uri, before) else None

    return [plan(stage) for stage in stages]


def plan_of(stage: Stage) -> Callable[[RunConfig, Plan | None], Plan]:
    """What `--plan` prints of the stage, from its parent's plan if need be; imports no torch."""
    module = importlib.import_module(f"pipeline.{ROOMS[stage]}.plan")
    plan: Callable[[RunConfig, Plan | None], Plan] = module.plan
    return plan


def _show(arguments: argparse.Namespace) -> int:
    import yaml

    values = load(arguments.config, arguments.overrides).model_dump(mode="json")
    print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120), end="")
    return 0


def _schema(arguments: argparse.Namespace) -> int:
    schema = report_schema() if arguments.what == "report" else RunConfig.model_json_schema()
    print(json.dumps(schema, indent=2, ensure_ascii=False))
    return 0


def _drafters(arguments: argparse.Namespace) -> int:
    for name, info in DRAFTERS.items():
        print(f"{name:<12}{info.about}\n{'':<12}needs {info.needs}")
        section = DrafterSection.model_fields.get(name)
        settings = section.get_default(call_default_factory=True) if section else None
        if isinstance(settings, Section):
            for key, field in type(settings).model_fields.items():
                about = " ".join((field.description or "").split())
                print(f"{'':<14}{name}.{key} = {field.get_default()}: {about}")
    return 0


def _plan_decode(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from pipeline.serve_eval.page.decode_page import print_plan, write_page

    config = load(arguments.config, arguments.overrides)
    plan = _decode_plan_on_paper(config, arguments) if arguments.paper else None
    if plan is None:
        from pipeline.serve_eval.decode_plan import Grid, plan_decode

        asked = {name: getattr(arguments, name) for name in Grid._fields}
        plan = plan_decode(config, Grid(**asked))
    print_plan(plan)
    if arguments.json:
        Path(arguments.json).write_text(plan.model_dump_json(indent=1) + "\n", encoding="utf-8")
    if arguments.page:
        Path(arguments.page).write_text(write_page(plan), encoding="utf-8")
    return 0


def _decode_plan_on_paper(config: RunConfig, arguments: argparse.Namespace) -> DecodePlan:
    from pipeline.planning.decode import plan_on_paper
    from pipeline.planning.devices import device_of
    from pipeline.planning.targets import KNOWN, shape_of

    plan = config.plan.model_copy(update={"device": arguments.paper})
    device = device_of(config.model_copy(update={"plan": plan}))
    if not device.is_cuda:
        problem = "a plan on paper needs a GPU with a data sheet"
        raise ConfigError(problem, where="--paper", fix="name one, such as h100, or leave it out")
    draft = KNOWN.get(arguments.draft.lower()) if arguments.draft else None
    if "standalone" in arguments.alpha and draft is None:
        fix = f"name one with --draft: {', '.join(KNOWN)}"
        raise ConfigError("standalone needs a known draft model", where="--draft", fix=fix)
    return plan_on_paper(
        shape_of(config),
        device,
        config.target.source,
        acceptance=arguments.alpha,
        batches=arguments.batches,
        contexts=arguments.contexts,
        budget=arguments.budget,
        draft_shape=draft,
    )


def _simulate(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from pipeline.serve_eval.simulated import print_simulated, simulate

    curves = simulate(load(arguments.config, arguments.overrides), arguments.acceptance)
    print_simulated(curves)
    if arguments.json:
        Path(arguments.json).write_text(curves.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from pipeline.serve_eval.compare import check_regression, compare_reports, sentence
    from pipeline.store.manifest import read_report

    own, earlier = read_report(arguments.report), read_report(arguments.earlier)
    compared = compare_reports(own, earlier, where=arguments.earlier)
    print(compared.model_dump_json(indent=1) if arguments.json else sentence(compared))
    check_regression(compared, arguments.tolerance, where=arguments.report)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    asked = {
        "serve.host": arguments.host,
        "serve.port": arguments.port,
        "eval.head": arguments.head,
    }
    # JSON is YAML, and a path that looks like a number stays a text.
    given = [f"{key}={json.dumps(value)}" for key, value in asked.items() if value is not None]
    config = load(arguments.config, [*arguments.overrides, *given])
    from pipeline.server.start import serve

    serve(config)
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from pipeline.exchange.inspect import inspect_head, print_inspection

    inspection = inspect_head(arguments.head)
    if arguments.json:
        print(inspection.as_json())
    else:
        print_inspection(inspection)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from pipeline.exchange.export import export_head

    export_head(
        arguments.head,
        format=arguments.format,
        out=arguments.out,
        target=arguments.target,
        report=arguments.report,
    )
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from pipeline.exchange.imports import import_head

    template = arguments.chat_template
    import_head(arguments.head, target=arguments.target, out=arguments.out, chat_template=template)
    return 0


def _pii_score(arguments: argparse.Namespace) -> int:
    from pipeline.cli.pii_score import print_score, score_files

    section = load(arguments.config).synth if arguments.config else None
    policy, dlp = (section.pii, section.dlp) if section else (PiiSection(), None)
    score = score_files(arguments.files, policy, dlp)
    if arguments.json:
        print(json.dumps(score.as_json(), indent=2))
    else:
        print_score(score)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from pipeline.store.manifest import read_manifest
    from pipeline.store.verify import verify_run
    from pipeline.target.open import recheck_weights

    check = verify_run(arguments.uri)
    problems, target = list(check.problems), ""
    for stage in check.finished[:1]:  # the contract is one throughout
        manifest, where = read_manifest(arguments.uri, stage), f"{arguments.uri}/{stage}"
        try:
            unseen = recheck_weights(manifest.contract, where=where)
            target = f"; the target was not looked at: {unseen}" if unseen else "; same target"
        except Eagle3Error as error:
            problems.append(str(error))
    for problem in problems:
        fail(problem, 2)
    if problems:
        return 2
    unfinished = f"; not finished: {', '.join(check.begun)}" if check.begun else ""
    stages = ", ".join(check.finished) or "no finished stage"
    size = f"{check.shards:,} shards, {readable_bytes(check.bytes)}"
    print(f"sound: {stages}; {size}{unfinished}{target}")
    return 0


def _gc(arguments: argparse.Namespace) -> int:
    from pipeline.store.gc import find_orphans, remove

    orphans = find_orphans(arguments.uri)
    quiet = [orphan for orphan in orphans if orphan.is_quiet(arguments.quiet_minutes)]
    if not arguments.dry_run:
        remove(quiet)
    verb = "would remove" if arguments.dry_run else "removed"
    for orphan in quiet:
        print(f"{verb} {orphan.where}: {orphan.reason}, {readable_bytes(orphan.size)}")
    young, minutes = len(orphans) - len(quiet), arguments.quiet_minutes
    left = f"; left alone: {young} written in the last {minutes:g} minutes" if young else ""
    size = readable_bytes(sum(orphan.size for orphan in quiet))
    print(f"{verb} {len(quiet)} files, {size}{left}")
    return 0


def _jobs(arguments: argparse.Namespace) -> int:
    from pipeline.jobs import render, write

    files = render(load(arguments.config, arguments.overrides), arguments.scheduler)
    if arguments.out:
        start = write(files, arguments.out)
        print(f"wrote {len(files)} files; {start} runs the stages")
        return 0
    if arguments.scheduler == "kubernetes":  # one stream of objects, as kubectl reads it
        files = {name: text for name, text in files.items() if name.endswith(".yaml")}
    for name, text in files.items():
        print(f"---\n# {name}\n{text}", end="")
    return 0


#: Command → what runs it and gives the exit code.
COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    **dict.fromkeys((*STAGES, "run"), run_stages),
    "show": _show,
    "schema": _schema,
    "drafters": _drafters,
    "plan-decode": _plan_decode,
    "simulate": _simulate,
    "serve": _serve,
    "compare": _compare,
    "check-serving": _check_serving,
    "inspect": _inspect,
    "export": _export,
    "import": _import,
    "pii-score": _pii_score,
    "verify": _verify,
    "gc": _gc,
    "jobs": _jobs,
}
