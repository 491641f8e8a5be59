"""What a Location asks of the storage below it: disk.py and remote.py are the two answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")

#: Bytes that are read or written at a time where a file need not be in memory whole.
BLOCK = 16 << 20


class FileInfo(NamedTuple):
    """What the storage knows of a file without reading it."""

    size: int
    checksum: str = ""  # "crc32c:…" or "md5:…" as the store reports it; empty where it reports none
    modified: float | None = None  # seconds since 1970; None where the store does not say


class Backend(Protocol):
    """Plain files in one directory. Missing files raise FileNotFoundError, other failures whatever the storage raises."""

    def attempt(self, call: Callable[[], T], where: str) -> T: ...  # with or without repetition
    def info(self, name: str) -> FileInfo | None: ...
    def files(self) -> dict[str, FileInfo]: ...  # temporary ones included
    def directories(self) -> list[str]: ...
    def read(self, name: str) -> bytes: ...
    def read_range(self, name: str, start: int, stop: int) -> bytes: ...  # shorter when the file is
    def blocks(
        self, name: str
    ) -> Iterator[bytes]: ...  # each read that fails is repeated by itself
    def write(self, name: str, data: bytes) -> FileInfo: ...
    def put_file(self, name: str, path: str | os.PathLike[str]) -> FileInfo: ...
    def delete(self, name: str) -> None: ...
    def delete_tree(self) -> None: ...
