"""Samples ⇄ Parquet, readable with `datasets.load_dataset("parquet", …)`, pandas and anything else.

    sample_id source license category finish_reason generator variant tools: string
    messages     list<struct<role: string, content: string>>
    token_ids    list<int32>                              exactly the ids read and generated
    supervised   list<struct<start: int32, end: int32>>   half-open ranges of generated ids
    sampling     struct<temperature: double, top_p: double, top_k: int32, max_new_tokens: int32>
    seed         int64

The file's key-value metadata holds under `eagle3` a JSON object of notes: facts about the whole
file that no row has, such as why conversations ended. Readers that do not know it skip it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from pipeline.errors import CorruptShard, DataError
from pipeline.records import Record, Sample, Shard, canonical_json
from pipeline.store.location import Location
from pipeline.store.shards import SHARDS, read_shard

RecordType = TypeVar("RecordType", bound=Record)

_TEXT_FIELDS = (
    *("sample_id", "source", "license", "category", "finish_reason"),
    *("generator", "variant", "tools"),
)
_NOTES = b"eagle3"
_FIX = "restore the file, or run `eagle3 synth --force`"


def encode_samples(samples: list[Sample], notes: Mapping[str, Any] | None = None) -> bytes:
    """One Parquet file, also of no samples; equal samples and notes (JSON) give equal bytes."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    rows = [sample.model_dump(mode="json") for sample in samples]
    table = pa.Table.from_pylist(rows, schema=_schema())
    if notes:
        table = table.replace_schema_metadata({_NOTES: canonical_json(dict(notes)).encode()})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def decode_samples(data: bytes, where: str) -> list[Sample]:
    """The samples of one file, in order. Raises CorruptShard that names `where` and the field."""
    return decode_rows(data, where, Sample)


def decode_rows(data: bytes, where: str, kind: type[RecordType]) -> list[RecordType]:
    """As `decode_samples`, of rows of any kind."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[dict[str, Any]] = pq.read_table(io.BytesIO(data)).to_pylist()
    except (pa.ArrowException, OSError) as error:
        problem = f"not a readable Parquet file: {' '.join(str(error).split())[:200]}"
        raise CorruptShard(problem, where=where, fix=_FIX) from None
    records = []
    for index, row in enumerate(rows):
        try:
            records.append(kind.model_validate(row))
        except ValidationError as error:
            first = error.errors()[0]
            field = f"row {index}, {'.'.join(str(part) for part in first['loc'])}"
            raise CorruptShard(first["msg"], where=f"{where}: {field}", fix=_FIX) from None
    return records


def decode_notes(data: bytes, where: str) -> dict[str, Any]:
    """The notes of one file, empty where it has none. Raises CorruptShard that names `where`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        text = (pq.read_schema(io.BytesIO(data)).metadata or {}).get(_NOTES, b"{}")
        notes: dict[str, Any] = json.loads(text)
    except (pa.ArrowException, OSError, ValueError) as error:
        problem = f"its notes cannot be read: {' '.join(str(error).split())[:200]}"
        raise CorruptShard(problem, where=where, fix=_FIX) from None
    return notes


def read_samples(location: Location, shard: Shard) -> list[Sample]:
    """The samples of one shard of the stage at `location`, after checking its bytes."""
    where = location.child(SHARDS).where(shard.path)
    return decode_samples(read_shard(location, shard), where)


def check_supervised(supervised: int, tokens: int, *, where: str, fix: str) -> None:
    """Raise DataError when no token or every token is supervised: either trains a useless head."""
    if not 0 < supervised < tokens:
        extent, percent = ("all", 100) if supervised else ("none", 0)
        problem = f"{extent} of the {tokens} tokens are supervised ({percent} %)"
        raise DataError(problem, where=where, fix=fix)


def _schema() -> Any:
    import pyarrow as pa

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    span = pa.struct([("start", pa.int32()), ("end", pa.int32())])
    sampling = {
        "temperature": pa.float64(),
        "top_p": pa.float64(),
        "top_k": pa.int32(),
        "max_new_tokens": pa.int32(),
    }
    fields = {
        **dict.fromkeys(_TEXT_FIELDS, pa.string()),
        "messages": pa.list_(message),
        "token_ids": pa.list_(pa.int32()),
        "supervised": pa.list_(span),
        "sampling": pa.struct(sampling),
        "seed": pa.int64(),
    }
    return pa.schema(fields)
