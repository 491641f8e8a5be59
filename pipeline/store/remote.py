"""A directory on an object store, or on any other fsspec filesystem.

An object becomes visible when its one upload ends. What the store then reports — size, and CRC32C or
MD5 where it has one — is compared with what was sent before the write counts as done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from pipeline.store.backend import BLOCK, FileInfo
from pipeline.store.checksums import Checksum
from pipeline.store.failures import open_filesystem
from pipeline.store.retry import AlteredUpload, persist, status_of

T = TypeVar("T")


class Remote:
    """The directory at `uri`."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._fs: Any
        self._fs, self._root = open_filesystem(uri)

    def attempt(self, call: Callable[[], T], where: str) -> T:
        """Until it succeeds, fails for good, or has been tried for long enough (see retry.py)."""
        return persist(call, where)

    def info(self, name: str) -> FileInfo | None:
        self._fs.invalidate_cache()
        with suppress(FileNotFoundError):
            return _info(self._fs.info(self._key(name)))
        return None

    def files(self) -> dict[str, FileInfo]:
        return {
            _last(entry["name"]): _info(entry)
            for entry in self._entries()
            if entry["type"] == "file"
        }

    def directories(self) -> list[str]:
        return sorted(
            _last(entry["name"]) for entry in self._entries() if entry["type"] == "directory"
        )

    def read(self, name: str) -> bytes:
        return bytes(self._fs.cat_file(self._key(name)))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        return bytes(self._fs.cat_file(self._key(name), start=start, end=stop))

    def blocks(self, name: str) -> Iterator[bytes]:
        """The next block is on its way while the caller works on this one."""
        info = self.attempt(lambda: self.info(name), self._where(name))
        if info is None:
            raise FileNotFoundError(name)

        def block(start: int) -> bytes:
            return self.attempt(
                lambda: self.read_range(name, start, min(start + BLOCK, info.size)),
                self._where(name),
            )

        with ThreadPoolExecutor(1, thread_name_prefix="block") as pool:
            coming = pool.submit(block, 0) if info.size else None
            for following in range(BLOCK, info.size + BLOCK, BLOCK) if coming else ():
                assert coming
                data = coming.result()
                coming = pool.submit(block, following) if following < info.size else None
                yield data

    def write(self, name: str, data: bytes) -> FileInfo:
        self._upload(lambda: self._fs.pipe_file(self._key(name), data))
        return self._arrived(name, len(data), lambda: (data,))

    def put_file(self, name: str, path: str | os.PathLike[str]) -> FileInfo:
        self._upload(lambda: self._fs.put_file(os.fspath(path), self._key(name)))
        return self._arrived(name, os.path.getsize(path), lambda: _blocks_of(path))

    def delete(self, name: str) -> None:
        self._fs.rm_file(self._key(name))

    def delete_tree(self) -> None:
        self._fs.rm(self._root, recursive=True)

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _where(self, name: str) -> str:
        return f"{self._uri}/{name}"

    def _entries(self) -> list[dict[str, Any]]:
        self._fs.invalidate_cache()
        with suppress(FileNotFoundError):
            return list(self._fs.ls(self._root, detail=True))
        return []

    def _upload(self, call: Callable[[], object]) -> None:
        """A store that has forgotten an upload in parts calls it not found, or gone; with its bucket there, it is begun anew."""
        try:
            call()
        except Exception as error:
            is_lost = isinstance(error, FileNotFoundError) or status_of(error) == 410
            if is_lost and self._fs.exists(self._root.split("/", 1)[0]):
                raise AlteredUpload("the upload was forgotten half-way") from error
            raise

    def _arrived(self, name: str, size: int, sent: Callable[[], Iterable[bytes]]) -> FileInfo:
        found = self.info(name)
        if found is None:
            raise AlteredUpload("is not there after its upload")
        if found.size != size:
            raise AlteredUpload(f"arrived with {found.size} bytes, {size} were sent")
        if found.checksum:
            own = Checksum(found.checksum.partition(":")[0])
            for block in sent():
                own.update(block)
            if found.checksum != str(own):
                raise AlteredUpload(f"arrived with {found.checksum}, {own} was sent")
        return found


def _info(entry: dict[str, Any]) -> FileInfo:
    reported = (
        (kind, entry.get(field)) for kind, field in (("crc32c", "crc32c"), ("md5", "md5Hash"))
    )
    checksum = next((f"{kind}:{value}" for kind, value in reported if value), "")
    return FileInfo(int(entry["size"]), checksum, _modified(entry))


def _modified(entry: dict[str, Any]) -> float | None:
    """Filesystems name it differently and give a datetime, seconds or ISO 8601."""
    for name in ("mtime", "updated", "LastModified", "last_modified", "created"):
        value = entry.get(name)
        if isinstance(value, str):
            with suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None


def _blocks_of(path: str | os.PathLike[str]) -> Iterator[bytes]:
    with open(Path(path), "rb", buffering=0) as file:
        while block := file.read(BLOCK):
            yield block


def _last(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]
