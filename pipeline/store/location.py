"""A directory, local or remote, with the few operations that the stages need.

    run = Location("gs://bucket/run")      # or "runs/run", "file:///…", "memory://…"
    run.child("synth").write("begin.json", b"{}")

A name becomes visible only with all of its bytes: local files are written beside their final
name, flushed to the disk and renamed; object stores make an object visible when its one upload ends.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.errors import CorruptShard, Eagle3Error
from pipeline.records import digest
from pipeline.store.failures import explain_os_error, explain_remote_error, open_filesystem

_BLOCK = 16 << 20


class Location:
    """A directory at `uri`; it need not exist before the first write.

    Every failure of the storage below is a StoreError that names the file and what to do.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/") or uri
        path = uri.removeprefix("file://").removeprefix("local://")
        self.is_local = "://" not in path
        self._directory = Path(path)
        self._fs: Any = None
        self._root = ""
        if not self.is_local:
            self._fs, self._root = open_filesystem(self.uri)

    def __repr__(self) -> str:
        return f"Location({self.uri!r})"

    def child(self, name: str) -> Location:
        """The directory `name` below this one."""
        return Location(f"{self.uri}/{name}")

    def where(self, name: str) -> str:
        """How messages call the file `name`."""
        return f"{self.uri}/{name}"

    def exists(self, name: str) -> bool:
        """Whether the file `name` is there. Unlike fsspec's, raises when that cannot be told."""
        return self._info(name) is not None

    def size(self, name: str) -> int:
        """Bytes of the file `name`."""
        info = self._info(name)
        if info is None:
            raise explain_os_error(FileNotFoundError(), self.where(name), writing=False)
        return int(info["size"])

    def sizes(self) -> dict[str, int]:
        """Name → bytes of the files directly in this directory, from one listing; temporary files are left out."""
        with self._explained("", writing=False):
            found = self._list_local() if self.is_local else self._list_remote()
        return {name: size for name, size in sorted(found) if not _is_temporary(name)}

    def names(self) -> list[str]:
        """Sorted names of the files directly in this directory."""
        return list(self.sizes())

    def read(self, name: str) -> bytes:
        """All bytes of `name`."""
        with self._explained(name, writing=False):
            if self.is_local:
                return (self._directory / name).read_bytes()
            return bytes(self._fs.cat_file(self._key(name)))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of `name`; fewer bytes than that is a CorruptShard."""
        if stop <= start:
            return b""
        with self._explained(name, writing=False):
            if self.is_local:
                with open(self._directory / name, "rb") as file:
                    file.seek(start)
                    data = file.read(stop - start)
            else:
                data = bytes(self._fs.cat_file(self._key(name), start=start, end=stop))
        if len(data) != stop - start:
            problem = f"ends after {start + len(data)} bytes where {stop} were expected"
            raise CorruptShard(problem, where=self.where(name), fix="restore the file, or run the stage that wrote it with --force")
        return data

    def sha256(self, name: str) -> str:
        """Hex SHA-256 of `name`, read in blocks."""
        checksum = hashlib.sha256()
        with self._explained(name, writing=False), self._open(name) as file:
            while block := file.read(_BLOCK):
                checksum.update(block)
        return checksum.hexdigest()

    def write(self, name: str, data: bytes) -> None:
        """Create or replace `name` atomically."""
        with self._explained(name, writing=True):
            if self.is_local:
                _replace(self._directory / name, lambda file: _write_all(file, data))
            else:
                self._fs.pipe_file(self._key(name), data)

    def put_file(self, name: str, local_path: str | os.PathLike[str]) -> None:
        """Create or replace `name` atomically with a local file's bytes, without holding them in memory."""
        with self._explained(name, writing=True):
            if self.is_local:
                with open(local_path, "rb") as source:
                    _replace(self._directory / name, lambda file: shutil.copyfileobj(source, file, _BLOCK))
            else:
                self._fs.put_file(os.fspath(local_path), self._key(name))

    def delete(self, name: str) -> None:
        """Remove the file `name`; absent is fine."""
        with self._explained(name, writing=True), suppress(FileNotFoundError):
            if self.is_local:
                (self._directory / name).unlink()
            else:
                self._fs.rm_file(self._key(name))

    def delete_tree(self) -> None:
        """Remove this directory and all below it; absent is fine."""
        with self._explained("", writing=True), suppress(FileNotFoundError):
            if self.is_local:
                shutil.rmtree(self._directory)
            else:
                self._fs.rm(self._root, recursive=True)

    def subdirectories(self) -> list[str]:
        """Sorted names of the directories directly in this one."""
        with self._explained("", writing=False), suppress(FileNotFoundError):
            if self.is_local:
                return sorted(path.name for path in self._directory.iterdir() if path.is_dir())
            self._fs.invalidate_cache()
            return sorted(_last(entry["name"]) for entry in self._fs.ls(self._root, detail=True) if entry["type"] == "directory")
        return []

    def sweep(self) -> None:
        """Remove temporary files that a killed writer left in this directory."""
        if not self.is_local:
            return
        with self._explained("", writing=True), suppress(FileNotFoundError):
            for path in self._directory.iterdir():
                if _is_temporary(path.name):
                    path.unlink()

    def local_path(self, name: str) -> Path:
        """A path that holds the bytes of `name`: the file itself, or a copy in the user's cache.

        Copies are kept by URI, size and the store's own checksum, so a replaced object is fetched anew.
        """
        if self.is_local:
            return self._directory / name
        info = self._info(name)
        if info is None:
            raise explain_os_error(FileNotFoundError(), self.where(name), writing=False)
        version = [self.where(name), info["size"], str(_checksum(info))]
        copy = cache_directory() / "objects" / digest(version)[:32] / name
        if not copy.exists():
            with self._explained(name, writing=False), self._open(name) as source:
                _replace(copy, lambda file: shutil.copyfileobj(source, file, _BLOCK))
        return copy

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _open(self, name: str) -> BinaryIO:
        file: BinaryIO = open(self._directory / name, "rb") if self.is_local else self._fs.open(self._key(name), "rb", cache_type="readahead")  # noqa: SIM115
        return file

    def _info(self, name: str) -> dict[str, Any] | None:
        with self._explained(name, writing=False), suppress(FileNotFoundError):
            if self.is_local:
                return {"size": os.stat(self._directory / name).st_size}
            self._fs.invalidate_cache()
            info: dict[str, Any] = self._fs.info(self._key(name))
            return info
        return None

    def _list_local(self) -> list[tuple[str, int]]:
        with suppress(FileNotFoundError):
            return [(path.name, path.stat().st_size) for path in self._directory.iterdir() if path.is_file()]
        return []

    def _list_remote(self) -> list[tuple[str, int]]:
        self._fs.invalidate_cache()
        with suppress(FileNotFoundError):
            return [(_last(entry["name"]), int(entry["size"])) for entry in self._fs.ls(self._root, detail=True) if entry["type"] == "file"]
        return []

    @contextmanager
    def _explained(self, name: str, *, writing: bool) -> Iterator[None]:
        """Turn what the storage raises into a StoreError."""
        where = self.where(name) if name else self.uri
        try:
            yield
        except Eagle3Error:
            raise
        except OSError as error:
            raise explain_os_error(error, where, writing=writing) from error
        except Exception as error:
            # Remote filesystems have no common exception class; on a local disk the rest is our own bug.
            if self.is_local:
                raise
            raise explain_remote_error(error, where) from error


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/eagle3, or ~/.cache/eagle3."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "eagle3"


def _replace(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Write a temporary file beside `path`, flush it to the disk and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _write_all(file: BinaryIO, data: bytes) -> None:
    file.write(data)


def _sync_directory(directory: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def _last(key: str) -> str:
    return key.rstrip("/").rsplit("/", 1)[-1]


def _checksum(info: dict[str, Any]) -> Any:
    """What changes when an object's bytes change; the name of the field differs between stores."""
    fields = ("md5Hash", "crc32c", "etag", "ETag", "generation", "mtime", "LastModified", "created")
    return next((info[field] for field in fields if info.get(field)), "")
