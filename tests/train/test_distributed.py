"""Two processes of a real launcher over gloo against one process with the same global batch."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from pipeline.config import RunConfig
from pipeline.store.manifest import read_manifest
from pipeline.train import run
from tests.train.runs import Configure, Store, head_of, lines_of, without_speed

SETTINGS = {
    "epochs": 8,
    "batch_tokens": 48,
    "dtype": "float32",
    "checkpoint_every": 3,
    "max_steps": 8,
}
EVALUATION = {
    "evaluate_every": 4,
    "evaluate_prompts": 2,
    "evaluate_tokens": 8,
    "evaluate_tree": {"top_k": 1, "steps": 3, "nodes": 4},
}


LAUNCHERS = {
    "torchrun": "torch.distributed.run --standalone --nproc-per-node={processes} -m",
    "deepspeed": "deepspeed.launcher.runner --num_gpus={processes} --master_port={port} --module",
}


def launch(
    config: RunConfig, processes: int, *, launcher: str = "torchrun", succeeds: bool = True
) -> str:
    """Train with `processes` processes of a launcher; returns what they wrote to standard error."""
    file = Path(f"{config.run.uri}.yaml")
    tree = config.model_dump(mode="json", exclude_none=True)
    file.write_text(yaml.safe_dump({**tree, "synth": None}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started_by = LAUNCHERS[launcher].format(processes=processes, port=port).split()
    command = [sys.executable, "-m", *started_by, "pipeline.cli", "train", "-c", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert (done.returncode == 0) == succeeds, done.stderr[-3000:]
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "launcher"), [(0, "deepspeed"), (2, "torchrun"), (3, "torchrun")]
)
def test_two_processes_follow_the_loss_curve_of_one(
    tiny_config: Configure, store_states: Store, stage: int, launcher: str
) -> None:
    one = tiny_config("one", **SETTINGS, **EVALUATION, accumulate=2)
    two = tiny_config("two", **SETTINGS, **EVALUATION, zero_stage=stage)
    for config in (one, two):
        store_states(config)
    run(one)
    launch(two, 2, launcher=launcher)
    curves = [lines_of(config) for config in (one, two)]
    assert [line["step"] for line in curves[1]] == list(range(1, 9))
    assert curves[0][-1]["loss"] < curves[0][0]["loss"]
    for single, double in zip(*curves, strict=True):
        assert double["loss"] == pytest.approx(single["loss"], rel=1e-5)
        assert double["tokens"] == single["tokens"] and double["lr"] == single["lr"]
        assert double["acc_0"] == pytest.approx(single["acc_0"], abs=0.02)
    details = [read_manifest(config.run.uri, "train").details for config in (one, two)]
    assert details[1]["tau"] == pytest.approx(details[0]["tau"], abs=0.1)
    assert details[1]["evaluations"] == 2
    heads = [load_file(head_of(config) / "model.safetensors") for config in (one, two)]
    for name, tensor in heads[0].items():
        assert (tensor.float() - heads[1][name].float()).abs().max() < 1e-2, name


def stop_at(config: RunConfig, steps: int) -> None:
    """Make a finished run look like one that was killed after the checkpoint of step `steps`."""
    directory = Path(config.run.uri) / "train"
    for name in ("manifest.json", "shards", "head"):
        path = directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for marker in (directory / "checkpoints").glob("step-*.json"):
        if int(marker.stem.removeprefix("step-")) > steps:
            marker.unlink()


@pytest.mark.slow
def test_another_number_of_processes_continues_with_the_same_data(
    tiny_config: Configure, store_states: Store
) -> None:
    """Two processes stop after three steps, six batches; one process goes on with batch seven."""
    settings = {**SETTINGS, "max_steps": None, "epochs": 3, "keep_checkpoints": 9}
    config = tiny_config("run", **settings)
    store_states(config)
    launch(config, 2)
    before = lines_of(config)
    stop_at(config, 3)
    run(config)
    after = lines_of(config)
    assert after[:3] == before[:3]
    assert [line["step"] for line in after] == list(range(1, len(after) + 1))
    # Tokens are counted over all that was read: after two steps of one process as after one step of
    # two.
    assert [line["tokens"] for line in after[4::2]] == [line["tokens"] for line in before[3:]]
    assert all(0 < line["loss"] < 2 * before[0]["loss"] for line in after)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_two_processes_continue_bit_for_bit(
    tiny_config: Configure, store_states: Store, stage: int
) -> None:
    """In bfloat16, with recomputed activations and an output layer that is not trained."""
    settings = {
        **SETTINGS,
        **EVALUATION,
        "dtype": "bfloat16",
        "train_lm_head": False,
        "activation_checkpointing": True,
        "keep_checkpoints": 9,
    }
    config = tiny_config("run", **settings, zero_stage=stage)
    store_states(config)
    launch(config, 2)
    lines, head = lines_of(config), read_manifest(config.run.uri, "train").shards
    stop_at(config, 3)
    launch(config, 2)
    assert without_speed(lines_of(config)) == without_speed(lines)
    assert read_manifest(config.run.uri, "train").shards == head


@pytest.mark.slow
def test_parts_of_an_optimiser_belong_to_their_number_of_processes(
    tiny_config: Configure, store_states: Store
) -> None:
    config = tiny_config("run", **SETTINGS, zero_stage=2, keep_checkpoints=9)
    store_states(config)
    run(config)
    stop_at(config, 3)
    errors = launch(config, 2, succeeds=False)
    problem = "holds the optimiser's state in 1 parts, this run has 2 processes"
    assert f"{problem} (fix: start 1 processes" in errors
    assert run(config).details["steps"] == 8


@pytest.mark.parametrize("stage", [1, 3])
def test_every_zero_stage_trains_the_same_head(
    tiny_config: Configure, store_states: Store, stage: int
) -> None:
    """Split over a group of one, nothing changes but the bookkeeping."""
    settings = {**SETTINGS, **EVALUATION, "accumulate": 2}
    plain = tiny_config("plain", **settings)
    split = tiny_config("split", **settings, zero_stage=stage)
    for config in (plain, split):
        store_states(config)
        run(config)
    losses = [[line["loss"] for line in lines_of(config)] for config in (plain, split)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
