"""The command line: parser.py reads the arguments, commands.py does what they ask.

eagle3 synth|features|train|eval -c run.yaml [section.key=value …] [--plan] [--force]
eagle3 run    -c run.yaml …      the four stages in order
eagle3 show   -c run.yaml …      the resolved configuration as YAML
eagle3 schema                    the configuration's JSON schema
eagle3 inspect HEAD [--json]     contract, size, tensors, vocabulary, provenance, metrics of a head
eagle3 export HEAD --format sglang|speculators --out DIR [--target SOURCE]
eagle3 import DIR --target SOURCE --out HEAD
eagle3 pii-score FILE… [-c run.yaml] [--json]   recall and precision of the personal-data filter
eagle3 verify URI                re-check every byte of a run, and how its stages hang together
eagle3 gc URI [--dry-run] [--quiet-minutes N]    remove what killed writers left behind
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from pipeline.cli.commands import COMMANDS
from pipeline.cli.parser import parse_arguments
from pipeline.console import fail, logs_json
from pipeline.errors import Eagle3Error

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 done, 1 not lossless, 2 the user can fix it, 130 Ctrl-C.
    """
    arguments = parse_arguments(argv)
    try:
        logs_json()  # an unusable EAGLE3_LOG stops here and not at the first notice
        return COMMANDS[arguments.command](arguments)
    except Eagle3Error as error:
        return fail(str(error), error.exit_code, stage=arguments.command)
    except KeyboardInterrupt:
        fix = "run the same command again; it continues after the last committed work"
        return fail(f"interrupted (fix: {fix})", INTERRUPTED, stage=arguments.command)
    except BrokenPipeError:  # `eagle3 schema | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
