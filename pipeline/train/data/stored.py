"""The states of a run on storage, local or remote, as training reads them.

    local disk ──────────────────────────────────────────────► sample, CRC-32 checked
    remote ─ whole shard, checksum checked ─► cache ─────────► sample, CRC-32 checked
    remote, cache too small ─ two byte ranges a sample ──────► sample, CRC-32 checked

A sample whose bytes are wrong is read once more, from a fresh copy; then training stops with its name.
Memory is bounded whatever the corpus holds: a fixed number of shards is open, and none is mapped.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from pipeline.config import RunConfig, cache_directory
from pipeline.errors import CorruptShard, Eagle3Error, StoreError
from pipeline.records import Manifest, Shard
from pipeline.store.cache import ShardCache
from pipeline.store.location import Location
from pipeline.store.shards import SHARDS, verify_shard, verify_stored
from pipeline.store.stage_run import stage_location
from pipeline.store.states import Room, StatesReader, StatesSample
from pipeline.store.states.layout import TYPES, as_bytes
from pipeline.train.data.corpus import Piece
from pipeline.train.data.schedule import SHUFFLED_SHARDS

#: Remote shards that are surveyed at one time.
_AT_ONCE = 4
#: Attempts at opening a copy before other processes evict it.
_OPENINGS = 4

_FIX = "restore the file, or run `eagle3 features --force`"


class ShardReader(StatesReader):
    """A StatesReader that reads the states of a local shard into memory of their own.

    A memory map would count every page it has shown as this process's memory, and take a page fault for
    each; a read at a position costs one copy into memory that the allocator has at hand.
    """

    def __init__(self, location: Location, shard: Shard) -> None:
        super().__init__(location, shard)
        self._file: int | None = None
        if self._map is not None:
            self._file = os.open(self._folder.local_path(self._name), os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)  # readers are closed by forgetting them
            self._map.madvise(mmap.MADV_DONTNEED)  # header, ids and masks have been copied

    def _rows(self, name: str, rows: slice, room: Room | None) -> Tensor:
        if self._file is None:
            return super()._rows(name, rows, room)
        tensor = self._layout.tensors[name]
        count, width, dtype = rows.stop - rows.start, tensor.shape[1], TYPES[tensor.dtype]
        states = room(name, count, width, dtype) if room else torch.empty(count, width, dtype=dtype)
        (start, _), target = tensor.span(rows), as_bytes(states).reshape(-1).data
        read = os.preadv(self._file, [target], start) if len(target) else 0
        if read != len(target):
            raise self._corrupt(
                f"ends after {start + read} bytes where {start + len(target)} were expected"
            )
        return states

    def announce(self, index: int) -> None:
        """Have the operating system read the states of sample `index` of a local shard ahead, where it can be asked to."""
        if self._file is None or not hasattr(os, "posix_fadvise"):
            return
        for name, rows in self._spans(index).items():
            start, stop = self._layout.tensors[name].span(rows)
            if stop > start:  # a length of 0 would mean all of the file
                os.posix_fadvise(self._file, start, stop - start, os.POSIX_FADV_WILLNEED)


class StoredCorpus:
    """The committed shards of the features stage at `location`; at most `keep_open` stay open.

    Remote shards are fetched into `cache` when it can hold those that are shuffled together; otherwise, and
    without a cache, samples are read by byte range. `hidden_size` is that of the target they must be of.
    """

    def __init__(
        self,
        location: Location,
        shards: Sequence[Shard],
        *,
        keep_open: int = SHUFFLED_SHARDS,
        cache: ShardCache | None = None,
        hidden_size: int | None = None,
    ) -> None:
        self._location, self._shards, self._keep_open, self._hidden_size = (
            location,
            list(shards),
            keep_open,
            hidden_size,
        )
        self._open: OrderedDict[int, ShardReader] = OrderedDict()
        self._lock, self._reopening = threading.Lock(), threading.Lock()
        window = sum(
            sorted((shard.bytes for shard in self._shards), reverse=True)[:SHUFFLED_SHARDS]
        )
        self._cache = cache if cache and not location.is_local and cache.limit >= window else None

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def readers(self) -> int:
        """Two for local files: more would wait for the interpreter. A store that is read by byte range takes its time for each answer."""
        return 2 if self._location.is_local or self._cache else 4

    def rows(self, shard: int) -> int:
        """Samples of shard number `shard`."""
        return self._shards[shard].rows

    def verify(self) -> None:
        """Check every shard of a local store, and all that a remote store tells without reading its shards. Raises CorruptShard.

        Remote shards are checked when they are fetched, and their samples when they are read.
        """
        if not self._location.is_local:
            verify_stored(self._location, tuple(self._shards))
            return
        for shard in self._shards:
            verify_shard(self._location, shard)

    def outline(self, shard: int) -> ShardReader:
        """Ids, masks and origins of shard number `shard`; those of a remote one are read by byte range, without fetching it."""
        with self._lock:
            if shard in self._open:
                return self._open[shard]
        return (
            self.reader(shard) if self._location.is_local else self._checked(self._location, shard)
        )

    def outlines(self) -> Iterator[ShardReader]:
        """Of all shards in order; remote ones are read a few at a time."""
        if self._location.is_local:
            yield from map(self.outline, range(len(self)))
            return
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="outline") as pool:
            numbers = iter(range(len(self)))
            coming = [pool.submit(self.outline, shard) for shard in islice(numbers, 2 * _AT_ONCE)]
            while coming:
                yield coming.pop(0).result()
                coming += [pool.submit(self.outline, shard) for shard in islice(numbers, 1)]

    def reader(self, shard: int) -> ShardReader:
        """The reader of shard number `shard`; the one unused for longest is closed for it. Raises CorruptShard."""
        with self._lock:
            if shard in self._open:
                self._open.move_to_end(shard)
                return self._open[shard]
        opened = self._opened(shard)
        with self._lock:
            opened = self._open.setdefault(shard, opened)  # another thread may have been faster
            self._open.move_to_end(shard)
            while len(self._open) > self._keep_open:
                self._open.popitem(last=False)
        return opened

    def sample(self, shard: int, index: int, room: Room | None = None) -> StatesSample:
        """One sample with its states as stored, in the `room` for them. Read once more when its bytes are wrong, then CorruptShard."""
        reader: ShardReader | None = None
        try:
            reader = self.reader(shard)
            return reader.sample(index, decode=False, room=room)
        except CorruptShard:
            pass
        try:
            return self._reopened(shard, instead_of=reader).sample(index, decode=False, room=room)
        except CorruptShard as error:
            copy = (
                str(self._cache.folder(self._shards[shard])) if self._cache else self._location.uri
            )
            where = error.where.replace(copy, self._location.uri)  # name the shard, not its copy
            raise CorruptShard(
                f"{error.problem}, read twice", where=f"{where}: sample {index}", fix=error.fix
            ) from error

    def prefetch(self, shard: int) -> None:
        """Have the shard in the cache when this returns. A failure arrives with the sample that needs the shard."""
        if self._cache:
            with suppress(Eagle3Error):
                self._cache.fetch(self._location, self._shards[shard])

    def announce(self, piece: Piece) -> None:
        """Have a local sample on its way from the disk. A failure arrives with the sample itself."""
        if self._location.is_local:
            with suppress(Eagle3Error):
                self.reader(piece.shard).announce(piece.sample)

    def _opened(self, shard: int) -> ShardReader:
        if self._cache is None:
            return self._checked(self._location, shard)
        for _ in range(_OPENINGS):
            folder = self._cache.fetch(self._location, self._shards[shard])
            try:
                return self._checked(folder, shard)
            except CorruptShard:
                raise
            except (StoreError, FileNotFoundError):
                continue  # evicted by another process between fetch and open
        raise StoreError(
            "does not stay in the cache",
            where=self._where(shard),
            fix="raise run.cache_bytes: other processes fill the cache as well",
        )

    def _checked(self, folder: Location, shard: int) -> ShardReader:
        """The shard, or its copy, in `folder`; it must be of this target."""
        reader = ShardReader(folder, self._shards[shard])
        if self._hidden_size is not None and reader.hidden_size != self._hidden_size:
            problem = f"holds states of hidden_size {reader.hidden_size}, the target of the manifest's contract has {self._hidden_size}"
            raise CorruptShard(problem, where=self._where(shard), fix=_FIX)
        return reader

    def _reopened(self, shard: int, *, instead_of: ShardReader | None) -> ShardReader:
        """A reader of a fresh copy; threads that found the same one wrong share it."""
        with self._reopening:
            with self._lock:
                current = self._open.get(shard)
            if current is not None and current is not instead_of:
                return current
            if self._cache:
                self._cache.drop(self._shards[shard])
            fresh = self._opened(shard)
            with self._lock:
                self._open[shard] = fresh  # whatever a slower thread has opened meanwhile
            return fresh

    def _where(self, shard: int) -> str:
        return f"{self._location.uri}/{SHARDS}/{self._shards[shard].name}"


def open_corpus(config: RunConfig, parent: Manifest) -> StoredCorpus:
    """The states of the run, `parent` being their manifest."""
    directory = (
        Path(config.run.cache_dir).expanduser() if config.run.cache_dir else cache_directory()
    )
    cache = ShardCache(directory, config.run.cache_bytes)
    return StoredCorpus(
        stage_location(config.run.uri, "features"),
        parent.shards,
        cache=cache,
        hidden_size=parent.contract.hidden_size,
    )
