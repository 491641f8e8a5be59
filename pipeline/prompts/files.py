"""Prompts from JSONL and Parquet files, local or behind any fsspec URI."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from pipeline.errors import DataError
from pipeline.prompts.records import to_prompt
from pipeline.records import Prompt

_JSONL = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
PARQUET = (".parquet", ".parquet.gz")
#: Of a Parquet file, decoded at one time.
_ROWS = 4096


def read_file(source: str, *, field: str | None = None) -> Iterator[Prompt]:
    """Prompts of one file; `field` names the field that holds them.

    Raises DataError naming file, line and field of a broken record.
    """
    if source.endswith(_JSONL):
        records = read_jsonl(source)
    elif source.endswith(PARQUET):
        records = _read_parquet(source)
    else:
        problem = "is not a kind of prompts file that can be read"
        fix = f"use {', '.join((*_JSONL, '.parquet'))} or hub:ORG/NAME"
        raise DataError(problem, where=source, fix=fix)
    stem = PurePosixPath(source).name.split(".")[0]
    for number, (where, record) in enumerate(records, start=1):
        yield to_prompt(record, where=where, sample_id=f"{stem}:{number}", source=stem, field=field)


def read_jsonl(source: str) -> Iterator[tuple[str, Any]]:
    """(file:line, object) of every line that is not blank."""
    with open_file(source) as file:
        for number, line in enumerate(_lines(file, source), start=1):
            where = f"{source}:{number}"
            if line.strip():
                yield where, _parse(line, where)


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        problem = f"byte {error.start + 1} is not UTF-8"
        raise DataError(problem, where=where, fix="save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        problem = f"not valid JSON: {error.msg} at column {error.colno}"
        raise DataError(problem, where=where, fix="correct or remove that line") from None


def count_rows(source: str) -> int:
    """Records of a Parquet file, by its own account. Raises DataError."""
    with _parquet(source) as table:
        return int(table.metadata.num_rows)


def _read_parquet(source: str) -> Iterator[tuple[str, Any]]:
    with _parquet(source) as table:
        number = 0
        for batch in table.iter_batches(_ROWS):
            for record in batch.to_pylist():
                number += 1
                yield f"{source}: row {number}", record


@contextmanager
def _parquet(source: str) -> Iterator[Any]:
    """The file as pyarrow has it. Raises DataError, also for damage that shows while reading."""
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    with open_file(source) as file:
        try:
            yield pyarrow.parquet.ParquetFile(file)
        except (pyarrow.ArrowException, OSError) as error:
            problem = f"not a readable Parquet file: {str(error).splitlines()[0]}"
            raise DataError(problem, where=source, fix="write the file again") from None


def _lines(file: BinaryIO, source: str) -> Iterator[bytes]:
    """Lines of a possibly compressed file, whose damage shows only while reading."""
    try:
        yield from file
    except (OSError, EOFError, zlib.error) as error:
        problem = f"cannot be read to its end: {error}"
        raise DataError(problem, where=source, fix="write or download the file again") from None


def open_file(source: str, *, unpack: bool = True) -> BinaryIO:
    """A local or remote file; the bytes in a `.gz` one, unless they are wanted as they are.

    Raises DataError.
    """
    import fsspec  # type: ignore[import-untyped]

    compression = "gzip" if unpack and source.endswith(".gz") else None
    try:
        file: BinaryIO = fsspec.open(source, "rb", compression=compression).open()
        return file
    except FileNotFoundError:
        raise DataError("no such file", where=source, fix="correct the path in `source`") from None
    except (OSError, ValueError, ImportError) as error:
        problem = f"cannot be opened: {error}"
        raise DataError(problem, where=source, fix="pass a readable file") from None
