"""Prompts from JSONL and Parquet files, local or at any fsspec URI.

A table gives each struct the fields of all records, null where a record had none; `plain` leaves
nulls out of objects, at any depth. A null that a record really had cannot be told from those. JSON
holds only what was written, so records of JSONL files are left as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from itertools import islice
from typing import Any, BinaryIO

from pipeline.config import SourceSpec
from pipeline.config.credentials import holds_credentials
from pipeline.documents import BrokenDocument, local_path, parse_record, refuse_other_kinds
from pipeline.errors import DataError
from pipeline.prompts.bad_records import BadRecord, BadRecords, usable
from pipeline.prompts.parquet import open_batches
from pipeline.prompts.records import to_prompt
from pipeline.records import Prompt

_JSONL = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
PARQUET = (".parquet", ".parquet.gz")
#: Bytes of a line: some four million tokens. Parsed, it takes twenty times as much memory.
LONGEST_LINE = 16 << 20
#: Bytes of records that are made of a table at one time.
_MOST_AT_ONCE = 128 << 20
#: Bytes of a value as Python has it, and of the shortest one in a line of JSON.
_OBJECT, _SHORTEST = 64, 3
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
        if isinstance(values, _RowSize):
            raise _too_long(where)
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
    if len(line) > LONGEST_LINE:
        raise _too_long(where)
    try:
        return parse_record(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _not_utf8(error, where) from None
    except BrokenDocument as error:
        at = f"{where}: {error.key}" if error.key else where
        fix = "correct or remove that line"
        raise BadRecord(error.problem, where=at, fix=fix, reason="not_json") from None


def _too_long(where: str) -> BadRecord:
    problem, fix = f"has more than {LONGEST_LINE:,} bytes", "remove or shorten it"
    return BadRecord(problem, where=where, fix=fix, reason="too_long")


def _not_utf8(error: UnicodeDecodeError, where: str) -> BadRecord:
    problem, fix = f"byte {error.start + 1} is not UTF-8", "save the file as UTF-8"
    return BadRecord(problem, where=where, fix=fix, reason="not_utf8")


def count_rows(source: str) -> int:
    """Records of a Parquet file, by its own account. Raises DataError."""
    with _parquet(source) as (count, _, _):
        return count


def _read_parquet(source: str) -> Iterator[tuple[str, Any]]:
    with _parquet(source) as (_, schema, batches):
        _refuse_repeated_names(schema, source)
        number = 0
        for batch in batches:
            for record in _rows(_timeless(batch)):
                number += 1
                yield f"{source}: row {number}", record


def _parquet(source: str) -> AbstractContextManager[tuple[int, Any, Iterator[Any]]]:
    open_file(source).close()  # which says what is wrong with a path
    return open_batches(local_path(source) or source)


def _refuse_repeated_names(fields: Any, source: str, above: str = "") -> None:
    """Raises DataError for two columns of one name, of which a record would hold the last."""
    names = [field.name for field in fields]
    for field, name in zip(fields, names, strict=True):
        if names.count(name) > 1:
            problem, fix = f"has two columns {above}{name}", "rename or remove one of them"
            raise DataError(problem, where=source, fix=fix)
        inner = field.type
        while hasattr(inner, "value_field"):
            inner = inner.value_field.type
        if hasattr(inner, "fields"):
            _refuse_repeated_names(inner.fields, source, f"{above}{name}.")


def _timeless(batch: Any) -> Any:
    """The batch with times as the integers that they are stored as: Python's own end with the year
    9999, and its zones and nanoseconds are not those of tables."""
    import pyarrow  # type: ignore[import-untyped]

    kinds = [_timeless_type(array.type) for array in batch.columns]
    columns = [
        array if array.type == kind else array.view(kind)
        for array, kind in zip(batch.columns, kinds, strict=True)
    ]
    return pyarrow.record_batch(columns, names=batch.schema.names) if columns else batch


def _timeless_type(kind: Any) -> Any:
    import pyarrow
    from pyarrow import types

    def inner(field: Any) -> Any:
        return field.with_type(_timeless_type(field.type))

    if types.is_temporal(kind) and not types.is_interval(kind):
        return pyarrow.int32() if kind.bit_width == 32 else pyarrow.int64()
    if types.is_dictionary(kind):
        return pyarrow.dictionary(kind.index_type, _timeless_type(kind.value_type), kind.ordered)
    if types.is_struct(kind):
        return pyarrow.struct([inner(field) for field in kind.fields])
    if types.is_map(kind):
        return pyarrow.map_(inner(kind.key_field), inner(kind.item_field), kind.keys_sorted)
    if types.is_fixed_size_list(kind):
        return pyarrow.list_(inner(kind.value_field), kind.list_size)
    lists = (
        (types.is_list, pyarrow.list_),
        (types.is_large_list, pyarrow.large_list),
        (types.is_list_view, pyarrow.list_view),
        (types.is_large_list_view, pyarrow.large_list_view),
    )
    made = (make(inner(kind.value_field)) for is_kind, make in lists if is_kind(kind))
    return next(made, kind)


def _rows(batch: Any) -> Iterator[Any]:
    """The records. In the place of one that cannot be is its error, or its size where it is too
    large: repetitions of a text take no room in a file, and all of their length here."""
    size, values = _measured(batch.columns)
    if size + _OBJECT * values <= _MOST_AT_ONCE:
        with suppress(UnicodeDecodeError):
            yield from [plain(record) for record in batch.to_pylist()]
            return
    for index in range(batch.num_rows):
        row = batch.slice(index, 1)
        size, values = _measured(row.columns)
        size += _SHORTEST * values
        try:
            yield _RowSize(size) if size > LONGEST_LINE else plain(row.to_pylist()[0])
        except UnicodeDecodeError as error:
            yield error


class _RowSize(int):
    """Bytes of a row that is not read."""


def _measured(arrays: Iterable[Any]) -> tuple[int, int]:
    """Bytes of texts and numbers, each counted as often as it occurs, and how many values and lists
    there are."""
    import pyarrow
    import pyarrow.compute as compute  # type: ignore[import-untyped]

    size = values = 0
    for array in arrays:
        kind = array.type
        if pyarrow.types.is_dictionary(kind):
            array = compute.binary_length(array.dictionary).take(array.indices)
            more, inner = compute.sum(array).as_py() or 0, 0
        elif pyarrow.types.is_struct(kind):
            more, inner = _measured(array.flatten())
        elif pyarrow.types.is_map(kind):
            first, last = (array.offsets[at].as_py() for at in (0, -1))
            parts = (each.slice(first, last - first) for each in (array.keys, array.items))
            more, inner = _measured(parts)
        elif hasattr(kind, "value_field"):
            more, inner = _measured([array.flatten()])
        else:
            more, inner = int(array.nbytes), 0
        size, values = size + more, values + inner + len(array)
    return size, values


def _lines(file: BinaryIO, source: str) -> Iterator[bytes]:
    """Lines of a possibly compressed file, whose damage shows only while reading.

    Of one that is too long the beginning comes, with more than LONGEST_LINE bytes: a small
    compressed file may hold a line that fills the memory.
    """
    try:
        while line := file.readline(LONGEST_LINE + 1):
            yield line
            while len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE + 1) or b"\n"
    except (OSError, EOFError, zlib.error) as error:
        problem = f"cannot be read to its end: {error}"
        raise DataError(problem, where=source, fix="write or download the file again") from None


def open_file(source: str, *, unpack: bool = True) -> BinaryIO:
    """A local or remote file; the bytes in a `.gz` one, unless they are wanted as they are.

    Raises DataError.
    """
    import fsspec  # type: ignore[import-untyped]

    if holds_credentials(source):
        problem, fix = "holds a key or a password", "take it out of the address"
        raise DataError(problem, where="the address of a file", fix=fix)
    compression = "gzip" if unpack and source.endswith(".gz") else None
    try:
        file: BinaryIO = fsspec.open(
            refuse_other_kinds(source), "rb", compression=compression
        ).open()
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
