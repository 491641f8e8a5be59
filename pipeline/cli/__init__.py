"""The command line: the only argument parser of the package.

    eagle3 synth|features|train|eval -c run.yaml [section.key=value …] [--plan] [--force]
    eagle3 run    -c run.yaml …      the four stages in order
    eagle3 show   -c run.yaml …      the resolved configuration as YAML
    eagle3 schema                    the configuration's JSON schema
    eagle3 inspect HEAD [--json]     contract, size, tensors, vocabulary, provenance and metrics of a head
    eagle3 export HEAD --format sglang|speculators --out DIR [--target SOURCE]
    eagle3 import DIR --target SOURCE --out HEAD
    eagle3 pii-score FILE… [-c run.yaml] [--json]   recall, precision and false alarms of the personal-data filter
    eagle3 verify URI                re-check every byte of a run, and how its stages hang together
    eagle3 gc URI [--dry-run] [--quiet-minutes N]    remove what killed writers left behind

A stage is imported when it is asked for, so that `--help`, `--plan`, `show` and `schema` answer
without torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

import pipeline
from pipeline.cli.commands import COMMANDS, Parser, add_commands
from pipeline.config import RunConfig, load
from pipeline.console import fail, readable_bytes, readable_duration
from pipeline.errors import Eagle3Error
from pipeline.records import STAGES, Manifest, Plan, Stage

#: The room behind each stage; `eval` would shadow a builtin as a package name.
ROOMS: dict[Stage, str] = {
    "synth": "synth",
    "features": "features",
    "train": "train",
    "eval": "serve_eval",
}

ABOUT: dict[Stage, str] = {
    "synth": "prompts to samples: filter, then let the target answer",
    "features": "samples to states: the target's aux and final states",
    "train": "states to head: train and export the draft head",
    "eval": "head to report: acceptance length and speed of the head",
}

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 (not lossless), 2 (the user can fix it), 130 (Ctrl-C)."""
    arguments = parse_arguments(argv)
    try:
        return _dispatch(arguments)
    except Eagle3Error as error:
        return fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return fail(
            "interrupted (fix: run the same command again; it continues after the last committed work)",
            INTERRUPTED,
        )
    except BrokenPipeError:  # `eagle3 schema | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `argv`; overrides may stand before, between and after the options."""
    parser = _build_parser()
    arguments, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        parser.error(f"unknown option {unknown[0]!r}")
    if rest and not hasattr(arguments, "overrides"):
        parser.error(f"{arguments.command} takes no argument {rest[0]!r}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="eagle3",
        description=pipeline.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"eagle3 {pipeline.__version__}")
    # DeepSpeed's launcher puts it in front of every command; LOCAL_RANK in the environment says the same.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    configured = _configured()
    staged = _staged()
    for stage in STAGES:
        commands.add_parser(
            stage, parents=[configured, staged], help=ABOUT[stage], description=ABOUT[stage]
        )
    everything = "the four stages in order; finished ones are left as they are"
    commands.add_parser(
        "run", parents=[configured, staged], help=everything, description=everything
    )
    shown = "print the resolved configuration as YAML"
    commands.add_parser("show", parents=[configured], help=shown, description=shown)
    schema = "print the JSON schema of the configuration"
    commands.add_parser("schema", help=schema, description=schema)
    add_commands(commands)
    return parser


def _configured() -> Parser:
    """Arguments of every command that reads a configuration."""
    parent = Parser(add_help=False)
    parent.add_argument(
        "-c", "--config", required=True, metavar="FILE", help="YAML configuration of the run"
    )
    parent.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="replaces a value of the file; the value is YAML",
    )
    return parent


def _staged() -> Parser:
    """Switches of every command that runs stages."""
    parent = Parser(add_help=False)
    parent.add_argument(
        "--plan", action="store_true", help="print what would be done, and do nothing"
    )
    parent.add_argument(
        "--force",
        action="store_true",
        help="discard a stage's earlier output that belongs to another config or parent",
    )
    return parent


def _dispatch(arguments: argparse.Namespace) -> int:
    if arguments.command == "schema":
        print(json.dumps(RunConfig.model_json_schema(), indent=2, ensure_ascii=False))
        return 0
    if arguments.command == "show":
        print(_as_yaml(load(arguments.config, arguments.overrides)), end="")
        return 0
    if arguments.command in COMMANDS:
        return COMMANDS[arguments.command](arguments)
    config = load(arguments.config, arguments.overrides, force=arguments.force)
    stages = STAGES if arguments.command == "run" else (cast(Stage, arguments.command),)
    for stage in stages:
        if arguments.plan:
            _print_plan(_plan_of(stage)(config))
        else:
            _run_of(stage)(config)
    return 0


class _Run(Protocol):
    def __call__(self, config: RunConfig) -> Manifest: ...


class _MakePlan(Protocol):
    def __call__(self, config: RunConfig) -> Plan: ...


def _run_of(stage: Stage) -> _Run:
    return cast(_Run, importlib.import_module(f"pipeline.{ROOMS[stage]}").run)


def _plan_of(stage: Stage) -> _MakePlan:
    return cast(_MakePlan, importlib.import_module(f"pipeline.{ROOMS[stage]}.plan").plan)


def _as_yaml(config: RunConfig) -> str:
    import yaml

    return yaml.safe_dump(
        config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120
    )


def _print_plan(plan: Plan) -> None:
    from rich.table import Table
    from rich.text import Text

    from pipeline.console import console

    table = Table(
        title=f"eagle3 {plan.stage} --plan",
        title_justify="left",
        title_style="bold",
        show_header=False,
    )
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


if __name__ == "__main__":
    sys.exit(main())
