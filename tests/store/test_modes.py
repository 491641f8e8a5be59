"""Who may read what a run leaves on a disk: samples and states are the user's own."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from pipeline.cli import main
from pipeline.records import Shard
from pipeline.store.disk import create_file, replace_file
from pipeline.store.location import Location
from pipeline.store.manifest import stage_location
from pipeline.store.shards import ShardCache
from tests.end_to_end.conftest import write_config

__all__ = ["write_config"]


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Path → permissions, of the folder and all in it."""
    paths = [folder, *folder.rglob("*")]
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in paths}


def test_samples_and_their_directories_are_the_users_alone(tmp_path: Path) -> None:
    uri = str(tmp_path / "runs/run")
    synth, train = stage_location(uri, "synth"), stage_location(uri, "train")
    source = tmp_path / "source"
    source.write_bytes(b"x")
    synth.child("shards").write("a", b"1")
    synth.create("selection.json", b"2")
    synth.child("prompts").put_file("c", source)
    train.child("head").write("config.json", b"3")
    stage_location(f"{uri}/", "features").child("shards").create("d", b"4")
    assert modes(tmp_path / "runs") == {
        **dict.fromkeys((".", "run", "run/train", "run/train/head"), 0o755),
        "run/train/head/config.json": 0o644,
        **dict.fromkeys(("run/synth", "run/synth/shards", "run/synth/prompts"), 0o700),
        **dict.fromkeys(("run/features", "run/features/shards"), 0o700),
        **dict.fromkeys(
            ("run/synth/shards/a", "run/synth/selection.json", "run/synth/prompts/c"), 0o600
        ),
        "run/features/shards/d": 0o600,
    }


def test_a_group_that_shares_a_directory_says_so_by_its_setgid_bit(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(0o2770)
    os.umask(0o007)
    stage_location(str(run), "synth").child("shards").write("a", b"1")
    assert {name: mode & 0o777 for name, mode in modes(run).items()} == {
        **dict.fromkeys((".", "synth", "synth/shards"), 0o770),
        "synth/shards/a": 0o660,
    }


def test_a_file_is_never_readable_by_others_not_even_while_it_is_written(tmp_path: Path) -> None:
    """Also in a directory of an earlier version, which others may enter."""
    folder = tmp_path / "synth"
    folder.mkdir(mode=0o755)
    seen: list[int] = []

    def fill(file: BinaryIO) -> None:
        seen.extend(mode for name, mode in modes(folder).items() if name != ".")
        file.write(b"text")

    replace_file(folder / "a", fill, private=folder)
    create_file(folder / "b", fill, private=folder)
    assert seen == [0o600] * 3 and modes(folder) == {".": 0o755, "a": 0o600, "b": 0o600}


def test_copies_of_shards_are_the_users_alone(tmp_path: Path) -> None:
    memory = Location("memory://modes/features")
    memory.child("shards").write("s", b"states")
    checksum = memory.child("shards").sha256("s")
    shard = Shard(name="s", rows=1, tokens=1, bytes=6, sha256=checksum)
    ShardCache(tmp_path / "cache", 1000).fetch(memory, shard)
    below = modes(tmp_path / "cache/shards")
    assert {path.split("/")[-1]: mode for path, mode in below.items()} == {
        **{".": 0o700, checksum: 0o700, "shards": 0o700},
        "s": 0o600,
    }


@pytest.mark.slow
def test_a_whole_run(write_config: Callable[..., Path], tmp_path: Path) -> None:
    """Samples, prompts and states; an exported head follows the umask."""
    config = str(write_config())
    assert main(["run", "-c", config]) == 0
    head, out = tmp_path / "run/train/head", tmp_path / "out"
    assert main(["export", str(head), "--format", "sglang", "--out", str(out)]) == 0
    for stage in ("synth", "features"):
        assert not {mode & 0o077 for mode in modes(tmp_path / "run" / stage).values()} - {0}, stage
    for folder in (head, out):
        assert set(modes(folder).values()) == {0o755, 0o644}, folder
