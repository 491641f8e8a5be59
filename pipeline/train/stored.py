"""The states of a run on storage, local or remote, as training reads them.

    local disk ──────────────────────────────────────────────► sample, CRC-32 checked
    remote ─ whole shard, checksum checked ─► cache ─────────► sample, CRC-32 checked
    remote, cache too small ─ two byte ranges a sample ──────► sample, CRC-32 checked

A sample whose bytes are wrong is read once more, from a fresh copy; then training stops with its
name. Memory is bounded whatever the corpus holds: a fixed number of shards is open, and a sample is
read into the rows of its batch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import TypeVar

from torch import Tensor

from pipeline.config import RunConfig, cache_directory
from pipeline.errors import CorruptShard, Eagle3Error, StoreError
from pipeline.learning.batches import shards_together
from pipeline.learning.corpus import Piece, cut_into, final_rows
from pipeline.records import Manifest, Shard
from pipeline.store.location import Location
from pipeline.store.manifest import stage_location
from pipeline.store.shards import SHARDS, ShardCache, verify_shard, verify_sizes, verify_stored
from pipeline.store.states import StatesReader, StatesSample

T = TypeVar("T")


#: Remote shards that are surveyed at one time.
_AT_ONCE = 4


#: Attempts at opening a copy before other processes evict it.
_OPENINGS = 4


_FIX = "restore the file, or run `eagle3 features --force`"


class StoredCorpus:
    """The committed shards of the features stage at `location`; at most `keep_open` stay open, as
    many as are shuffled together.

    Remote shards are fetched into `cache` when it can hold those that are shuffled together;
    otherwise, and without a cache, samples are read by byte range. `hidden_size` is that of the
    target they must be of.
    """

    def __init__(
        self,
        location: Location,
        shards: Sequence[Shard],
        *,
        keep_open: int | None = None,
        cache: ShardCache | None = None,
        hidden_size: int | None = None,
    ) -> None:
        self._location, self._shards = location, list(shards)
        sizes = sorted((shard.bytes for shard in self._shards), reverse=True)
        self.together = shards_together(sizes)
        self._keep_open, self._hidden_size = keep_open or self.together, hidden_size
        self._open: OrderedDict[int, StatesReader] = OrderedDict()
        self._lock, self._reopening = threading.Lock(), threading.Lock()
        largest = sum(sizes[: self.together])
        fits = cache is not None and not location.is_local and cache.limit >= largest
        self._cache = cache if fits else None

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def reading_threads(self) -> int:
        """Two for local files: more would wait for the interpreter. Four for byte ranges: a remote
        store takes its time for each answer."""
        return 2 if self._location.is_local or self._cache else 4

    def rows(self, shard: int) -> int:
        """Samples of shard number `shard`."""
        return self._shards[shard].rows

    def verify(self, shards: Sequence[int] | None = None) -> None:
        """Check the size of every shard, and the checksums of all or of `shards`.

        Local ones are read for that. Of remote ones what the store tells is compared; they are
        checked when they are fetched, and their samples when they are read. Raises CorruptShard.
        """
        own = tuple(self._shards if shards is None else map(self._shards.__getitem__, shards))
        if len(own) < len(self):
            verify_sizes(self._location, tuple(self._shards))
        if not self._location.is_local:
            verify_stored(self._location, own)
            return
        for shard in own:
            verify_shard(self._location, shard)

    def outline(self, shard: int) -> StatesReader:
        """Ids, masks and origins of shard number `shard`, without fetching a remote one."""
        with self._lock:
            if shard in self._open:
                return self._open[shard]
        if self._location.is_local:
            return self.reader(shard)
        return self._checked(self._location, shard)

    def outlines(self, shards: Sequence[int]) -> Iterator[StatesReader]:
        """Of `shards` in order; remote ones are read a few at a time."""
        if self._location.is_local:
            yield from map(self.outline, shards)
            return
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="outline") as pool:
            numbers = iter(shards)
            coming = [pool.submit(self.outline, shard) for shard in islice(numbers, 2 * _AT_ONCE)]
            while coming:
                yield coming.pop(0).result()
                coming += [pool.submit(self.outline, shard) for shard in islice(numbers, 1)]

    def reader(self, shard: int) -> StatesReader:
        """The reader of shard number `shard`; the one unused for longest is closed for it.

        Raises CorruptShard.
        """
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

    def new_rows(self, piece: Piece, tokens: int, finals: int) -> tuple[Tensor, Tensor]:
        """Memory for aux states of `tokens` tokens and for final states, in rows like `piece`'s."""
        return self._retried(piece, lambda reader: reader.new_rows(tokens, finals))

    def read(self, piece: Piece, aux: Tensor, final: Tensor) -> StatesSample:
        """The piece with its past (see `cut_into`), in the first of the given rows."""
        return self._retried(piece, lambda reader: read_piece(reader, piece, aux, final))

    def prefetch(self, shard: int) -> None:
        """Have the shard in the cache when this returns. A failure arrives with a sample of it."""
        if self._cache:
            with suppress(Eagle3Error):
                self._cache.fetch(self._location, self._shards[shard])

    def announce(self, piece: Piece) -> None:
        """Have a local sample read ahead. A failure arrives with the sample itself."""
        if self._location.is_local:
            with suppress(Eagle3Error):
                self.reader(piece.shard).announce(piece.sample)

    def _retried(self, piece: Piece, read: Callable[[StatesReader], T]) -> T:
        """`read` with the reader of the piece's shard, again with a fresh copy if bytes are wrong.

        Then CorruptShard with the sample.
        """
        reader: StatesReader | None = None
        try:
            reader = self.reader(piece.shard)
            return read(reader)
        except CorruptShard:
            pass
        try:
            return read(self._reopened(piece.shard, instead_of=reader))
        except CorruptShard as error:
            problem, where = f"{error.problem}, read twice", error.where
            if self._cache:  # name the shard, not its copy
                copy = str(self._cache.folder(self._shards[piece.shard]))
                where = where.replace(copy, self._location.uri)
            where = f"{where}: sample {piece.sample}"
            raise CorruptShard(problem, where=where, fix=error.fix) from error

    def _opened(self, shard: int) -> StatesReader:
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

    def _checked(self, folder: Location, shard: int) -> StatesReader:
        """The shard, or its copy, in `folder`; it must be of this target."""
        reader = StatesReader(folder, self._shards[shard])
        if self._hidden_size is not None and reader.hidden_size != self._hidden_size:
            expected = f"the target of the manifest's contract has {self._hidden_size}"
            problem = f"holds states of hidden_size {reader.hidden_size}, {expected}"
            raise CorruptShard(problem, where=self._where(shard), fix=_FIX)
        return reader

    def _reopened(self, shard: int, *, instead_of: StatesReader | None) -> StatesReader:
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
        return f"{self._location.uri}/{SHARDS}/{self._shards[shard].path}"


def read_piece(reader: StatesReader, piece: Piece, aux: Tensor, final: Tensor) -> StatesSample:
    """A piece of one of the reader's samples with its past, in the first of the given rows.

    A sample that is kept with all of its states is read there. Others must be read whole, for their
    checksum; of those, what is kept is copied.
    """
    positions = reader.final_positions(piece.sample)
    stored = (reader.lengths[piece.sample], slice(0, len(positions)))
    needed = (piece.stop, final_rows(positions, piece.start, piece.stop))
    if needed == stored:
        return reader.read_into(piece.sample, aux[: piece.stop], final[: len(positions)])
    return cut_into(reader.sample(piece.sample, decode=False), piece, aux, final)


def open_corpus(config: RunConfig, parent: Manifest) -> StoredCorpus:
    """The states of the run, `parent` being their manifest."""
    cache = ShardCache(cache_directory(), config.run.cache_bytes)
    location, hidden_size = stage_location(config.run.uri, "features"), parent.contract.hidden_size
    return StoredCorpus(location, parent.shards, cache=cache, hidden_size=hidden_size)
