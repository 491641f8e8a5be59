"""What training a head took."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.report import ROOT


class Usage(NamedTuple):
    """Of a process and those that it waited for."""

    cpu_hours: float
    peak_gb: float | None  # unknown of several beside one another


class Trained(NamedTuple):
    """A head's training, ours or another's."""

    usage: Usage
    data_tokens: int
    trained_tokens: int  # over all passes
    parameters: int


def run_measured(command: Sequence[str], environment: Mapping[str, str]) -> Usage:
    """Run a command that says itself what is wrong; SystemExit with its code."""
    process = subprocess.Popen(command, cwd=ROOT, env=dict(environment))
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(process.returncode)
    return Usage((used.ru_utime + used.ru_stime) / 3600, used.ru_maxrss / 1e6)
