"""Which failures of a remote store pass by themselves, and for how long to wait for that.

    attempt ─ transient failure ─ wait w ─ attempt ─ … ─ until EAGLE3_STORE_RETRY_SECONDS are over
                                  w = 0.5, 1, 2, … 30 s, each with up to half a second of jitter

Transient: HTTP 408, 425, 429 and 5xx, refused, dropped and silent connections, unfinished bodies,
and uploads whose checksum at the store is not ours. Everything else fails at once: a missing bucket
or object, a refused permission, a bad request. gcsfs repeats single requests up to six times itself
(half a minute); this policy comes on top, covers the timeouts that gcsfs does not, and is all there
is for filesystems that never repeat. Every operation it repeats is idempotent.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from pipeline.console import notice
from pipeline.errors import ConfigError

T = TypeVar("T")

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


class Patience(NamedTuple):
    """How a remote store is waited for. Seconds."""

    total: float  # of trying one operation
    silence: float  # without a byte on a connection, before it counts as dropped
    first: float = 0.5  # wait after the first failure; doubles each time
    longest: float = 30.0  # wait


class AlteredUpload(OSError):
    """The store holds other bytes than were sent, or has forgotten an upload that was under way."""


def patience() -> Patience:
    """Limits from the environment: EAGLE3_STORE_RETRY_SECONDS (300) and EAGLE3_STORE_TIMEOUT_SECONDS (60)."""
    return Patience(
        total=_seconds("EAGLE3_STORE_RETRY_SECONDS", 300.0),
        silence=_seconds("EAGLE3_STORE_TIMEOUT_SECONDS", 60.0),
    )


def persist(call: Callable[[], T], where: str) -> T:
    """The result of `call`, repeated while it fails in a way that passes. Raises its last failure."""
    import tenacity

    limits = patience()

    def tell(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        text = " ".join(str(error).split())[:120]
        notice(
            "storage",
            f"{where}: {type(error).__name__} {text}; attempt {state.attempt_number + 1} follows in {state.upcoming_sleep:.1f} s",
        )

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        wait=tenacity.wait_exponential(multiplier=limits.first, max=limits.longest)
        + tenacity.wait_random(0, limits.first),
        stop=tenacity.stop_after_delay(limits.total),
        before_sleep=tell,
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
    return any(
        f"{kind.__module__}.{kind.__qualname__}" in _TRANSIENT_CLASSES
        for kind in type(error).__mro__
    )


def status_of(error: Any) -> int | None:
    """The HTTP status that an exception of gcsfs, aiohttp or requests carries."""
    for value in (
        getattr(error, "code", None),
        getattr(error, "status", None),
        getattr(getattr(error, "response", None), "status_code", None),
    ):
        if isinstance(value, int | str) and str(value).isdigit() and 100 <= int(value) <= 599:
            return int(value)
    return None


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name)
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(
            f"{text!r} is not a number of seconds",
            where=f"environment: {name}",
            fix=f"set it to a number of at least 0, or unset it for {default:.0f}",
        )
    return value
