"""Which failures of a remote store pass by themselves, and for how long it is tried again.

    attempt ─ transient failure ─ wait w ─ attempt ─ … ─ until run.store_retry_seconds are over
                                  w = 0.5, 1, 2, … 30 s, each with up to half a second of jitter

Transient: HTTP 408, 425, 429 and 5xx, refused, dropped and silent connections, unfinished bodies,
and uploads whose checksum at the store is not ours. Everything else fails at once: a missing bucket
or object, a refused permission, a bad request. gcsfs repeats single requests up to six times itself
(half a minute); this policy comes on top, covers the timeouts that gcsfs does not, and is all there
is for filesystems that never repeat. Every operation it repeats is idempotent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pipeline.config import store_retry_seconds
from pipeline.console import notice

T = TypeVar("T")

#: What helps against a transient failure that did not pass in time.
RETRY_LATER = (
    "run the same command again when the storage is well, "
    "or raise run.store_retry_seconds or EAGLE3_STORE_RETRY_SECONDS to wait longer for it"
)

#: Seconds; the wait doubles with each failure.
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
_TRANSIENT_STATUS = frozenset({408, 425, 429})
#: Exceptions by name, so that no remote package is imported to recognise them.
_TRANSIENT_CLASSES = frozenset(
    {
        "aiohttp.client_exceptions.ClientConnectionError",
        "aiohttp.client_exceptions.ClientPayloadError",
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
        "requests.exceptions.ChunkedEncodingError",
        "requests.exceptions.ContentDecodingError",
        "google.auth.exceptions.TransportError",
        "gcsfs.retry.ChecksumError",
    }
)


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
    if status is not None:
        return status in _TRANSIENT_STATUS or status >= 500
    if getattr(error, "retryable", False) is True:  # google.auth says so of its own errors
        return True
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    return not names.isdisjoint(_TRANSIENT_CLASSES)


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
