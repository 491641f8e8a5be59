"""The prompts of a synth stage, selected once, before anything is generated.

    synth/prompts/00003-1f2e3d4c.9f2c41d07be3a685.parquet   the prompts of one shard, in a file of
                                                            this attempt's own
    synth/selection.json                                    the Selection, which names the files

The selection is created exclusively when all files are written: of several processes that select,
the first decides, and the others take its prompts for theirs. The files hold the prompts as the
sources gave them, not screened for personal data: once the stage has its manifest nobody needs
them, and whoever has written it removes them.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from pipeline.errors import CorruptShard
from pipeline.records import FILE_NAME, Prompt, Record, digest
from pipeline.store.location import Location
from pipeline.store.samples import decode_rows

PROMPTS = "prompts"
SELECTION = "selection.json"
#: Names of so many shards begin with five digits. Later ones begin with a letter, so that names
#: sort in the order of the shards however many there are.
_NUMBERED = 100_000
_CONCURRENT_DELETES = 16
_FIX = f"restore the file, or delete {SELECTION} to have the prompts selected again"


_FileName = Annotated[str, Field(pattern=FILE_NAME)]


class PromptShard(NamedTuple):
    """The prompts of one shard of samples. There may be 100,000: half a kilobyte of memory each."""

    name: _FileName  # the shard's
    file: _FileName  # of one attempt's own
    prompts: int
    bytes: int
    sha256: str


class Selection(Record):
    """Which prompts go in, and what was left out before any model."""

    inputs: str  # digest of the configuration that decides it
    loaded: int  # prompts that the sources gave
    rejected: dict[str, int]  # reason → those that did not pass
    turns: int  # that are asked in the longest conversation
    asked: int  # turns, over all prompts
    characters: int  # in those turns
    shards: tuple[PromptShard, ...]
    #: Size and SHA-256 of each local file in sources, then exclude; earlier runs have none.
    files: tuple[str | None, ...] = ()

    @property
    def prompts(self) -> int:
        return sum(shard.prompts for shard in self.shards)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the shards, in order."""
        return tuple(shard.name for shard in self.shards)

    def difference(self, other: Selection) -> str:
        """What `other` says otherwise; empty where both hold the same prompts.

        Files and their bytes may differ: each attempt has its own, maybe of another pyarrow.
        """
        for field in ("inputs", "loaded", "prompts", "rejected"):
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                return f"{field} {theirs}, not {ours}"
        for own, others in zip(self.names, other.names, strict=False):
            if own != others:
                return f"shard {others}, not {own}"
        return ""


def shard_name(index: int, prompts: Sequence[Prompt]) -> str:
    """It carries the prompts' digest: other prompts, another name."""
    number = f"{index:05d}" if index < _NUMBERED else f"x{index:010d}"
    return f"{number}-{digest([prompt.model_dump(mode='json') for prompt in prompts])[:8]}.parquet"


def write_prompts(
    location: Location, index: int, prompts: Sequence[Prompt], own: str
) -> PromptShard:
    """Store the prompts of shard number `index`; files of the attempt `own` touch nobody else's."""
    name, data = shard_name(index, prompts), _encode(prompts)
    stem, _, suffix = name.rpartition(".")
    shard = PromptShard(
        name=name,
        file=f"{stem}.{own}.{suffix}",
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
        raise CorruptShard("the file is missing", where=where, fix=_FIX)
    data = folder.read(shard.file)
    checksum = hashlib.sha256(data).hexdigest()
    if (len(data), checksum) != (shard.bytes, shard.sha256):
        actual = f"has {len(data)} bytes, SHA-256 {checksum[:16]}…"
        problem = f"{actual}; {shard.bytes}, {shard.sha256[:16]}… were selected"
        raise CorruptShard(problem, where=where, fix=_FIX)
    prompts = tuple(decode_rows(data, where, Prompt))
    if len(prompts) != shard.prompts:
        problem = f"holds {len(prompts)} prompts, {shard.prompts} were selected"
        raise CorruptShard(problem, where=where, fix=_FIX)
    return prompts


def delete_prompts(location: Location, files: Iterable[str]) -> None:
    """Of the synth stage at `location`; those that another process has deleted do not matter."""
    delete = location.child(PROMPTS).delete
    with ThreadPoolExecutor(_CONCURRENT_DELETES, thread_name_prefix="prompts") as pool:
        list(pool.map(delete, files))


def find_selection(location: Location) -> Selection | None:
    """Of the synth stage at `location`, None before it is committed.

    Raises CorruptShard for a file that is none.
    """
    return _parse(location, location.read(SELECTION)) if location.exists(SELECTION) else None


def create_selection(location: Location, selection: Selection) -> Selection:
    """Commit it unless there is one; returns the one that is there."""
    data = selection.model_dump_json().encode()
    return _parse(location, location.create(SELECTION, data))


def _parse(location: Location, data: bytes) -> Selection:
    selection = Selection.parse(data, where=location.where(SELECTION), fix=_FIX)
    kept, left_out = selection.prompts, sum(selection.rejected.values())
    if selection.loaded != kept + left_out:
        problem = f"{kept} prompts and {left_out} rejected are not the {selection.loaded} loaded"
        raise CorruptShard(problem, where=location.where(SELECTION), fix=_FIX)
    return selection


def _encode(prompts: Sequence[Prompt]) -> bytes:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    rows = [prompt.model_dump(mode="json") for prompt in prompts]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=_schema()), sink, compression="zstd")
    return sink.getvalue()


def _schema() -> Any:
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
