"""A directory, local or remote, with the few operations that the stages need.

    run = Location("gs://bucket/run")      # or "runs/run", "file:///…", "memory://…", "hub:…"
    run.child("synth").write("begin.json", b"{}")

A name becomes visible only with all of its bytes: local files are written beside their final name,
flushed to the disk and renamed; object stores make an object visible when its one upload ends.
Remote operations are retried while their failures are transient (backend.py).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pipeline.console import visible
from pipeline.documents import local_path
from pipeline.errors import CorruptShard, Eagle3Error
from pipeline.store.backend import Backend, FileInfo, explain_os_error
from pipeline.store.disk import Disk, is_temporary
from pipeline.store.hub import HUB, Hub, HubAddress
from pipeline.store.remote import Remote, explain_remote_error

T = TypeVar("T")

#: A temporary file that has not changed for this long was abandoned.
_ABANDONED_SECONDS = 3600.0


class Location:
    """A directory at `uri`; it need not exist before the first write.

    On a disk a `private` one, and all below it, is readable by the user who creates it, or by the
    group where the directory above has the setgid bit; buckets have their own rules. Of a `closed`
    one, links that lead out of it are refused, and of any, named pipes and devices.

    Every failure of the storage below is a StoreError that names the file and what to do. Raises
    ConfigError for a scheme without `://`.
    """

    def __init__(
        self, uri: str, *, private: bool | Path = False, closed: bool | Path = False
    ) -> None:
        self.uri = uri.rstrip("/") or uri
        path = local_path(uri)
        self._is_hub = uri.startswith(HUB)
        self.is_local = path is not None
        self._directory = Path(path or uri)
        self._private = self._directory if private is True else private or None
        self._closed = self._directory if closed is True else closed or None
        self._backend: Backend = (
            Disk(self._directory, self._private, self._closed)
            if self.is_local
            else (Hub if self._is_hub else Remote)(self.uri)
        )

    def __repr__(self) -> str:
        return f"Location({self.uri!r})"

    def child(self, name: str) -> Location:
        """The directory `name` below this one."""
        private, closed = self._private or False, self._closed or False
        return Location(self._below(name), private=private, closed=closed)

    def where(self, name: str) -> str:
        """The file `name` as messages show it."""
        return visible(self._below(name) if name else self.uri)

    def _below(self, name: str) -> str:
        # The revision of a repository stands at the end.
        return str(HubAddress.parse(self.uri).child(name)) if self._is_hub else f"{self.uri}/{name}"

    def exists(self, name: str) -> bool:
        """Whether the file `name` exists. Unlike fsspec's, raises without an answer."""
        return self.info_if_there(name) is not None

    def info_if_there(self, name: str) -> FileInfo | None:
        """As `info`, for a file that others may delete."""
        return self._attempt(lambda: self._backend.info(name), name, writing=False)

    def info(self, name: str) -> FileInfo:
        """Size, the store's own checksum, and age of the file `name`."""
        info = self.info_if_there(name)
        if info is None:
            raise explain_os_error(FileNotFoundError(), self.where(name), writing=False)
        return info

    def size(self, name: str) -> int:
        """Bytes of the file `name`."""
        return self.info(name).size

    def files(self) -> dict[str, FileInfo]:
        """Those directly in this directory, sorted by name, from one listing; no temporary ones."""
        return {name: info for name, info in self._listing().items() if not is_temporary(name)}

    def temporaries(self) -> dict[str, FileInfo]:
        """Unfinished files directly in this directory, of running and of killed writers."""
        return {name: info for name, info in self._listing().items() if is_temporary(name)}

    def sizes(self) -> dict[str, int]:
        """As `files`, with their bytes only."""
        return {name: info.size for name, info in self.files().items()}

    def names(self) -> list[str]:
        """As `files`, their names only."""
        return list(self.files())

    def read(self, name: str) -> bytes:
        """All bytes of `name`."""
        return self._attempt(lambda: self._backend.read(name), name, writing=False)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of `name`; fewer bytes than that is a CorruptShard."""
        if stop <= start:
            return b""
        read = self._backend.read_range
        data = self._attempt(lambda: read(name, start, stop), name, writing=False)
        if len(data) != stop - start:
            problem = f"ends after {start + len(data)} bytes where {stop} were expected"
            fix = "restore the file, or run the stage that wrote it with --force"
            raise CorruptShard(problem, where=self.where(name), fix=fix)
        return data

    def blocks(self, name: str) -> Iterator[bytes]:
        """The bytes of `name` in order, a few megabytes at a time."""
        with self._explained(name, writing=False):
            yield from self._backend.blocks(name)

    def sha256(self, name: str) -> str:
        """Hex SHA-256 of `name`, read in blocks."""
        checksum = hashlib.sha256()
        for block in self.blocks(name):
            checksum.update(block)
        return checksum.hexdigest()

    def write(self, name: str, data: bytes) -> FileInfo:
        """Create or replace `name` atomically; returns what the store then says of it.

        A remote store's size and checksum have been compared with `data` when this returns.
        """
        return self._attempt(lambda: self._backend.write(name, data), name, writing=True)

    def create(self, name: str, data: bytes) -> bytes:
        """Write `name` unless something is there; returns the bytes that are there afterwards.

        Of several writers at once, one succeeds, and all get its bytes. A writer whose answer was
        lost finds its own bytes at the next attempt: put something unique into the data to tell
        writers apart.
        """
        create = self._backend.create
        while not self._attempt(lambda: create(name, data), name, writing=True):
            there = self._attempt(lambda: self._read_if_there(name), name, writing=False)
            if there is not None:  # else it has been deleted meanwhile
                return there
        return data

    def _read_if_there(self, name: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return self._backend.read(name)
        return None

    def put_file(self, name: str, local_path: str | os.PathLike[str]) -> FileInfo:
        """As `write`, with a local file's bytes, without holding them in memory."""
        return self._attempt(lambda: self._backend.put_file(name, local_path), name, writing=True)

    def create_from(self, name: str, local_path: str | os.PathLike[str]) -> bool:
        """Write `name` with a local file's bytes unless something is there.

        Returns whether those bytes are there afterwards: False for another writer's.
        """
        create = self._backend.create_from
        while not self._attempt(lambda: create(name, local_path), name, writing=True):
            if (info := self.info_if_there(name)) is not None:  # else deleted meanwhile
                own = Path(local_path)
                return info.size == own.stat().st_size and self.sha256(name) == _sha256_of(own)
        return True

    def delete(self, name: str) -> None:
        """Remove the file `name`; absent is fine."""
        with self._explained(name, writing=True), suppress(FileNotFoundError):
            self._backend.attempt(lambda: self._backend.delete(name), self.where(name))

    def delete_tree(self) -> None:
        """Remove this directory and all below it; absent is fine."""
        with self._explained("", writing=True), suppress(FileNotFoundError):
            self._backend.attempt(self._backend.delete_tree, self.uri)

    def subdirectories(self) -> list[str]:
        """Sorted names of the directories directly in this one."""
        return self._attempt(self._backend.directories, "", writing=False)

    def others(self) -> dict[str, str]:
        """What is directly in this directory and neither a file nor a directory, and what it is:
        named pipes, devices, links to directories, links that lead nowhere or out of the run."""
        return self._attempt(self._backend.others, "", writing=False)

    def sweep(self) -> dict[str, FileInfo]:
        """Remove temporary files that a killed writer left in this directory over an hour ago.

        Younger ones may belong to a running writer, on this machine or on another. Their age is
        measured by the store's clock. Returns the other files, as `files` does.
        """
        listing = self._listing()
        temporaries = {name: info for name, info in listing.items() if is_temporary(name)}
        now = self.now() if temporaries else 0.0
        for name, info in temporaries.items():
            if info.modified is not None and now - info.modified > _ABANDONED_SECONDS:
                self.delete(name)
        return {name: info for name, info in listing.items() if name not in temporaries}

    def now(self) -> float:
        """Seconds since 1970 by the clock that dates this directory's files."""
        name = f".clock.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        modified = self.write(name, b"").modified
        self.delete(name)
        return time.time() if modified is None else modified

    def local_path(self, name: str) -> Path:
        """Where a local directory has the file `name`; "." is the directory itself."""
        assert self.is_local, f"{self.uri} is not local"
        return self._directory / name

    def _listing(self) -> dict[str, FileInfo]:
        return dict(sorted(self._attempt(self._backend.files, "", writing=False).items()))

    def _attempt(self, call: Callable[[], T], name: str, *, writing: bool) -> T:
        with self._explained(name, writing=writing):
            return self._backend.attempt(call, self.where(name))

    @contextmanager
    def _explained(self, name: str, *, writing: bool) -> Iterator[None]:
        """Turn what the storage raises into a StoreError."""
        try:
            yield
        except Eagle3Error:
            raise
        except OSError as error:
            raise explain_os_error(error, self.where(name), writing=writing) from error
        except Exception as error:
            # Remote filesystems have no common exception class; on a disk the rest is our own bug.
            if self.is_local:
                raise
            raise explain_remote_error(error, self.where(name)) from error


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def as_directory(location: Location, names: Sequence[str]) -> Iterator[Path]:
    """The named files as a local directory, for libraries that read paths.

    That is the location itself when it is local, otherwise copies for the time of the block.
    """
    if location.is_local:
        for name in names:
            location.exists(name)  # raises for a link that leads out of a run
        yield location.local_path(".")
        return
    with tempfile.TemporaryDirectory(prefix="eagle3-") as folder:
        for name in names:
            if location.exists(name):
                with open(Path(folder) / name, "wb") as file:
                    file.writelines(location.blocks(name))
        yield Path(folder)
