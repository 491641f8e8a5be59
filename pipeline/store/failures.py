"""What storage raises, said as one line with a fix; and the door to fsspec."""

from __future__ import annotations

import errno
import logging
import os
from typing import Any

from pipeline.errors import MissingPackage, StoreError
from pipeline.store.retry import is_transient, patience

_LATER = "run the same command again when the storage is well, or raise EAGLE3_STORE_RETRY_SECONDS to wait longer for it"
_ELSEWHERE = "or set run.uri=… to another directory or bucket"
#: A request may take this many silences in all: an upload that the store does not read has no silence that a client could see.
_REQUEST_SILENCES = 10
_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "abfs": "adlfs", "az": "adlfs"}


def open_filesystem(uri: str) -> tuple[Any, str]:
    """fsspec's filesystem of `uri` and the path in it."""
    import fsspec  # type: ignore[import-untyped]

    protocol = uri.split("://", 1)[0]
    try:
        filesystem, root = fsspec.core.url_to_fs(
            uri, **(_gcs_options() if protocol in ("gs", "gcs") else {})
        )
    except ImportError as error:
        package = _PACKAGES.get(protocol, f"the fsspec package for {protocol}://")
        raise MissingPackage(
            f"{protocol}:// needs {package}: {error}",
            where=f"run.uri {uri}",
            fix=f"pip install {package}",
        ) from error
    except ValueError as error:
        raise StoreError(
            str(error),
            where=f"run.uri {uri}",
            fix="use a local path, file://, gs:// or another fsspec protocol",
        ) from error
    except Exception as error:
        raise explain_remote_error(error, uri) from error
    return filesystem, str(root).rstrip("/")


def _gcs_options() -> dict[str, Any]:
    """Options of gcsfs: a connection that has been silent for too long is dropped, and can then be tried again."""
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        # gcsfs asks for the bucket's storage layout over gRPC first; an emulator never answers, and each call waits 60 s.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import aiohttp

    # gcsfs logs each failure with a traceback; they are raised as well, and said here in one line.
    logger = logging.getLogger("gcsfs")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)
    silence = patience().silence
    timeout = aiohttp.ClientTimeout(
        total=_REQUEST_SILENCES * silence, sock_connect=silence, sock_read=silence
    )
    return {"requests_timeout": timeout}


def explain_os_error(error: OSError, where: str, *, writing: bool) -> StoreError:
    """A StoreError for what the operating system, or a remote filesystem in its words, refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        problem = "no space left" if error.errno == errno.ENOSPC else "disk quota exceeded"
        return StoreError(
            problem,
            where=where,
            fix=f"free some space and run the same command again, {_ELSEWHERE}",
        )
    if error.errno == errno.EROFS:
        return StoreError(
            "the file system is read-only", where=where, fix=f"make it writable, {_ELSEWHERE}"
        )
    if isinstance(error, PermissionError):
        return StoreError(
            f"no permission to {'write' if writing else 'read'}",
            where=where,
            fix=f"grant access, {_ELSEWHERE}",
        )
    if isinstance(error, NotADirectoryError | FileExistsError | IsADirectoryError):
        return StoreError(
            "a file stands where a directory is needed, or the reverse",
            where=where,
            fix=f"move it away, {_ELSEWHERE}",
        )
    if isinstance(error, FileNotFoundError):
        if writing:
            return StoreError(
                "cannot be created: no such bucket or directory",
                where=where,
                fix=f"create the bucket, {_ELSEWHERE}",
            )
        return StoreError(
            "no such file", where=where, fix="restore the file, or run the stage that writes it"
        )
    action = "writing" if writing else "reading"
    text = " ".join(str(error).split())[:300] or type(error).__name__
    if text.startswith("Forbidden"):  # gcsfs' word for 403, without an errno
        return StoreError(
            f"no permission to {'write' if writing else 'read'}: {text}",
            where=where,
            fix=f"grant access, {_ELSEWHERE}",
        )
    if is_transient(error):
        return StoreError(
            f"{action} failed: {type(error).__name__}: {text}", where=where, fix=_LATER
        )
    return StoreError(
        f"{action} failed: {text}",
        where=where,
        fix=f"check the storage and run the same command again, {_ELSEWHERE}",
    )


def explain_remote_error(error: Exception, where: str) -> StoreError:
    """A StoreError for an exception of a remote filesystem that is no OSError."""
    text = " ".join(str(error).split())[:300]
    fix = (
        _LATER
        if is_transient(error)
        else "check credentials, network and bucket, then run the same command again"
    )
    return StoreError(f"{type(error).__name__}: {text}", where=where, fix=fix)
