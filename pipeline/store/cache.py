"""Remote shards on the local disk: fetched whole, checked on the way, read from there.

    $XDG_CACHE_HOME/eagle3/shards/<sha256 of the shard>/shards/<name>   like a stage's directory
                                  locks/<first two digits>.lock         one fetch of equal shards

A copy is named by the checksum that the manifest gives, so it can never be that of another shard,
and runs that share shards share copies. Once the copies exceed the limit those unused for longest
go. Any number of processes may use one cache: a shard is fetched by one of them, and a file that is
removed while another process has it open stays readable there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pipeline.errors import CorruptShard, StoreError
from pipeline.records import Shard
from pipeline.store.backends.base import Checksum, explain_os_error
from pipeline.store.backends.disk import is_temporary, replace_file
from pipeline.store.location import Location
from pipeline.store.shards import SHARDS, check_shard, stored_checksum

#: A download that has not grown for this long was killed. Seconds.
_ABANDONED = 3600.0


class _Copy(NamedTuple):
    used: float  # seconds since 1970
    size: int
    folder: Path


class ShardCache:
    """At most `limit` bytes of shards below `directory`, besides those that are being fetched."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.limit, self._directory = limit, directory

    def fetch(self, location: Location, shard: Shard) -> Location:
        """A local directory that holds `shard` as the stage at `location` does; fetched if need be.

        Raises CorruptShard when the store twice delivers other bytes than were committed,
        StoreError when the disk is full.
        """
        folder = self.folder(shard)
        path = folder / SHARDS / shard.path
        if not _touch(path, shard):
            try:
                with self._locked(f"{shard.sha256[:2]}.lock"):
                    if not _touch(path, shard):  # another process may have fetched it meanwhile
                        self._evict_for(shard.bytes)
                        download_shard(location, shard, path, private=folder.parent)
            except OSError as error:
                raise _explain_full_cache(error, path) from error
        return Location(str(folder))

    def drop(self, shard: Shard) -> None:
        """Remove the copy of `shard`, if there is one, after a fetch that may be under way."""
        with self._locked(f"{shard.sha256[:2]}.lock"), suppress(FileNotFoundError):
            shutil.rmtree(self.folder(shard))

    def folder(self, shard: Shard) -> Path:
        """Where the copy of `shard` is, or would be."""
        return self._directory / "shards" / shard.sha256

    def _evict_for(self, needed: int) -> None:
        """Remove the copies unused for longest until `needed` more bytes fit."""
        with self._locked("evict.lock"):
            copies = sorted(self._copies())
            excess = sum(copy.size for copy in copies) + needed - self.limit
            for copy in copies:
                if excess <= 0:
                    return
                shutil.rmtree(copy.folder, ignore_errors=True)
                excess -= copy.size

    def _copies(self) -> Iterator[_Copy]:
        """What is there; abandoned downloads are removed on the way."""
        for folder in _children(self._directory / "shards"):
            size, used = 0, 0.0
            for path in _children(folder / SHARDS):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    if is_temporary(path.name) and status.st_mtime < time.time() - _ABANDONED:
                        path.unlink()
                        continue
                    size, used = size + status.st_size, max(used, status.st_mtime)
            yield _Copy(used, size, folder)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Exclusive among threads and processes; the kernel releases it when its holder dies."""
        path = self._directory / "locks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def download_shard(
    location: Location,
    shard: Shard,
    path: Path,
    *,
    thorough: bool = False,
    private: Path | None = None,
) -> None:
    """Write the bytes of a remote shard to `path`, which appears once they are the committed ones.

    They are compared by the CRC32C that the store reported at the commit, where it did, as it costs
    next to nothing; else, and when `thorough`, by SHA-256. Other bytes are read once more. Raises
    CorruptShard when they differ again.
    """
    folder, stored = location.child(SHARDS), "" if thorough else stored_checksum(location, shard)
    expected = stored if stored.startswith("crc32c:") else f"sha256:{shard.sha256}"

    def fill(file: BinaryIO) -> None:
        checksum, size = Checksum(expected.partition(":")[0]), 0
        for block in folder.blocks(shard.path):
            checksum.update(block)
            size += file.write(block)
        check_shard(location, shard, size, str(checksum), expected)

    try:
        replace_file(path, fill, durable=False, private=private)
    except CorruptShard:
        replace_file(path, fill, durable=False, private=private)


def _touch(path: Path, shard: Shard) -> bool:
    """Whether a whole copy is there; notes that it was used now."""
    with suppress(FileNotFoundError):
        if path.stat().st_size == shard.bytes:
            os.utime(path)
            return True
    return False


def _children(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return list(folder.iterdir())
    return []


def _explain_full_cache(error: OSError, path: Path) -> StoreError:
    problem = explain_os_error(error, str(path), writing=True).problem
    fix = "free some space, lower run.cache_bytes, or set run.cache_dir to another disk"
    return StoreError(problem, where=str(path), fix=fix)
