"""One committed file. Data first, then its entry: a file without an entry was never committed.

<stage>/shards/00003.safetensors             the bytes
<stage>/shards/00003.safetensors.entry.json  the Shard record and the seconds it took
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from pipeline.errors import CorruptShard
from pipeline.records import Shard, canonical_json
from pipeline.store.location import Location

#: Directory of the shards inside a stage's directory.
SHARDS = "shards"
ENTRY = ".entry.json"


class Entry(NamedTuple):
    """What is recorded beside a committed file."""

    shard: Shard
    seconds: float  # since the commit before it; adds up to the stage's wall time over all attempts


def verify_shard(location: Location, shard: Shard) -> None:
    """Check size and SHA-256 of one shard of the stage at `location`, in blocks.

    Raises CorruptShard with the file and what differs.
    """
    folder = location.child(SHARDS)
    if not folder.exists(shard.name):
        raise _corrupt(location, shard, "the file is missing")
    _check(location, shard, folder.size(shard.name), folder.sha256(shard.name))


def read_shard(location: Location, shard: Shard) -> bytes:
    """All bytes of one shard of the stage at `location`, verified on the way. Raises CorruptShard."""
    folder = location.child(SHARDS)
    if not folder.exists(shard.name):
        raise _corrupt(location, shard, "the file is missing")
    data = folder.read(shard.name)
    _check(location, shard, len(data), hashlib.sha256(data).hexdigest())
    return data


def verify_sizes(location: Location, shards: tuple[Shard, ...]) -> None:
    """Check that all shards are there with their sizes, from one listing. Raises CorruptShard."""
    sizes = location.child(SHARDS).sizes() if shards else {}
    for shard in shards:
        if shard.name not in sizes:
            raise _corrupt(location, shard, "the file is missing")
        _check(location, shard, sizes[shard.name], shard.sha256)


def write_shard(location: Location, name: str, data: bytes, *, rows: int, tokens: int, rejected: dict[str, int], seconds: float) -> Shard:
    """Write the file, read its size back, then write its entry."""
    folder = location.child(SHARDS)
    shard = Shard(name=name, rows=rows, tokens=tokens, bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), rejected=dict(sorted(rejected.items())))
    folder.write(name, data)
    _check(location, shard, folder.size(name), shard.sha256)
    entry = {"shard": shard.model_dump(mode="json"), "seconds": round(seconds, 3)}
    folder.write(name + ENTRY, canonical_json(entry).encode())
    return shard


def committed(location: Location) -> dict[str, Entry]:
    """All entries of the stage at `location` whose files match. Raises CorruptShard for one that does not."""
    folder = location.child(SHARDS)
    names = [name for name in folder.names() if name.endswith(ENTRY)]
    entries = {name.removesuffix(ENTRY): _read_entry(folder, name) for name in names}
    for entry in entries.values():
        verify_shard(location, entry.shard)
    return entries


def _read_entry(folder: Location, name: str) -> Entry:
    try:
        fields: dict[str, Any] = json.loads(folder.read(name))
        entry = Entry(Shard.model_validate(fields["shard"]), float(fields["seconds"]))
    except (ValueError, KeyError, TypeError) as error:
        problem = f"not a shard's entry: {' '.join(str(error).split())[:200]}"
        raise CorruptShard(problem, where=folder.where(name), fix="delete it; the shard is then made again") from None
    if entry.shard.name + ENTRY != name:
        raise CorruptShard(f"is the entry of {entry.shard.name}", where=folder.where(name), fix="delete it; the shard is then made again")
    return entry


def _check(location: Location, shard: Shard, size: int, sha256: str) -> None:
    if size != shard.bytes:
        raise _corrupt(location, shard, f"has {size} bytes, {shard.bytes} were committed")
    if sha256 != shard.sha256:
        raise _corrupt(location, shard, f"has SHA-256 {sha256[:16]}…, {shard.sha256[:16]}… was committed")


def _corrupt(location: Location, shard: Shard, problem: str) -> CorruptShard:
    stage = location.uri.rsplit("/", 1)[-1]
    return CorruptShard(problem, where=f"{location.uri}/{SHARDS}/{shard.name}", fix=f"restore the file, or make it again with `eagle3 {stage} --force`")
