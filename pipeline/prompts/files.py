"""Prompts from JSONL and Parquet files, local or at any fsspec URI.

A table gives each struct the fields of all records, null where a record had none; `plain` leaves
nulls out of objects, at any depth. A null that a record really had cannot be told from those. JSON
holds only what was written, so records of JSONL files are left as they are.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, BinaryIO

from pipeline.config import SourceSpec
from pipeline.documents import refuse_other_kinds
from pipeline.errors import DataError
from pipeline.prompts.bad_records import BadRecord, BadRecords, usable
from pipeline.prompts.records import to_prompt
from pipeline.records import Prompt

_JSONL = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
PARQUET = (".parquet", ".parquet.gz")
#: Of a Parquet file, decoded at one time.
_ROWS = 4096
#: Of files that Windows and its programs save as UTF-8 and as UTF-16.
_MARK = b"\xef\xbb\xbf"
_OTHER_MARKS = (b"\xff\xfe", b"\xfe\xff")


def read_file(spec: SourceSpec, name: str, bad: BadRecords | None = None) -> Iterator[Prompt]:
    """Prompts of one file; `name` is the source of those that have none of their own.

    Raises DataError naming file, line and field of a broken record, as `usable` does.
    """
    source = spec.source
    records: Iterator[tuple[str, Any]]
    if source.endswith(_JSONL):
        records = _read_lines(source)
    elif source.endswith(PARQUET):
        records = _read_parquet(source)
    else:
        problem = "is not a kind of prompts file that can be read"
        fix = f"use {', '.join((*_JSONL, '.parquet'))} or hub:ORG/NAME"
        raise DataError(problem, where=source, fix=fix)

    def read(number: int, where: str, record: Any) -> Prompt:
        values = _parse(record, where) if isinstance(record, bytes) else record
        if isinstance(values, UnicodeDecodeError):
            raise _not_utf8(values, where)
        sample_id = f"{name}:{number}"
        return to_prompt(values, where=where, sample_id=sample_id, source=name, field=spec.field)

    yield from usable(islice(records, spec.read_at_most), read, bad)


def read_jsonl(source: str) -> Iterator[tuple[str, Any]]:
    """(file:line, object) of every line that is not blank."""
    for where, line in _read_lines(source):
        yield where, _parse(line, where)


def _read_lines(source: str) -> Iterator[tuple[str, bytes]]:
    with open_file(source) as file:
        for number, line in enumerate(_lines(file, source), start=1):
            if number == 1 and line.startswith(_OTHER_MARKS):
                raise DataError("is UTF-16", where=source, fix="save the file as UTF-8")
            text = line.removeprefix(_MARK) if number == 1 else line
            if text.strip():
                yield f"{source}:{number}", text


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _not_utf8(error, where) from None
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at column {error.colno}"
    except ValueError:
        problem = "a number has too many digits"
    except RecursionError:
        problem = "it is nested too deeply"
    fix = "correct or remove that line"
    raise BadRecord(f"not valid JSON: {problem}", where=where, fix=fix, reason="not_json")


def _not_utf8(error: UnicodeDecodeError, where: str) -> BadRecord:
    problem, fix = f"byte {error.start + 1} is not UTF-8", "save the file as UTF-8"
    return BadRecord(problem, where=where, fix=fix, reason="not_utf8")


def count_rows(source: str) -> int:
    """Records of a Parquet file, by its own account. Raises DataError."""
    with _parquet(source) as table:
        return int(table.metadata.num_rows)


def _read_parquet(source: str) -> Iterator[tuple[str, Any]]:
    with _parquet(source) as table:
        number = 0
        for batch in table.iter_batches(_ROWS):
            for record in _rows(batch):
                number += 1
                yield f"{source}: row {number}", record


def _rows(batch: Any) -> Iterator[Any]:
    """Of a row whose texts are no UTF-8 the error takes the place."""
    try:
        yield from map(plain, batch.to_pylist())
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                yield from map(plain, batch.slice(index, 1).to_pylist())
            except UnicodeDecodeError as error:
                yield error


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
        refuse_other_kinds(source)
        file: BinaryIO = fsspec.open(source, "rb", compression=compression).open()
        return file
    except FileNotFoundError:
        fix = "correct the path in `source`"
        if "configs/prompts/" in source:
            fix += "; `make setup` writes the demo's prompts there"
        raise DataError("no such file", where=source, fix=fix) from None
    except (OSError, ValueError, ImportError) as error:
        problem = f"cannot be opened: {error}"
        raise DataError(problem, where=source, fix="pass a readable file") from None


def plain(value: Any) -> Any:
    """Without nulls in objects; maps, arrays and numbers of other libraries as Python's own."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        if value and all(isinstance(each, tuple) and len(each) == 2 for each in value):
            keys = [key for key, _ in value]  # a map, whose keys may be any
            if len({str(key) for key in keys}) == len(keys):
                return plain({str(key): each for key, each in value})
        return [plain(each) for each in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return plain(value.tolist()) if hasattr(value, "tolist") else value
