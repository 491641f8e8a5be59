"""How much a source holds, without reading all of it."""

from __future__ import annotations

import os
import zlib
from contextlib import suppress

from pipeline.config import SourceSpec
from pipeline.prompts.files import PARQUET, count_rows, open_file
from pipeline.prompts.hub import count_hub

#: The beginning of a file, whose lines stand for the rest.
_HEAD = 4 << 20
_GZIP = 31  # zlib's window bits for gzip
_LONGEST_TEXT = 64 << 20  # that a compressed beginning is unpacked to
_PACKED = 4  # bytes of records for one byte of a compressed file, about


def record_bytes(spec: SourceSpec) -> int | None:
    """About how many bytes of records the source has; None for a hub data set, which does not say.

    Raises DataError for a file that cannot be opened.
    """
    if spec.source.startswith("hub:"):
        return None
    is_packed = spec.source.endswith((".gz", *PARQUET))
    return _size(spec.source) * (_PACKED if is_packed else 1)


def estimate_records(spec: SourceSpec) -> int | None:
    """About how many records a file or a hub data set has, None where nobody says.

    Of Parquet files exactly; of others from their size and the length of their first lines.
    """
    kind, _, name = spec.source.partition(":")
    if name and kind == "hub":
        return count_hub(name, spec)
    if spec.source.endswith(PARQUET):
        return count_rows(spec.source)
    with open_file(spec.source, unpack=False) as file:
        head = file.read(_HEAD)
    text, read = _unpack(head) if spec.source.endswith(".gz") else (head, len(head))
    return round(text.count(b"\n") * _size(spec.source) / max(1, read))


def _size(source: str) -> int:
    with open_file(source, unpack=False) as file:
        return file.seek(0, os.SEEK_END)


def _unpack(head: bytes) -> tuple[bytes, int]:
    """The text of a compressed file's beginning, and of how many of these bytes it is."""
    text, rest = b"", head
    with suppress(zlib.error):  # whoever reads the records says what is wrong
        while rest and len(text) < _LONGEST_TEXT:  # a file may be several compressed ones in a row
            packed = zlib.decompressobj(_GZIP)
            text += packed.decompress(rest, _LONGEST_TEXT)
            rest = packed.unused_data or packed.unconsumed_tail
    return text, len(head) - len(rest)
