"""A directory of the local filesystem.

Files appear under their name with all of their bytes, on the disk, or not at all.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from pipeline.documents import open_file, require_file, require_inside
from pipeline.store.backend import BLOCK, FileInfo

T = TypeVar("T")


class Disk:
    """A directory that need not exist before the first write.

    What is created in `private` and below it is readable by this user alone (see `make_directory`).
    Links that lead out of `closed` are refused, and so is what is no file, before it is opened.
    """

    def __init__(
        self, directory: Path, private: Path | None = None, closed: Path | None = None
    ) -> None:
        self._directory, self._private, self._closed = directory, private, closed

    def attempt(self, call: Callable[[], T], where: str) -> T:
        """Once: what a local disk refuses, it refuses again."""
        return call()

    def info(self, name: str) -> FileInfo | None:
        with suppress(FileNotFoundError):
            return _info(self._path(name))
        return None

    def files(self) -> dict[str, FileInfo]:
        files: dict[str, FileInfo] = {}
        for entry in self._entries():
            # A writer may rename or remove its temporary file meanwhile.
            with suppress(FileNotFoundError):
                if entry.is_file() and not self._problem(entry):
                    status = entry.stat()
                    files[entry.name] = FileInfo(status.st_size, "", status.st_mtime)
        return files

    def directories(self) -> list[str]:
        return sorted(
            entry.name for entry in self._entries() if entry.is_dir() and not self._problem(entry)
        )

    def others(self) -> dict[str, str]:
        return {entry.name: what for entry in self._entries() if (what := self._problem(entry))}

    def read(self, name: str) -> bytes:
        with self._open(name) as file:
            return file.read()

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        with self._open(name) as file:
            return os.pread(file.fileno(), stop - start, start)

    def blocks(self, name: str) -> Iterator[bytes]:
        with self._open(name) as file:
            while block := file.read(BLOCK):
                yield block

    def write(self, name: str, data: bytes) -> FileInfo:
        path = self._path(name)
        replace_file(path, lambda file: file.write(data), private=self._private)
        return _info(path)

    def create(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        return create_file(path, lambda file: file.write(data), private=self._private)

    def put_file(self, name: str, path: str | os.PathLike[str]) -> FileInfo:
        with open(path, "rb") as source:
            copy = self._path(name)
            fill = partial(shutil.copyfileobj, source, length=BLOCK)
            replace_file(copy, fill, private=self._private)
        return _info(copy)

    def create_from(self, name: str, path: str | os.PathLike[str]) -> bool:
        with open(path, "rb") as source:
            fill = partial(shutil.copyfileobj, source, length=BLOCK)
            return create_file(self._path(name), fill, private=self._private)

    def delete(self, name: str) -> None:
        (self._directory / name).unlink()

    def delete_tree(self) -> None:
        shutil.rmtree(self._directory)

    def _path(self, name: str) -> Path:
        """Raises NotAFile where links lead out, FileNotFoundError never."""
        path = self._directory / name
        if self._closed is not None:
            require_inside(path, self._closed)
        return path

    def _open(self, name: str) -> BinaryIO:
        return open_file(self._path(name))

    def _problem(self, entry: os.DirEntry[str]) -> str:
        """Why neither a file nor a directory of ours has that name; empty where one has."""
        try:
            if entry.is_symlink():
                self._path(entry.name)
                if entry.is_dir():
                    return "is a link to a directory"
            elif entry.is_dir():
                return ""
            require_file(entry.stat())
        except FileNotFoundError:  # removed meanwhile, or a link to nothing
            return "is a link that leads nowhere" if entry.is_symlink() else ""
        except OSError as error:
            return str(error.strerror)
        return ""

    def _entries(self) -> list[os.DirEntry[str]]:
        with suppress(FileNotFoundError), os.scandir(self._directory) as entries:
            return list(entries)
        return []


def is_temporary(name: str) -> bool:
    """Whether `name` is that of a file which `replace_file` had not finished."""
    return name.startswith(".") and name.endswith(".tmp")


def make_directory(directory: Path, private: Path | None = None) -> None:
    """Create it, with its parents, by the process's umask; from `private` down with mode 700.

    Where the directory above has the setgid bit, which is how teams share one, with mode 770.
    """
    if directory.is_dir():
        return
    make_directory(directory.parent, private)
    is_private = private is not None and directory.is_relative_to(private)
    mode = _mode(directory.parent, 0o700, 0o770) if is_private else 0o777
    directory.mkdir(mode, exist_ok=True)


def _mode(directory: Path, user_mode: int, group_mode: int) -> int:
    return group_mode if directory.stat().st_mode & stat.S_ISGID else user_mode


def replace_file(
    path: Path,
    fill: Callable[[BinaryIO], object],
    *,
    durable: bool = True,
    private: Path | None = None,
) -> None:
    """Write a temporary file beside `path`, flush it to the disk if `durable`, and rename it.

    With `private` it is readable by this user alone, like its directories from there down.
    """
    with _temporary(path, fill, private, durable=durable) as temporary:
        os.replace(temporary, path)
    if durable:
        _sync_directory(path.parent)


def create_file(
    path: Path, fill: Callable[[BinaryIO], object], *, private: Path | None = None
) -> bool:
    """Write a temporary file beside `path` and link it to that name, unless something is there.

    Of several concurrent calls, on one machine or on several, one succeeds. Returns whether this
    one did. Raises OSError (EOPNOTSUPP) where the file system has no hard links.
    """
    with _temporary(path, fill, private, durable=True) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP)) from error
            raise
    _sync_directory(path.parent)
    return True


#: What file systems without hard links say, among them FAT and some FUSE mounts.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


@contextmanager
def _temporary(
    path: Path, fill: Callable[[BinaryIO], object], private: Path | None, *, durable: bool
) -> Iterator[Path]:
    """A finished temporary file beside `path`, until the end of the block at most."""
    make_directory(path.parent, private)
    mode = _mode(path.parent, 0o600, 0o660) if private else 0o666
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
            fill(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        yield temporary
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _info(path: Path) -> FileInfo:
    status = os.stat(path)
    return FileInfo(status.st_size, "", status.st_mtime)


def _sync_directory(directory: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
