"""Samples ⇄ Parquet, readable with `datasets.load_dataset("parquet", …)`, pandas and anything else.

prompt_id source license category finish_reason generator   string
messages       list<struct<role: string, content: string>>
token_ids      list<int32>                         exactly the ids that the target read and generated
supervised     list<struct<start: int32, end: int32>>        half-open ranges of generated ids
sampling       struct<temperature: double, top_p: double, top_k: int32, max_new_tokens: int32>
seed           int64

The file's key-value metadata holds under `eagle3` a JSON object of notes: facts about the whole file
that no row tells, such as why conversations ended. Readers that do not know it skip it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from pipeline.errors import CorruptShard
from pipeline.records import Sample, Shard, canonical_json
from pipeline.store.location import Location
from pipeline.store.shards import read_shard

_TEXT_FIELDS = ("prompt_id", "source", "license", "category", "finish_reason", "generator")


_NOTES = b"eagle3"


def encode_samples(samples: list[Sample], notes: Mapping[str, Any] | None = None) -> bytes:
    """One Parquet file; equal samples and notes (JSON values) give equal bytes. An empty list is legal."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    table = pa.Table.from_pylist(
        [sample.model_dump(mode="json") for sample in samples], schema=_schema()
    )
    if notes:
        table = table.replace_schema_metadata({_NOTES: canonical_json(dict(notes)).encode()})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def decode_samples(data: bytes, where: str) -> list[Sample]:
    """The samples of one file, in order. Raises CorruptShard that names `where` and the field."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    fix = "restore the file, or run `eagle3 synth --force`"
    try:
        rows: list[dict[str, Any]] = pq.read_table(io.BytesIO(data)).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise CorruptShard(
            f"not a readable Parquet file: {' '.join(str(error).split())[:200]}",
            where=where,
            fix=fix,
        ) from None
    samples = []
    for index, row in enumerate(rows):
        try:
            samples.append(Sample.model_validate(row))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise CorruptShard(
                f"{first['msg']}", where=f"{where}: row {index}, {field}", fix=fix
            ) from None
    return samples


def decode_notes(data: bytes, where: str) -> dict[str, Any]:
    """The notes of one file, empty where it has none. Raises CorruptShard that names `where`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        text = (pq.read_schema(io.BytesIO(data)).metadata or {}).get(_NOTES, b"{}")
        notes: dict[str, Any] = json.loads(text)
    except (pa.ArrowException, OSError, ValueError) as error:
        problem = f"its notes cannot be read: {' '.join(str(error).split())[:200]}"
        raise CorruptShard(
            problem, where=where, fix="restore the file, or run `eagle3 synth --force`"
        ) from None
    return notes


def read_samples(location: Location, shard: Shard) -> list[Sample]:
    """The samples of one shard of the stage at `location`, after checking its bytes."""
    return decode_samples(read_shard(location, shard), where=f"{location.uri}/shards/{shard.name}")


def _schema() -> Any:
    import pyarrow as pa

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    span = pa.struct([("start", pa.int32()), ("end", pa.int32())])
    sampling = pa.struct(
        [
            ("temperature", pa.float64()),
            ("top_p", pa.float64()),
            ("top_k", pa.int32()),
            ("max_new_tokens", pa.int32()),
        ]
    )
    lists = [
        ("messages", pa.list_(message)),
        ("token_ids", pa.list_(pa.int32())),
        ("supervised", pa.list_(span)),
    ]
    text = [(name, pa.string()) for name in _TEXT_FIELDS]
    return pa.schema([*text, *lists, ("sampling", sampling), ("seed", pa.int64())])
