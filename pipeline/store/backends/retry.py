"""Which failures of a remote store pass by themselves, and for how long it is tried again.

    attempt ─ transient failure ─ wait w ─ attempt ─ … ─ until run.store_retry_seconds are over
                                  w = 0.5, 1, 2, … 30 s, each with up to half a second of jitter

Transient: HTTP 408, 425, 429 and 5xx, refused, dropped and silent connections, unfinished bodies,
uploads whose checksum at the store is not ours, and what gcsfs itself would repeat (an expired
token). Everything else fails at once: a missing bucket or object, a refused permission, a bad
request. gcsfs repeats single requests up to six times itself (half a minute); this policy comes on
top, covers the timeouts that gcsfs does not, and is all there is for filesystems that never repeat.
Every operation it repeats is idempotent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from pipeline.config import store_retry_seconds
from pipeline.console import notice
from pipeline.telemetry import count

T = TypeVar("T")

#: What helps against a transient failure that did not pass in time.
RETRY_LATER = (
    "run the same command again when the storage is well, "
    "or raise run.store_retry_seconds or EAGLE3_STORE_RETRY_SECONDS to wait longer for it"
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
    """What google.auth and gcsfs say of errors of their own, of requests and of aiohttp.

    An exception of a package that nobody has imported there cannot be.
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
