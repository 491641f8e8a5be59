"""Samples and selected prompts ⇄ Parquet, readable with `datasets.load_dataset("parquet", …)`.

    sample_id source license category finish_reason generator variant tools: string
    messages     list<struct<role: string, content: string>>
    token_ids    list<int32>                              exactly the ids read and generated
    supervised   list<struct<start: int32, end: int32>>   half-open ranges of generated ids
    sampling     struct<temperature: double, top_p: double, top_k: int32, max_new_tokens: int32>
    seed         int64

The file's key-value metadata holds under `eagle3` a JSON object of notes: facts about the whole
file that no row has, such as why conversations ended. Other readers skip it.

Prompts are selected once, before anything is generated:

    synth/prompts/00003-1f2e3d4c.9f2c41d07be3a685.parquet   the prompts of one shard, in a file of
                                                            this attempt's own
    synth/selection.json                                    the Selection, which names the files

The selection is created exclusively when all files are written: of several processes that select,
the first one wins, and the others use its prompts. The files hold the prompts as the sources have
them, not screened for personal data; the process that writes the stage's manifest deletes them.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from pipeline.errors import CorruptShard, DataError
from pipeline.records import FILE_NAME, Prompt, Record, Sample, Shard, canonical_json, digest
from pipeline.store.location import Location
from pipeline.store.shards import SHARDS, read_shard

RecordType = TypeVar("RecordType", bound=Record)
_TEXT_FIELDS = (
    *("sample_id", "source", "license", "category", "finish_reason"),
    *("generator", "variant", "tools"),
)
_NOTES = b"eagle3"
_FIX = "restore the file, or run `eagle3 synth --force`"
PROMPTS = "prompts"
SELECTION = "selection.json"
#: Names of so many shards begin with five digits. Later ones begin with a letter, so that names
#: sort in the order of the shards however many there are.
_NUMBERED = 100_000
_CONCURRENT_DELETES = 16
_SELECT_AGAIN = f"restore the file, or delete {SELECTION} to have the prompts selected again"
_FileName = Annotated[str, Field(pattern=FILE_NAME)]


def encode_samples(samples: list[Sample], notes: Mapping[str, Any] | None = None) -> bytes:
    """One Parquet file, also of no samples; equal samples and notes (JSON) give equal bytes."""
    return _encode(samples, _sample_schema(), notes)


def decode_samples(data: bytes, where: str) -> list[Sample]:
    """The samples of one file, in order. Raises CorruptShard that names `where` and the field."""
    return decode_rows(data, where, Sample)


def decode_rows(data: bytes, where: str, kind: type[RecordType]) -> list[RecordType]:
    """As `decode_samples`, for rows of any record."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

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


def read_samples(location: Location, shard: Shard) -> list[Sample]:
    """The samples of one shard of the stage at `location`, after checking its bytes."""
    where = location.child(SHARDS).where(shard.path)
    return decode_samples(read_shard(location, shard), where)


class SampleTokens(NamedTuple):
    """Of a sample what its states rest on."""

    sample_id: str
    source: str
    token_ids: NDArray[np.int32]  # [T]
    supervised: tuple[tuple[int, int], ...]  # half-open ranges


def read_tokens(location: Location, shard: Shard) -> list[SampleTokens]:
    """As `read_samples`, ids and supervised ranges alone, which takes a fraction of the time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = location.child(SHARDS).where(shard.path)
    columns = ["sample_id", "source", "token_ids", "supervised"]
    try:
        table = pq.read_table(io.BytesIO(read_shard(location, shard)), columns=columns)
        ids, sources = (table[name].to_pylist() for name in columns[:2])
        tokens = table["token_ids"].combine_chunks()
        supervised = [
            tuple((span["start"], span["end"]) for span in spans)
            for spans in table["supervised"].to_pylist()
        ]
        arrays = [tokens[row].values.to_numpy() for row in range(len(tokens))]
    except (pa.ArrowException, OSError, KeyError, TypeError, AttributeError) as error:
        problem = f"not a readable Parquet file: {' '.join(str(error).split())[:200]}"
        raise CorruptShard(problem, where=where, fix=_FIX) from None
    return list(map(SampleTokens, ids, sources, arrays, supervised))


def check_supervised(supervised: int, tokens: int, *, where: str, fix: str) -> None:
    """Raise DataError when no token or every token is supervised: either trains a useless head."""
    if not 0 < supervised < tokens:
        extent, percent = ("all", 100) if supervised else ("none", 0)
        problem = f"{extent} of the {tokens} tokens are supervised ({percent} %)"
        raise DataError(problem, where=where, fix=fix)


class PromptShard(NamedTuple):
    """The prompts of one shard of samples. There may be 100,000: half a kilobyte of memory each."""

    name: _FileName  # the shard's
    file: _FileName  # of one attempt's own
    prompts: int
    bytes: int
    sha256: str


class Selection(Record):
    """Which prompts were selected, and what was rejected before any model ran."""

    inputs: str  # digest of the configuration that decides it
    loaded: int  # prompts that the sources gave
    rejected: dict[str, int]  # reason → those that did not pass
    turns: int  # of the longest conversation
    asked: int  # turns of all prompts
    characters: int  # in those turns
    shards: tuple[PromptShard, ...]
    #: Size and SHA-256 of each local file in sources, then exclude, or `commit:…` of a hub data
    #: set; absent in earlier runs.
    files: tuple[str | None, ...] = ()

    @property
    def prompts(self) -> int:
        return sum(shard.prompts for shard in self.shards)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the shards, in order."""
        return tuple(shard.name for shard in self.shards)

    def difference(self, other: Selection) -> str:
        """The first field in which `other` differs; empty where both hold the same prompts.

        Files and their bytes may differ: each attempt writes its own, maybe with another pyarrow.
        """
        for field in ("inputs", "loaded", "prompts", "rejected"):
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                return f"{field} {theirs}, not {ours}"
        for ours, theirs in zip(self.names, other.names, strict=False):
            if ours != theirs:
                return f"shard {theirs}, not {ours}"
        return ""


def shard_name(index: int, prompts: Sequence[Prompt]) -> str:
    """File name of a shard; it carries the prompts' digest, so other prompts get another name."""
    number = f"{index:05d}" if index < _NUMBERED else f"x{index:010d}"
    return f"{number}-{digest([prompt.model_dump(mode='json') for prompt in prompts])[:8]}.parquet"


def write_prompts(
    location: Location, index: int, prompts: Sequence[Prompt], attempt: str
) -> PromptShard:
    """Store the prompts of shard number `index`, in files of this `attempt` alone."""
    name, data = shard_name(index, prompts), _encode(prompts, _prompt_schema())
    stem, _, suffix = name.rpartition(".")
    shard = PromptShard(
        name=name,
        file=f"{stem}.{attempt}.{suffix}",
        prompts=len(prompts),
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )
    location.child(PROMPTS).write(shard.file, data)
    return shard


def load_prompt_shard(location: Location, shard: PromptShard) -> tuple[Prompt, ...]:
    """The prompts of one shard of the synth stage at `location`. Raises CorruptShard."""
    folder = location.child(PROMPTS)
    where = folder.where(shard.file)
    if not folder.exists(shard.file):
        raise CorruptShard("the file is missing", where=where, fix=_SELECT_AGAIN)
    data = folder.read(shard.file)
    checksum = hashlib.sha256(data).hexdigest()
    if (len(data), checksum) != (shard.bytes, shard.sha256):
        actual = f"has {len(data)} bytes, SHA-256 {checksum[:16]}…"
        problem = f"{actual}; {shard.bytes}, {shard.sha256[:16]}… were selected"
        raise CorruptShard(problem, where=where, fix=_SELECT_AGAIN)
    prompts = tuple(decode_rows(data, where, Prompt))
    if len(prompts) != shard.prompts:
        problem = f"holds {len(prompts)} prompts, {shard.prompts} were selected"
        raise CorruptShard(problem, where=where, fix=_SELECT_AGAIN)
    return prompts


def delete_prompts(location: Location, files: Iterable[str]) -> None:
    """Delete prompt files of the synth stage at `location`; missing ones are fine."""
    delete = location.child(PROMPTS).delete
    with ThreadPoolExecutor(_CONCURRENT_DELETES, thread_name_prefix="prompts") as pool:
        list(pool.map(delete, files))


def find_selection(location: Location) -> Selection | None:
    """The selection of the synth stage at `location`, None before it is committed.

    Raises CorruptShard where it cannot be read.
    """
    if not location.exists(SELECTION):
        return None
    return _parse_selection(location, location.read(SELECTION))


def create_selection(location: Location, selection: Selection) -> Selection:
    """Commit it unless there is one; returns the committed one."""
    data = selection.model_dump_json().encode()
    return _parse_selection(location, location.create(SELECTION, data))


def _parse_selection(location: Location, data: bytes) -> Selection:
    selection = Selection.parse(data, where=location.where(SELECTION), fix=_SELECT_AGAIN)
    selected, rejected = selection.prompts, sum(selection.rejected.values())
    if selection.loaded != selected + rejected:
        loaded = selection.loaded
        problem = f"{selected} prompts and {rejected} rejected are not the {loaded} loaded"
        raise CorruptShard(problem, where=location.where(SELECTION), fix=_SELECT_AGAIN)
    return selection


def _prompt_schema() -> Any:
    import pyarrow as pa

    sampling = {"temperature": pa.float64(), "top_p": pa.float64(), "top_k": pa.int64()}
    return pa.schema(
        {
            **dict.fromkeys(("sample_id", "source", "license", "category"), pa.string()),
            "turns": pa.list_(pa.string()),
            "tool_turns": pa.list_(pa.int32()),
            **dict.fromkeys(("tools", "system"), pa.string()),
            "sampling": pa.struct(list(sampling.items())),
        }
    )


def _encode(
    records: Sequence[Record], schema: Any, notes: Mapping[str, Any] | None = None
) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [record.model_dump(mode="json") for record in records]
    table = pa.Table.from_pylist(rows, schema=schema)
    if notes:
        table = table.replace_schema_metadata({_NOTES: canonical_json(dict(notes)).encode()})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _sample_schema() -> Any:
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
