"""The command line: parser.py reads the arguments, commands.py does what they ask.

eagle3 synth|features|train|eval -c run.yaml [section.key=value …] [--plan] [--force]
eagle3 run    -c run.yaml …      the four stages in order
eagle3 show   -c run.yaml …      the resolved configuration as YAML
eagle3 schema [report]           the JSON schema of the configuration, or of report.json
eagle3 drafters                  what can draft, what it needs, and its settings
eagle3 plan-decode -c run.yaml … [--paper GPU]   which drafter pays at which batch size and context
eagle3 simulate -c run.yaml … [--acceptance τ,…]    speed at acceptance lengths that are imposed
eagle3 compare REPORT EARLIER [--tolerance τ]    a gate: exit code 1 where acceptance is worse
eagle3 serve  -c run.yaml … [--host ADDRESS] [--port N] [--head DIR]    OpenAI's API
eagle3 eval   -c run.yaml … --server URL        a running SGLang, vLLM or eagle3 server
eagle3 check-serving --server URL -c run.yaml | --report FILE   its τ against the report's
eagle3 inspect HEAD [--json]     contract, size, tensors, vocabulary, provenance, metrics of a head
eagle3 export HEAD --format sglang|speculators|mtp --out DIR [--target SOURCE]
eagle3 import DIR --target SOURCE --out HEAD
eagle3 pii-score FILE… [-c run.yaml] [--json]   recall and precision of the personal-data filter
eagle3 verify URI                re-check every byte of a run, and how its stages hang together
eagle3 gc URI [--dry-run] [--quiet-minutes N]    remove what killed writers left behind
eagle3 jobs render -c run.yaml … --for slurm|kubernetes [--out DIR]    what a cluster needs
"""

from __future__ import annotations

import signal
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pipeline.cli.commands import COMMANDS, run_stages
from pipeline.cli.parser import parse_arguments
from pipeline.console import discard_output, fail, logs_json, open_streams, output
from pipeline.errors import Eagle3Error

INTERRUPTED = 130  # 128 + SIGINT, as shells report it; also after SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 done, 1 not lossless, worse than an earlier report or a server that differs from its report,
    2 a person has to act, 75 try again, 130 interrupted.
    """
    open_streams()
    arguments = parse_arguments(argv)
    command = COMMANDS[arguments.command]
    try:
        with _sigterm_as_ctrl_c():
            logs_json()  # an unusable EAGLE3_LOG stops here and not at the first notice
            return command(arguments)
    except Eagle3Error as error:
        return fail(str(error), error.exit_code, stage=_stage(arguments))
    except KeyboardInterrupt:
        fix = "run the same command again; it continues after the last committed work"
        return fail(f"interrupted (fix: {fix})", INTERRUPTED, stage=_stage(arguments))
    except BrokenPipeError:
        if command is run_stages:  # not of standard output: what stages print may get lost
            raise
        discard_output()  # `eagle3 schema | head`: the reader has seen enough
        return 0
    finally:
        output.drop_unwritten()


def _stage(arguments: Namespace) -> str:
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
