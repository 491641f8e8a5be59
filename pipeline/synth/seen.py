"""What came before, in a stream of more records than memory holds."""

from __future__ import annotations

import sqlite3
import tempfile

from pipeline.errors import StoreError

_DIGEST_BYTES = 16
#: About 25 bytes a digest; of more digests a part is on the disk.
_MEMORY_KIB = 128 << 10
_SETTINGS = (
    f"PRAGMA cache_size = -{_MEMORY_KIB}",
    "PRAGMA journal_mode = OFF",
    "PRAGMA synchronous = OFF",
    "CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID",
    "BEGIN",
)


class SeenDigests:
    """A set of digests of 16 bytes, in a file of SQLite's in TMPDIR that vanishes with it."""

    def __init__(self) -> None:
        self._rows = sqlite3.connect("", isolation_level=None)
        for setting in _SETTINGS:
            self._rows.execute(setting)

    def add(self, digest: bytes) -> bool:
        """Whether it is new. Raises StoreError when the disk is full."""
        assert len(digest) == _DIGEST_BYTES
        try:
            added = self._rows.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,))
        except sqlite3.OperationalError as error:
            problem = f"which prompts came before cannot be noted: {error}"
            fix = "free some space there, or set TMPDIR to a directory of a larger disk"
            raise StoreError(problem, where=tempfile.gettempdir(), fix=fix) from error
        return added.rowcount == 1
