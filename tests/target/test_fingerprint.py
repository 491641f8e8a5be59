"""The fingerprint is of every byte, whatever is cached and whatever clocks say."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from pipeline.config import TargetSection
from pipeline.errors import ContractMismatch
from pipeline.records import TargetContract, match_contracts
from pipeline.target import files
from pipeline.target.files import fingerprint, sampled_fingerprint, sha256_of
from pipeline.target.open import open_target

pytestmark = pytest.mark.usefixtures("own_cache")


def _entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "eagle3" / "fingerprints").glob("*.json"))


def _settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the files had been written long ago."""
    monkeypatch.setattr(files, "_SETTLED", -1.0)


def _contract(directory: Path) -> TargetContract:
    return open_target(TargetSection(source=str(directory))).contract


@pytest.mark.parametrize("size", [136 << 20, 1000, 0])
def test_it_is_the_sum_of_the_whole_file(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(250)) * (size // 250))
    assert sha256_of([path])[path] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_half_a_large_file_zeroed_where_no_sample_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sampled figure missed: of every 2.1 MB of this file it read the first 1 MiB."""
    _settle(monkeypatch)
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(1 << 20) * 136)
    before, sampled = fingerprint([path]), sampled_fingerprint([path])
    step = -(-path.stat().st_size // 64)
    with path.open("r+b") as file:
        for offset in range(0, path.stat().st_size - 2 * step, step):
            file.seek(offset + (1 << 20))
            file.write(bytes(step - (1 << 20)))
    assert sampled_fingerprint([path]) == sampled
    assert fingerprint([path]) != before


def test_any_flipped_byte_is_another_target(
    monkeypatch: pytest.MonkeyPatch, target_copy: Path
) -> None:
    _settle(monkeypatch)
    path, before = target_copy / "model.safetensors", _contract(target_copy)
    stat = path.stat()
    for offset in (-1, stat.st_size // 2 - stat.st_size):
        with path.open("r+b") as file:
            file.seek(offset, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(offset, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        with pytest.raises(ContractMismatch, match=r"contract\.fingerprint"):
            match_contracts(_contract(target_copy), before, where="head")


def test_a_file_is_read_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"one")
    sha256_of([path])
    assert not _entries(tmp_path), "written a moment ago: the clock may not show the next change"
    _settle(monkeypatch)
    first = sha256_of([path])[path]
    (entry,) = _entries(tmp_path)
    entry.write_text(entry.read_text().replace(first, "0" * 64))
    assert sha256_of([path])[path] == "0" * 64, "this is what shows that it was not read"
    stat = path.stat()
    other = tmp_path / "other"
    other.write_bytes(b"two")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)  # of the same size and time
    assert sha256_of([path])[path] == hashlib.sha256(b"two").hexdigest()
    entry.write_text("{")
    assert sha256_of([path])[path] == hashlib.sha256(b"two").hexdigest()


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert sha256_of([tmp_path / "file"])[tmp_path / "file"] == hashlib.sha256(b"").hexdigest()


def test_the_hub_s_sum_counts_until_the_blob_changes(tmp_path: Path) -> None:
    blob, link = tmp_path / "blobs" / ("ab" * 32), tmp_path / "snapshots" / "c" / "x.safetensors"
    blob.parent.mkdir()
    link.parent.mkdir(parents=True)
    blob.write_bytes(b"one")
    link.symlink_to(blob)
    assert sha256_of([link])[link] == "ab" * 32
    time.sleep(1.1)
    blob.write_bytes(b"two")
    assert sha256_of([link])[link] == hashlib.sha256(b"two").hexdigest()


def test_the_sum_of_a_download_to_a_directory_counts_until_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"one")
    folder = tmp_path / ".cache" / "huggingface" / "download"
    folder.mkdir(parents=True)
    metadata = folder / "x.safetensors.metadata"
    metadata.write_text(f"commit\n{'cd' * 32}\n{time.time()}\n")
    assert sha256_of([path])[path] == "cd" * 32
    metadata.write_text(f"commit\n{'cd' * 32}\n{time.time() - 10}\n")
    assert sha256_of([path])[path] == hashlib.sha256(b"one").hexdigest()
    metadata.write_text(f"commit\n{'cd' * 20}\n{time.time()}\n")  # the etag of a file of git
    assert sha256_of([path])[path] == hashlib.sha256(b"one").hexdigest()


def test_what_an_earlier_version_made_is_known_by_its_sampled_figure(
    tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = _contract(tiny_target)
    older = now.model_copy(
        update={"fingerprint": now.sampled_fingerprint, "sampled_fingerprint": ""}
    )
    assert now.fingerprint.startswith("sha256:") and len(older.fingerprint) == 64
    match_contracts(now, older, where="head")
    match_contracts(older, now, where="run")
    section = TargetSection(source=str(tiny_target))
    open_target(section, expected=older, where="x/manifest.json")
    assert "made by a version that sampled the target's weights" in capsys.readouterr().out
    open_target(section, expected=now, where="x")
    assert "sampled" not in capsys.readouterr().out
    other = older.model_copy(update={"fingerprint": "0" * 64})
    for ours, theirs in ((now, other), (other, now)):
        with pytest.raises(ContractMismatch, match=r"contract\.fingerprint"):
            match_contracts(ours, theirs, where="head")
    # Two of this version are never compared by samples.
    changed = now.model_copy(update={"fingerprint": "sha256:" + "0" * 64})
    with pytest.raises(ContractMismatch, match=r"contract\.fingerprint"):
        match_contracts(now, changed, where="head")
