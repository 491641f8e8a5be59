"""One committed file. Data first, then its entry: a file without an entry was never committed.

    <stage>/shards/00003.safetensors             the bytes
    <stage>/shards/00003.safetensors.entry.json  the Shard, its seconds, the store's own checksum

A commit is write → verify → entry; the manifest that lists the shard comes when all are committed:

    write ──► size and checksum as the store reports them ──► entry ──► … ──► manifest
      └ killed here: an orphan, written again       └ killed from here on: committed, left as it is
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from pipeline.errors import CorruptShard
from pipeline.records import Arithmetic, Shard, canonical_json
from pipeline.store.backend import FileInfo
from pipeline.store.location import Location

#: Directory of the shards inside a stage's directory.
SHARDS = "shards"
ENTRY = ".entry.json"
#: Entries that are read at one time; each is one request to a remote store.
_CONCURRENT_READS = 16
_DELETE_ENTRY = "delete it; the shard is then made again"


class Entry(NamedTuple):
    """What is recorded beside a committed file."""

    shard: Shard
    seconds: float  # since the commit before it; adds up to the stage's wall time over all attempts
    stored: str = ""  # the store's own checksum of the file ("crc32c:…", "md5:…"), where it has one
    arithmetic: Arithmetic | None = None  # what computed it; an older version did not say


def verify_shard(location: Location, shard: Shard) -> None:
    """Check size and SHA-256 of one shard of the stage at `location`, in blocks.

    Raises CorruptShard with the file and what differs.
    """
    folder = _folder_of(location, shard)
    check_shard(location, shard, folder.size(shard.name), f"sha256:{folder.sha256(shard.name)}")


def read_shard(location: Location, shard: Shard) -> bytes:
    """All bytes of one shard of the stage at `location`, verified. Raises CorruptShard."""
    folder = _folder_of(location, shard)
    data = folder.read(shard.name)
    check_shard(location, shard, len(data), f"sha256:{hashlib.sha256(data).hexdigest()}")
    return data


def verify_sizes(location: Location, shards: tuple[Shard, ...]) -> None:
    """Check that all shards are there with their sizes, from one listing. Raises CorruptShard."""
    files = location.child(SHARDS).files() if shards else {}
    for shard in shards:
        _check_info(location, shard, files.get(shard.name))


def verify_stored(location: Location, shards: tuple[Shard, ...]) -> None:
    """As `verify_sizes`, and that the store's own checksums are still those of the commits."""
    folder = location.child(SHARDS)
    files = folder.files() if shards else {}
    for shard in shards:
        _check_info(location, shard, files.get(shard.name))
    with_checksum = [shard for shard in shards if files[shard.name].checksum]
    recorded = [shard for shard in with_checksum if shard.name + ENTRY in files]
    entries = _read_entries(folder, [shard.name + ENTRY for shard in recorded])
    for shard, entry in zip(recorded, entries, strict=True):
        now = files[shard.name].checksum
        if entry.shard == shard and entry.stored and entry.stored != now:
            raise _corrupt(location, shard, f"has {now} in the store, {entry.stored} was committed")


def stored_checksum(location: Location, shard: Shard) -> str:
    """What the store reported of this very shard at its commit; empty without report or entry."""
    folder, name = location.child(SHARDS), shard.name + ENTRY
    entry = read_entry(folder, name) if folder.exists(name) else None
    return entry.stored if entry and entry.shard == shard else ""


def write_shard(
    location: Location,
    name: str,
    data: bytes,
    *,
    rows: int,
    tokens: int,
    rejected: dict[str, int],
    seconds: float,
    arithmetic: Arithmetic | None = None,
) -> Shard:
    """Write the file, compare what the store reports of it, then write its entry."""
    shard = Shard(
        name=name,
        rows=rows,
        tokens=tokens,
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        rejected=dict(sorted(rejected.items())),
    )
    folder = location.child(SHARDS)
    info = folder.write(name, data)
    check_size(location, shard, info.size)
    fields = {
        "shard": shard.model_dump(mode="json"),
        "seconds": round(seconds, 3),
        "stored": info.checksum,
        "arithmetic": arithmetic and arithmetic.model_dump(mode="json"),
    }
    folder.write(name + ENTRY, canonical_json(fields).encode())
    return shard


def delete_entry(location: Location, name: str) -> None:
    """Remove the entry of the shard `name`, so that its file may be replaced."""
    location.child(SHARDS).delete(name + ENTRY)


def committed(location: Location) -> dict[str, Entry]:
    """All entries of the stage at `location`. Raises CorruptShard for a file that does not match.

    Local files are read and their SHA-256 compared. Where a remote store reports checksums, the one
    it reports now is compared with the one of the commit, so that resuming reads no shard.
    """
    folder = location.child(SHARDS)
    files = folder.files()
    names = [name for name in files if name.endswith(ENTRY)]
    entries = {entry.shard.name: entry for entry in _read_entries(folder, names)}
    for entry in entries.values():
        info = _check_info(location, entry.shard, files.get(entry.shard.name))
        if not info.checksum or info.checksum != entry.stored:
            verify_shard(location, entry.shard)
    return entries


def _read_entries(folder: Location, names: Sequence[str]) -> list[Entry]:
    with ThreadPoolExecutor(_CONCURRENT_READS, thread_name_prefix="entries") as pool:
        return list(pool.map(lambda name: read_entry(folder, name), names))


def read_entry(folder: Location, name: str) -> Entry:
    """The entry in the file `name` of the shards' directory `folder`. Raises CorruptShard."""
    try:
        fields: dict[str, Any] = json.loads(folder.read(name))
        shard, seconds = Shard.model_validate(fields["shard"]), float(fields["seconds"])
        computed = fields.get("arithmetic")
        arithmetic = Arithmetic.model_validate(computed) if computed else None
        entry = Entry(shard, seconds, str(fields.get("stored", "")), arithmetic)
    except (ValueError, KeyError, TypeError) as error:
        problem = f"not a shard's entry: {' '.join(str(error).split())[:200]}"
        raise CorruptShard(problem, where=folder.where(name), fix=_DELETE_ENTRY) from None
    if shard.name + ENTRY != name:
        problem = f"is the entry of {shard.name}"
        raise CorruptShard(problem, where=folder.where(name), fix=_DELETE_ENTRY)
    return entry


def _folder_of(location: Location, shard: Shard) -> Location:
    """The directory of the shards, once `shard` is in it."""
    folder = location.child(SHARDS)
    if not folder.exists(shard.name):
        raise _corrupt(location, shard, "the file is missing")
    return folder


def _check_info(location: Location, shard: Shard, info: FileInfo | None) -> FileInfo:
    """What a listing knows of `shard`, once it is there with its size."""
    if info is None:
        raise _corrupt(location, shard, "the file is missing")
    check_size(location, shard, info.size)
    return info


def check_size(location: Location, shard: Shard, size: int) -> None:
    """Raises CorruptShard for another size than was committed."""
    if size != shard.bytes:
        raise _corrupt(location, shard, f"has {size} bytes, {shard.bytes} were committed")


def check_shard(
    location: Location, shard: Shard, size: int, checksum: str, expected: str | None = None
) -> None:
    """Raises CorruptShard for another size or SHA-256 (or `expected` checksum) than committed."""
    check_size(location, shard, size)
    expected = expected or f"sha256:{shard.sha256}"
    if checksum != expected:
        raise _corrupt(location, shard, f"has {_shown(checksum)}, {_shown(expected)} was committed")


def _shown(checksum: str) -> str:
    kind, value = checksum.split(":")
    return f"SHA-256 {value[:16]}…" if kind == "sha256" else checksum


def _corrupt(location: Location, shard: Shard, problem: str) -> CorruptShard:
    where, stage = f"{location.uri}/{SHARDS}/{shard.name}", location.uri.rsplit("/", 1)[-1]
    fix = f"restore the file, or make it again with `eagle3 {stage} --force`"
    return CorruptShard(problem, where=where, fix=fix)
