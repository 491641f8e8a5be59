"""States on storage as training reads them: cached, prefetched, checked, bounded."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pipeline.errors import CorruptShard, StoreError
from pipeline.learning.batches import ReadAhead, Schedule, TrainBatch, read_batch
from pipeline.learning.corpus import Piece, survey
from pipeline.records import Shard
from pipeline.store.location import Location
from pipeline.store.shards import SHARDS, ShardCache, write_shard
from pipeline.store.states import Encoding, StatesSample, encode_states, teacher_positions
from pipeline.train.prepare import StoredCorpus

HIDDEN = 8


def make_samples(
    shard: int, count: int = 3, *, length: int = 24, hidden: int = HIDDEN
) -> list[StatesSample]:
    draw = torch.Generator().manual_seed(shard)
    mask = torch.zeros(length, dtype=torch.uint8)
    mask[length // 2 :] = 1
    positions = teacher_positions(mask)
    ids = [torch.randint(0, 60, (length,), generator=draw, dtype=torch.int32) for _ in range(count)]
    aux = [torch.randn(length, 3 * hidden, generator=draw).bfloat16() for _ in range(count)]
    final = [torch.randn(len(positions), hidden, generator=draw).bfloat16() for _ in range(count)]
    return [
        StatesSample(f"s{shard}-{n}", "test", ids[n], mask, aux[n], final[n], positions)
        for n in range(count)
    ]


@dataclass(frozen=True)
class Store:
    """Shards that were committed, and what was in them."""

    location: Location
    shards: tuple[Shard, ...]
    samples: tuple[list[StatesSample], ...]

    def path(self, shard: int) -> Path:
        return self.location.child(SHARDS).local_path(self.shards[shard].path)

    def pieces(self) -> list[Piece]:
        return [
            Piece(shard, index, 0, len(sample.token_ids))
            for shard, part in enumerate(self.samples)
            for index, sample in enumerate(part)
        ]


def store(uri: object, total: int, encodings: Sequence[Encoding] = ("bf16",), **kind: int) -> Store:
    location = Location(str(uri))
    samples = [make_samples(shard, **kind) for shard in range(total)]
    shards = []
    for number, part in enumerate(samples):
        data, tokens = (
            encode_states(part, encodings[number % len(encodings)]),
            sum(len(sample.token_ids) for sample in part),
        )
        shards.append(
            write_shard(
                location,
                f"{number:05d}.safetensors",
                data,
                rows=len(part),
                tokens=tokens,
                rejected={},
                seconds=0,
            ).shard
        )
    return Store(location, tuple(shards), tuple(samples))


def read(corpus: StoredCorpus, piece: Piece) -> StatesSample:
    """A piece in memory of its own."""
    return corpus.read(piece, corpus.new_rows(piece, piece.stop, piece.stop))


def flip(data: bytes) -> bytes:
    """A bit of the last sample's states is wrong; the header is right."""
    return data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards that were read from a store block by block, as fetching one does."""
    names: list[str] = []
    blocks = Location.blocks

    def counted(self: Location, name: str) -> object:
        names.append(name)
        return blocks(self, name)

    monkeypatch.setattr(Location, "blocks", counted)
    return names


def read_all(corpus: StoredCorpus, pieces: Sequence[Piece], *, epochs: int = 1) -> list[TrainBatch]:
    schedule = Schedule(pieces, budget=60, seed=1, epochs=epochs)
    with ReadAhead(corpus, schedule, range(len(schedule))) as reader:
        return [reader.take() for _ in range(len(schedule))]


def assert_holds(batches: Sequence[TrainBatch], expected: Store) -> None:
    """Every sample once, with its very states."""
    known = {sample.sample_id: sample for part in expected.samples for sample in part}
    read_ids = [name for batch in batches for name in batch.sample_ids]
    assert sorted(read_ids) == sorted(known)
    for batch in batches:
        for name, states in zip(
            batch.sample_ids, batch.aux_states.split_with_sizes(list(batch.lengths)), strict=True
        ):
            assert torch.equal(states, known[name].aux_states)
        teachers = torch.cat([known[name].final_states for name in batch.sample_ids])
        assert torch.equal(batch.teacher_states, teachers)


@pytest.mark.parametrize("kind", ["local", "gs", "cached"])
def test_every_sample_arrives_once_and_whole(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    uri = (
        str(tmp_path / "run")
        if kind == "local"
        else f"{request.getfixturevalue('bucket')}/{tmp_path.name}"
    )
    stored = store(uri, 4)
    cache = ShardCache(tmp_path / "cache", 10**7) if kind == "cached" else None
    corpus = StoredCorpus(stored.location, stored.shards, cache=cache, hidden_size=HIDDEN)
    corpus.verify()
    surveyed = survey(corpus, vocab_size=60, budget=60)
    assert list(surveyed.pieces) == stored.pieces() and surveyed.tokens == 4 * 3 * 24
    assert_holds(read_all(corpus, stored.pieces()), stored)


def test_the_order_is_that_of_the_schedule_wherever_the_states_are(tmp_path: Path) -> None:
    local, remote = store(tmp_path / "run", 5), store(f"memory://{tmp_path.name}", 5)
    cache = ShardCache(tmp_path / "cache", 10**7)
    corpora = [
        StoredCorpus(local.location, local.shards),
        StoredCorpus(remote.location, remote.shards),
        StoredCorpus(remote.location, remote.shards, cache=cache),
    ]
    orders = [
        [batch.sample_ids for batch in read_all(corpus, local.pieces(), epochs=2)]
        for corpus in corpora
    ]
    assert orders[0] == orders[1] == orders[2]


def test_a_remote_shard_is_fetched_once(tmp_path: Path, downloads: list[str]) -> None:
    stored = store(f"memory://{tmp_path.name}", 4)
    cache = ShardCache(tmp_path / "cache", 10**7)
    survey(StoredCorpus(stored.location, stored.shards, cache=cache), vocab_size=60, budget=60)
    assert downloads == [], "a survey reads ids and masks alone"
    for _ in range(2):
        read_all(
            StoredCorpus(stored.location, stored.shards, cache=cache), stored.pieces(), epochs=2
        )
    assert sorted(downloads) == sorted(shard.path for shard in stored.shards)
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_a_cache_too_small_for_the_shuffled_shards_is_not_used(
    tmp_path: Path, downloads: list[str]
) -> None:
    stored = store(f"memory://{tmp_path.name}", 4)
    cache = ShardCache(tmp_path / "cache", sum(shard.bytes for shard in stored.shards) - 1)
    assert_holds(
        read_all(StoredCorpus(stored.location, stored.shards, cache=cache), stored.pieces()), stored
    )
    assert downloads == [] and not (tmp_path / "cache").exists()


def test_the_shards_unused_for_longest_leave_the_cache(tmp_path: Path) -> None:
    stored = store(f"memory://{tmp_path.name}", 5)
    largest = max(shard.bytes for shard in stored.shards)
    cache = ShardCache(tmp_path, 3 * largest)
    for shard in (0, 1, 2, 0, 3, 0, 4):
        cache.fetch(stored.location, stored.shards[shard])
        kept = {path.parent.parent.name for path in tmp_path.glob("shards/*/shards/*")}
        assert (
            sum(path.stat().st_size for path in tmp_path.glob("shards/*/shards/*")) <= cache.limit
        )
    assert kept == {stored.shards[shard].sha256 for shard in (0, 3, 4)}
    cache.drop(stored.shards[3])
    cache.drop(stored.shards[3])
    assert not cache.folder(stored.shards[3]).exists()


def test_equal_shards_are_fetched_by_one_of_many(tmp_path: Path, downloads: list[str]) -> None:
    """Each with a cache object of its own, as processes have: the lock is the kernel's."""
    stored = store(f"memory://{tmp_path.name}", 2)
    together = threading.Barrier(6)

    def fetch() -> None:
        together.wait()
        for shard in stored.shards:
            ShardCache(tmp_path, 10**7).fetch(stored.location, shard)

    threads = [threading.Thread(target=fetch) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(downloads) == sorted(shard.path for shard in stored.shards)


def test_a_copy_that_rotted_in_the_cache_is_fetched_again(
    tmp_path: Path, downloads: list[str]
) -> None:
    stored = store(f"memory://{tmp_path.name}", 2)
    cache = ShardCache(tmp_path / "cache", 10**7)
    copy = (
        cache.fetch(stored.location, stored.shards[1])
        .child(SHARDS)
        .local_path(stored.shards[1].path)
    )
    for damaged in (flip(copy.read_bytes()), copy.read_bytes()[:-7]):
        copy.write_bytes(damaged)
        downloads.clear()
        batches = read_all(
            StoredCorpus(stored.location, stored.shards, cache=cache), stored.pieces()
        )
        assert_holds(batches, stored)
        assert downloads.count(stored.shards[1].path) == 1


@pytest.mark.parametrize("part", [slice(0, 24), slice(4, 20)])
def test_threads_that_find_the_same_copy_rotten_share_a_fresh_one(
    part: slice, tmp_path: Path, downloads: list[str]
) -> None:
    """Whether the sample is read into place, or a piece of it is copied."""
    stored = store(f"memory://{tmp_path.name}", 1)
    corpus = StoredCorpus(
        stored.location, stored.shards, cache=ShardCache(tmp_path / "cache", 10**7)
    )
    copy = (
        ShardCache(tmp_path / "cache", 10**7)
        .fetch(stored.location, stored.shards[0])
        .child(SHARDS)
        .local_path(stored.shards[0].path)
    )
    copy.write_bytes(flip(copy.read_bytes()))
    downloads.clear()
    last, together = len(stored.samples[0]) - 1, threading.Barrier(8)

    def read_last() -> StatesSample:
        corpus.reader(0)
        together.wait()
        return read(corpus, Piece(0, last, part.start, part.stop))

    with ThreadPoolExecutor(8) as pool:
        samples = [future.result() for future in [pool.submit(read_last) for _ in range(8)]]
    expected = stored.samples[0][last].aux_states[: part.stop]
    assert all(torch.equal(sample.aux_states, expected) for sample in samples)
    assert len(downloads) == 1


@pytest.mark.parametrize("kind", ["local", "ranges", "cached"])
def test_a_flipped_byte_is_read_twice_and_named(
    kind: str, tmp_path: Path, downloads: list[str]
) -> None:
    stored = store(tmp_path / "run" if kind == "local" else f"memory://{tmp_path.name}", 3)
    folder = stored.location.child(SHARDS)
    name = stored.shards[1].path
    folder.write(name, flip(folder.read(name)))
    cache = ShardCache(tmp_path / "cache", 10**7) if kind == "cached" else None
    corpus = StoredCorpus(stored.location, stored.shards, cache=cache)
    problem = "has SHA-256" if kind == "cached" else "sample s1-2 of test has CRC-32"
    with pytest.raises(
        CorruptShard,
        match=rf"{stored.location.uri}/shards/00001\.\w+\.safetensors: sample 2: {problem}"
        r".*, read twice \(fix: ",
    ):
        read(corpus, Piece(1, 2, 0, 24))
    assert downloads.count(name) == (4 if kind == "cached" else 0)
    with pytest.raises(CorruptShard, match=r"00001\.\w+\.safetensors: sample \d: .*read twice"):
        read_all(corpus, stored.pieces())
    assert not list(tmp_path.glob("cache/shards/*/shards/00001*")), "nothing that is wrong is kept"


def test_a_shard_that_the_store_delivers_wrong_is_not_let_in(bucket: str, tmp_path: Path) -> None:
    """Its CRC32C is not the one that the store reported at the commit."""
    stored = store(f"{bucket}/{tmp_path.name}", 1)
    folder = stored.location.child(SHARDS)
    name = stored.shards[0].path
    folder.write(name, flip(folder.read(name)))
    cache = ShardCache(tmp_path, 10**7)
    with pytest.raises(
        CorruptShard,
        match=r"shards/00000\.\w+\.safetensors: has crc32c:\S+, crc32c:\S+ was committed",
    ):
        cache.fetch(stored.location, stored.shards[0])
    folder.delete("00000.safetensors.entry.json")
    with pytest.raises(CorruptShard, match=r"shards/00000\.\w+\.safetensors: has SHA-256"):
        cache.fetch(stored.location, stored.shards[0])
    assert not list(tmp_path.glob("shards/*/shards/*"))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: path.write_bytes(flip(path.read_bytes())), "has SHA-256"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "were committed"),
        (lambda path: path.unlink(), "the file is missing"),
    ],
)
def test_damage_is_found_before_training(
    damage: Callable[[Path], object], problem: str, tmp_path: Path
) -> None:
    stored = store(tmp_path, 2)
    damage(stored.path(1))
    with pytest.raises(CorruptShard, match=rf"shards/00001\.\w+\.safetensors: .*{problem}"):
        StoredCorpus(stored.location, stored.shards).verify()


def test_damage_is_found_while_training(tmp_path: Path) -> None:
    stored, first = store(tmp_path, 2), Piece(1, 0, 0, 24)
    whole, corpus = stored.path(1).read_bytes(), StoredCorpus(stored.location, stored.shards)
    stored.path(1).write_bytes(whole[:-1])
    with pytest.raises(
        CorruptShard, match=r"00001\.\w+\.safetensors: sample 0: has \d+ bytes, \d+ were committed"
    ):
        read(corpus, first)
    stored.path(1).unlink()
    with pytest.raises(StoreError, match=r"00001\.\w+\.safetensors: no such file"):
        read(corpus, first)
    stored.path(1).write_bytes(whole)
    assert read(corpus, first).sample_id == "s1-0"


def test_a_store_that_holds_another_object_is_found_without_reading_it(
    bucket: str, tmp_path: Path, downloads: list[str]
) -> None:
    stored = store(f"{bucket}/{tmp_path.name}", 2)
    corpus, folder = StoredCorpus(stored.location, stored.shards), stored.location.child(SHARDS)
    corpus.verify()
    name = stored.shards[1].path
    whole = folder.read(name)
    folder.write(name, flip(whole))
    with pytest.raises(
        CorruptShard,
        match=r"00001\.\w+\.safetensors: has crc32c:\S+ in the store, crc32c:\S+ was committed",
    ):
        corpus.verify()
    folder.write(name, whole)
    corpus.verify()
    folder.delete(stored.shards[0].path)
    with pytest.raises(CorruptShard, match=r"00000\.\w+\.safetensors: the file is missing"):
        corpus.verify()
    assert downloads == []


@pytest.mark.parametrize("kind", ["path", "memory"])
def test_a_shard_of_another_target_is_named(kind: str, tmp_path: Path) -> None:
    stored = store(tmp_path if kind == "path" else f"memory://{tmp_path.name}", 2)
    corpus = StoredCorpus(stored.location, stored.shards, hidden_size=16)
    for call in (lambda: read(corpus, Piece(1, 0, 0, 24)), lambda: corpus.outline(1)):
        with pytest.raises(
            CorruptShard,
            match=r"shards/00001\.\w+\.safetensors.*: holds states of hidden_size 8, "
            "the target of the manifest's contract has 16",
        ):
            call()


@pytest.mark.parametrize("encoding", ["fp8", "int8"])
def test_states_are_decoded_on_the_training_device(encoding: Encoding, tmp_path: Path) -> None:
    """Documents of shards with other scales, and a piece of one, in one batch."""
    stored = store(tmp_path, 2, [encoding])
    corpus = StoredCorpus(stored.location, stored.shards)
    pieces = [Piece(0, 1, 0, 24), Piece(0, 2, 0, 24), Piece(1, 0, 4, 20), Piece(1, 2, 0, 24)]
    batch = read_batch(corpus, pieces)
    assert batch.aux_states.dtype != torch.bfloat16 and len(batch.codecs) == (
        1 if encoding == "fp8" else 2
    )
    there = batch.to(torch.device("cpu"), torch.float32)
    assert (
        there.codecs == () and there.aux_states.dtype == there.teacher_states.dtype == torch.float32
    )
    for piece, states in zip(
        pieces, there.aux_states.split_with_sizes(list(batch.lengths)), strict=True
    ):
        whole = corpus.reader(piece.shard).sample(piece.sample)
        assert torch.equal(states.bfloat16(), whole.aux_states[: piece.stop])
        assert (
            states - stored.samples[piece.shard][piece.sample].aux_states[: piece.stop].float()
        ).abs().max() < 0.3
    alone = read_batch(corpus, pieces[2:3]).to(torch.device("cpu"), torch.float32)
    first = sum(len(read_batch(corpus, [piece]).labels) for piece in pieces[:2])
    assert torch.equal(
        there.teacher_states[first : first + len(alone.labels)], alone.teacher_states
    )


def test_a_state_that_teaches_no_label_is_left_out(tmp_path: Path) -> None:
    """Position 0 teaches token 1, which is never predicted."""
    stored = store(tmp_path, 1, length=3)
    batch = read_batch(StoredCorpus(stored.location, stored.shards), stored.pieces())
    assert batch.labels.tolist() == [2, 5, 8] and batch.depths.tolist() == [2, 2, 2]
    assert torch.equal(batch.aux_states, torch.cat([part.aux_states for part in stored.samples[0]]))
    teachers = [part.final_states[1:] for part in stored.samples[0]]
    assert torch.equal(batch.teacher_states, torch.cat(teachers))


def test_what_is_planned_is_announced_to_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte ranges of all states of the planned samples, and of nothing else."""
    stored, announced = store(tmp_path, 2), list[tuple[int, int]]()
    monkeypatch.setattr(
        os, "posix_fadvise", lambda file, start, length, advice: announced.append((start, length))
    )
    read_all(StoredCorpus(stored.location, stored.shards), stored.pieces())
    ranges = []
    for shard in stored.shards:
        data = (stored.location.child(SHARDS).local_path(shard.path)).read_bytes()
        first = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:first])
        for name in ("aux_states", "final_states"):
            start, stop = (first + at for at in header[name]["data_offsets"])
            size = (stop - start) // 3  # three samples of one length
            ranges += [(start + place * size, size) for place in range(3)]
    assert sorted(announced) == sorted(ranges)


def resident() -> int:
    """Bytes of this process that are in memory, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """Ten times the shards, all open at once, and no more memory than for the first of them."""
    stored = store(tmp_path, 30, count=4, length=100, hidden=512)  # 1.4 MB a shard
    corpus = StoredCorpus(stored.location, stored.shards)
    peaks = []
    for shards in (3, 30):
        schedule = Schedule(
            [piece for piece in stored.pieces() if piece.shard < shards],
            budget=100,
            seed=0,
            epochs=1,
        )
        start = resident()
        with ReadAhead(corpus, schedule, range(len(schedule))) as reader:
            peaks.append(max(_after(reader) for _ in range(len(schedule))) - start)
    data = sum(shard.bytes for shard in stored.shards)
    assert data > 35e6 and peaks[1] - max(0, peaks[0]) < data / 4


def _after(reader: ReadAhead) -> int:
    reader.take()
    return resident()
