"""What was found, without what it was: counts by entity type, and salted hashes of the values.

A hash lets a team see that one value occurs a hundred times, or that it also occurs in another run,
without holding it. Phone or card numbers are few enough to try them all, so the salt is a secret:
HMAC-SHA-256 under a key that no artefact of the run holds. It is taken from the environment, or
made once for this user on this machine and kept outside every run directory.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from pipeline.synth.privacy.finding import Finding
from pipeline.synth.privacy.replace import normal_form

_HEX_DIGITS = 16  # 64 bits: no two of a million values are likely to share one
_KEY_BYTES = 32


class Ledger:
    """Counts and hashes since the last `take`."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._counts: dict[str, dict[str, dict[str, int]]] = {}  # where → entity → hash → times

    def note(self, where: str, text: str, findings: Iterable[Finding]) -> None:
        """Count findings of one text of the kind `where` ("prompts" or "replies")."""
        for finding in findings:
            values = self._counts.setdefault(where, {}).setdefault(finding.entity, {})
            key = self._hash(finding.entity, text[finding.start : finding.end])
            values[key] = values.get(key, 0) + 1

    def take(self) -> dict[str, Any]:
        """{"prompts": {"EMAIL_ADDRESS": {"findings": 3, "values": {hash: times}}}, "replies": …}.

        Counting starts again from nothing.
        """
        counts, self._counts = self._counts, {}
        return {
            where: {
                entity: {"findings": sum(values.values()), "values": dict(sorted(values.items()))}
                for entity, values in sorted(entities.items())
            }
            for where, entities in sorted(counts.items())
        }

    def _hash(self, entity: str, value: str) -> str:
        message = f"{entity}\0{normal_form(value)}".encode()
        return hmac.new(self._salt, message, hashlib.sha256).hexdigest()[:_HEX_DIGITS]


def read_salt(variable: str) -> bytes:
    """The salt in the environment variable, or this user's own, made at first use.

    Raises ConfigError where neither works.
    """
    if salt := os.environ.get(variable):
        return salt.encode()
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = state / "eagle3" / "pii-salt"
    try:
        return _read_or_make(path)
    except OSError as error:
        raise ConfigError(
            f"cannot be read or made: {error.strerror}",
            where=str(path),
            fix=f"set the environment variable {variable}",
        ) from None


def fingerprint(salt: bytes) -> str:
    """Tells two salts apart and gives neither away."""
    return hmac.new(salt, b"which salt this is", hashlib.sha256).hexdigest()[:_HEX_DIGITS]


def _read_or_make(path: Path) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        try:
            os.link(fresh, path)  # the first link wins; nobody reads a half-written salt
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    return path.read_bytes()
