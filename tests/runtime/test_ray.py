"""A stage on a real Ray cluster of several nodes: what comes out is what one process makes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from pipeline import runtime
from pipeline.config import load
from pipeline.errors import WorkersDied
from pipeline.features.stage import run as run_features
from pipeline.records import Stage
from pipeline.store.manifest import find_manifest, read_manifest
from pipeline.store.verify import verify_run
from pipeline.synth.stage import run as run_synth

ray = pytest.importorskip("ray")

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without room for a worker, and two nodes with room for one each."""
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        started.add_node(num_cpus=1)
    yield started
    started.shutdown()  # type: ignore[no-untyped-call]


@pytest.fixture
def files(write_config: Write) -> tuple[Path, Path]:
    """The same configuration for this process and for Ray, cut into a dozen shards."""
    cut = {"synth": {"shard_prompts": 2}, "features": {"shard_tokens": 60}}
    return write_config("alone", **cut), write_config("fleet", **cut)


def driver(file: Path, stage: str, address: str) -> subprocess.Popen[str]:
    overrides = ["run.runtime=ray", "run.claim_seconds=5", "run.ray.cpus=1"]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "pipeline.cli", stage, "-c", str(file), *overrides],
        env={**os.environ, "RAY_ADDRESS": address, "EAGLE3_LOG": "json"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def entries(file: Path, stage: str) -> int:
    uri = yaml.safe_load(file.read_text())["run"]["uri"]
    return len(list((Path(uri) / stage / "shards").glob("*.entry.json")))


def wait_for(file: Path, stage: str, least: int, process: subprocess.Popen[str]) -> None:
    for _ in range(6000):
        if entries(file, stage) >= least:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError("no shard in ten minutes")


def test_a_node_and_then_the_driver_are_killed(cluster: Any, files: tuple[Path, Path]) -> None:
    here, there = files
    alone = load(here)
    whole = {"synth": run_synth(alone), "features": run_features(alone)}

    first = driver(there, "synth", cluster.address)
    wait_for(there, "synth", 2, first)
    node = cluster.list_all_nodes()[-1]
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(num_cpus=1)
    output = first.communicate(timeout=900)[0]
    assert first.returncode == 0, output
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert "2 workers on Ray" in [line["message"] for line in lines]

    second = driver(there, "features", cluster.address)
    wait_for(there, "features", 2, second)
    os.kill(second.pid, signal.SIGKILL)
    second.communicate()
    assert find_manifest(load(there).run.uri, "features") is None
    again = driver(there, "features", cluster.address)
    output = again.communicate(timeout=900)[0]
    assert again.returncode == 0, output

    uri = load(there).run.uri
    stages: tuple[Stage, ...] = ("synth", "features")
    for stage in stages:
        manifest = read_manifest(uri, stage)
        assert manifest.shards == whole[stage].shards
        assert manifest.content_hash == whole[stage].content_hash
    assert verify_run(uri).problems == ()


def workers() -> set[int]:
    """Processes of actors at work: Ray titles them by the method that runs."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if process.joinpath("cmdline").read_bytes().startswith(b"ray::Worker.run"):
                found.add(int(process.name))
    return found


def test_a_worker_that_is_stopped_for_good_holds_nobody_up(
    cluster: Any, files: tuple[Path, Path]
) -> None:
    here, there = files
    whole = run_synth(load(here))
    process = driver(there, "synth", cluster.address)
    wait_for(there, "synth", 1, process)
    stopped = min(workers())
    os.kill(stopped, signal.SIGSTOP)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert read_manifest(load(there).run.uri, "synth").shards == whole.shards
    os.kill(stopped, signal.SIGKILL)


def test_workers_that_die_one_after_the_other_are_said_to(
    cluster: Any, files: tuple[Path, Path]
) -> None:
    process = driver(files[1], "synth", cluster.address)
    while process.poll() is None:
        for worker in workers():
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        time.sleep(0.05)
    output = process.communicate()[0]
    assert process.returncode == 75, output
    last = json.loads(output.splitlines()[-1])
    assert "3 workers died and no shard was committed" in last["message"]
    assert "Traceback" not in output


def test_a_head_that_goes_away_is_tried_again(files: tuple[Path, Path]) -> None:
    from ray.cluster_utils import Cluster

    own = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        process = driver(files[1], "synth", own.address)
        wait_for(files[1], "synth", 1, process)
        for worker in workers():
            os.kill(worker, signal.SIGSTOP)
        own.head_node.kill_gcs_server()  # type: ignore[attr-defined]
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 75, output
        assert "the head of the cluster has gone" in output.splitlines()[-1], output
        assert "Traceback" not in output
    finally:
        for worker in workers():
            os.kill(worker, signal.SIGKILL)
        own.shutdown()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("address", ["ray://cluster:10001", "127.0.0.1:1"])
def test_a_head_behind_ray_s_client_is_not_looked_for(
    write_config: Write, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """It names an address of its own network, where this machine reaches nobody."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(runtime, "_HEADLESS", 0.0)
    context = SimpleNamespace(gcs_address="127.0.0.1:1")
    connected = SimpleNamespace(get_runtime_context=lambda: context)
    starting = runtime._Driver(connected, load(write_config("client")), "synth")
    expected = nullcontext() if "://" in address else pytest.raises(WorkersDied, match="has gone")
    with expected:
        starting._look_for_head()


def test_an_error_of_a_worker_is_the_command_s(cluster: Any, write_config: Write) -> None:
    file = write_config("broken", synth={"sources": [{"source": "gone.jsonl"}]})
    process = driver(file, "synth", cluster.address)
    output = process.communicate(timeout=900)[0]
    error = json.loads(output.splitlines()[-1])
    assert process.returncode == 2 and error["exit_code"] == 2
    assert "gone.jsonl: no such file (fix: correct the path" in error["message"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.ray.gpus=8", "config: run.ray: no worker fits: the cluster has 2 CPUs and 0 GPUs"),
        ("run.shard=0/2", "config: run.shard: with run.runtime=ray workers claim their shards"),
        ("RAY_ADDRESS=127.0.0.1:1", "Ray at 127.0.0.1:1: no Ray cluster answers"),
    ],
)
def test_what_the_cluster_cannot_do_is_said(
    cluster: Any, write_config: Write, override: str, message: str
) -> None:
    key, _, value = override.partition("=")
    elsewhere = key == "RAY_ADDRESS"
    overrides = [] if elsewhere else [override]
    environment = {**os.environ, "RAY_ADDRESS": value if elsewhere else cluster.address}
    command = [sys.executable, "-W", "ignore", "-m", "pipeline.cli", "synth", "-c"]
    done = subprocess.run(
        [*command, str(write_config("refused")), "run.runtime=ray", *overrides],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    code = 75 if elsewhere else 2
    assert done.returncode == code and message in done.stderr, done.stderr
