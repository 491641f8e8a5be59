"""`eagle3 verify` and `eagle3 gc` on a small sound run, and on that run damaged in every way."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.config import RunConfig
from pipeline.records import SCHEMA_VERSION, Manifest
from pipeline.store.location import Location
from pipeline.store.manifest import read_manifest
from pipeline.store.samples import encode_samples
from pipeline.store.shards import ENTRY, write_shard
from pipeline.store.stage_run import open_stage
from pipeline.store.states import StatesSample, encode_states
from tests.shard_files import reseal, stored, stored_path
from tests.store.conftest import CONTRACT, make_config, make_sample
from tests.store.states import H, make_states


def states_of(count: int, *, hidden: int = H) -> list[StatesSample]:
    return [make_states(index, 20, range(10, 20), hidden=hidden) for index in range(count)]


def make_run(config: RunConfig) -> Manifest:
    """Synth and features of two shards each."""
    counts: dict[str, Any] = {"licenses": {"MIT": 2}, "sources": {"unit": 2}}
    stage_run = open_stage(config, "synth", None)
    for index in range(2):
        data = encode_samples([make_sample(index)])
        stage_run.commit(f"{index:05d}.parquet", data, rows=1, tokens=8)
    parent = stage_run.finish(contract=CONTRACT, **counts)
    stage_run = open_stage(config, "features", parent)
    for index in range(2):
        data = encode_states(states_of(2))
        stage_run.commit(f"{index:05d}.safetensors", data, rows=2, tokens=40)
    return stage_run.finish(contract=CONTRACT, **counts)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run(make_config(tmp_path / "run"))
    return tmp_path / "run"


def change(run: Path, **fields: object) -> None:
    """Rewrite fields of the features' manifest."""
    reseal(run / "features", **fields)


def replace_shard(run: Path, data: bytes, *, rows: int = 2, tokens: int = 40) -> None:
    """Another file under the same name, in entry and manifest as if it had been committed there."""
    old = read_manifest(str(run), "features").shards
    name, features = old[1].name, Location(f"{run}/features")
    features.child("shards").delete(name + ENTRY)
    new = write_shard(features, name, data, rows=rows, tokens=tokens, rejected={}, seconds=0)
    change(run, shards=[shard.model_dump() for shard in (old[0], new.shard)])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def verify(uri: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, list[str]]:
    code = main(["verify", str(uri)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err.splitlines()


def test_a_sound_run_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, errors = verify(run, capsys)
    assert (code, errors) == (0, [])
    assert out.startswith("sound: synth, features; 4 shards and 6 other files, ")
    assert len(out.splitlines()) == 1


def test_a_sound_run_on_an_object_store(bucket: str, tmp_path: Path) -> None:
    uri = f"{bucket}/{tmp_path.name}"
    make_run(make_config(uri))
    assert main(["verify", uri]) == 0
    location = Location(f"{uri}/features/shards")
    name = stored(location, "00001.safetensors")
    data = location.read(name)
    location.write(name, data[:-1] + bytes([data[-1] ^ 1]))
    assert main(["verify", uri]) == 2


def test_all_damage_is_named_at_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = run / "features/shards"
    flipped, cut = (stored_path(states, f"0000{index}.safetensors") for index in range(2))
    missing = stored_path(run / "synth/shards", "00001.parquet")
    flip(flipped)
    cut.write_bytes(cut.read_bytes()[:-9])
    missing.unlink()
    code, _, errors = verify(run, capsys)
    assert code == 2 and len(errors) == 3
    expected = [
        (missing, "the file is missing"),
        (flipped, "has SHA-256 "),
        (cut, " were committed"),
    ]
    for line, (path, problem) in zip(errors, expected, strict=True):
        assert line.startswith(f"error: {path}: ") and problem in line and "(fix: " in line


def test_a_sample_that_was_wrong_before_it_was_committed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shard's checksum is right; the sample's own is not."""
    data = bytearray(stored_path(run / "features/shards", "00001.safetensors").read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    start = 8 + int.from_bytes(data[:8], "little") + header["aux_states"]["data_offsets"][1] - 1
    data[start] ^= 1
    replace_shard(run, bytes(data))
    code, _, errors = verify(run, capsys)
    assert code == 2 and len(errors) == 1
    assert re.search(
        r"features/shards/00001\.\w+\.safetensors: sample s1 of unit has CRC-32", errors[0]
    )


@pytest.mark.parametrize(
    ("hidden", "count", "problem"),
    [
        (8, 2, "holds states of hidden_size 8, the target of the manifest's contract has 4"),
        (4, 1, "holds 1 samples, 2 were committed"),
    ],
)
def test_a_shard_of_another_run(
    hidden: int, count: int, problem: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_shard(run, encode_states(states_of(count, hidden=hidden)))
    code, _, errors = verify(run, capsys)
    assert code == 2 and len(errors) == 1
    assert re.search(rf"features/shards/00001\.\w+\.safetensors: {problem}", errors[0])


def test_files_that_are_not_what_their_names_say(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    location, name, data = Location(f"{run}/synth"), "00001.parquet", b"not parquet"
    (run / "synth/shards" / (name + ENTRY)).unlink()
    new = write_shard(location, name, data, rows=1, tokens=8, rejected={}, seconds=0)
    fields = json.loads((run / "synth/manifest.json").read_text())
    reseal(run / "synth", shards=[fields["shards"][0], new.shard.model_dump()])
    code, _, errors = verify(run, capsys)
    assert code == 2
    assert re.search(r"00001\.\w+\.parquet: not a readable Parquet file", errors[0])
    assert "features/manifest.json: parent_hash: was made from synth" in errors[1]
    assert "which is now" in errors[1]


def test_manifests_that_do_not_fit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (run / "features/manifest.json").read_text()
    other = CONTRACT.model_copy(update={"capture_layers": (2, 4, 5)})
    cases: list[tuple[dict[str, object], str]] = [
        ({"schema_version": SCHEMA_VERSION + 1}, f"schema_version {SCHEMA_VERSION + 1} is newer"),
        ({"contract": other.model_dump(mode="json")}, "contract.capture_layers"),
        ({"parent_hash": "0" * 64}, "was made from synth 0000000000000000…, which is now "),
        ({"surprise": 1}, "surprise: not a manifest"),
    ]
    for fields, problem in cases:
        change(run, **fields)
        code, _, errors = verify(run, capsys)
        assert code == 2 and len(errors) == 1
        assert "features/manifest.json: " in errors[0] and problem in errors[0]
        (run / "features/manifest.json").write_text(whole)
    shutil.rmtree(run / "synth")
    code, _, errors = verify(run, capsys)
    assert code == 2 and "was made from synth, which has no readable manifest here" in errors[0]


def test_an_unfinished_stage_is_checked_as_far_as_it_is(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "features/manifest.json").unlink()
    code, out, _ = verify(run, capsys)
    assert code == 0 and "not finished: features" in out
    assert f"not checked: {run}/features: its manifest, which will name all files, is not" in out
    assert "sound: synth; 4 shards and 3 other files, " in out
    path = stored_path(run / "features/shards", "00001.safetensors")
    flip(path)
    code, _, errors = verify(run, capsys)
    assert code == 2 and f"{path}: has SHA-256" in errors[0]


def test_what_no_manifest_names(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stray file is a problem; what `gc` removes and what lies beside the stages is listed."""
    orphan, claim = run / "synth/shards/00009.parquet", run / "synth/claims/00000.parquet.0000.json"
    for path in (orphan, claim, run / "notes.txt", run / "old/report.json"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    log = run / "features/wandb/run/logs/debug.log"
    log.parent.mkdir(parents=True)
    log.symlink_to("/nowhere/debug.log")
    code, out, errors = verify(run, capsys)
    assert (code, errors) == (0, [])
    for path in (orphan, claim):
        assert f"not checked: {path}: left by a writer that was killed, see `eagle3 gc`" in out
    assert all(f"not checked: {run}/{name}: of no stage" in out for name in ("notes.txt", "old"))
    strays = [run / name for name in ("synth/a.pkl", "features/head/x.bin")]
    for path in strays:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    code, _, errors = verify(run, capsys)
    assert code == 2 and len(errors) == 2
    for path, line in zip(strays, errors, strict=True):
        assert f"{path}: is not a file that the stage wrote" in line


@pytest.mark.parametrize("command", ["verify", "gc"])
def test_a_directory_that_is_no_run_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train/shards").mkdir(parents=True)
    (tmp_path / "train/shards/mine.bin").write_bytes(b"not eagle3's")
    options = ["--quiet-minutes", "0"] if command == "gc" else []
    assert main([command, str(tmp_path), *options]) == 2
    assert "holds no stage of a run (fix: pass the run.uri" in capsys.readouterr().err
    assert (tmp_path / "train/shards/mine.bin").exists()


def test_gc_removes_what_belongs_to_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    (run / "features/manifest.json").unlink()  # features is under way again
    litter = {
        run / "features/shards/.00002.safetensors.123-0a1b2c3d.tmp": 1000,
        run / "features/shards/00002.safetensors": 500,  # no entry
        run / "train/shards/config.json": 20,  # nobody's
    }
    for path, size in litter.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    (run / "features/shards/.mine.tmp").write_bytes(b"of another program")

    assert main(["gc", str(run)]) == 0
    left_alone = "left alone: 3 written in the last 60 minutes"
    assert f"removed 0 files, 0 B; {left_alone}" in capsys.readouterr().out
    for path in litter:
        os.utime(path, (time.time() - 7200,) * 2)
    assert main(["gc", str(run), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert all(path.exists() and f"would remove {path}: " in out for path in litter)
    assert out.splitlines()[-1] == "would remove 3 files, 1.5 KiB"
    assert main(["gc", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "removed 3 files, 1.5 KiB"
    assert not any(path.exists() for path in litter)
    assert (run / "features/shards/.mine.tmp").exists()
    for path, data in before.items():
        assert path.name == "manifest.json" or path.read_bytes() == data


def test_gc_on_an_object_store(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"{bucket}/{tmp_path.name}"
    make_run(make_config(uri))
    shards = Location(f"{uri}/features/shards")
    committed = shards.names()
    shards.write("00002.safetensors", bytes(500))
    assert main(["gc", uri]) == 0 and "left alone: 1" in capsys.readouterr().out
    assert main(["gc", uri, "--quiet-minutes", "0"]) == 0
    removed = f"removed {uri}/features/shards/00002.safetensors: shard without an entry, 500 B"
    assert shards.names() == committed and removed in capsys.readouterr().out


def test_gc_touches_nothing_below_a_manifest_it_cannot_read(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "features/shards/00009.bin").write_bytes(b"x")
    change(run, schema_version=SCHEMA_VERSION + 1)
    assert main(["gc", str(run), "--quiet-minutes", "0"]) == 2
    assert "is newer" in capsys.readouterr().err
    assert (run / "features/shards/00009.bin").exists()


@pytest.mark.parametrize(
    "name", ["features/extra", "features/audit.json", "synth/shards/x.parquet"]
)
def test_pipes_devices_and_links_out_of_the_run_are_named(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """None of them is opened: a pipe would wait for a writer for ever."""
    path, secret = run / name, tmp_path / "secret"
    secret.mkdir()
    (secret / "begin.json").write_text("{}")
    makers: dict[str, Callable[[], object]] = {
        "is a named pipe, not a file": lambda: os.mkfifo(path),
        "is a link that leads out of ": lambda: path.symlink_to(secret / "begin.json"),
        "is a device, not a file": lambda: path.symlink_to("/dev/zero"),
        "is a link that leads nowhere": lambda: path.symlink_to("nowhere"),
    }
    for problem, make in makers.items():
        make()
        code, _, errors = verify(run, capsys)
        assert code == 2 and len(errors) == 1
        expected = "is a link that leads out of " if "device" in problem else problem
        assert errors[0].startswith(f"error: {path}: {expected}") and "(fix: delete it" in errors[0]
        path.unlink()
    path.symlink_to(secret, target_is_directory=True)
    code, _, errors = verify(run, capsys)
    assert code == 2 and f"{path}: is a link that leads out of " in errors[0]


@pytest.mark.parametrize("name", ["begin.json", "manifest.json"])
def test_a_pipe_in_the_place_of_a_file(
    name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "features" / name
    path.unlink()
    os.mkfifo(path)
    code, _, errors = verify(run, capsys)
    assert code == 2 and all(f"{path}: is a named pipe, not a file (fix: " in e for e in errors)
    if name == "manifest.json":
        assert main(["gc", str(run)]) == 2


def test_a_stage_may_be_a_link_to_that_of_another_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the leaderboard's rows share their data. Nothing in it may lead out of it."""
    (run / "features").rename(tmp_path / "elsewhere")
    (run / "features").symlink_to(tmp_path / "elsewhere")
    assert verify(run, capsys)[0] == 0
    manifest = tmp_path / "elsewhere/manifest.json"
    manifest.rename(tmp_path / "manifest.json")
    manifest.symlink_to(tmp_path / "manifest.json")
    code, _, errors = verify(run, capsys)
    assert code == 2 and "features/manifest.json: is a link that leads out of " in errors[0]
    assert main(["gc", str(run), "--quiet-minutes", "0"]) == 2


def test_links_are_not_followed_in_circles(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "features/again").symlink_to(run / "features")
    code, _, errors = verify(run, capsys)
    assert code == 2 and f"{run}/features/again: is a link to a directory" in errors[0]
    assert main(["gc", str(run)]) == 0


def test_names_are_printed_with_every_character(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "00009.\x1b[2Jparquet\nremoved 0 files"
    (run / "synth/shards" / name).write_bytes(b"x")
    (run / "synth" / name).write_bytes(b"x")
    shown = r"00009.\x1b[2Jparquet\nremoved 0 files"
    code, out, errors = verify(run, capsys)
    assert code == 2 and len(errors) == 1 and f"{run}/synth/{shown}: is not a file" in errors[0]
    assert "\x1b" not in out and f"not checked: {run}/synth/shards/{shown}: left by" in out
    assert main(["gc", str(run), "--quiet-minutes", "0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"removed {run}/synth/shards/{shown}: ") and len(out.splitlines()) == 2
