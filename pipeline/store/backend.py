"""What a Location needs from disk.py or remote.py, and which failures of a store are transient.

    attempt ─ transient failure ─ wait w ─ attempt ─ … ─ until EAGLE3_STORE_RETRY_SECONDS are over
                                  w = 0.5, 1, 2, … 30 s, each with up to half a second of jitter

Transient: HTTP 408, 425, 429 and 5xx, refused, dropped and silent connections, unfinished bodies,
uploads whose checksum at the store is not ours, and what gcsfs itself would repeat (an expired
token). Everything else fails at once: a missing bucket or object, a refused permission, a bad
request. gcsfs repeats single requests up to six times itself (half a minute); this policy comes on
top, covers the timeouts that gcsfs does not, and is all there is for filesystems that never repeat.
Every operation it repeats is idempotent.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

from pipeline.config import store_retry_seconds
from pipeline.console import notice
from pipeline.documents import NotAFile
from pipeline.errors import StoreError, StoreUnavailable
from pipeline.telemetry import count

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
    def others(self) -> dict[str, str]: ...  # what is neither, and what it is
    def read(self, name: str) -> bytes: ...
    def read_range(self, name: str, start: int, stop: int) -> bytes: ...
    def blocks(self, name: str) -> Iterator[bytes]: ...
    def write(self, name: str, data: bytes) -> FileInfo: ...
    def create(self, name: str, data: bytes) -> bool: ...  # False: something is there, and stays
    def put_file(self, name: str, path: str | os.PathLike[str]) -> FileInfo: ...
    def create_from(self, name: str, path: str | os.PathLike[str]) -> bool: ...  # as `create`
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
    if isinstance(error, NotAFile):
        return str(error), "move it away, and put the file itself there"
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


#: What helps against a transient failure that did not pass in time.
RETRY_LATER = (
    "run the same command again when the storage is well, "
    "or raise EAGLE3_STORE_RETRY_SECONDS to wait longer for it"
)
#: Seconds; the wait doubles with each failure.
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
_TRANSIENT_STATUS = frozenset({408, 425, 429})


class AlteredUpload(OSError):
    """The store holds other bytes than were sent, or has forgotten an upload that was under way."""


def retry(call: Callable[[], T], where: str) -> T:
    """The result of `call`, repeated while its failures are transient. Raises the last one."""
    import tenacity

    def log_retry(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        failure = f"{type(error).__name__} {' '.join(str(error).split())[:120]}"
        following = f"attempt {state.attempt_number + 1} follows in {state.upcoming_sleep:.1f} s"
        notice("storage", f"{where}: {failure}; {following}")
        count("retries", of="store")

    backoff = tenacity.wait_exponential(multiplier=_FIRST_WAIT, max=_LONGEST_WAIT)
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        wait=backoff + tenacity.wait_random(0, _FIRST_WAIT),
        stop=tenacity.stop_after_delay(store_retry_seconds()),
        before_sleep=log_retry,
        reraise=True,
    )
    return retrying(call)


def is_transient(error: BaseException) -> bool:
    """Whether the same operation may succeed a little later."""
    if isinstance(error, AlteredUpload | ConnectionError | TimeoutError):
        return True
    status = status_of(error)
    if status is not None and (status in _TRANSIENT_STATUS or status >= 500):
        return True
    return _its_library_repeats(error, status)


def _its_library_repeats(error: BaseException, status: int | None) -> bool:
    """What google.auth and gcsfs would retry, among errors of theirs, of requests and of aiohttp.

    A package that is not imported cannot have raised.
    """
    auth, gcsfs = sys.modules.get("google.auth.exceptions"), sys.modules.get("gcsfs.retry")
    if auth and isinstance(error, auth.GoogleAuthError):  # gcsfs repeats also what is final
        return bool(error.retryable) or isinstance(error, auth.TransportError)
    if gcsfs and isinstance(error, gcsfs.HttpError):  # such as a token that has just expired
        return bool(gcsfs.is_retriable(error))
    if status is not None:
        return False
    if gcsfs and gcsfs.is_retriable(error):
        return True
    aiohttp = sys.modules.get("aiohttp")  # s3fs and adlfs use it, too
    connection = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) if aiohttp else ()
    return isinstance(error, connection)


def status_of(error: Any) -> int | None:
    """The HTTP status that an exception of gcsfs, aiohttp or requests carries."""
    response = getattr(error, "response", None)
    for value in (
        getattr(error, "code", None),
        getattr(error, "status", None),
        getattr(response, "status_code", None),
    ):
        if isinstance(value, int | str) and str(value).isdigit() and 100 <= int(value) <= 599:
            return int(value)
    return None
