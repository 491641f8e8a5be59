"""The rendered Slurm scripts on a real cluster of one node, where Slurm is installed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.config import RunConfig, load
from pipeline.jobs import render, write
from pipeline.store.manifest import read_manifest
from pipeline.store.verify import verify_run
from pipeline.synth.stage import run as run_synth
from tests.end_to_end.conftest import write_config  # noqa: F401  (a fixture)
from tests.jobs.cluster import slurm_cluster

SMALL = {"gpus": 0, "cpus": 1, "memory_gib": 1}
STAGES = {"synth": {"workers": 2}, "features": {"workers": 4}, "train": {}, "eval": {}}
JOBS = {"stages": {stage: {**SMALL, **size} for stage, size in STAGES.items()}}

Write = Callable[..., Path]


class Cluster:
    """A running Slurm; jobs work in `folder`."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._environment, self.folder = environment, folder

    def ask(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self._environment, cwd=self.folder, capture_output=True, text=True
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def states(self) -> dict[str, str]:
        """Job or task of an array → state and reason, of those that ended too."""
        lines = self.ask("squeue", "--states=all", "--array", "-h", "-o", "%i %T %r").splitlines()
        return dict(line.split(" ", 1) for line in lines)

    def finish(self, seconds: float = 400) -> dict[str, str]:
        """Wait until all are complete, or one failed."""
        until = time.monotonic() + seconds
        states = self.states()
        while time.monotonic() < until:
            ended = {state.split()[0] for state in states.values()}
            if ended == {"COMPLETED"} or "FAILED" in ended:
                break
            time.sleep(0.5)
            states = self.states()
        return states

    def logs(self, name: str) -> list[str]:
        return [file.read_text() for file in sorted(self.folder.glob(f"{name}-*.log"))]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    for name in ("slurm", "jobs"):
        (tmp_path / name).mkdir()
    with slurm_cluster(tmp_path / "slurm") as environment:
        yield Cluster(environment, tmp_path / "jobs")


def sound(config: RunConfig, *stages: str) -> None:
    check = verify_run(config.run.uri)
    assert (list(check.problems), list(check.finished)) == ([], list(stages))


@pytest.mark.parametrize("follows", [False, True])
def test_submitted_chain_runs_to_the_head(
    cluster: Cluster,
    write_config: Write,  # noqa: F811
    tmp_path: Path,
    follows: bool,
) -> None:
    """Arrays of two and four, whose tasks claim shards, then training; each after the other.

    Or training beside an array of two, in a run that holds four shards.
    """
    jobs, train = JOBS, {"epochs": 1, "follow": follows}
    features = {"shard_tokens": 100, "keep_shards": 4} if follows else {}
    if follows:  # all must find a place: four CPUs are there
        jobs = {"stages": {**JOBS["stages"], "features": {**SMALL, "workers": 2}}}
    file = write_config("chain", features=features, train=train, eval={"sources": []}, jobs=jobs)
    config = load(file)
    start = write(render(config, "slurm"), tmp_path / "scripts")
    submitted = cluster.ask(str(start)).splitlines()
    assert [line.split(":")[0] for line in submitted] == ["synth", "features", "train"]
    states = cluster.finish()
    tasks = 2 if follows else 4
    assert len(states) == 2 + tasks + 1
    assert {state.split()[0] for state in states.values()} == {"COMPLETED"}, (
        states,
        cluster.logs("chain"),
    )
    assert len(cluster.logs("chain-features")) == tasks
    sound(config, "synth", "features", "train")
    if follows:
        shards = read_manifest(config.run.uri, "features").shards
        assert verify_run(config.run.uri).consumed == len(shards) > 4


def test_array_with_an_interrupted_task(
    cluster: Cluster,
    write_config: Write,  # noqa: F811
    tmp_path: Path,
) -> None:
    """A task that got SIGTERM comes again; the others claim what it left."""
    file = write_config("parts", features={"shard_tokens": 100}, jobs=JOBS)
    config = load(file)
    run_synth(config)
    write(render(config, "slurm"), tmp_path / "scripts")
    scripts = tmp_path / "scripts"
    job = cluster.ask(
        "sbatch", "--parsable", str(scripts / "features.sbatch"), str(scripts / "run.yaml")
    ).strip()
    until = time.monotonic() + 60
    while f"{job}.0" not in cluster.ask("squeue", "--steps") and time.monotonic() < until:
        time.sleep(0.2)
    time.sleep(1)
    cluster.ask("scancel", "--signal=TERM", f"{job}_2")
    states = cluster.finish()
    assert len(states) == 4 and {state.split()[0] for state in states.values()} == {"COMPLETED"}, (
        states,
        cluster.logs("parts"),
    )
    logs = cluster.logs("parts-features")
    # slurmstepd says that the step was cancelled, or srun that it was terminated, if that is first.
    assert "CANCELLED" in logs[2] or "task 0: Terminated" in logs[2]
    sound(config, "synth", "features")
    assert len(read_manifest(config.run.uri, "features").shards) > 4
