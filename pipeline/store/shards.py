"""One committed file: data first, then its entry. A file without an entry was never committed.

    <stage>/shards/00003.9f2c41d07be3a685.safetensors  the bytes, in a file of this attempt's own
                   00003.safetensors.entry.json        the Shard, which names that file; seconds,
                                                       the store's own checksum

A commit is write → verify → entry. The entry is created exclusively: of several processes that make
the same shard, on whatever machines, the first entry wins for good, and the others take over its
shard. The manifest that lists the shard follows when all are committed:

    write ──► size and checksum as the store reports them ──► entry ──► … ──► manifest
      └ killed here: an orphan, for `eagle3 gc`     └ killed from here on: committed, left as it is

States that a training has followed (train.follow) are deleted once a checkpoint is past them. Their
entries stay, and a record, which is there before the first of them goes, names them:

    checkpoint ──► <stage>/consumed/000016.json ──► the files of the first 16 shards are deleted

Remote shards are read from a cache on the local disk:

    $XDG_CACHE_HOME/eagle3/shards/<sha256 of the shard>/shards/<name>   like a stage's directory
                                  locks/<first two digits>.lock         one fetch of equal shards

A copy is named by the checksum in the manifest, so it can never be another shard's, and runs that
share shards share copies. Above the limit the least recently used copies are evicted. Any number of
processes may use one cache: one of them fetches a shard, and a file that is removed while another
process has it open stays readable there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

from pipeline.errors import ConsumedShard, CorruptShard, StoreError
from pipeline.records import (
    Arithmetic,
    Record,
    Shard,
    StoredFile,
    json_object,
    sealed_json,
    stored_file,
    take_checksum,
)
from pipeline.store.backend import Checksum, FileInfo, explain_os_error
from pipeline.store.disk import is_temporary, replace_file
from pipeline.store.location import Location
from pipeline.telemetry import count_shard

#: Directory of the shards inside a stage's directory.
SHARDS = "shards"
ENTRY = ".entry.json"
_ENTRY_KEYS = {"shard", "seconds", "stored", "arithmetic", "tallies"}
#: Directory, inside a stage's, of the records of what was consumed.
CONSUMED = "consumed"
#: What tells the file of one attempt at a shard from another's: the shard's name is all the rest.
_ATTEMPT = re.compile(r"\.[0-9a-f]{16}(?=\.\w+$)")
#: Entries that are read at one time; each is one request to a remote store.
_CONCURRENT_READS = 16
#: Entries in memory while they are summed up.
_ENTRIES_AHEAD = 1024
_DELETE_ENTRY = "delete it; the shard is then made again"


class Entry(NamedTuple):
    """What is recorded beside a committed file."""

    shard: Shard
    file: StoredFile  # its own
    seconds: float  # since the commit before it; adds up to the stage's wall time over all attempts
    stored: str = ""  # the store's own checksum of the file ("crc32c:…", "md5:…"), where it has one
    arithmetic: Arithmetic | None = None  # what computed it; None for older versions
    #: The stage's counts of it, which its manifest sums up.
    tallies: Mapping[str, Any] = MappingProxyType({})


class Consumed(Record):
    """`consumed/000016.json`: the first 16 shards of the stage, by name, are not needed again."""

    shards: tuple[str, ...]  # those that no earlier record names
    step: int  # of training's checkpoint that is past them


def consumed_count(location: Location) -> int:
    """How many shards of the stage at `location` are consumed, from the front; one listing."""
    return max(map(_count_of, location.child(CONSUMED).names()), default=0)


def last_consumed(location: Location) -> tuple[int, int]:
    """`consumed_count`, and the step of the checkpoint that was past them; 0 without any."""
    count, folder = consumed_count(location), location.child(CONSUMED)
    return count, _read_record(folder, f"{count:06d}.json").step if count else 0


def read_consumed(location: Location) -> set[str]:
    """Names of the consumed shards of the stage at `location`. Raises CorruptShard."""
    folder = location.child(CONSUMED)
    return {name for file in folder.names() for name in _read_record(folder, file).shards}


def consume(location: Location, names: Sequence[str], *, before: int, step: int) -> None:
    """Record that the shards `names`, the first of the stage, are consumed, and delete their files.

    All but `before` of them, which have a record. The caller's checkpoint of `step` is stored.
    """
    if before < len(names):
        record = Consumed(shards=tuple(names[before:]), step=step)
        data = sealed_json(record.model_dump(mode="json"))
        location.child(CONSUMED).create(f"{len(names):06d}.json", data)
    folder = location.child(SHARDS)
    for file in consumed_files(folder.names(), set(names)):
        folder.delete(file)


def consumed_files(files: Iterable[str], consumed: Container[str]) -> list[str]:
    """Of the `files` of a shards' directory those of all attempts at `consumed` shards."""
    return [
        file for file in files if not file.endswith(ENTRY) and _ATTEMPT.sub("", file) in consumed
    ]


def check_record(data: bytes, where: str) -> Consumed:
    """The record in the file `where`. Raises CorruptShard for another than was written."""
    fix = "restore the file; the shards that it names are gone without it"
    fields = json_object(data, where=where, fix=fix)
    if not take_checksum(fields, data, where=where, fix=fix):
        raise CorruptShard("has no checksum", where=where, fix=fix)
    return Consumed.from_fields(fields, where=where, fix=fix)


def _read_record(folder: Location, file: str) -> Consumed:
    return check_record(folder.read(file), folder.where(file))


def _count_of(file: str) -> int:
    stem = file.removesuffix(".json")
    return int(stem) if stem.isdecimal() else 0


def verify_shard(location: Location, shard: Shard) -> None:
    """Check size and SHA-256 of one shard of the stage at `location`, in blocks.

    Raises CorruptShard with the file and what differs, ConsumedShard for one that was consumed.
    """
    folder = _folder_of(location, shard)
    check_shard(location, shard, folder.size(shard.path), f"sha256:{folder.sha256(shard.path)}")


def read_shard(location: Location, shard: Shard) -> bytes:
    """All bytes of one shard of the stage at `location`, verified. Raises CorruptShard."""
    folder = _folder_of(location, shard)
    data = folder.read(shard.path)
    check_shard(location, shard, len(data), f"sha256:{hashlib.sha256(data).hexdigest()}")
    return data


def committed_state(location: Location, expected: str) -> str:
    """For a plan: how many of the `expected` shards of the stage at `location` are committed."""
    committed = sum(name.endswith(ENTRY) for name in location.child(SHARDS).names())
    return f"{committed} of {expected} shards committed" if committed else "not started"


def verify_sizes(location: Location, shards: tuple[Shard, ...]) -> None:
    """Check that all shards are there with their sizes, from one listing, or were consumed.

    Raises CorruptShard.
    """
    files = location.child(SHARDS).files() if shards else {}
    # Its record is there before a file goes, so it is looked for after the files.
    absent = any(shard.path not in files for shard in shards)
    consumed = read_consumed(location) if absent else set()
    for shard in shards:
        if shard.path in files or shard.name not in consumed:
            _check_listed(location, shard, files)


def verify_stored(location: Location, shards: tuple[Shard, ...]) -> None:
    """As `verify_sizes`, and that the store's own checksums are still those of the commits."""
    folder = location.child(SHARDS)
    files = folder.files() if shards else {}
    files |= {shard.path: _check_listed(location, shard, files) for shard in shards}
    with_checksum = [shard for shard in shards if files[shard.path].checksum]
    recorded = [shard for shard in with_checksum if shard.name + ENTRY in files]
    entries = read_entries(folder, [shard.name for shard in recorded])
    for shard, entry in zip(recorded, entries, strict=True):
        now = files[shard.path].checksum
        if entry.shard == shard and entry.stored and entry.stored != now:
            raise _corrupt(location, shard, f"has {now} in the store, {entry.stored} was committed")


def stored_checksum(location: Location, shard: Shard) -> str:
    """The store's checksum of this shard at its commit; empty without one."""
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
    tallies: Mapping[str, Any] | None = None,
) -> Entry:
    """Write a file, compare what the store reports of it, then claim `name` by the entry.

    Returns the entry of `name`: this one, or that of another process which was first. Raises
    CorruptShard where the existing one cannot be read.
    """
    stem, dot, suffix = name.rpartition(".")
    attempt = f".{secrets.token_hex(8)}"
    shard = Shard(
        name=name,
        file=f"{stem}{attempt}{dot}{suffix}" if stem else f"{name}{attempt}",
        rows=rows,
        tokens=tokens,
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        rejected=dict(sorted(rejected.items())),
    )
    folder = location.child(SHARDS)
    info = folder.write(shard.path, data)
    check_size(location, shard, info.size)
    fields = {
        "shard": shard.model_dump(mode="json"),
        "seconds": round(seconds, 3),
        "stored": info.checksum,
        "arithmetic": arithmetic and arithmetic.model_dump(mode="json"),
        "tallies": dict(tallies or {}),
    }
    there = folder.create(name + ENTRY, sealed_json(fields))
    entry = _parse_entry(folder, name + ENTRY, there)
    count_shard(shard, lost=entry.shard.path != shard.path)
    if entry.shard.path != shard.path:
        folder.delete(shard.path)  # an orphan
    return entry


def committed(files: Iterable[str]) -> set[str]:
    """Names of the shards whose entries are among the `files` of a shards' directory."""
    return {name.removesuffix(ENTRY) for name in files if name.endswith(ENTRY)}


def read_committed(
    location: Location, names: Sequence[str], *, trusted: Container[str] = ()
) -> Iterator[Entry]:
    """Entries of the committed shards `names` of the stage at `location`, in that order.

    Their files are compared with them, from one listing: sizes, and the checksums that a remote
    store reports. Local files are read, except `trusted` ones. Of consumed shards there is the
    entry alone. Raises CorruptShard.
    """
    folder = location.child(SHARDS)
    files = folder.files() if names else {}
    consumed = read_consumed(location)

    def read(name: str) -> Entry:
        entry = read_entry(folder, name + ENTRY)
        try:
            return entry if name in consumed else check(name, entry)
        except StoreError:
            if name not in read_consumed(location):  # or it was consumed meanwhile
                raise
            return entry

    def check(name: str, entry: Entry) -> Entry:
        info = _check_listed(location, entry.shard, files)
        if name not in trusted and (not info.checksum or info.checksum != entry.stored):
            verify_shard(location, entry.shard)
        return entry

    with ThreadPoolExecutor(_CONCURRENT_READS, thread_name_prefix="entries") as pool:
        for start in range(0, len(names), _ENTRIES_AHEAD):
            yield from pool.map(read, names[start : start + _ENTRIES_AHEAD])


def read_entries(folder: Location, names: Iterable[str]) -> list[Entry]:
    """Those of the shards `names` in the shards' directory `folder`."""
    with ThreadPoolExecutor(_CONCURRENT_READS, thread_name_prefix="entries") as pool:
        return list(pool.map(lambda name: read_entry(folder, name + ENTRY), names))


def read_entry(folder: Location, name: str) -> Entry:
    """The entry in the file `name` of the shards' directory `folder`. Raises CorruptShard."""
    return _parse_entry(folder, name, folder.read(name))


def _parse_entry(folder: Location, name: str, data: bytes) -> Entry:
    where = folder.where(name)
    fields = json_object(data, where=where, fix=_DELETE_ENTRY)
    take_checksum(fields, data, where=where, fix=_DELETE_ENTRY)
    try:
        if unknown := fields.keys() - _ENTRY_KEYS:
            raise ValueError(f"has a key {min(unknown)}")
        shard, seconds = Shard.model_validate(fields["shard"]), float(fields["seconds"])
        computed = fields.get("arithmetic")
        arithmetic = Arithmetic.model_validate(computed) if computed else None
        stored, tallies = str(fields.get("stored", "")), dict(fields.get("tallies", {}))
        entry = Entry(shard, stored_file(data), seconds, stored, arithmetic, tallies)
    except (ValueError, KeyError, TypeError) as error:
        problem = f"not a shard's entry: {' '.join(str(error).split())[:200]}"
        raise CorruptShard(problem, where=where, fix=_DELETE_ENTRY) from None
    if shard.name + ENTRY != name:
        problem = f"is the entry of {shard.name}"
        raise CorruptShard(problem, where=where, fix=_DELETE_ENTRY)
    return entry


@contextmanager
def reading_tallies(location: Location, entry: Entry) -> Iterator[Mapping[str, Any]]:
    """The tallies of an entry of the stage at `location`, for a block that sums them up.

    Raises CorruptShard where they are not what the stage commits.
    """
    try:
        yield entry.tallies
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"tallies are not those of this stage: {type(error).__name__}: {error}"
        where = location.child(SHARDS).where(entry.shard.name + ENTRY)
        raise CorruptShard(problem[:200], where=where, fix=_DELETE_ENTRY) from error


def _folder_of(location: Location, shard: Shard) -> Location:
    """The directory of the shards. Raises CorruptShard where `shard` is not in it."""
    folder = location.child(SHARDS)
    if not folder.exists(shard.path):
        raise _missing(location, shard)
    return folder


def _check_listed(location: Location, shard: Shard, files: Mapping[str, FileInfo]) -> FileInfo:
    """What a listing says of the shard's file. One that it lacks is asked for: the listing may be
    an old one, or have passed by a file that was committed while it was made.

    Raises CorruptShard where the file is missing or has another size.
    """
    info = files.get(shard.path) or location.child(SHARDS).info_if_there(shard.path)
    if info is None:
        raise _missing(location, shard)
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


def _missing(location: Location, shard: Shard) -> CorruptShard:
    if shard.name not in read_consumed(location):
        return _corrupt(location, shard, "the file is missing")
    problem = "was consumed: training is past it, and features.keep_shards had it deleted"
    fix = "make the states again under another run.uri=…"
    return ConsumedShard(problem, where=f"{location.uri}/{SHARDS}/{shard.path}", fix=fix)


def _corrupt(location: Location, shard: Shard, problem: str) -> CorruptShard:
    where, stage = f"{location.uri}/{SHARDS}/{shard.path}", location.uri.rsplit("/", 1)[-1]
    fix = f"restore the file, or make it again with `eagle3 {stage} --force`"
    return CorruptShard(problem, where=where, fix=fix)


#: A download that has not grown for this long was killed. Seconds.
_ABANDONED = 3600.0


class _Copy(NamedTuple):
    used: float  # seconds since 1970
    size: int
    folder: Path


class ShardCache:
    """At most `limit` bytes of shards below `directory`, besides those that are being fetched."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.limit, self._directory = limit, directory

    def fetch(self, location: Location, shard: Shard) -> Location:
        """A local directory that holds `shard` like the stage at `location`; fetched if needed.

        Raises CorruptShard when the store twice delivers other bytes than were committed,
        StoreError when the disk is full.
        """
        folder = self.folder(shard)
        path = folder / SHARDS / shard.path
        if not _touch(path, shard):
            try:
                with self._locked(f"{shard.sha256[:2]}.lock"):
                    if not _touch(path, shard):  # another process may have fetched it meanwhile
                        self._evict_for(shard.bytes)
                        download_shard(location, shard, path, private=folder.parent)
            except OSError as error:
                raise _explain_full_cache(error, path) from error
        return Location(str(folder))

    def drop(self, shard: Shard) -> None:
        """Remove the copy of `shard`, if there is one, after a fetch that may be under way."""
        with self._locked(f"{shard.sha256[:2]}.lock"), suppress(FileNotFoundError):
            shutil.rmtree(self.folder(shard))

    def folder(self, shard: Shard) -> Path:
        """Where the copy of `shard` is, or would be."""
        return self._directory / "shards" / shard.sha256

    def _evict_for(self, needed: int) -> None:
        """Remove the copies unused for longest until `needed` more bytes fit."""
        with self._locked("evict.lock"):
            copies = sorted(self._copies())
            excess = sum(copy.size for copy in copies) + needed - self.limit
            for copy in copies:
                if excess <= 0:
                    return
                shutil.rmtree(copy.folder, ignore_errors=True)
                excess -= copy.size

    def _copies(self) -> Iterator[_Copy]:
        """What is there; abandoned downloads are removed on the way."""
        for folder in _children(self._directory / "shards"):
            size, used = 0, 0.0
            for path in _children(folder / SHARDS):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    if is_temporary(path.name) and status.st_mtime < time.time() - _ABANDONED:
                        path.unlink()
                        continue
                    size, used = size + status.st_size, max(used, status.st_mtime)
            yield _Copy(used, size, folder)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Exclusive among threads and processes; the kernel releases it when its holder dies."""
        path = self._directory / "locks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def download_shard(
    location: Location,
    shard: Shard,
    path: Path,
    *,
    thorough: bool = False,
    private: Path | None = None,
) -> None:
    """Write the bytes of a remote shard to `path`, which appears once they are the committed ones.

    They are compared by the CRC32C that the store reported at the commit, where it did, as it costs
    next to nothing; else, and when `thorough`, by SHA-256. Other bytes are read once more. Raises
    CorruptShard when they differ again.
    """
    folder, stored = location.child(SHARDS), "" if thorough else stored_checksum(location, shard)
    expected = stored if stored.startswith("crc32c:") else f"sha256:{shard.sha256}"

    def fill(file: BinaryIO) -> None:
        checksum, size = Checksum(expected.partition(":")[0]), 0
        for block in folder.blocks(shard.path):
            checksum.update(block)
            size += file.write(block)
        check_shard(location, shard, size, str(checksum), expected)

    try:
        replace_file(path, fill, durable=False, private=private)
    except CorruptShard:
        replace_file(path, fill, durable=False, private=private)


def _touch(path: Path, shard: Shard) -> bool:
    """Whether a whole copy is there; notes that it was used now."""
    with suppress(FileNotFoundError):
        if path.stat().st_size == shard.bytes:
            os.utime(path)
            return True
    return False


def _children(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return list(folder.iterdir())
    return []


def _explain_full_cache(error: OSError, path: Path) -> StoreError:
    problem = explain_os_error(error, str(path), writing=True).problem
    fix = "free some space, lower run.cache_bytes, or set run.cache_dir to another disk"
    return StoreError(problem, where=str(path), fix=fix)
