"""A directory on an object store, or on any other fsspec filesystem.

An object becomes visible when its one upload ends. What the store then reports — size, and CRC32C
or MD5 where it has one — is compared with what was sent before the write counts as done.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipeline.config import store_timeout_seconds
from pipeline.config.credentials import holds_credentials
from pipeline.errors import Eagle3Error, MissingPackage, StoreError, StoreUnavailable
from pipeline.store.backend import (
    BLOCK,
    RETRY_LATER,
    AlteredUpload,
    Checksum,
    FileInfo,
    is_transient,
    retry,
    status_of,
)

T = TypeVar("T")
#: A request may take this many timeouts in all: an upload that the store does not read has no
#: silence that a client could see.
_REQUEST_TIMEOUTS = 10
#: Protocols whose store can create a file only if none exists: Google Cloud Storage by its
#: generation, S3 by If-None-Match (s3fs from 2025.7 on).
_EXCLUSIVE = frozenset({"gs", "gcs", "s3", "memory"})
#: fsspec's store in memory looks whether there is a file, and creates it later.
_MEMORY_LOCK = threading.RLock()
_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "abfs": "adlfs", "az": "adlfs"}


class Remote:
    """The directory at `uri`."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._fs: Any
        self._fs, self._root = open_filesystem(uri)

    def attempt(self, call: Callable[[], T], where: str) -> T:
        """Until it succeeds, fails for good, or has been tried for long enough (see `retry`)."""
        with _MEMORY_LOCK if self._uri.startswith("memory://") else nullcontext():
            return retry(call, where)

    def info(self, name: str) -> FileInfo | None:
        self._fs.invalidate_cache()
        with suppress(FileNotFoundError):
            return _info(self._fs.info(self._key(name)))
        return None

    def files(self) -> dict[str, FileInfo]:
        return {_last(entry["name"]): _info(entry) for entry in self._entries("file")}

    def directories(self) -> list[str]:
        return sorted(_last(entry["name"]) for entry in self._entries("directory"))

    def others(self) -> dict[str, str]:
        return {}

    def read(self, name: str) -> bytes:
        return bytes(self._fs.cat_file(self._key(name)))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        return bytes(self._fs.cat_file(self._key(name), start=start, end=stop))

    def blocks(self, name: str) -> Iterator[bytes]:
        """The next block is on its way while the caller works on this one."""
        where = f"{self._uri}/{name}"
        info = self.attempt(lambda: self.info(name), where)
        if info is None:
            raise FileNotFoundError(name)
        size = info.size

        def block(start: int) -> bytes:
            stop = min(start + BLOCK, size)
            return self.attempt(lambda: self.read_range(name, start, stop), where)

        with ThreadPoolExecutor(1, thread_name_prefix="block") as pool:
            coming = pool.submit(block, 0) if size else None
            for following in range(BLOCK, size + BLOCK, BLOCK) if coming else ():
                assert coming
                data = coming.result()
                coming = pool.submit(block, following) if following < size else None
                yield data

    def write(self, name: str, data: bytes) -> FileInfo:
        self._upload(lambda: self._fs.pipe_file(self._key(name), data))
        return self._arrived(name, len(data), lambda: (data,))

    def create(self, name: str, data: bytes) -> bool:
        protocol = self._uri.split("://", 1)[0]
        if protocol not in _EXCLUSIVE:
            problem = f"{protocol}:// cannot refuse to overwrite what another writer has committed"
            fix = f"use a local directory or one of {', '.join(sorted(_EXCLUSIVE))}"
            raise StoreError(problem, where=f"{self._uri}/{name}", fix=fix)
        return self._create(
            partial(self._fs.pipe_file, self._key(name), data, mode="create"),
            lambda: self._arrived(name, len(data), lambda: (data,)),
        )

    def create_from(self, name: str, path: str | os.PathLike[str]) -> bool:
        """Stores outside _EXCLUSIVE look whether there is a file, and create it later."""
        return self._create(
            partial(self._fs.put_file, os.fspath(path), self._key(name), mode="create"),
            lambda: self._arrived(name, os.path.getsize(path), lambda: _blocks_of(path)),
        )

    def _create(self, upload: Callable[[], object], check: Callable[[], object]) -> bool:
        try:
            self._upload(upload)
        except Exception as error:
            if _is_taken(error):
                return False
            raise
        check()
        return True

    def put_file(self, name: str, path: str | os.PathLike[str]) -> FileInfo:
        self._upload(lambda: self._fs.put_file(os.fspath(path), self._key(name)))
        return self._arrived(name, os.path.getsize(path), lambda: _blocks_of(path))

    def delete(self, name: str) -> None:
        self._fs.rm_file(self._key(name))

    def delete_tree(self) -> None:
        self._fs.rm(self._root, recursive=True)

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _entries(self, kind: str) -> list[dict[str, Any]]:
        self._fs.invalidate_cache()
        with suppress(FileNotFoundError):
            entries = self._fs.ls(self._root, detail=True)
            return [entry for entry in entries if entry["type"] == kind]
        return []

    def _upload(self, call: Callable[[], object]) -> None:
        """Run `call`; raises AlteredUpload where the store has lost an upload in parts.

        Such a store answers "not found" or "gone"; if its bucket exists, the upload is retried.
        """
        try:
            call()
        except Exception as error:
            is_lost = isinstance(error, FileNotFoundError) or status_of(error) == 410
            if is_lost and self._fs.exists(self._root.split("/", 1)[0]):
                raise AlteredUpload("the upload was forgotten half-way") from error
            raise

    def _arrived(self, name: str, size: int, sent: Callable[[], Iterable[bytes]]) -> FileInfo:
        info = self.info(name)
        if info is None:
            raise AlteredUpload("is not there after its upload")
        if info.size != size:
            raise AlteredUpload(f"arrived with {info.size} bytes, {size} were sent")
        if info.checksum:
            checksum = Checksum(info.checksum.partition(":")[0])
            for block in sent():
                checksum.update(block)
            if info.checksum != str(checksum):
                raise AlteredUpload(f"arrived with {info.checksum}, {checksum} was sent")
        return info


def _is_taken(error: Exception) -> bool:
    """Whether a file was not created as there is one: gcsfs says so, s3fs passes on S3's 412."""
    response = getattr(error.__cause__, "response", None)
    status = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    return isinstance(error, FileExistsError) or status.get("HTTPStatusCode") == 412


def explain_remote_error(error: Exception, where: str) -> StoreError:
    """A StoreError for an exception of a remote filesystem that is no OSError."""
    problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if is_transient(error):
        return StoreUnavailable(problem, where=where, fix=RETRY_LATER)
    fix = "check credentials, network and bucket, then run the same command again"
    return StoreError(problem, where=where, fix=fix)


def open_filesystem(uri: str) -> tuple[Any, str]:
    """fsspec's filesystem of `uri` and the path in it."""
    import fsspec  # type: ignore[import-untyped]

    if holds_credentials(uri):  # of a command; a configuration has been refused before
        problem, fix = (
            "holds a key or a password",
            "take it out, and let the store's client have it",
        )
        raise StoreError(problem, where="the address of the run or the head", fix=fix)
    protocol, where = uri.split("://", 1)[0], f"run.uri {uri}"
    try:
        options = _gcs_options() if protocol in ("gs", "gcs") else {}
        filesystem, root = fsspec.core.url_to_fs(uri, **options)
    except ImportError as error:
        package = _PACKAGES.get(protocol, f"the fsspec package for {protocol}://")
        problem = f"{protocol}:// needs {package}: {error}"
        raise MissingPackage(problem, where=where, fix=f"pip install {package}") from error
    except Eagle3Error:  # of the settings, such as a time limit that is no number
        raise
    except ValueError as error:
        fix = "use a local path, file://, gs:// or another fsspec protocol"
        raise StoreError(str(error), where=where, fix=fix) from error
    except Exception as error:
        raise explain_remote_error(error, uri) from error
    return filesystem, str(root).rstrip("/")


def _gcs_options() -> dict[str, Any]:
    """A connection that has been silent for too long is dropped, and can then be tried again."""
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        # gcsfs first asks for the bucket's storage layout over gRPC; an emulator never answers,
        # and each call waits 60 s.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import aiohttp

    # gcsfs logs each failure with a traceback; they are raised as well, and said here in one line.
    logger = logging.getLogger("gcsfs")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)
    silence = store_timeout_seconds()
    total = _REQUEST_TIMEOUTS * silence
    timeout = aiohttp.ClientTimeout(total=total, sock_connect=silence, sock_read=silence)
    return {"requests_timeout": timeout}


def _info(entry: dict[str, Any]) -> FileInfo:
    reported = {"crc32c": entry.get("crc32c"), "md5": entry.get("md5Hash")}
    checksum = next((f"{kind}:{value}" for kind, value in reported.items() if value), "")
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
