"""The launcher ends with the code that a scheduler needs to know; real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.jobs.launch import exit_code

#: A process of a training; what it does is its first argument.
PROCESS = """
import os, pathlib, signal, sys, time

what, folder, rank = sys.argv[1], pathlib.Path(sys.argv[2]), os.environ["RANK"]

def end(*_):
    (folder / f"ended{rank}").touch()
    sys.exit(130)

signal.signal(signal.SIGTERM, end)
(folder / f"begun{rank}").touch()
if what.isdigit() and rank == "1":
    sys.exit(int(what))
if what == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if what != "0":
    time.sleep(60)
"""


def start(
    tmp_path: Path, what: str, *options: str, node: str = "", processes: int = 2, log: str = ""
) -> subprocess.Popen[str]:
    script = tmp_path / "process.py"
    script.write_text(PROCESS)
    launch = [sys.executable, "-m", "pipeline.jobs.launch", f"--nproc-per-node={processes}"]
    command = [*launch, *options, str(script), what, str(tmp_path)]
    environment = {**os.environ, "SLURM_NODEID": node, "OMP_NUM_THREADS": "1", "EAGLE3_LOG": log}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("what", "code"), [("2", 2), ("75", 75), ("killed", 137)])
def test_ends_with_the_code_of_its_processes(tmp_path: Path, what: str, code: int) -> None:
    process = start(tmp_path, what, "--standalone")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors


def test_sigterm_reaches_every_process_and_ends_with_130(tmp_path: Path) -> None:
    process = start(tmp_path, "wait", "--standalone", log="json")
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("begun*"))) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    [said] = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    assert said["stage"] == "wait", "the first word of what it started"
    assert sorted(path.name for path in tmp_path.glob("ended*")) == ["ended0", "ended1"]


def test_two_nodes_meet_at_the_first(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}")
    nodes = [
        start(tmp_path, "0", *options, "--rdzv-id=x", node=node, processes=1) for node in ("1", "0")
    ]
    errors = [node.communicate(timeout=120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], errors
    assert sorted(path.name for path in tmp_path.glob("begun*")) == ["begun0", "begun1"]


@pytest.mark.parametrize(
    ("codes", "code"),
    [([1, 2], 2), ([-15, 75], 75), ([130, -9], 137), ([1, -15], 1), ([75, 2], 2), ([130], 130)],
)
def test_what_a_stage_says_counts_more_than_a_crash(codes: list[int], code: int) -> None:
    assert exit_code(codes) == code
