"""The commands that run no stage: on single heads, on whole runs, and on the personal-data filter.

Whatever a command needs is imported when it is asked for, so that `--help` answers without torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import NoReturn

from pipeline.config import PiiSection, load
from pipeline.console import fail, readable_bytes


class Parser(argparse.ArgumentParser):
    """Reports misuse in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (fix: see {self.prog} --help)\n")


def add_commands(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add their parsers."""
    _add_travel(commands)
    _add_store(commands)
    _add_pii_score(commands)


def _add_travel(commands: argparse._SubParsersAction[Parser]) -> None:
    """The commands on single heads; every directory may be an fsspec URI."""
    looked = "print contract, size, tensors, draft vocabulary, provenance and metrics of a head"
    look = commands.add_parser("inspect", help=looked, description=looked)
    look.add_argument("head", metavar="HEAD", help="head directory")
    look.add_argument("--json", action="store_true", help="print JSON")
    exported = "write a head in the format of SGLang, or of speculators and vLLM"
    export = commands.add_parser("export", help=exported, description=exported)
    export.add_argument("head", metavar="HEAD", help="head directory")
    export.add_argument(
        "--format",
        required=True,
        choices=("sglang", "speculators"),
        help="sglang is the format of a head directory itself",
    )
    export.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="directory to write; it must be empty or not exist",
    )
    export.add_argument(
        "--target",
        metavar="SOURCE",
        help="where the target is now, for its embedding; default: where the head was trained",
    )
    imported = "read a head of another trainer, in either format, and make a head directory of it"
    bring = commands.add_parser("import", help=imported, description=imported)
    bring.add_argument("head", metavar="DIR", help="directory with config.json and *.safetensors")
    bring.add_argument(
        "--target",
        required=True,
        metavar="SOURCE",
        help="the target it was trained for, as in target.source",
    )
    bring.add_argument(
        "--out",
        required=True,
        metavar="HEAD",
        help="head directory to write; it must be empty or not exist",
    )
    bring.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float32", "float16"),
        help="the target's compute type, as in target.dtype",
    )


def _add_store(commands: argparse._SubParsersAction[Parser]) -> None:
    """The commands on whole runs; every directory may be an fsspec URI."""
    verified = (
        "re-check every shard of every stage of a run: size, SHA-256, content, contract, parents"
    )
    verify = commands.add_parser("verify", help=verified, description=verified)
    verify.add_argument("uri", metavar="URI", help="the run's directory, as in run.uri")
    collected = "remove what killed writers left in a run; committed data is never touched"
    collect = commands.add_parser("gc", help=collected, description=collected)
    collect.add_argument("uri", metavar="URI", help="the run's directory, as in run.uri")
    collect.add_argument(
        "--dry-run", action="store_true", help="list what would be removed, and remove nothing"
    )
    collect.add_argument(
        "--quiet-minutes",
        type=float,
        default=60.0,
        metavar="N",
        help="leave younger files alone, a writer may be at work; default 60",
    )


def _add_pii_score(commands: argparse._SubParsersAction[Parser]) -> None:
    scored = "measure the personal-data filter on labelled texts and on prompts"
    score = commands.add_parser("pii-score", help=scored, description=scored)
    score.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="JSONL with {text, spans} (recall, precision) or {turns} (false alarms)",
    )
    score.add_argument(
        "-c",
        "--config",
        metavar="FILE",
        help="YAML configuration whose synth.pii and synth.dlp to use; default: the built-in policy",
    )
    score.add_argument("--json", action="store_true", help="print JSON")


def _inspect(arguments: argparse.Namespace) -> int:
    from pipeline.exchange.inspect import inspect_head, print_inspection

    found = inspect_head(arguments.head)
    if arguments.json:
        print(found.as_json())
    else:
        print_inspection(found)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from pipeline.exchange.export import export_head

    export_head(arguments.head, format=arguments.format, out=arguments.out, target=arguments.target)
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from pipeline.exchange.imports import import_head

    import_head(arguments.head, target=arguments.target, out=arguments.out, dtype=arguments.dtype)
    return 0


def _pii_score(arguments: argparse.Namespace) -> int:
    from pipeline.synth.privacy.score import print_score, score_files

    section = load(arguments.config).synth if arguments.config else None
    score = score_files(
        arguments.files, section.pii if section else PiiSection(), section.dlp if section else None
    )
    if arguments.json:
        print(json.dumps(score.as_json(), indent=2))
    else:
        print_score(score)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from pipeline.store.verify import verify_run

    found = verify_run(arguments.uri)
    for problem in found.problems:
        fail(problem, 2)
    if found.problems:
        return 2
    unfinished = f"; not finished: {', '.join(found.begun)}" if found.begun else ""
    stages = ", ".join(found.finished) or "no finished stage"
    print(f"sound: {stages}; {found.shards:,} shards, {readable_bytes(found.bytes)}{unfinished}")
    return 0


def _collect(arguments: argparse.Namespace) -> int:
    from pipeline.store.gc import find_orphans, remove

    orphans = find_orphans(arguments.uri)
    quiet = [orphan for orphan in orphans if orphan.is_quiet(arguments.quiet_minutes)]
    if not arguments.dry_run:
        remove(quiet)
    verb = "would remove" if arguments.dry_run else "removed"
    for orphan in quiet:
        print(f"{verb} {orphan.where}: {orphan.reason}, {readable_bytes(orphan.size)}")
    young = len(orphans) - len(quiet)
    left = (
        f"; left alone: {young} written in the last {arguments.quiet_minutes:g} minutes"
        if young
        else ""
    )
    print(
        f"{verb} {len(quiet)} files, {readable_bytes(sum(orphan.size for orphan in quiet))}{left}"
    )
    return 0


#: Command → what runs it and gives the exit code.
COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "inspect": _inspect,
    "export": _export,
    "import": _import,
    "pii-score": _pii_score,
    "verify": _verify,
    "gc": _collect,
}
