"""Going on after an end that nobody planned: on another node, after a signal."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import RunConfig
from pipeline.errors import CorruptShard
from pipeline.records import Manifest
from pipeline.store.gc import find_orphans, remove
from pipeline.store.location import Location
from pipeline.store.stage_run import Claims, open_stage
from pipeline.train.checkpoints import Checkpoints
from pipeline.train.loop import Grace
from pipeline.train.progress import Best, Progress
from pipeline.train.stage import run
from pipeline.train.trainer import TrainingState
from tests.train.runs import (
    Configure,
    Store,
    begin,
    kill_after,
    lines_of,
    stop_at,
    without_speed,
)

EVALUATION = {
    "evaluate_every": 1,
    "evaluate_prompts": 2,
    "evaluate_tokens": 6,
    "evaluate_tree": {"top_k": 1, "steps": 2, "nodes": 3},
}


def checksums(manifest: Manifest) -> dict[str, str]:
    return {shard.name: shard.sha256 for shard in manifest.shards}


def cached_in(config: RunConfig, directory: Path) -> RunConfig:
    run = config.run.model_copy(update={"cache_dir": str(directory)})
    return config.model_copy(update={"run": run})


def checkpoints_of(config: RunConfig) -> Location:
    return Location(config.run.uri).child("train").child("checkpoints")


def test_a_node_dies_and_another_one_goes_on_from_the_bucket(
    tiny_config: Configure,
    store_states: Store,
    bucket: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {
        "epochs": 8,
        "max_steps": 24,
        "checkpoint_every": 4,
        **EVALUATION,
        "evaluate_every": 3,
    }
    whole = tiny_config("whole", **settings)
    remote = tiny_config(f"{bucket}/{tmp_path.name}", **settings)
    for config in (whole, remote):
        store_states(config)
    undisturbed = run(whole)
    dead, alive = tmp_path / "dead", tmp_path / "alive"
    kill_after(cached_in(remote, dead), 8)
    assert list(dead.rglob("weights.safetensors"))
    shutil.rmtree(dead)
    # A checkpoint that the dead node was writing has no marker: it is left to `eagle3 gc`.
    unfinished = checkpoints_of(remote).child("step-000008-0123456789abcdef")
    unfinished.write("weights.safetensors", b"cut")
    capsys.readouterr()
    manifest = run(cached_in(remote, alive))
    assert "continuing from checkpoint step-0000" in capsys.readouterr().out
    assert without_speed(lines_of(remote)) == without_speed(lines_of(whole))
    assert checksums(manifest) == checksums(undisturbed)
    markers = [name for name in checkpoints_of(remote).names() if name.endswith(".json")]
    assert markers == ["step-000020.json", "step-000024.json"]
    assert unfinished.names() == ["weights.safetensors"]
    remove(find_orphans(remote.run.uri))
    assert len(checkpoints_of(remote).subdirectories()) == 2


def asked_to_end(config: RunConfig, *, after: int) -> tuple[int, str]:
    """Train, SIGTERM once so many steps are logged; returns the exit code and what was printed."""
    process, printed = begin(config)
    until = time.monotonic() + 120
    while len(lines_of(config)) < after and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    return process.wait(timeout=60), printed.read_text()


def test_sigterm_writes_a_checkpoint_and_nothing_is_lost(
    tiny_config: Configure, store_states: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between a step and its evaluation, which the next attempt makes."""
    settings = {"epochs": 10, "max_steps": 40, "checkpoint_every": 99, **EVALUATION}
    whole, ended = tiny_config("whole", **settings), tiny_config("ended", **settings)
    for config in (whole, ended):
        store_states(config)
    manifest = run(whole)
    code, shown = asked_to_end(ended, after=3)
    assert code == 130, shown
    steps = len(lines_of(ended)) + 1  # the last one is not evaluated
    assert f"SIGTERM: ended with a checkpoint after step {steps}" in " ".join(shown.split())
    assert checkpoints_of(ended).exists(f"step-{steps:06d}.json")
    capsys.readouterr()
    again = run(ended)
    assert f"continuing from checkpoint step-{steps:06d}" in capsys.readouterr().out
    assert without_speed(lines_of(ended)) == without_speed(lines_of(whole))
    # The tokens before that line took time that this attempt has not seen.
    assert lines_of(ended)[steps - 1]["tokens_per_second"] == 0
    assert all(line["tokens_per_second"] > 0 for line in lines_of(ended)[steps:])
    assert checksums(again) == checksums(manifest)


def ask(*numbers: signal.Signals) -> None:
    """Signals to this very process, and time for what follows from them."""
    for number in numbers:
        os.kill(os.getpid(), number)
    time.sleep(0.2)


def test_a_grace_ends_by_itself_or_at_a_second_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Grace(60) as grace:
        assert not grace.begun
        ask(signal.SIGTERM)
        assert grace.begun
        with pytest.raises(KeyboardInterrupt):
            ask(signal.SIGTERM)
        monkeypatch.setenv("RANK", "1")  # a launcher passes on what this process also got
        ask(signal.SIGTERM)
    assert not capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt), Grace(0.05):
        ask(signal.SIGTERM)
    assert "no checkpoint within train.grace_seconds=0.05" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


class Planted:
    """What a pickle does to whoever reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_planted_pickle_is_not_executed(
    tiny_config: Configure, store_states: Store, tmp_path: Path
) -> None:
    """In place of every file of the checkpoint, with a marker that vouches for it."""
    config, executed = tiny_config(max_steps=4, checkpoint_every=2), tmp_path / "executed"
    store_states(config)
    run(config)
    stop_at(config, 2)
    directory = Path(config.run.uri) / "train" / "checkpoints"
    marker = json.loads((directory / "step-000002.json").read_text())
    for name in marker["files"]:
        file = directory / marker.get("folder", "step-000002") / name
        torch.save(Planted(executed), file)
        data = file.read_bytes()
        marker["files"][name] = len(data), hashlib.sha256(data).hexdigest()
    (directory / "step-000002.json").write_text(json.dumps(marker))
    with pytest.raises(CorruptShard, match="not a checkpoint"):
        run(config)
    assert not executed.exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1])
def test_every_zero_stage_continues_bit_for_bit(
    tiny_config: Configure,
    store_states: Store,
    capsys: pytest.CaptureFixture[str],
    stage: int,
    dtype: str,
) -> None:
    settings = {"max_steps": 5, "checkpoint_every": 2, "keep_checkpoints": 9}
    config = tiny_config(zero_stage=stage, dtype=dtype, **settings)
    store_states(config)
    manifest, lines = run(config), lines_of(config)
    stop_at(config, 2)
    capsys.readouterr()
    again = run(config)
    assert "continuing from checkpoint step-000002" in capsys.readouterr().out
    assert without_speed(lines_of(config)) == without_speed(lines)
    assert checksums(again) == checksums(manifest)


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_tokens": 16},  # every sample comes in parts with a past
        {"head": {"draft_window": 8}},
        {"loss": "kl", "teacher_temperature": 0.7, "head": {"fc_norm": True}},
        {"optimizer": "muon", "dropout": 0.2},
    ],
    ids=["parts", "window", "loss", "muon"],
)
def test_every_kind_of_training_continues_bit_for_bit(
    tiny_config: Configure, store_states: Store, settings: dict[str, Any]
) -> None:
    config = tiny_config(max_steps=7, checkpoint_every=3, keep_checkpoints=9, **settings)
    store_states(config)
    manifest, lines = run(config), lines_of(config)
    stop_at(config, 3)
    again = run(config)
    assert without_speed(lines_of(config)) == without_speed(lines)
    assert checksums(again) == checksums(manifest)


STATE = TrainingState({"fc.weight": torch.ones(2, 3)}, {"exp_avg/fc.weight": torch.ones(2, 3)}, 1)


@pytest.fixture(params=["path", "memory"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    return Location(
        str(tmp_path / "run") if request.param == "path" else f"memory://{tmp_path}/run"
    )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`machine("a")`: from now on this is the machine a, with a cache of its own."""
    return lambda name: monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))


def opened(stage: Location, *, keep: int = 2, identity: str = "ours") -> Checkpoints:
    return Checkpoints(stage, identity=identity, keep=keep)


def save(checkpoints: Checkpoints, step: int, best: Best | None = None) -> None:
    lines = "".join(f"line {number}\n" for number in range(step)).encode()
    progress = Progress(step=step, batches=2 * step, best=best)
    checkpoints.save(STATE, progress, epoch=0, index=2 * step, metrics=lines)


def newest_step(checkpoints: Checkpoints) -> int | None:
    newest = checkpoints.newest()
    return newest and newest.marker.progress.step


def test_the_newest_whole_checkpoint_wins_on_every_machine(
    stage: Location, machine: Callable[[str], None], tmp_path: Path
) -> None:
    machine("a")
    folder = stage.child("checkpoints")
    assert newest_step(opened(stage)) is None
    for step in (999_998, 999_999, 1_000_000):  # by number, not by name
        save(opened(stage), step)
    assert sorted(folder.names()) == ["step-1000000.json", "step-999999.json"]
    assert len(folder.subdirectories()) == 2
    machine("b")
    newest = opened(stage).newest()
    assert newest is not None and newest.marker.progress.step == 1_000_000
    assert newest.metrics().count(b"\n") == 1_000_000
    state = newest.state()
    assert state.step == 1 and torch.equal(state.weights["fc.weight"], torch.ones(2, 3))
    assert newest_step(opened(stage, identity="another's")) is None


@pytest.mark.parametrize("damage", ["gone", "cut", "other", "marker"])
def test_a_checkpoint_that_is_not_whole_is_passed_over(
    stage: Location, machine: Callable[[str], None], damage: str
) -> None:
    machine("a")
    folder = stage.child("checkpoints")
    save(opened(stage, keep=9), 3)
    save(opened(stage, keep=9), 6)
    last = folder.child(folder.subdirectories()[-1])
    whole = last.read("weights.safetensors")
    if damage == "gone":
        last.delete("weights.safetensors")
    elif damage == "marker":
        folder.write("step-000006.json", b"{")
    else:
        last.write("weights.safetensors", whole[:-1] if damage == "cut" else bytes(len(whole)))
    machine("b")
    assert newest_step(opened(stage)) == 3
    save(opened(stage, keep=1), 5)  # the one that is kept is a whole one
    machine("c")
    assert newest_step(opened(stage)) == 5


def test_a_copy_counts_for_nothing_without_the_store_and_is_mended_from_it(
    machine: Callable[[str], None], tmp_path: Path
) -> None:
    machine("a")
    stage = Location(f"memory://{tmp_path}/run")
    for step in (3, 6):
        save(opened(stage), step)
    copy = next((tmp_path / "a").rglob("step-000003-*/weights.safetensors"))
    copy.write_bytes(b"rotten")
    stage.child("checkpoints").delete("step-000006.json")
    newest = opened(stage).newest()
    assert newest is not None and newest.marker.progress.step == 3
    assert torch.equal(newest.state().weights["fc.weight"], torch.ones(2, 3))


def test_two_attempts_at_once_never_mix_their_files(
    stage: Location, machine: Callable[[str], None]
) -> None:
    """One on a node that was given up for lost: whichever marks last, the checkpoint is whole."""
    machine("a")
    lost, other = opened(stage, keep=1), opened(stage, keep=1)
    save(lost, 3)
    machine("b")
    save(other, 3)
    machine("a")
    save(lost, 9)
    machine("b")
    save(other, 6)
    machine("c")
    assert newest_step(opened(stage)) == 9


def test_a_best_head_is_kept_while_a_marker_names_it(
    stage: Location, machine: Callable[[str], None]
) -> None:
    machine("a")
    checkpoints = opened(stage, keep=1)
    bests = []
    for step in (2, 4):
        file = checkpoints.keep_best(step, {"fc.weight": torch.full((2, 2), float(step))})
        bests.append(Best(step=step, measured={}, file=file))
    save(checkpoints, 3, bests[0])
    names = stage.child("checkpoints").names()
    assert [name[:11] for name in names] == ["best-000002", "best-000004", "step-000003"]
    save(checkpoints, 5, bests[1])
    names = stage.child("checkpoints").names()
    assert [name[:11] for name in names] == ["best-000004", "step-000005"]
    machine("b")
    assert torch.equal(opened(stage).read_best(bests[1])["fc.weight"], torch.full((2, 2), 4.0))
    stage.child("checkpoints").write(names[0], b"rotten")
    machine("c")
    assert newest_step(opened(stage)) is None
    with pytest.raises(CorruptShard, match="best head"):
        opened(stage).read_best(bests[1])


def test_gc_leaves_the_best_head_of_a_training_at_work(
    tiny_config: Configure, machine: Callable[[str], None]
) -> None:
    """Which no marker names for as long as the next checkpoint is away."""
    machine("a")
    config = tiny_config()
    run_uri, stage_run = config.run.uri, open_stage(config, "train", None)
    with Claims(stage_run.location, 60) as claims:
        assert claims.take("train")
        opened(stage_run.location).keep_best(100, {"fc.weight": torch.ones(2, 2)})
        folder = Path(run_uri) / "train/checkpoints"
        [best] = folder.iterdir()
        os.utime(best, times=(before := time.time() - 4000, before))
        [orphan] = find_orphans(run_uri)
        assert orphan.name == best.name and not orphan.is_quiet(60)
    [orphan] = find_orphans(run_uri)
    assert orphan.is_quiet(60)
