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
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, cast

import pipeline
from pipeline.config import PiiSection, RunConfig, load
from pipeline.errors import Eagle3Error
from pipeline.records import STAGES, Manifest, Plan, Stage

#: The room behind each stage; `eval` would shadow a builtin as a package name.
ROOMS: dict[Stage, str] = {"synth": "synth", "features": "features", "train": "train", "eval": "serve_eval"}

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
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted (fix: run the same command again; it continues after the last committed work)", INTERRUPTED)
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


class _Parser(argparse.ArgumentParser):
    """Reports misuse in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (fix: see {self.prog} --help)\n")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="eagle3", description=pipeline.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"eagle3 {pipeline.__version__}")
    # DeepSpeed's launcher puts it in front of every command; LOCAL_RANK in the environment says the same.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    configured = _configured()
    staged = _staged()
    for stage in STAGES:
        commands.add_parser(stage, parents=[configured, staged], help=ABOUT[stage], description=ABOUT[stage])
    everything = "the four stages in order; finished ones are left as they are"
    commands.add_parser("run", parents=[configured, staged], help=everything, description=everything)
    shown = "print the resolved configuration as YAML"
    commands.add_parser("show", parents=[configured], help=shown, description=shown)
    schema = "print the JSON schema of the configuration"
    commands.add_parser("schema", help=schema, description=schema)
    _add_travel(commands)
    _add_store(commands)
    _add_pii_score(commands)
    return parser


def _add_travel(commands: argparse._SubParsersAction[_Parser]) -> None:
    """The commands on single heads; every directory may be an fsspec URI."""
    looked = "print contract, size, tensors, draft vocabulary, provenance and metrics of a head"
    look = commands.add_parser("inspect", help=looked, description=looked)
    look.add_argument("head", metavar="HEAD", help="head directory")
    look.add_argument("--json", action="store_true", help="print JSON")
    exported = "write a head in the format of SGLang, or of speculators and vLLM"
    export = commands.add_parser("export", help=exported, description=exported)
    export.add_argument("head", metavar="HEAD", help="head directory")
    export.add_argument("--format", required=True, choices=("sglang", "speculators"), help="sglang is the format of a head directory itself")
    export.add_argument("--out", required=True, metavar="DIR", help="directory to write; it must be empty or not exist")
    export.add_argument("--target", metavar="SOURCE", help="where the target is now, for its embedding; default: where the head was trained")
    imported = "read a head of another trainer, in either format, and make a head directory of it"
    bring = commands.add_parser("import", help=imported, description=imported)
    bring.add_argument("head", metavar="DIR", help="directory with config.json and *.safetensors")
    bring.add_argument("--target", required=True, metavar="SOURCE", help="the target it was trained for, as in target.source")
    bring.add_argument("--out", required=True, metavar="HEAD", help="head directory to write; it must be empty or not exist")
    bring.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"), help="the target's compute type, as in target.dtype")


def _add_store(commands: argparse._SubParsersAction[_Parser]) -> None:
    """The commands on whole runs; every directory may be an fsspec URI."""
    verified = "re-check every shard of every stage of a run: size, SHA-256, content, contract, parents"
    verify = commands.add_parser("verify", help=verified, description=verified)
    verify.add_argument("uri", metavar="URI", help="the run's directory, as in run.uri")
    collected = "remove what killed writers left in a run; committed data is never touched"
    collect = commands.add_parser("gc", help=collected, description=collected)
    collect.add_argument("uri", metavar="URI", help="the run's directory, as in run.uri")
    collect.add_argument("--dry-run", action="store_true", help="list what would be removed, and remove nothing")
    collect.add_argument("--quiet-minutes", type=float, default=60.0, metavar="N", help="leave younger files alone, a writer may be at work; default 60")


def _add_pii_score(commands: argparse._SubParsersAction[_Parser]) -> None:
    scored = "measure the personal-data filter on labelled texts and on prompts"
    score = commands.add_parser("pii-score", help=scored, description=scored)
    score.add_argument("files", nargs="+", metavar="FILE", help="JSONL with {text, spans} (recall, precision) or {turns} (false alarms)")
    score.add_argument("-c", "--config", metavar="FILE", help="YAML configuration whose synth.pii and synth.dlp to use; default: the built-in policy")
    score.add_argument("--json", action="store_true", help="print JSON")


def _configured() -> _Parser:
    """Arguments of every command that reads a configuration."""
    parent = _Parser(add_help=False)
    parent.add_argument("-c", "--config", required=True, metavar="FILE", help="YAML configuration of the run")
    parent.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="replaces a value of the file; the value is YAML")
    return parent


def _staged() -> _Parser:
    """Switches of every command that runs stages."""
    parent = _Parser(add_help=False)
    parent.add_argument("--plan", action="store_true", help="print what would be done, and do nothing")
    parent.add_argument("--force", action="store_true", help="discard a stage's earlier output that belongs to another config or parent")
    return parent


def _dispatch(arguments: argparse.Namespace) -> int:
    if arguments.command == "schema":
        print(json.dumps(RunConfig.model_json_schema(), indent=2, ensure_ascii=False))
        return 0
    if arguments.command == "show":
        print(_as_yaml(load(arguments.config, arguments.overrides)), end="")
        return 0
    if arguments.command in TRAVEL:
        TRAVEL[arguments.command](arguments)
        return 0
    if arguments.command in STORE:
        return STORE[arguments.command](arguments)
    config = load(arguments.config, arguments.overrides, force=arguments.force)
    stages = STAGES if arguments.command == "run" else (cast(Stage, arguments.command),)
    for stage in stages:
        if arguments.plan:
            _print_plan(_plan_of(stage)(config))
        else:
            _run_of(stage)(config)
    return 0


def _inspect(arguments: argparse.Namespace) -> None:
    from pipeline.travel.inspect import inspect_head, print_inspection

    found = inspect_head(arguments.head)
    if arguments.json:
        print(found.as_json())
    else:
        print_inspection(found)


def _export(arguments: argparse.Namespace) -> None:
    from pipeline.travel.export import export_head

    export_head(arguments.head, format=arguments.format, out=arguments.out, target=arguments.target)


def _import(arguments: argparse.Namespace) -> None:
    from pipeline.travel.imports import import_head

    import_head(arguments.head, target=arguments.target, out=arguments.out, dtype=arguments.dtype)


def _pii_score(arguments: argparse.Namespace) -> None:
    from pipeline.synth.score import print_score, score_files

    section = load(arguments.config).synth if arguments.config else None
    score = score_files(arguments.files, section.pii if section else PiiSection(), section.dlp if section else None)
    if arguments.json:
        print(json.dumps(score.as_json(), indent=2))
    else:
        print_score(score)


TRAVEL: dict[str, Callable[[argparse.Namespace], None]] = {"inspect": _inspect, "export": _export, "import": _import, "pii-score": _pii_score}


def _verify(arguments: argparse.Namespace) -> int:
    from pipeline.store.verify import verify_run

    found = verify_run(arguments.uri)
    for problem in found.problems:
        _fail(problem, 2)
    if found.problems:
        return 2
    unfinished = f"; not finished: {', '.join(found.begun)}" if found.begun else ""
    stages = ", ".join(found.finished) or "no finished stage"
    print(f"sound: {stages}; {found.shards:,} shards, {_bytes(found.bytes)}{unfinished}")
    return 0


def _collect(arguments: argparse.Namespace) -> int:
    from pipeline.store.housekeeping import find_orphans, remove

    orphans = find_orphans(arguments.uri)
    quiet = [orphan for orphan in orphans if orphan.is_quiet(arguments.quiet_minutes)]
    if not arguments.dry_run:
        remove(quiet)
    verb = "would remove" if arguments.dry_run else "removed"
    for orphan in quiet:
        print(f"{verb} {orphan.where}: {orphan.reason}, {_bytes(orphan.size)}")
    young = len(orphans) - len(quiet)
    left = f"; left alone: {young} written in the last {arguments.quiet_minutes:g} minutes" if young else ""
    print(f"{verb} {len(quiet)} files, {_bytes(sum(orphan.size for orphan in quiet))}{left}")
    return 0


STORE: dict[str, Callable[[argparse.Namespace], int]] = {"verify": _verify, "gc": _collect}


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

    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _print_plan(plan: Plan) -> None:
    from rich.table import Table
    from rich.text import Text

    from pipeline.console import console

    table = Table(title=f"eagle3 {plan.stage} --plan", title_justify="left", title_style="bold", show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("state", Text(plan.state))
    table.add_row("records", f"{plan.records:,}")
    table.add_row("tokens", f"{plan.tokens:,}")
    table.add_row("storage", _bytes(plan.storage_bytes))
    table.add_row("time", _duration(plan.seconds))
    table.add_row("peak memory", _bytes(plan.peak_memory_bytes))
    for position, line in enumerate(plan.basis):
        table.add_row("based on" if position == 0 else "", Text(line))
    console.print(table)


def _bytes(count: float) -> str:
    """1536 → "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _duration(seconds: float) -> str:
    """3700 → "1 h 2 min"; exactness beyond two units would pretend to knowledge."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _fail(message: str, code: int) -> int:
    """One line on standard error, whatever line breaks a quoted value may hold."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
