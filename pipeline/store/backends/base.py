"""What a Location asks of disk.py or remote.py below it, and what these two share."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

from pipeline.errors import StoreError, StoreUnavailable
from pipeline.store.backends.retry import RETRY_LATER, is_transient

T = TypeVar("T")

#: Bytes that are read or written at a time where a file need not be in memory whole.
BLOCK = 16 << 20

_ELSEWHERE = "or set run.uri=… to another directory or bucket"


class FileInfo(NamedTuple):
    """What the storage knows of a file without reading it."""

    size: int
    checksum: str = ""  # "crc32c:…" or "md5:…" as the store reports it; empty where it reports none
    modified: float | None = None  # seconds since 1970; None where the store does not say


class Backend(Protocol):
    """Plain files in one directory.

    Missing files raise FileNotFoundError, other failures whatever the storage raises. `files`
    lists temporary ones too, `read_range` gives fewer bytes where the file ends, and `blocks`
    repeats each read that fails by itself.
    """

    def attempt(self, call: Callable[[], T], where: str) -> T: ...  # with or without repetition
    def info(self, name: str) -> FileInfo | None: ...
    def files(self) -> dict[str, FileInfo]: ...
    def directories(self) -> list[str]: ...
    def read(self, name: str) -> bytes: ...
    def read_range(self, name: str, start: int, stop: int) -> bytes: ...
    def blocks(self, name: str) -> Iterator[bytes]: ...
    def write(self, name: str, data: bytes) -> FileInfo: ...
    def create(self, name: str, data: bytes) -> bool: ...  # False: something is there, and stays
    def put_file(self, name: str, path: str | os.PathLike[str]) -> FileInfo: ...
    def delete(self, name: str) -> None: ...
    def delete_tree(self) -> None: ...


class Checksum:
    """A checksum that grows with the bytes it is shown: "crc32c:yZRlqg==", "md5:…", "sha256:<hex>".

    CRC32C runs at memory speed, SHA-256 at a tenth of it.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._state: Any
        if kind == "crc32c":
            import google_crc32c  # comes with gcsfs

            self._state = google_crc32c.Checksum()  # type: ignore[no-untyped-call]
        else:
            self._state = hashlib.new(kind, usedforsecurity=kind != "md5")

    def update(self, data: bytes) -> None:
        self._state.update(data)

    def __str__(self) -> str:
        """Google Cloud Storage writes base64 of the big-endian bytes."""
        if self.kind == "sha256":
            return f"sha256:{self._state.hexdigest()}"
        return f"{self.kind}:{base64.b64encode(self._state.digest()).decode()}"


def explain_os_error(error: OSError, where: str, *, writing: bool) -> StoreError:
    """A StoreError for what the operating system, or a remote filesystem in its words, refused."""
    problem, fix = _problem_and_fix(error, writing=writing)
    passes = fix is RETRY_LATER
    return (StoreUnavailable if passes else StoreError)(problem, where=where, fix=fix)


def _problem_and_fix(error: OSError, *, writing: bool) -> tuple[str, str]:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        problem = "no space left" if error.errno == errno.ENOSPC else "disk quota exceeded"
        return problem, f"free some space and run the same command again, {_ELSEWHERE}"
    if error.errno == errno.EOPNOTSUPP:
        problem = "this file system has no hard links, so two writers could overwrite each other"
        return problem, "set run.uri=… to another directory or bucket"
    if error.errno == errno.EROFS:
        return "the file system is read-only", f"make it writable, {_ELSEWHERE}"
    refused = f"no permission to {'write' if writing else 'read'}"
    if isinstance(error, PermissionError):
        return refused, f"grant access, {_ELSEWHERE}"
    if isinstance(error, NotADirectoryError | FileExistsError | IsADirectoryError):
        problem = "a file stands where a directory is needed, or the reverse"
        return problem, f"move it away, {_ELSEWHERE}"
    if isinstance(error, FileNotFoundError):
        if writing:
            problem = "cannot be created: no such bucket or directory"
            return problem, f"create the bucket, {_ELSEWHERE}"
        return "no such file", "restore the file, or run the stage that writes it"
    text = " ".join(str(error).split())[:300] or type(error).__name__
    if text.startswith("Forbidden"):  # gcsfs' word for 403, without an errno
        return f"{refused}: {text}", f"grant access, {_ELSEWHERE}"
    failed = f"{'writing' if writing else 'reading'} failed"
    if is_transient(error):
        return f"{failed}: {type(error).__name__}: {text}", RETRY_LATER
    return f"{failed}: {text}", f"check the storage and run the same command again, {_ELSEWHERE}"
