"""The command line.

eagle3 synth|features|train|eval -c run.yaml [section.key=value …] [--plan] [--force]
eagle3 run    -c run.yaml …      the four stages in order
eagle3 refresh -c run.yaml target.source=TUNED run.uri=NEW refresh.run=OLD …   after a fine-tune
eagle3 show   -c run.yaml …      the resolved configuration as YAML
eagle3 schema [report]           the JSON schema of the configuration, or of report.json
eagle3 drafters                  what can draft, what it needs, and its settings
eagle3 plan-decode -c run.yaml …   which drafter pays at which batch size and context
eagle3 simulate -c run.yaml … [--acceptance τ,…]    speed at acceptance lengths that are imposed
eagle3 compare REPORT EARLIER [--tolerance τ]    a gate: exit code 1 where acceptance is worse
eagle3 serve  -c run.yaml … [--host ADDRESS] [--port N] [--head DIR]    OpenAI's API
eagle3 eval   -c run.yaml … --server URL        a running SGLang, vLLM or eagle3 server
eagle3 check-serving --server URL -c run.yaml | --report FILE   its τ against the report's
eagle3 inspect HEAD [--json]     contract, size, tensors, vocabulary, provenance, metrics of a head
eagle3 export HEAD --format sglang|speculators|mtp|gguf --out DIR [--target …] [--verifier …]
eagle3 import DIR --target SOURCE --out HEAD
eagle3 float8 SOURCE --out DIR    a target rounded to float8: on a GPU half the bytes a token
eagle3 export-samples URI --out DIR    a run's samples as a data set
eagle3 import-samples DIR --out URI    such a data set as the synth stage of a run
eagle3 pii-score FILE… [-c run.yaml] [--json]   recall and precision of the personal-data filter
eagle3 verify URI                re-check every byte of a run, and how its stages hang together
eagle3 gc URI [--dry-run] [--quiet-minutes N]    remove what killed writers left behind
eagle3 jobs render -c run.yaml … --for slurm|kubernetes [--out DIR]    what a cluster needs

Commands import what they need themselves: `--help`, `--plan`, `show` and `schema` need no torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import pipeline
from pipeline.config import DRAFTERS, DrafterSection, PiiSection, RunConfig, load
from pipeline.console import (
    discard_output,
    fail,
    logs_json,
    one_line,
    open_streams,
    output,
    readable_bytes,
)
from pipeline.errors import ConfigError, Eagle3Error, is_out_of_memory, memory_cause, out_of_memory
from pipeline.planning.decode import DecodePlan, MachineRates, parse_acceptance, plan_on_paper
from pipeline.records import STAGES, Plan, Stage, ZeroMemory
from pipeline.reports import report_schema
from pipeline.runtime import ROOMS, run, run_side_by_side
from pipeline.store.manifest import find_manifest

if TYPE_CHECKING:
    from rich.table import Table

    from pipeline.store.location import Location
    from pipeline.store.output import Publication
    from pipeline.store.verify import BegunFiles

_OTHER_FILE = "name a file in a directory that exists and can be written"
INTERRUPTED = 130  # 128 + SIGINT, as shells report it; also after SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 done, 1 not lossless, worse than an earlier report or a server that differs from its report,
    2 a person has to act, 75 try again, 130 interrupted.
    """
    open_streams()
    arguments = parse_arguments(argv)
    try:
        _require_working_directory()
        with _sigterm_as_ctrl_c():
            logs_json()  # an unusable EAGLE3_LOG stops here and not at the first notice
            if arguments.handler:
                code: int = arguments.handler(arguments)
                return code
            config, stages = _load_stages(arguments)
            for stage, *beside in config.in_turn(stages):
                arguments.stage = stage  # names the stage in errors
                if beside:
                    run_side_by_side(config, (stage, *beside))
                else:
                    run(config, stage)
            return 0
    except Eagle3Error as error:
        cause = memory_cause(error)
        said = out_of_memory(cause, where=f"eagle3 {_stage(arguments)}") if cause else error
        return fail(str(said), said.exit_code, stage=_stage(arguments))
    except KeyboardInterrupt:
        fix = "run the same command again; it continues after the last committed work"
        return fail(f"interrupted (fix: {fix})", INTERRUPTED, stage=_stage(arguments))
    except FileNotFoundError:
        try:
            _require_working_directory()  # deleted meanwhile
        except ConfigError as error:
            return fail(str(error), error.exit_code, stage=_stage(arguments))
        raise
    except BrokenPipeError:
        if arguments.handler is None:  # not standard output, whose loss does not stop a stage
            raise
        discard_output()  # `eagle3 schema | head`: the reader has seen enough
        return 0
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        no_memory = out_of_memory(error, where=f"eagle3 {_stage(arguments)}")
        return fail(str(no_memory), no_memory.exit_code, stage=_stage(arguments))
    finally:
        output.drop_unwritten()


def _require_working_directory() -> None:
    """Raises ConfigError where it has been deleted: every relative path is then lost."""
    try:
        os.getcwd()
    except OSError as error:
        problem = f"cannot be found: {error.strerror}; it has been deleted or unmounted"
        fix = "cd to a directory that exists, and run the same command again"
        raise ConfigError(problem, where="the working directory", fix=fix) from None


def _stage(arguments: argparse.Namespace) -> str:
    """The stage at which `run` was, else the command."""
    stage: str = vars(arguments).get("stage", arguments.command)
    return stage


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Schedulers end a job with SIGTERM: the block then ends as by Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():  # it cannot have handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


#: Stages whose plan rests on that of the one before.
_READING: tuple[Stage, ...] = ("features", "train")


def _load_stages(arguments: argparse.Namespace) -> tuple[RunConfig, tuple[Stage, ...]]:
    """The configuration of `eagle3 synth|features|train|eval|run`, and the stages to run."""
    config = load(
        arguments.config, arguments.overrides, force=arguments.force, shard=arguments.shard
    )
    if arguments.command != "run":
        return config, (arguments.command,)
    if config.refresh:
        problem, fix = "is set, which trains a head more", "run `eagle3 refresh` instead"
        raise ConfigError(problem, where=f"{arguments.config}: refresh", fix=fix)
    if find_manifest(config.run.uri, "train") is None:
        from pipeline.train.plan import check_size

        check_size(config)
    return config, STAGES


def _refresh(arguments: argparse.Namespace) -> int:
    config = load(
        arguments.config, arguments.overrides, force=arguments.force, shard=arguments.shard
    )
    require_refresh(config, arguments.config)
    from pipeline.refresh import check_refresh

    check_refresh(config)
    for stage, each in refresh_steps(config):
        arguments.stage = stage
        run(each, stage)
    return 0


def require_refresh(config: RunConfig, where: str) -> None:
    """Raises ConfigError for a configuration of an ordinary run."""
    if config.refresh is None:
        fix = "set refresh.run to the run whose head goes on"
        raise ConfigError("required but not set", where=f"{where}: refresh", fix=fix)


def refresh_steps(config: RunConfig) -> list[tuple[Stage, RunConfig]]:
    """The stages of a refresh in order, each with its configuration."""
    *before, last = ((stage, config) for stage in STAGES)
    return [*before, ("train", config.from_scratch), last]


def _plan(arguments: argparse.Namespace) -> int:
    workers = [] if arguments.workers is None else [f"plan.workers={arguments.workers}"]
    overrides = [*arguments.overrides, *workers]
    config = load(arguments.config, overrides, force=arguments.force, shard=arguments.shard)
    stages = STAGES if arguments.command in ("run", "refresh") else (arguments.command,)
    plans = make_plans(config, stages)
    if arguments.command == "refresh":
        require_refresh(config, arguments.config)
        states = None if find_manifest(config.run.uri, "features") else plans[1]
        plans.insert(3, plan_of("train")(config.from_scratch, states))
    _print_plans(plans, config)
    return 0


def _evaluate_server(arguments: argparse.Namespace) -> int:
    if arguments.plan or arguments.force or arguments.shard:
        problem = "--plan, --force and --shard do not apply to a running server"
        raise ConfigError(problem, where="--server", fix="leave them out")
    config = load(arguments.config, [*arguments.overrides, _server(arguments)])
    from pipeline.serve_eval.servers.evaluate import evaluate_server

    return 0 if evaluate_server(config).passed else 1


def _check_serving(arguments: argparse.Namespace) -> int:
    overrides = [*arguments.overrides, _server(arguments)]
    config = load(arguments.config, overrides) if arguments.config else None
    from pipeline.serve_eval.servers.check import check_report, check_run

    if config is not None:
        return 0 if check_run(config) else 1
    return 0 if check_report(arguments.report, overrides) else 1


def _server(arguments: argparse.Namespace) -> str:
    return f"eval.server.url={json.dumps(arguments.server)}"


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
    """The stage's `plan`, which takes its parent's plan where that is unfinished."""
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
        for key, field in info.settings.model_fields.items():
            about = " ".join((field.description or "").split())
            default = "required" if field.is_required() else field.get_default()
            print(f"{'':<14}{key} = {default}: {about}")
    about = " ".join((DrafterSection.model_fields["lookup"].description or "").split())
    print(f"lookup = None, beside any of them but none and ngram: {about}")
    return 0


def _plan_decode(arguments: argparse.Namespace) -> int:
    from pipeline.serve_eval.pages import print_plan, write_plan

    config = load(arguments.config, arguments.overrides)
    _require_writable(arguments.json, arguments.page)
    if arguments.bandwidth or arguments.tflops:
        plan = _plan_on_paper(config, arguments)
    else:
        from pipeline.serve_eval.decode_plan import Grid, plan_decode

        grid = Grid(**{name: getattr(arguments, name) for name in Grid._fields})
        plan = plan_decode(config, grid)
    print_plan(plan)
    if arguments.json:
        _write(arguments.json, plan.model_dump_json(indent=1) + "\n")
    if arguments.page:
        _write(arguments.page, write_plan(plan))
    return 0


def _require_writable(*files: str | None) -> None:
    """Before anything is measured. Raises ConfigError."""
    for file in filter(None, files):
        folder = os.path.dirname(file) or "."
        if not os.path.isdir(folder):
            problem = f"cannot be written: there is no directory {folder}"
        elif os.path.isdir(file):
            problem = "cannot be written: it is a directory"
        elif not os.access(file if os.path.exists(file) else folder, os.W_OK):
            problem = "cannot be written: no permission"
        else:
            continue
        raise ConfigError(problem, where=file, fix=_OTHER_FILE)


def _write(file: str, text: str) -> None:
    """Raises ConfigError."""
    try:
        with open(file, "w", encoding="utf-8") as opened:
            opened.write(text)
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        raise ConfigError(problem, where=file, fix=_OTHER_FILE) from error


def _plan_on_paper(config: RunConfig, arguments: argparse.Namespace) -> DecodePlan:
    from pipeline.planning.targets import KNOWN, shape_of

    if not arguments.bandwidth or not arguments.tflops:
        fix = "pass what the machine sustains: --bandwidth GB/s --tflops N"
        raise ConfigError("a plan on paper needs both", where="--bandwidth, --tflops", fix=fix)
    draft = KNOWN.get(arguments.draft.lower()) if arguments.draft else None
    if "standalone" in arguments.alpha and draft is None:
        fix = f"name one with --draft: {', '.join(KNOWN)}"
        raise ConfigError("standalone needs a known draft model", where="--draft", fix=fix)
    return plan_on_paper(
        shape_of(config),
        MachineRates(arguments.bandwidth * 1e9, arguments.tflops * 1e12),
        config.target.source,
        acceptance=arguments.alpha,
        batches=arguments.batches,
        contexts=arguments.contexts,
        budget=arguments.budget,
        draft_shape=draft,
    )


def _simulate(arguments: argparse.Namespace) -> int:
    from pipeline.serve_eval.load import print_simulated, simulate

    config = load(arguments.config, arguments.overrides)
    _require_writable(arguments.json)
    curves = simulate(config, arguments.acceptance)
    print_simulated(curves)
    if arguments.json:
        _write(arguments.json, curves.model_dump_json(indent=1) + "\n")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from pipeline.serve_eval.compare import check_regression, compare_reports, sentence
    from pipeline.store.manifest import read_report

    report, earlier = read_report(arguments.report), read_report(arguments.earlier)
    compared = compare_reports(report, earlier, where=arguments.earlier)
    print(compared.model_dump_json(indent=1) if arguments.json else sentence(compared))
    check_regression(compared, arguments.tolerance, where=arguments.report)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from pipeline.server.start import serve

    options = {
        "serve.host": arguments.host,
        "serve.port": arguments.port,
        "eval.head": arguments.head,
    }
    # JSON is YAML, and a path that looks like a number remains text.
    overrides = [
        f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None
    ]
    serve(load(arguments.config, [*arguments.overrides, *overrides]))
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
        verifier=arguments.verifier,
        report=arguments.report,
        license=arguments.license,
        publication=_publication(arguments),
    )
    return 0


def _publication(arguments: argparse.Namespace) -> Publication:
    from pipeline.store.output import Publication

    return Publication(arguments.upload, arguments.public, arguments.replace)


def _export_samples(arguments: argparse.Namespace) -> int:
    from pipeline.synth.dataset import export_samples

    export_samples(arguments.run, arguments.out, _publication(arguments))
    return 0


def _import_samples(arguments: argparse.Namespace) -> int:
    from pipeline.synth.dataset import import_samples

    import_samples(arguments.dataset, arguments.out)
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from pipeline.exchange.imports import import_head

    template = arguments.chat_template
    import_head(arguments.head, target=arguments.target, out=arguments.out, chat_template=template)
    return 0


def _float8(arguments: argparse.Namespace) -> int:
    from pipeline.exchange.float8 import round_target

    round_target(arguments.source, arguments.out)
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

    check = verify_run(arguments.uri, {"train": _stored_checkpoints})
    problems, target = list(check.problems), ""
    for stage in check.finished[:1]:  # the contract is one throughout
        manifest, where = read_manifest(arguments.uri, stage), f"{arguments.uri}/{stage}"
        try:
            unseen = recheck_weights(manifest.contract, where=where)
            target = f"; the target was not checked: {unseen}" if unseen else "; same target"
        except Eagle3Error as error:
            problems.append(str(error))
    for line in check.uncovered:
        print(f"not checked: {one_line(line)}")
    for problem in problems:
        fail(problem, 2)
    if problems:
        return 2
    unfinished = f"; not finished: {', '.join(check.begun)}" if check.begun else ""
    stages = ", ".join(check.finished) or "no finished stage"
    size = f"{check.shards:,} shards and {check.files:,} other files"
    size += f", {readable_bytes(check.bytes)}"
    size += f"; {check.consumed:,} shards of states consumed by training" if check.consumed else ""
    print(f"sound: {stages}; {size}{unfinished}{target}")
    return 0


def _stored_checkpoints(stage: Location) -> BegunFiles:
    from pipeline.train.checkpoints import stored_checkpoints  # torch

    return stored_checkpoints(stage)


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
        del files["apply.sh"]
    for name, text in files.items():
        print(f"---\n# {name}\n{text}", end="")
    return 0


def _print_plans(plans: Sequence[Plan], config: RunConfig) -> None:
    """A table a stage on standard output, and the totals of several."""
    from pipeline.console import console

    for plan in plans:
        console.print(_plan_table(plan))
        if plan.zero:
            console.print(_zero_table(plan.zero, config.train.zero_stage))
    if len(plans) > 1:
        size = readable_bytes(sum(plan.storage_bytes for plan in plans))
        objects = sum(plan.objects for plan in plans)
        console.print(f"all stages: {size} in {objects:,} objects", highlight=False)


def _plan_table(plan: Plan) -> Table:
    from rich.table import Table
    from rich.text import Text

    title = f"eagle3 {plan.stage} --plan"
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("state", Text(plan.state))
    table.add_row("records", f"{plan.records:,}")
    table.add_row("tokens", f"{plan.tokens:,}")
    table.add_row("storage", readable_bytes(plan.storage_bytes))
    if plan.objects:
        table.add_row("objects", f"{plan.objects:,}")
    if plan.shards:
        table.add_row("shards", f"{plan.shards:,}")
    if plan.parameters:
        table.add_row("parameters", f"{plan.parameters:,}")
    if plan.peak_memory_bytes:
        table.add_row("peak memory", readable_bytes(plan.peak_memory_bytes))
    sizes = {name: size for name, size in plan.memory.items() if size}
    parts = ", ".join(f"{name} {readable_bytes(size)}" for name, size in sizes.items())
    if parts:
        table.add_row("", Text(parts))
    for problem in plan.problems:
        table.add_row("problem", Text(problem, style="red"))
    for position, line in enumerate(plan.basis):
        table.add_row("based on" if position == 0 else "", Text(line))
    return table


def _zero_table(rows: Sequence[ZeroMemory], chosen: int) -> Table:
    from rich.table import Table

    title = "memory of one process by train.zero_stage, GiB"
    table = Table(title=title, title_justify="left", title_style="bold")
    names = ("weights", "gradients", "optimiser", "buffers", "frozen", "working", "peak")
    for name in ("ZeRO", *names):
        table.add_column(name, justify="right")
    for row in rows:
        sizes = row.weights, row.gradients, row.optimiser, row.buffers, row.frozen
        working = max(row.activations, row.stepping)
        cells = [f"{size / 2**30:,.1f}" for size in (*sizes, working, row.total)]
        mark = "bold" if row.stage == chosen else None
        table.add_row(str(row.stage), *cells, style=mark)
    return table


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


Handler = Callable[[argparse.Namespace], int]
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `argv`; overrides may stand before, between and after the options."""
    parser = _build_parser()
    arguments, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        parser.error(f"unknown option {unknown[0]!r}")
    if rest and not hasattr(arguments, "overrides"):
        parser.error(f"{arguments.command} takes no argument {rest[0]!r}")
    if getattr(arguments, "workers", None) is not None and not arguments.plan:
        parser.error("--workers requires --plan")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    if vars(arguments).get("server") and arguments.command == "eval":
        arguments.handler = _evaluate_server
    elif vars(arguments).get("plan"):
        arguments.handler = _plan
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
    commands: Commands, name: str, handler: Handler | None, help: str, *parents: Parser
) -> Parser:
    """A subcommand; the stages have no handler: `main` runs them itself."""
    command = commands.add_parser(name, help=help, description=help, parents=list(parents))
    command.set_defaults(handler=handler)
    return command


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


def _add_stages(commands: Commands) -> None:
    """The commands on a configuration."""
    configured = _configured()
    staged = Parser(add_help=False)
    staged.add_argument(
        "--plan", action="store_true", help="print what would be done, and do nothing"
    )
    staged.add_argument(
        "--workers",
        metavar="N",
        type=_count,
        help="with --plan: training processes that share the optimiser's state, as plan.workers",
    )
    staged.add_argument(
        "--force",
        action="store_true",
        help="discard a stage's earlier output that belongs to another config or parent",
    )
    staged.add_argument(
        "--shard",
        metavar="I/N",
        help="make every N-th shard of synth and features, starting at number I (0/4 … 3/4); "
        "exit code 75: other parts are still missing",
    )
    for stage in STAGES:
        command = _command(commands, stage, None, _STAGES[stage], configured, staged)
        if stage == "eval":
            _add_server(command, "evaluate a running server with the same prompts instead")
    in_order = "the four stages in order; finished ones are left as they are"
    _command(commands, "run", None, in_order, configured, staged)
    tuned = (
        "after the target was fine-tuned: answer prompts again, go on from the head of "
        "refresh.run, and compare it with that head and one from scratch; docs/refresh.md"
    )
    _command(commands, "refresh", _refresh, tuned, configured, staged)
    _command(commands, "show", _show, "print the resolved configuration as YAML", configured)
    schema = _command(
        commands, "schema", _schema, "print the JSON schema of the configuration, or a report"
    )
    schema.add_argument("what", nargs="?", choices=("config", "report"), default="config")
    _command(
        commands, "drafters", _drafters, "list the drafters, what each needs, and its settings"
    )
    _add_plan_decode(commands, configured)
    _add_simulate(commands, configured)
    _add_serve(commands, configured)
    _add_compare(commands)
    _add_check_serving(commands)


def _add_plan_decode(commands: Commands, configured: Parser) -> None:
    measured = "measure which drafter pays off at which batch size and context, with which tree"
    planned = _command(commands, "plan-decode", _plan_decode, measured, configured)
    option = planned.add_argument
    names = [name for name in DRAFTERS if name != "none"]
    option("--drafters", type=_words, default=["eagle3"], metavar="NAMES", help=", ".join(names))
    option("--batches", type=_counts, default=[1, 4, 16], metavar="B,…", help="batch sizes")
    option("--contexts", type=_counts, default=[512, 2048], metavar="S,…", help="tokens of context")
    option("--prompts", type=_count, default=4, metavar="N", help="prompts traced at each context")
    option("--new-tokens", type=_count, default=48, metavar="N", help="tokens of each reply")
    option(
        "--most-tokens",
        type=_count,
        default=32768,
        metavar="N",
        help="skip cells whose batch x context is larger; default 32768",
    )
    option("--check", action="store_true", help="run each cell's best shape beside plain decoding")
    option("--json", metavar="FILE", help="write the plan as JSON")
    option("--page", metavar="FILE", help="write the plan as an HTML page with pictures")
    on_paper = planned.add_argument_group("on paper, for a machine that is not at hand")
    option = on_paper.add_argument
    option("--bandwidth", type=_positive, metavar="GB/s", help="memory bandwidth that it sustains")
    option("--tflops", type=_positive, metavar="N", help="TFLOP/s that it sustains in 16 bits")
    option(
        "--alpha",
        type=_alpha,
        default={"eagle3": 0.75},
        metavar="NAME=α,…",
        help="drafters and the probability that a drafted token is accepted once those before it "
        "are; default eagle3=0.75",
    )
    option("--budget", type=_count, default=512, metavar="N", help="self_spec's compressed cache")
    option("--draft", metavar="NAME", help="the standalone drafter: a well-known target's name")


def _add_simulate(commands: Commands, configured: Parser) -> None:
    imposed = (
        "measure speed under load at imposed acceptance lengths: what a head with such a τ would "
        "gain on this machine, at eval.load's concurrency and contexts"
    )
    simulated = _command(commands, "simulate", _simulate, imposed, configured)
    option = simulated.add_argument
    lengths = "acceptance lengths, 1 to 1 + eval.tree.steps; default 1.5,2,2.5,3"
    option("--acceptance", type=_lengths, default=[1.5, 2, 2.5, 3], metavar="τ,…", help=lengths)
    option("--json", metavar="FILE", help="write the curves as JSON")


def _add_compare(commands: Commands) -> None:
    gate = "compare two evaluations on their common prompts; exit code 1 if the first is worse"
    compared = _command(commands, "compare", _compare, gate)
    option = compared.add_argument
    option("report", help="report.json, or the URI of a run")
    option("earlier", help="the baseline: report.json, or the URI of a run")
    option(
        "--tolerance",
        type=_not_negative,
        default=0.0,
        metavar="τ",
        help="how much lower the acceptance length may be; default 0",
    )
    option("--json", action="store_true", help="print the comparison as JSON")


def _add_serve(commands: Commands, configured: Parser) -> None:
    offered = "serve the target with eval's drafter and tree under OpenAI's API; docs/serving.md"
    served = _command(commands, "serve", _serve, offered, configured)
    option = served.add_argument
    option("--host", metavar="ADDRESS", help="as serve.host; default 127.0.0.1")
    option("--port", type=int, metavar="N", help="as serve.port; default 8000, 0 takes a free one")
    option(
        "--head",
        metavar="DIR",
        help="as eval.head: directory or hub:org/name of the head",
    )


def _add_server(command: Parser, help: str, *, required: bool = False) -> None:
    about = f"{help}: SGLang, vLLM or `eagle3 serve`; as eval.server.url (docs/evaluation.md)"
    command.add_argument("--server", metavar="URL", required=required, help=about)


def _add_check_serving(commands: Commands) -> None:
    about = (
        "send a running server prompts of a report; exit code 1 if its τ differs from the report's"
    )
    command = _command(commands, "check-serving", _check_serving, about)
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


def _count(text: str) -> int:
    (count, *more) = _counts(text)
    if more:
        raise argparse.ArgumentTypeError(f"{text!r} is not one number")
    return count


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def _positive(text: str) -> float:
    if not (value := _not_negative(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not positive")
    return value


def _words(text: str) -> list[str]:
    words = [word for word in text.split(",") if word]
    if not words:
        raise argparse.ArgumentTypeError("no drafter is named; see `eagle3 drafters`")
    for word in words:
        if word not in DRAFTERS or word == "none":
            raise argparse.ArgumentTypeError(f"unknown drafter {word!r}; see `eagle3 drafters`")
    return words


def _alpha(text: str) -> dict[str, float]:
    try:
        return parse_acceptance(text, [name for name in DRAFTERS if name != "none"])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _lengths(text: str) -> list[float]:
    try:
        return sorted({_positive(part) for part in text.split(",")})
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of lengths such as 2,2.5"
        ) from None


def _counts(text: str) -> list[int]:
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of counts such as 1,4,16"
        ) from None
    if counts[0] < 1:
        raise argparse.ArgumentTypeError(f"{counts[0]} is not positive")
    return counts


def _add_heads(commands: Commands) -> None:
    """The commands on single heads; every directory may be an fsspec URI, or hub:org/name."""
    empty = "it must be empty or not exist"
    facts = "print contract, size, tensors, draft vocabulary, provenance and metrics of a head"
    inspect = _command(commands, "inspect", _inspect, facts)
    inspect.add_argument("head", metavar="HEAD", help="head directory")
    inspect.add_argument("--json", action="store_true", help="print JSON")

    written = "write a head for SGLang, for speculators and vLLM, for llama.cpp, or as MTP layers"
    export = _command(commands, "export", _export, written)
    export.add_argument("head", metavar="HEAD", help="head directory")
    export.add_argument(
        "--format",
        required=True,
        choices=("sglang", "speculators", "mtp", "gguf"),
        help="sglang is the format of a head directory itself, mtp that of chained heads, gguf "
        "llama.cpp's",
    )
    export.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help=f"directory to write, or FILE.gguf with --format gguf, or hub:org/name; {empty}",
    )
    _add_publication(export)
    export.add_argument(
        "--license", metavar="ID", help="licence of the head for the model card, such as apache-2.0"
    )
    export.add_argument(
        "--target",
        metavar="SOURCE",
        help="where the target is now, for its embedding; default: where the head was trained",
    )
    export.add_argument(
        "--verifier",
        metavar="PATH_OR_ID",
        help="with --format speculators: where `vllm serve HEAD` finds the target, written as it "
        "is; default: its hub id, or the name of its directory without a path",
    )
    export.add_argument(
        "--report",
        metavar="REPORT",
        help="report.json of the head's evaluation, or its run: figures for the model card",
    )

    read = "convert a head of another trainer, in any supported format, to a head directory"
    imported = _command(commands, "import", _import, read)
    imported.add_argument(
        "head", metavar="DIR", help="directory or hub:org/name with config.json and *.safetensors"
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

    rounds = "write a copy of a target whose layers' matrices are rounded to float8"
    float8 = _command(commands, "float8", _float8, rounds)
    float8.add_argument("source", metavar="SOURCE", help="the target, as in target.source")
    float8.add_argument("--out", required=True, metavar="DIR", help=f"directory to write; {empty}")


def _add_publication(command: Parser) -> None:
    """How to write to the Hub."""
    option = command.add_argument_group("with --out hub:org/name[/folder][@branch]").add_argument
    option("--upload", action="store_true", help="do it; without this, say what would be uploaded")
    option("--public", action="store_true", help="a repository that all can read; default private")
    named = "replace what the repository holds, if it still is at this commit"
    option("--replace", metavar="COMMIT", help=named)


def _add_store(commands: Commands) -> None:
    """The commands on whole runs; every directory may be an fsspec URI."""
    written = "write a finished run's samples as a data set, for the Hub or for another run"
    export = _command(commands, "export-samples", _export_samples, written)
    export.add_argument("run", metavar="URI", help=_RUN_URI)
    out = "directory or hub:org/name to write; it must be empty or not exist"
    export.add_argument("--out", required=True, metavar="DIR", help=out)
    _add_publication(export)

    read = "make samples of `eagle3 export-samples` the finished synth stage of a run"
    imported = _command(commands, "import-samples", _import_samples, read)
    imported.add_argument(
        "dataset", metavar="DIR", help="directory of the data set, or hub:org/name"
    )
    imported.add_argument("--out", required=True, metavar="URI", help=_RUN_URI)

    checked = "re-check every shard of every stage: size, SHA-256, content, contract, parents"
    verify = _command(commands, "verify", _verify, checked)
    verify.add_argument("uri", metavar="URI", help=_RUN_URI)

    removed = "remove files that killed writers left in a run; committed data is never touched"
    gc = _command(commands, "gc", _gc, removed)
    gc.add_argument("uri", metavar="URI", help=_RUN_URI)
    gc.add_argument(
        "--dry-run", action="store_true", help="list what would be removed, and remove nothing"
    )
    gc.add_argument(
        "--quiet-minutes",
        type=_not_negative,
        default=60.0,
        metavar="N",
        help="keep younger files, whose writer may still be running; default 60",
    )


def _add_pii_score(commands: Commands) -> None:
    measured = "measure the personal-data filter on labelled texts and on prompts"
    score = _command(commands, "pii-score", _pii_score, measured)
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


def _add_jobs(commands: Commands) -> None:
    jobs = _command(commands, "jobs", None, "write what a cluster needs to run the stages")
    actions = jobs.add_subparsers(dest="action", metavar="action", required=True)
    written = "write Kubernetes manifests or Slurm scripts for the run; docs/fleet.md"
    render = _command(actions, "render", _jobs, written, _configured())
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
