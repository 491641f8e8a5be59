"""What training a head took.

    python -m bench.leaderboard.usage FILE COMMAND…

runs a command and leaves its usage in FILE. It is a process of its own because a child counts the
memory of the one that it was forked from, and that of the leaderboard holds a target and samples.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parents[2]


class Usage(NamedTuple):
    """Of a process and those that it waited for."""

    cpu_hours: float
    peak_gb: float | None  # of the largest; unknown of several beside one another


class Trained(NamedTuple):
    """A head's training, ours or another's."""

    usage: Usage
    data_tokens: int
    trained_tokens: int  # over all passes
    parameters: int


def run_measured(command: Sequence[str], environment: Mapping[str, str]) -> Usage:
    """Run a command that says itself what is wrong; SystemExit with its code."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "usage.json"
        measuring = [sys.executable, "-m", "bench.leaderboard.usage", str(file), *command]
        if code := subprocess.run(measuring, cwd=_ROOT, env=dict(environment)).returncode:
            raise SystemExit(code)
        return Usage(*json.loads(file.read_text()))


def children_usage() -> Usage:
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Usage((used.ru_utime + used.ru_stime) / 3600, used.ru_maxrss / 1e6)


def main() -> int:
    """Run the command that argv names."""
    file, *command = sys.argv[1:]
    code = subprocess.run(command).returncode
    Path(file).write_text(json.dumps(children_usage()))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
