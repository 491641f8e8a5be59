"""Location on a disk, in memory and on an object store; and its errors when the storage refuses."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFile  # type: ignore[import-untyped]

from pipeline.config import parse
from pipeline.documents import local_path
from pipeline.errors import ConfigError, CorruptShard, MissingPackage, StoreError
from pipeline.prompts.files import open_file
from pipeline.store import remote
from pipeline.store.location import Location

KINDS = ("path", "file", "memory", "gs")


@pytest.fixture
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    name = uuid.uuid4().hex
    kind = request.param
    if kind == "gs":
        return Location(f"{request.getfixturevalue('bucket')}/{name}/deep")
    roots = {"path": f"{tmp_path}/", "file": f"file://{tmp_path}/", "memory": "memory://"}
    return Location(f"{roots[kind]}{name}/deep")


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file://localhost/tmp/x", "/tmp/x"),
        ("file:///tmp/localhost/x", "/tmp/localhost/x"),
        ("localhost/x", "localhost/x"),
        ("~/x", "/home/me/x"),
        ("./gs:/x", "./gs:/x"),
        ("a:b/c", "a:b/c"),
        ("gs://bucket/x", None),
        ("hub:org/name", None),
    ],
)
def test_which_places_are_local(
    uri: str, path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert local_path(uri) == path
    assert Location(uri).is_local is (path is not None)


@pytest.mark.parametrize(
    ("uri", "right"),
    [
        ("gs:/bucket/x", "gs://bucket/x"),
        ("S3:bucket/x", "S3://bucket/x"),
        ("file:/tmp/x", "file:///tmp/x"),
    ],
)
def test_a_scheme_without_slashes_names_no_directory(uri: str, right: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{uri}: .* is not followed by // .*write {right}, or"):
        Location(uri)
    with pytest.raises(ConfigError, match=rf"run\.uri.* is not followed by //.*write {right}, or"):
        parse({"target": {"source": "x"}, "run": {"uri": uri}})
    with pytest.raises(ConfigError, match="is not followed by //"):
        open_file(uri)


@pytest.mark.parametrize("location", KINDS, indirect=True)
def test_every_operation_means_the_same_everywhere(location: Location, tmp_path: Path) -> None:
    assert location.names() == [] and not location.exists("a.bin")
    location.write("b.bin", b"0123456789")
    location.write("a.bin", b"old")
    location.write("a.bin", b"new!")
    (tmp_path / "source").write_bytes(b"from a file")
    location.put_file("c.bin", tmp_path / "source")
    location.child("below").write("x", b"")

    assert location.names() == ["a.bin", "b.bin", "c.bin"]
    assert location.sizes() == {"a.bin": 4, "b.bin": 10, "c.bin": 11}
    assert location.subdirectories() == ["below"]
    assert (location.read("a.bin"), location.read("c.bin")) == (b"new!", b"from a file")
    assert location.size("b.bin") == 10
    assert location.read_range("b.bin", 3, 6) == b"345"
    assert location.read_range("b.bin", 4, 4) == b""
    assert location.sha256("b.bin") == hashlib.sha256(b"0123456789").hexdigest()
    assert b"".join(location.blocks("b.bin")) == b"0123456789"
    assert not location.is_local or location.local_path("b.bin").read_bytes() == b"0123456789"
    assert location.info("b.bin").modified == pytest.approx(time.time(), abs=60)

    location.delete("a.bin")
    location.delete("a.bin")
    assert location.names() == ["b.bin", "c.bin"]
    location.delete_tree()
    location.delete_tree()
    assert location.names() == [] and not location.child("below").exists("x")


@pytest.mark.parametrize("location", KINDS, indirect=True)
def test_of_several_writers_one_creates_a_file_and_all_get_its_bytes(location: Location) -> None:
    assert location.create("a.bin", b"first") == b"first"
    assert location.create("a.bin", b"second") == b"first" == location.read("a.bin")
    assert location.create("empty", b"") == b"" == location.create("empty", b"late")
    together = threading.Barrier(8)

    def create(writer: int) -> bytes:
        together.wait()
        return location.create("b.bin", bytes([writer]) * 1000)

    for _ in range(5):
        with ThreadPoolExecutor(8) as pool:
            results = set(pool.map(create, range(8)))
        assert results == {location.read("b.bin")} and len(results) == 1
        location.delete("b.bin")
    assert location.names() == ["a.bin", "empty"] and not location.temporaries()


def test_a_store_in_memory_looks_and_creates_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's looks first and creates later: in between, others did too, and all succeeded."""
    commit = MemoryFile.commit

    def commit_late(self: Any) -> None:
        time.sleep(0.01)
        commit(self)

    monkeypatch.setattr(MemoryFile, "commit", commit_late)
    location = Location(f"memory://{uuid.uuid4().hex}")
    with ThreadPoolExecutor(4) as pool:
        results = set(pool.map(lambda writer: location.create("a.bin", bytes([writer])), range(4)))
    assert results == {location.read("a.bin")}


def test_a_store_that_cannot_refuse_to_overwrite_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = r"dir://.*/a.bin: dir:// cannot refuse to overwrite .*one of gcs, gs, memory, s3"
    monkeypatch.setattr(remote, "open_filesystem", lambda uri: (object(), "root"))
    with pytest.raises(StoreError, match=message):
        Location("dir://root").create("a.bin", b"")

    def no_links(*paths: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(StoreError, match="this file system has no hard links"):
        Location(str(tmp_path)).create("a.bin", b"")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("location", KINDS, indirect=True)
def test_missing_files_and_short_ranges_are_named(location: Location) -> None:
    location.write("a.bin", b"abc")
    for call in (location.read, location.size, location.sha256):
        with pytest.raises(StoreError, match=r"deep/absent: no such file \(fix: ") as caught:
            call("absent")
        assert caught.value.where.startswith(location.uri)
    with pytest.raises(CorruptShard, match="ends after 3 bytes where 9 were expected"):
        location.read_range("a.bin", 1, 9)


def test_temporary_files_of_a_killed_writer_are_unseen_and_swept(tmp_path: Path) -> None:
    location = Location(str(tmp_path))
    for age, name in ((3700, "old"), (3500, "young")):
        path = tmp_path / f".{name}.bin.123-abcd.tmp"
        path.write_bytes(b"half")
        os.utime(path, (time.time(), time.time() - age))
    location.write("a.bin", b"whole")
    assert location.names() == ["a.bin"]
    location.sweep()
    assert sorted(os.listdir(tmp_path)) == [".young.bin.123-abcd.tmp", "a.bin"]


@pytest.mark.parametrize("location", KINDS, indirect=True)
def test_the_time_is_the_stores(location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time()
    monkeypatch.setattr(time, "time", lambda: real + 1e6)
    assert location.now() == pytest.approx(real, abs=60)
    assert location.names() == [] and not location.temporaries()


def test_a_file_is_replaced_and_never_written_in_place(tmp_path: Path) -> None:
    """A second name for the old file still shows the old bytes, so no reader ever saw a mixture."""
    location = Location(str(tmp_path))
    location.write("a.bin", b"old")
    writes: list[Callable[[], object]] = [
        lambda: location.write("a.bin", b"new"),
        lambda: location.put_file("a.bin", __file__),
    ]
    for write in writes:
        before = location.read("a.bin")
        (tmp_path / "second").unlink(missing_ok=True)
        (tmp_path / "second").hardlink_to(tmp_path / "a.bin")
        write()
        assert location.read("second") == before != location.read("a.bin")


def test_a_missing_bucket_and_an_unknown_protocol_are_explained(bucket: str) -> None:
    with pytest.raises(StoreError, match="no such bucket or directory"):
        Location("gs://no-such-bucket/run").write("a", b"1")
    with pytest.raises(StoreError, match=r"run\.uri nope://x: .*fix: use a local path"):
        Location("nope://x")


def test_a_missing_filesystem_package_is_named() -> None:
    with pytest.raises(MissingPackage, match=r"pip install adlfs"):
        Location("abfs://container/run")


def test_a_file_in_the_way_is_explained(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("I am a file")
    with pytest.raises(StoreError, match="a file stands where a directory is needed"):
        Location(f"{tmp_path}/run/synth").write("a", b"1")


def test_a_full_disk_leaves_the_old_bytes_and_no_litter(mount: Callable[[str], Path]) -> None:
    point = mount("size=64k")
    location = Location(str(point))
    location.write("a.bin", b"old")
    message = r"a\.bin: no space left \(fix: free some space and run the same command again"
    with pytest.raises(StoreError, match=message):
        location.write("a.bin", bytes(1 << 20))
    assert location.read("a.bin") == b"old" and os.listdir(point) == ["a.bin"]


def test_permissions_are_explained_where_they_bind(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("permission bits do not bind root")
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="no permission to write"):
        Location(str(tmp_path)).write("a.bin", b"1")
