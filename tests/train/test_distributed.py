"""Several processes over gloo against one process with the same global batch.

Some are started by a real launcher; the others are forks, which have imported everything.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.config import RunConfig
from pipeline.store.manifest import read_manifest
from pipeline.store.states import StatesSample
from pipeline.train.stage import run
from tests.forked import group
from tests.train.runs import Configure, Store, head_of, lines_of, stop_at, without_speed, written

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


def environment() -> dict[str, str]:
    own = {"OMP_NUM_THREADS": "1"}
    return own if torch.cuda.is_available() else {**own, "DS_ACCELERATOR": "cpu"}


def start(
    config: RunConfig,
    processes: int,
    *,
    launcher: str = "torchrun",
    module: str = "pipeline.cli",
) -> subprocess.Popen[str]:
    """Training with `processes` processes of a launcher, all in a process group of their own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started_by = LAUNCHERS[launcher].format(processes=processes, port=port).split()
    command = [sys.executable, "-m", *started_by, module, "train", "-c", str(written(config))]
    return subprocess.Popen(
        command,
        env={**os.environ, **environment()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def launch(config: RunConfig, processes: int, *, launcher: str) -> None:
    """Train to the end."""
    process = start(config, processes, launcher=launcher)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors[-3000:]


def fork(config: RunConfig, processes: int, *, code: int = 0) -> str:
    """Train until all processes end, without a launcher; returns what they printed."""
    printed, words = Path(f"{config.run.uri}.printed"), ["train", "-c", str(written(config))]
    forked = group(words, processes, printed, environment=environment())
    codes = [each.wait(timeout=180) for each in forked]
    assert codes == [code] * processes, printed.read_text()[-3000:]
    return printed.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "stage", "dtype", "launcher", "optimizer"),
    [
        (2, 0, "float32", "deepspeed", "adamw"),
        (2, 0, "float32", "torchrun", "muon"),
        (2, 1, "float32", "", "adamw"),
        (4, 1, "bfloat16", "", "adamw"),
    ],
)
def test_processes_follow_the_loss_curve_of_one(
    tiny_config: Configure,
    store_states: Store,
    processes: int,
    stage: int,
    dtype: str,
    launcher: str,
    optimizer: str,
) -> None:
    settings = {**SETTINGS, **EVALUATION, "dtype": dtype, "epochs": 4 * processes}
    settings |= {"optimizer": optimizer, "dropout": 0.1}
    one = tiny_config("one", **settings, accumulate=4)
    two = tiny_config("two", **settings, accumulate=4 // processes, zero_stage=stage)
    for config in (one, two):
        store_states(config)
    run(one)
    if launcher:
        launch(two, processes, launcher=launcher)
    else:
        fork(two, processes)
    curves = [lines_of(config) for config in (one, two)]
    assert [line["step"] for line in curves[1]] == list(range(1, 9))
    assert curves[0][-1]["loss"] < curves[0][0]["loss"]
    near = {"float32": 1e-5, "bfloat16": 1e-3}[dtype]
    for single, double in zip(*curves, strict=True):
        assert double["loss"] == pytest.approx(single["loss"], rel=near)
        assert double["gradient_norm"] == pytest.approx(single["gradient_norm"], rel=10 * near)
        assert double["tokens"] == single["tokens"] and double["lr"] == single["lr"]
        assert double["acc_0"] == pytest.approx(single["acc_0"], abs=0.02)
    details = [read_manifest(config.run.uri, "train").details for config in (one, two)]
    assert details[1]["tau"] == pytest.approx(details[0]["tau"], abs=0.1)
    assert details[1]["evaluations"] == 2
    heads = [load_file(head_of(config) / "model.safetensors") for config in (one, two)]
    for name, tensor in heads[0].items():
        assert (tensor.float() - heads[1][name].float()).abs().max() < 1e-2, name


@pytest.fixture(scope="module")
def curves() -> dict[int, list[dict[str, float]]]:
    """ZeRO stage → lines of the run below."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_one_two_and_one_processes_train_on_each_batch_once(
    tiny_config: Configure,
    store_states: Store,
    curves: dict[int, list[dict[str, float]]],
    stage: int,
) -> None:
    """Batches 1 to 3 by one process, 4 to 9 by two, the rest by one: like steps, like losses."""
    settings = {
        **SETTINGS,
        "max_steps": None,
        "epochs": 3,
        "keep_checkpoints": 99,
        "checkpoint_every": 1,
    }
    config = tiny_config("run", **settings, zero_stage=stage)
    store_states(config)
    run(config)
    alone = lines_of(config)
    stop_at(config, 3)
    fork(config, 2)
    stop_at(config, 6)
    run(config)
    lines = curves[stage] = lines_of(config)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert without_speed(lines[:3]) == without_speed(alone[:3])
    # Tokens are counted over all that was read: three steps of two processes are six of one.
    read = [line["tokens"] for line in alone]
    assert [line["tokens"] for line in lines] == [*read[:3], *read[4:9:2], *read[9:]]
    assert all(0 < line["loss"] < 2 * alone[0]["loss"] for line in lines)
    plain = curves[min(curves)]
    for line, like in zip(lines, plain, strict=True):
        assert line["loss"] == pytest.approx(like["loss"], rel=1e-5)


@pytest.mark.slow
def test_two_processes_continue_bit_for_bit(tiny_config: Configure, store_states: Store) -> None:
    """In bfloat16, with recomputed activations and an output layer as it was."""
    settings = {
        **SETTINGS,
        **EVALUATION,
        "dtype": "bfloat16",
        "train_lm_head": False,
        "activation_checkpointing": True,
        "keep_checkpoints": 9,
    }
    config = tiny_config("run", **settings, zero_stage=1)
    store_states(config)
    fork(config, 2)
    lines, head = lines_of(config), read_manifest(config.run.uri, "train").shards
    stop_at(config, 3)
    fork(config, 2)
    assert without_speed(lines_of(config)) == without_speed(lines)
    assert read_manifest(config.run.uri, "train").shards == head


@pytest.mark.slow
def test_processes_agree_to_end_after_a_sigterm(
    tiny_config: Configure, store_states: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scheduler signals launcher and processes, and the launcher signals its processes."""
    settings = {**SETTINGS, "epochs": 60, "max_steps": 90, "checkpoint_every": 99}
    config = tiny_config("run", **settings, zero_stage=1)
    store_states(config)
    process, until = start(config, 2), time.monotonic() + 120
    while len(lines_of(config)) < 3 and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGTERM)
    out, errors = process.communicate(timeout=120)
    directory = Path(config.run.uri) / "train" / "checkpoints"
    (marker,) = directory.glob("step-*.json")
    step = int(marker.stem.removeprefix("step-"))
    shown = " ".join(out.split())
    assert f"SIGTERM: ended with a checkpoint after step {step}" in shown, errors[-3000:]
    capsys.readouterr()
    run(config)
    assert f"continuing from checkpoint {marker.stem}" in capsys.readouterr().out
    assert [line["step"] for line in lines_of(config)] == list(range(1, 91))


#: Training on a machine that decodes no Llama, or has no wandb.
LACKS = {
    "decoder": "pipeline.decoder.model.SUPPORTED = ('qwen3',)",
    "wandb": "sys.modules['wandb'] = None",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", LACKS)
def test_what_the_first_process_alone_needs_stops_all(
    tiny_config: Configure,
    store_states: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    settings = {**SETTINGS, **EVALUATION, "wandb": "offline", "head": {"init_layer": "target_last"}}
    config = tiny_config("run", **settings)
    store_states(config)
    begins = f"import sys, pipeline.decoder.model\n{LACKS[what]}\n"
    program = begins + "from pipeline.cli import main\nsys.exit(main())\n"
    (tmp_path / "lacking.py").write_text(program)
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    _, errors = start(config, 2, module="lacking").communicate(timeout=120)
    said = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(said) == 2 and said[0] == said[1], errors[-3000:]
    assert {"decoder": "model_type 'llama'", "wandb": "needs wandb"}[what] in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_a_loss_that_is_not_finite_stops_all_with_its_samples(
    tiny_config: Configure, store_states: Store, states: list[StatesSample], stage: int
) -> None:
    """The process that read them is one of two; the other neither blames the gradient nor waits."""
    broken = states[3].aux_states.clone()
    broken[2, 5] = torch.nan
    samples = [*states[:3], replace(states[3], aux_states=broken), *states[4:]]
    settings = {**SETTINGS, "batch_tokens": 30, "head": {"init_layer": "target_last"}}
    config = tiny_config("run", **settings, zero_stage=stage)
    store_states(config, samples)
    printed = fork(config, 2, code=2)
    said = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(said) == 2 and said[0] == said[1], printed[-3000:]
    assert "sample-3" in said[0] and "the loss is nan" in said[0]


def test_zero_trains_the_same_head(tiny_config: Configure, store_states: Store) -> None:
    """Split over a group of one, nothing changes but the bookkeeping."""
    settings = {**SETTINGS, **EVALUATION, "accumulate": 2}
    plain = tiny_config("plain", **settings)
    split = tiny_config("split", **settings, zero_stage=1)
    for config in (plain, split):
        store_states(config)
        run(config)
    losses = [[line["loss"] for line in lines_of(config)] for config in (plain, split)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
