"""What each command does, once its arguments are parsed.

Whatever a command needs is imported when it is asked for, so that `--help`, `--plan`, `show` and
`schema` answer without torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from typing import cast

from pipeline.config import PiiSection, RunConfig, load
from pipeline.console import fail, readable_bytes, readable_duration
from pipeline.records import STAGES, Plan, Stage
from pipeline.runtime import ROOMS, run


def run_stages(arguments: argparse.Namespace) -> int:
    """`eagle3 synth|features|train|eval|run`, or their plans."""
    options = {"force": arguments.force, "shard": arguments.shard}
    config = load(arguments.config, arguments.overrides, **options)
    stages = STAGES if arguments.command == "run" else (cast(Stage, arguments.command),)
    for stage in stages:
        arguments.stage = stage  # for what is said of an error
        if arguments.plan:
            _print_plan(plan_of(stage)(config))
        else:
            run(config, stage)
    return 0


def plan_of(stage: Stage) -> Callable[[RunConfig], Plan]:
    """What `--plan` prints of the stage; imports no torch."""
    module = importlib.import_module(f"pipeline.{ROOMS[stage]}.plan")
    plan: Callable[[RunConfig], Plan] = module.plan
    return plan


def _print_plan(plan: Plan) -> None:
    from rich.table import Table
    from rich.text import Text

    from pipeline.console import console

    title = f"eagle3 {plan.stage} --plan"
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("state", Text(plan.state))
    table.add_row("records", f"{plan.records:,}")
    table.add_row("tokens", f"{plan.tokens:,}")
    table.add_row("storage", readable_bytes(plan.storage_bytes))
    table.add_row("time", readable_duration(plan.seconds))
    table.add_row("peak memory", readable_bytes(plan.peak_memory_bytes))
    for position, line in enumerate(plan.basis):
        table.add_row("based on" if position == 0 else "", Text(line))
    console.print(table)


def _show(arguments: argparse.Namespace) -> int:
    import yaml

    values = load(arguments.config, arguments.overrides).model_dump(mode="json")
    print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120), end="")
    return 0


def _schema(arguments: argparse.Namespace) -> int:
    print(json.dumps(RunConfig.model_json_schema(), indent=2, ensure_ascii=False))
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

    target = arguments.target
    export_head(arguments.head, format=arguments.format, out=arguments.out, target=target)
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from pipeline.exchange.imports import import_head

    import_head(arguments.head, target=arguments.target, out=arguments.out)
    return 0


def _pii_score(arguments: argparse.Namespace) -> int:
    from pipeline.synth.privacy.score import print_score, score_files

    section = load(arguments.config).synth if arguments.config else None
    policy, dlp = (section.pii, section.dlp) if section else (PiiSection(), None)
    score = score_files(arguments.files, policy, dlp)
    if arguments.json:
        print(json.dumps(score.as_json(), indent=2))
    else:
        print_score(score)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from pipeline.store.verify import verify_run

    check = verify_run(arguments.uri)
    for problem in check.problems:
        fail(problem, 2)
    if check.problems:
        return 2
    unfinished = f"; not finished: {', '.join(check.begun)}" if check.begun else ""
    stages = ", ".join(check.finished) or "no finished stage"
    size = f"{check.shards:,} shards, {readable_bytes(check.bytes)}"
    print(f"sound: {stages}; {size}{unfinished}")
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
    "inspect": _inspect,
    "export": _export,
    "import": _import,
    "pii-score": _pii_score,
    "verify": _verify,
    "gc": _gc,
    "jobs": _jobs,
}
