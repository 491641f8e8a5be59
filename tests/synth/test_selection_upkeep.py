"""`eagle3 verify` and `eagle3 gc` on selected prompts, before and after the stage is finished."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.config import RunConfig
from pipeline.records import TargetContract
from pipeline.store.location import Location
from pipeline.store.samples import encode_samples
from pipeline.store.stage_run import StageRun, open_stage
from pipeline.synth.select import PROMPTS, SELECTION, Selection, find_selection, select

Configs = Callable[..., RunConfig]


@pytest.fixture
def config(make_config: Configs) -> RunConfig:
    return make_config()


@pytest.fixture
def begun(config: RunConfig) -> tuple[StageRun, Selection]:
    """A stage with three selected shards of prompts."""
    stage_run = open_stage(config, "synth", None)
    return stage_run, select(config, stage_run.location)


def finish(stage_run: StageRun, names: tuple[str, ...]) -> None:
    """Shards of no samples, and the manifest."""
    for name in names:
        stage_run.commit(name, encode_samples([]), rows=0, tokens=0, rejected={"pii:X": 8})
    contract = TargetContract(
        source="dir",
        revision="local",
        fingerprint="f" * 64,
        dtype="bfloat16",
        hidden_size=4,
        num_layers=8,
        vocab_size=64,
        rope={},
        capture_layers=(1, 3, 4),
        tokenizer_hash="t" * 64,
        chat_template_hash="c" * 64,
        parameters=1000,
    )
    stage_run.finish(contract=contract, licenses={}, sources={}, files=(SELECTION,))


def leave_alone(folder: Path, hours: float = 2) -> None:
    for path in folder.iterdir():
        os.utime(path, (time.time() - 3600 * hours,) * 2)


def problems(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> list[str]:
    code = main(["verify", config.run.uri])
    errors = capsys.readouterr().err.splitlines()
    assert code == (2 if errors else 0)
    return errors


def test_verify_reads_every_prompt_of_an_unfinished_stage(
    config: RunConfig, begun: tuple[StageRun, Selection], capsys: pytest.CaptureFixture[str]
) -> None:
    location, (first, second, _) = begun[0].location, begun[1].shards
    assert problems(config, capsys) == []
    folder = location.child(PROMPTS)
    folder.delete(first.file)
    folder.write(second.file, folder.read(second.file)[:-1])
    missing, short = problems(config, capsys)
    assert f"{PROMPTS}/{first.file}: the file is missing" in missing
    assert f"{PROMPTS}/{second.file}: has {second.bytes - 1} bytes" in short
    location.write(SELECTION, b"{}")
    [unreadable] = problems(config, capsys)
    assert f"{SELECTION}: inputs: not a selection" in unreadable


def test_verify_of_a_finished_stage(
    config: RunConfig, begun: tuple[StageRun, Selection], capsys: pytest.CaptureFixture[str]
) -> None:
    (stage_run, selection), folder = begun, begun[0].location.child(PROMPTS)
    finish(stage_run, selection.names)
    first, second, _ = selection.shards
    folder.delete(first.file)
    assert problems(config, capsys) == []
    folder.write(second.file, b"other bytes")
    [damaged] = problems(config, capsys)
    assert f"{PROMPTS}/{second.file}: has 11 bytes" in damaged


def test_verify_misses_a_shard_of_selected_prompts(
    config: RunConfig, begun: tuple[StageRun, Selection], capsys: pytest.CaptureFixture[str]
) -> None:
    stage_run, selection = begun
    finish(stage_run, selection.names[:2])
    [other] = problems(config, capsys)
    assert f"{SELECTION}: names other shards than the manifest" in other


def test_gc_keeps_what_is_selected_until_the_stage_is_finished(
    config: RunConfig, begun: tuple[StageRun, Selection], capsys: pytest.CaptureFixture[str]
) -> None:
    (stage_run, selection), folder = begun, begun[0].location.child(PROMPTS)
    stray = selection.shards[0].file.replace(".", ".0", 1)
    folder.write(stray, b"of a killed attempt")
    leave_alone(folder.local_path("."))
    assert main(["gc", config.run.uri]) == 0
    removed = f"removed {folder.where(stray)}: prompts that no {SELECTION} names, 19 B"
    assert removed in capsys.readouterr().out
    assert folder.names() == [shard.file for shard in selection.shards]

    finish(stage_run, selection.names)
    assert main(["gc", config.run.uri, "--quiet-minutes", "300"]) == 0
    assert "left alone: 3" in capsys.readouterr().out
    assert main(["gc", config.run.uri]) == 0
    assert capsys.readouterr().out.count("prompts of a finished stage, not screened") == 3
    assert folder.names() == [] and find_selection(stage_run.location) == selection
    assert problems(config, capsys) == []


def test_gc_leaves_a_process_alone_that_has_selected_for_hours(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = open_stage(config, "synth", None).location.child(PROMPTS)
    folder.write("00000-0.a.parquet", b"first")
    leave_alone(folder.local_path("."))
    folder.write("00001-1.a.parquet", b"written just now")
    assert main(["gc", config.run.uri]) == 0
    assert "left alone: 2" in capsys.readouterr().out and len(folder.names()) == 2
    leave_alone(folder.local_path("."))
    assert main(["gc", config.run.uri]) == 0
    assert folder.names() == []


def test_gc_stops_at_a_selection_it_cannot_read(
    config: RunConfig, begun: tuple[StageRun, Selection], capsys: pytest.CaptureFixture[str]
) -> None:
    begun[0].location.write(SELECTION, b"{}")
    assert main(["gc", config.run.uri, "--quiet-minutes", "0"]) == 2
    assert "not a selection" in capsys.readouterr().err
    assert len(Location(f"{config.run.uri}/synth/{PROMPTS}").names()) == 3


def test_force_removes_the_prompts_of_other_sources(
    make_config: Configs, begun: tuple[StageRun, Selection]
) -> None:
    other = make_config(max_prompts=20)
    forced = other.model_copy(update={"run": other.run.model_copy(update={"force": True})})
    location = open_stage(forced, "synth", None).location
    assert find_selection(location) is None and location.child(PROMPTS).names() == []
    assert select(other, location).prompts == 20
