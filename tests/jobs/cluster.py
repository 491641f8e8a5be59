"""A Slurm cluster of one node on this machine: real munged, slurmctld and slurmd, as root."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _settings(folder: Path, host: str) -> str:
    """cred_expire is how long a job waits that was put back into the queue, by default 120 s."""
    return f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={_free_port()}
SlurmdPort={_free_port()}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=8000
PartitionName=main Nodes={host} Default=YES
"""


@contextmanager
def _daemon(*command: str, environment: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=30)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which `sbatch` and the like find the cluster. Skips where it cannot be."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs Debian's slurm-wlm: no {', '.join(missing)} here")
    if os.geteuid():
        pytest.skip("slurmd starts jobs as root only")
    host = socket.gethostname().split(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    configuration = folder / "slurm.conf"
    configuration.write_text(_settings(folder, host))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "SLURM_CONF": str(configuration), "PATH": path}
    munge = [f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "seed-file")]
    munged = ("munged", "--foreground", "--force", f"--key-file={key}", *munge)
    daemons = {
        "munged": munged,
        "slurmctld": ("slurmctld", "-D", "-c"),
        "slurmd": ("slurmd", "-D", "-N", host),
    }
    with ExitStack() as stack:
        for name, command in daemons.items():
            log = folder / f"{name}.log"
            stack.enter_context(_daemon(*command, environment=environment, log=log))
        _await_node(environment, folder)
        stack.callback(_cancel_jobs, environment)
        yield environment


def _cancel_jobs(environment: dict[str, str]) -> None:
    """Nothing of a test that failed goes on when the daemons are gone."""
    subprocess.run(["scancel", "--user=root"], env=environment, check=True)
    until = time.monotonic() + 40
    listed = ["squeue", "--noheader"]
    while subprocess.run(listed, env=environment, capture_output=True).stdout:
        assert time.monotonic() < until, "jobs do not end"
        time.sleep(0.5)


def _await_node(environment: dict[str, str], folder: Path) -> None:
    state = ""
    for _ in range(60):
        asked = ["sinfo", "--noheader", "--format=%T"]
        state = subprocess.run(asked, env=environment, capture_output=True, text=True).stdout
        if state.strip() == "idle":
            return
        time.sleep(0.5)
    logs = "".join(log.read_text(errors="replace")[-1500:] for log in folder.glob("*.log"))
    raise AssertionError(f"the node is {state!r}: {logs}")
