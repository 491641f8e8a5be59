"""Location on a disk, in memory and on an object store; and its errors when the storage refuses."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import CorruptShard, MissingPackage, StoreError
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
    (tmp_path / ".a.bin.123-abcd.tmp").write_bytes(b"half")
    location.write("a.bin", b"whole")
    assert location.names() == ["a.bin"]
    location.sweep()
    assert os.listdir(tmp_path) == ["a.bin"]


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


def test_a_read_only_disk_is_explained(mount: Callable[[str], Path]) -> None:
    with pytest.raises(StoreError, match="the file system is read-only"):
        Location(str(mount("size=64k,ro"))).write("a.bin", b"1")


def test_permissions_are_explained_where_they_bind(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("permission bits do not bind root")
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="no permission to write"):
        Location(str(tmp_path)).write("a.bin", b"1")
