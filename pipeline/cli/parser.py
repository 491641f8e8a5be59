"""Every argument parser of the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

import pipeline
from pipeline.config import DRAFTERS
from pipeline.console import fail
from pipeline.planning.decode import parse_acceptance
from pipeline.records import STAGES, Stage

_STAGES: dict[Stage, str] = {
    "synth": "prompts to samples: filter, then let the target answer",
    "features": "samples to states: the target's aux and final states",
    "train": "states to head: train and export the draft head",
    "eval": "head to report: acceptance length and speed of the head",
}
_RUN_URI = "the run's directory, as in run.uri"


class Parser(argparse.ArgumentParser):
    """Reports misuse in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        sys.exit(fail(f"{message} (fix: see {self.prog} --help)", 2))


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `argv`; overrides may stand before, between and after the options."""
    parser = _build_parser()
    arguments, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        parser.error(f"unknown option {unknown[0]!r}")
    if rest and not hasattr(arguments, "overrides"):
        parser.error(f"{arguments.command} takes no argument {rest[0]!r}")
    for option in ("device", "workers"):
        if getattr(arguments, option, None) is not None and not arguments.plan:
            parser.error(f"--{option} belongs to --plan")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _build_parser() -> Parser:
    parser = Parser(
        prog="eagle3",
        description=pipeline.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"eagle3 {pipeline.__version__}")
    # DeepSpeed's launcher puts it in front of every command; LOCAL_RANK says the same.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    _add_stages(commands)
    _add_heads(commands)
    _add_store(commands)
    _add_pii_score(commands)
    _add_jobs(commands)
    return parser


def _command(
    commands: argparse._SubParsersAction[Parser], name: str, help: str, *parents: Parser
) -> Parser:
    return commands.add_parser(name, help=help, description=help, parents=list(parents))


def _configured() -> Parser:
    """The arguments of a command that reads a configuration."""
    configured = Parser(add_help=False)
    configured.add_argument(
        "-c", "--config", required=True, metavar="FILE", help="YAML configuration of the run"
    )
    configured.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="replaces a value of the file; the value is YAML",
    )
    return configured


def _add_stages(commands: argparse._SubParsersAction[Parser]) -> None:
    """The commands on a configuration."""
    configured = _configured()
    staged = Parser(add_help=False)
    staged.add_argument(
        "--plan", action="store_true", help="print what would be done, and do nothing"
    )
    staged.add_argument(
        "--device",
        metavar="NAME",
        help="with --plan: the device to plan for, as in plan.device: cpu, h100, … "
        "(docs/planning.md)",
    )
    staged.add_argument(
        "--workers",
        metavar="N",
        type=int,
        help="with --plan: how many GPUs or processes share a stage, as in plan.workers",
    )
    staged.add_argument(
        "--force",
        action="store_true",
        help="discard a stage's earlier output that belongs to another config or parent",
    )
    staged.add_argument(
        "--shard",
        metavar="I/N",
        help="make every N-th shard of synth and features, from number I on (0/4 … 3/4); exit code "
        "75 says that other parts are missing",
    )
    for stage in STAGES:
        command = _command(commands, stage, _STAGES[stage], configured, staged)
        if stage == "eval":
            _add_server(command, "evaluate a running server with the same prompts instead")
    in_order = "the four stages in order; finished ones are left as they are"
    _command(commands, "run", in_order, configured, staged)
    _command(commands, "show", "print the resolved configuration as YAML", configured)
    schema = _command(commands, "schema", "print the JSON schema of the configuration, or a report")
    schema.add_argument("what", nargs="?", choices=("config", "report"), default="config")
    _command(commands, "drafters", "list what can draft, what it needs, and its settings")
    _add_plan_decode(commands, configured)
    _add_simulate(commands, configured)
    _add_serve(commands, configured)
    _add_compare(commands)
    _add_check_serving(commands)


def _add_plan_decode(commands: argparse._SubParsersAction[Parser], configured: Parser) -> None:
    measured = "measure which drafter pays at which batch size and context, and with which shape"
    planned = _command(commands, "plan-decode", measured, configured)
    option = planned.add_argument
    names = [name for name in DRAFTERS if name != "none"]
    option("--drafters", type=_words, default=["eagle3"], metavar="NAMES", help=", ".join(names))
    option("--batches", type=_counts, default=[1, 4, 16], metavar="B,…", help="batch sizes")
    option("--contexts", type=_counts, default=[512, 2048], metavar="S,…", help="tokens of context")
    option("--prompts", type=int, default=4, metavar="N", help="prompts traced at each context")
    option("--new-tokens", type=int, default=48, metavar="N", help="tokens of each reply")
    option(
        "--most-tokens",
        type=int,
        default=32768,
        metavar="N",
        help="leave out cells of a larger batch x context; default 32768",
    )
    option("--check", action="store_true", help="run each cell's best shape beside plain decoding")
    option("--json", metavar="FILE", help="write the plan as JSON")
    option("--page", metavar="FILE", help="write the plan as an HTML page with pictures")
    on_paper = planned.add_argument_group("on paper, for a GPU that is not here")
    option = on_paper.add_argument
    option("--paper", metavar="GPU", help="a data sheet's name, as in plan.device: h100, b200, …")
    option(
        "--alpha",
        type=_alpha,
        default={"eagle3": 0.75},
        metavar="NAME=α,…",
        help="drafters and how likely a drafted token is accepted after those before it; default "
        "eagle3=0.75",
    )
    option("--budget", type=int, default=512, metavar="N", help="self_spec's compressed cache")
    option("--draft", metavar="NAME", help="the standalone drafter: a well-known target's name")


def _add_simulate(commands: argparse._SubParsersAction[Parser], configured: Parser) -> None:
    imposed = (
        "measure speed under load at acceptance lengths that are imposed: what a head of such "
    )
    imposed += "a τ would bring here; at eval.load's concurrency and contexts"
    simulated = _command(commands, "simulate", imposed, configured)
    option = simulated.add_argument
    lengths = "acceptance lengths, 1 to 1 + eval.tree.steps; default 1.5,2,2.5,3"
    option("--acceptance", type=_lengths, default=[1.5, 2, 2.5, 3], metavar="τ,…", help=lengths)
    option("--json", metavar="FILE", help="write the curves as JSON")


def _add_compare(commands: argparse._SubParsersAction[Parser]) -> None:
    gate = "compare two evaluations on the prompts of both; exit code 1 where the first is worse"
    compared = _command(commands, "compare", gate)
    option = compared.add_argument
    option("report", help="report.json, or the URI of a run")
    option("earlier", help="the one that it should not be worse than")
    option(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="τ",
        help="how much lower the acceptance length may be; default 0",
    )
    option("--json", action="store_true", help="print the comparison as JSON")


def _add_serve(commands: argparse._SubParsersAction[Parser], configured: Parser) -> None:
    offered = "serve the target with eval's drafter and tree under OpenAI's API; docs/serving.md"
    served = _command(commands, "serve", offered, configured)
    option = served.add_argument
    option("--host", metavar="ADDRESS", help="as serve.host; default 127.0.0.1")
    option("--port", type=int, metavar="N", help="as serve.port; default 8000, 0 takes a free one")
    option("--head", metavar="DIR", help="as eval.head: the head directory to draft with")


def _add_server(command: Parser, help: str, *, required: bool = False) -> None:
    about = f"{help}: SGLang, vLLM or `eagle3 serve`; as eval.server.url (docs/evaluation.md)"
    command.add_argument("--server", metavar="URL", required=required, help=about)


def _add_check_serving(commands: argparse._SubParsersAction[Parser]) -> None:
    about = (
        "ask a running server a few prompts of a report: exit code 1 unless its τ is the report's"
    )
    command = _command(commands, "check-serving", about)
    _add_server(command, "the server to check", required=True)
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("-c", "--config", metavar="FILE", help="the run whose report is taken")
    source.add_argument(
        "--report", metavar="FILE", help="a report.json; needs no run and no target"
    )
    command.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="eval.server.key=value",
        help="such as eval.server.tolerance=0.05; the value is YAML",
    )


def _words(text: str) -> list[str]:
    words = [word for word in text.split(",") if word]
    for word in words:
        if word not in DRAFTERS or word == "none":
            raise argparse.ArgumentTypeError(f"no drafter {word!r}; see `eagle3 drafters`")
    return words


def _alpha(text: str) -> dict[str, float]:
    try:
        return parse_acceptance(text, [name for name in DRAFTERS if name != "none"])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _lengths(text: str) -> list[float]:
    try:
        return sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of lengths such as 2,2.5") from None


def _counts(text: str) -> list[int]:
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of counts such as 1,4,16") from None
    if counts[0] < 1:
        raise argparse.ArgumentTypeError(f"{counts[0]} is not positive")
    return counts


def _add_heads(commands: argparse._SubParsersAction[Parser]) -> None:
    """The commands on single heads; every directory may be an fsspec URI."""
    empty = "it must be empty or not exist"
    facts = "print contract, size, tensors, draft vocabulary, provenance and metrics of a head"
    inspect = _command(commands, "inspect", facts)
    inspect.add_argument("head", metavar="HEAD", help="head directory")
    inspect.add_argument("--json", action="store_true", help="print JSON")

    written = "write a head in the format of SGLang, of speculators and vLLM, or as MTP layers"
    export = _command(commands, "export", written)
    export.add_argument("head", metavar="HEAD", help="head directory")
    export.add_argument(
        "--format",
        required=True,
        choices=("sglang", "speculators", "mtp"),
        help="sglang is the format of a head directory itself, mtp that of chained heads",
    )
    export.add_argument("--out", required=True, metavar="DIR", help=f"directory to write; {empty}")
    export.add_argument(
        "--target",
        metavar="SOURCE",
        help="where the target is now, for its embedding; default: where the head was trained",
    )
    export.add_argument(
        "--report",
        metavar="REPORT",
        help="report.json of the head's evaluation, or its run: figures for the model card",
    )

    read = "read a head of another trainer, in any format, and make a head directory of it"
    imported = _command(commands, "import", read)
    imported.add_argument(
        "head", metavar="DIR", help="directory with config.json and *.safetensors"
    )
    imported.add_argument(
        "--target",
        required=True,
        metavar="SOURCE",
        help="the target it was trained for, as in target.source",
    )
    imported.add_argument(
        "--chat-template",
        metavar="FILE",
        help="chat template that the target is used with, as in target.chat_template",
    )
    imported.add_argument(
        "--out", required=True, metavar="HEAD", help=f"head directory to write; {empty}"
    )


def _add_store(commands: argparse._SubParsersAction[Parser]) -> None:
    """The commands on whole runs; every directory may be an fsspec URI."""
    checked = "re-check every shard of every stage: size, SHA-256, content, contract, parents"
    verify = _command(commands, "verify", checked)
    verify.add_argument("uri", metavar="URI", help=_RUN_URI)

    removed = "remove what killed writers left in a run; committed data is never touched"
    gc = _command(commands, "gc", removed)
    gc.add_argument("uri", metavar="URI", help=_RUN_URI)
    gc.add_argument(
        "--dry-run", action="store_true", help="list what would be removed, and remove nothing"
    )
    gc.add_argument(
        "--quiet-minutes",
        type=float,
        default=60.0,
        metavar="N",
        help="leave younger files alone, a writer may be at work; default 60",
    )


def _add_pii_score(commands: argparse._SubParsersAction[Parser]) -> None:
    measured = "measure the personal-data filter on labelled texts and on prompts"
    score = _command(commands, "pii-score", measured)
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
        help="YAML configuration whose synth.pii and synth.dlp to use; default: built-in policy",
    )
    score.add_argument("--json", action="store_true", help="print JSON")


def _add_jobs(commands: argparse._SubParsersAction[Parser]) -> None:
    jobs = _command(commands, "jobs", "what a cluster needs to run the stages")
    actions = jobs.add_subparsers(dest="action", metavar="action", required=True)
    written = "write Kubernetes manifests or Slurm scripts for the run; docs/fleet.md"
    render = _command(actions, "render", written, _configured())
    render.add_argument(
        "--for",
        dest="scheduler",
        required=True,
        choices=("kubernetes", "slurm"),
        help="who runs the jobs",
    )
    render.add_argument(
        "--out", metavar="DIR", help="directory to write one file an object or script; else print"
    )
