"""The stage on two processes of a real launcher, against the stage on one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from pipeline.cli import main
from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.features.capture import differences
from pipeline.features.stage import run
from pipeline.records import Manifest
from pipeline.store.manifest import read_manifest, stage_location
from pipeline.store.states import StatesReader, StatesSample

TWO = "torch.distributed.run --standalone --nproc-per-node=2"
LAUNCHER = f"{TWO} -m pipeline.cli features -c"

#: What it registers first is done last.
PROGRAM = """
import atexit, os, sys
from pathlib import Path

@atexit.register
def write():
    left = not torch.distributed.is_initialized()
    Path(sys.argv[1], os.environ["RANK"]).write_text(str(left))

import torch
from pipeline.config import TargetSection
from pipeline.target.parallel import joined

target = TargetSection(source="not read", device="cpu")
with joined("tensor", target, stage="features") as group:
    group.broadcast("said to all")
"""


def stored(uri: str, manifest: Manifest) -> list[StatesSample]:
    readers = [StatesReader(stage_location(uri, "features"), shard) for shard in manifest.shards]
    return [reader.sample(index) for reader in readers for index in range(len(reader))]


def test_the_group_is_left_before_the_interpreter_ends(tmp_path: Path) -> None:
    """gloo's threads abort a process now and then that ends with them, and so its launcher."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    command = [sys.executable, "-m", *TWO.split(), str(file), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, timeout=120)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["True", "True"]


def test_two_processes_of_a_launcher_store_the_states_of_one(
    tmp_path: Path, ready: Callable[..., RunConfig], capfd: pytest.CaptureFixture[str]
) -> None:
    one, two = ready(tmp_path / "one"), ready(tmp_path / "two", parallel="tensor")
    with pytest.raises(ConfigError, match="one process cannot split the target"):
        run(two)
    file = tmp_path / "run.yaml"
    tree = two.model_dump(mode="json", exclude_none=True)
    file.write_text(yaml.safe_dump({**tree, "synth": one.model_dump(mode="json")["synth"]}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *LAUNCHER.split(), str(file)]
    subprocess.run(command, env=environment, check=True, timeout=120)
    printed = capfd.readouterr().out
    assert printed.count("12 samples") == 1, printed
    manifests = [run(one), read_manifest(two.run.uri, "features")]
    for name in ("rows", "tokens", "rejected", "details", "contract", "config_hash"):
        ours, theirs = (getattr(manifest, name) for manifest in manifests)
        assert ours == theirs, name
    # Sums over processes: another number of them gives other last bits.
    assert [one.repeatable for one in manifests[1].arithmetic] == ["no"]
    samples = [
        stored(config.run.uri, manifest)
        for config, manifest in zip((one, two), manifests, strict=True)
    ]
    for mine, theirs in zip(*samples, strict=True):
        assert mine.sample_id == theirs.sample_id
        assert torch.equal(mine.token_ids, theirs.token_ids)
        states = (mine.aux_states[mine.final_positions], mine.final_states)
        others = (theirs.aux_states[theirs.final_positions], theirs.final_states)
        assert max(differences(states, others)) < 2**-8  # a rounding to bf16
    assert main(["verify", two.run.uri]) == 0
    assert run(one.model_copy(update={"run": two.run})) == manifests[1]  # the key shapes nothing
