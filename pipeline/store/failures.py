"""What storage raises, said as one line with a fix; and the door to fsspec."""

from __future__ import annotations

import errno
import os
from typing import Any

from pipeline.errors import MissingPackage, StoreError

_ELSEWHERE = "or set run.uri=… to another directory or bucket"
_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "abfs": "adlfs", "az": "adlfs"}


def open_filesystem(uri: str) -> tuple[Any, str]:
    """fsspec's filesystem of `uri` and the path in it."""
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        # gcsfs asks for the bucket's storage layout over gRPC first; an emulator never answers, and each call waits 60 s.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import fsspec  # type: ignore[import-untyped]

    protocol = uri.split("://", 1)[0]
    try:
        filesystem, root = fsspec.core.url_to_fs(uri)
    except ImportError as error:
        package = _PACKAGES.get(protocol, f"the fsspec package for {protocol}://")
        raise MissingPackage(f"{protocol}:// needs {package}: {error}", where=f"run.uri {uri}", fix=f"pip install {package}") from error
    except ValueError as error:
        raise StoreError(str(error), where=f"run.uri {uri}", fix="use a local path, file://, gs:// or another fsspec protocol") from error
    except Exception as error:
        raise explain_remote_error(error, uri) from error
    return filesystem, str(root).rstrip("/")


def explain_os_error(error: OSError, where: str, *, writing: bool) -> StoreError:
    """A StoreError for what the operating system, or a remote filesystem in its words, refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        problem = "no space left" if error.errno == errno.ENOSPC else "disk quota exceeded"
        return StoreError(problem, where=where, fix=f"free some space and run the same command again, {_ELSEWHERE}")
    if error.errno == errno.EROFS:
        return StoreError("the file system is read-only", where=where, fix=f"make it writable, {_ELSEWHERE}")
    if isinstance(error, PermissionError):
        return StoreError(f"no permission to {'write' if writing else 'read'}", where=where, fix=f"grant access, {_ELSEWHERE}")
    if isinstance(error, NotADirectoryError | FileExistsError | IsADirectoryError):
        return StoreError("a file stands where a directory is needed, or the reverse", where=where, fix=f"move it away, {_ELSEWHERE}")
    if isinstance(error, FileNotFoundError):
        if writing:
            return StoreError("cannot be created: no such bucket or directory", where=where, fix=f"create the bucket, {_ELSEWHERE}")
        return StoreError("no such file", where=where, fix="restore the file, or run the stage that writes it")
    action = "writing" if writing else "reading"
    return StoreError(f"{action} failed: {error}", where=where, fix=f"check the storage and run the same command again, {_ELSEWHERE}")


def explain_remote_error(error: Exception, where: str) -> StoreError:
    """A StoreError for an exception of a remote filesystem that is no OSError."""
    text = " ".join(str(error).split()) or type(error).__name__
    return StoreError(f"{type(error).__name__}: {text[:300]}", where=where, fix="check credentials, network and bucket, then run the same command again")
