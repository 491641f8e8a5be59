"""What came before, in a stream of more records than memory holds.

Both are files of SQLite's in TMPDIR that have no name and vanish with their object. At most 128 MiB
of each are in memory.
"""

from __future__ import annotations

import hashlib
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pipeline.errors import StoreError

_DIGEST_BYTES = 16
_BAND_BYTES = 7  # SQLite's integers have eight, with a sign
_MEMORY_KIB = 128 << 10
_SETTINGS = (
    f"PRAGMA cache_size = -{_MEMORY_KIB}",
    "PRAGMA journal_mode = OFF",
    "PRAGMA synchronous = OFF",
    "BEGIN",
)


class SeenDigests:
    """A set of digests of 16 bytes: about 25 bytes each."""

    def __init__(self) -> None:
        self._rows = _open("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")

    def add(self, digest: bytes) -> bool:
        """Whether it is new. Raises StoreError when the disk is full."""
        assert len(digest) == _DIGEST_BYTES
        with _told_when_full():
            added = self._rows.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,))
        return added.rowcount == 1


class SeenSketches:
    """MinHash sketches, found again by any band that they share (locality-sensitive hashing).

        sketch   h0 h1 … h12 │ h13 … h25 │ …       32 bits each
        bands    └── 7 bytes ┘ └─────────┘         equal in one of them: a candidate

    About a kilobyte each. `bands` are the ranges [start, end) of a sketch.
    """

    def __init__(self, bands: Sequence[tuple[int, int]]) -> None:
        self._bands, self._count = bands, 0
        self._rows = _open(
            "CREATE TABLE sketches (id INTEGER PRIMARY KEY, sketch BLOB)",
            "CREATE TABLE bands (band INTEGER, id INTEGER, PRIMARY KEY (band, id)) WITHOUT ROWID",
        )

    def candidates(self, sketch: bytes) -> Iterator[bytes]:
        """Sketches that share a band with this one."""
        bands = self._digests(sketch)
        marks = ", ".join("?" * len(bands))
        among = f"SELECT id FROM bands WHERE band IN ({marks})"
        rows = self._rows.execute(f"SELECT sketch FROM sketches WHERE id IN ({among})", bands)
        return (row[0] for row in rows)

    def add(self, sketch: bytes) -> None:
        """Raises StoreError when the disk is full."""
        self._count += 1
        bands = [(band, self._count) for band in set(self._digests(sketch))]
        with _told_when_full():
            self._rows.execute("INSERT INTO sketches VALUES (?, ?)", (self._count, sketch))
            self._rows.executemany("INSERT INTO bands VALUES (?, ?)", bands)

    def _digests(self, sketch: bytes) -> list[int]:
        """Of the bands; the number of a band counts, so that different ones never look equal."""
        return [
            int.from_bytes(
                hashlib.blake2b(
                    sketch[4 * start : 4 * end], digest_size=_BAND_BYTES, key=bytes([number])
                ).digest()
            )
            for number, (start, end) in enumerate(self._bands)
        ]


def _open(*tables: str) -> sqlite3.Connection:
    rows = sqlite3.connect("", isolation_level=None)
    for statement in (*_SETTINGS, *tables):
        rows.execute(statement)
    return rows


@contextmanager
def _told_when_full() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        problem = f"which prompts came before cannot be noted: {error}"
        fix = "free some space there, or set TMPDIR to a directory of a larger disk"
        raise StoreError(problem, where=tempfile.gettempdir(), fix=fix) from error
