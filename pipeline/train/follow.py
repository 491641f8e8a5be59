"""States that are made while they are trained on, and of which the run holds a few shards.

    names in order    a b c d e f g h i j …      features.keep_shards: 4, so a window has 2
    features                    ▐ e ▌▐ f ▌ full
    on the disk           c d     e   f          at most 4
    training              ▐ epochs over c d ▌
    deleted           a b                        once a checkpoint was past both

Everything before the first step follows from the samples, which are all there: ids, masks, where a
final state is stored, and so lengths, held-out samples, the draft vocabulary, the batches and their
number. Training waits for a window as a whole, as its passes mix all of it.

A step may take the last batches of one window and the first of the next: two windows fit at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from pipeline.config import RunConfig, cache_directory, rank
from pipeline.console import notice
from pipeline.errors import CorruptShard, StageConflict
from pipeline.learning.batches import shards_together
from pipeline.records import Manifest, Shard
from pipeline.store.manifest import (
    Awaited,
    Begin,
    find_manifest,
    read_begin,
    read_manifest,
    stage_location,
)
from pipeline.store.parts import cut, parts_of, window_of
from pipeline.store.samples import SampleTokens, read_tokens
from pipeline.store.shards import (
    SHARDS,
    ShardCache,
    committed,
    consume,
    consumed_count,
    last_consumed,
    read_entries,
    verify_shard,
    verify_stored,
)
from pipeline.store.states import teacher_positions
from pipeline.train.group import all_gather_or_raise, broadcast_from_rank0, own_part, rank0_only
from pipeline.train.prepare import StoredCorpus

#: Seconds between two looks at the store: the first, which double, and the most.
_FIRST_LOOK, _LAST_LOOK = 0.1, 2.0
#: Synth shards whose tokens are in memory at one time.
_OPEN = 8
_GONE = "delete the run's features and train directories, or choose another run.uri=…"

T = TypeVar("T")


def await_begin(config: RunConfig, samples: Manifest) -> Awaited:
    """The features that are to come, once they have been begun from these `samples`.

    Raises StageConflict where they were begun with another configuration or parent.
    """
    location = stage_location(config.run.uri, "features")
    begun = _wait_until(lambda: read_begin(location), "waiting for features to begin")
    assert begun is not None, "nothing stops it"
    changes = begun.changes(Begin.of(config, "features", samples, begun.made_with), config)
    if changes:
        each = ", ".join(f"{name} {was} → {now}" for name, (was, now) in changes.items())
        fix = "run `eagle3 features --force` first, or choose another run.uri=…"
        raise StageConflict(f"was begun with other inputs: {each}", where=location.uri, fix=fix)
    return Awaited.of(begun)


def await_manifest(config: RunConfig) -> Manifest:
    """That of features, whose last shard is committed."""
    uri = config.run.uri
    _wait_until(lambda: find_manifest(uri, "features"), "waiting for features to finish")
    return read_manifest(uri, "features")


def require_states(config: RunConfig, states: Manifest | Awaited) -> None:
    """Raise StageConflict where training is to begin anew, maybe by --force, and its states are
    gone: what is left of an earlier training cannot be replaced."""
    count = consumed_count(stage_location(config.run.uri, "features"))
    location = stage_location(config.run.uri, "train")
    begun = read_begin(location)
    changes = begun and begun.changes(Begin.of(config, "train", states, {}), config)
    if not count or changes == {}:
        return
    which = "that is not here"
    if changes:
        each = ", ".join(f"{name} {was} → {now}" for name, (was, now) in changes.items())
        which = f"with other settings: {each}"
    problem = f"{count} shards of states were consumed by a training {which}"
    raise StageConflict(problem, where=location.uri, fix=_GONE)


class _Outline:
    """A shard of states as it will be."""

    def __init__(self, samples: Sequence[SampleTokens], *, everything: bool) -> None:
        self._samples, self._everything = samples, everything

    def __len__(self) -> int:
        return len(self._samples)

    def origin(self, index: int) -> tuple[str, str]:
        return self._samples[index].sample_id, self._samples[index].source

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.tensor(self._samples[index].token_ids, dtype=torch.int32)
        mask = torch.zeros(len(ids), dtype=torch.uint8)
        for start, end in self._samples[index].supervised:
            mask[start:end] = 1
        return ids, mask

    def final_positions(self, index: int) -> Tensor:
        mask = self.tokens(index)[1]
        return teacher_positions(mask, len(mask) - 1 if self._everything else None)


class _Source(NamedTuple):
    """Where a shard's samples are."""

    shard: int  # of synth
    number: int
    parts: int


class FollowedCorpus(StoredCorpus):
    """The states that features makes of `samples`, the manifest of synth."""

    def __init__(self, config: RunConfig, samples: Manifest) -> None:
        uri, keep = config.run.uri, config.features.keep_shards
        cache = ShardCache(cache_directory(), config.run.cache_bytes)
        hidden_size = samples.contract.hidden_size
        super().__init__(stage_location(uri, "features"), [], cache=cache, hidden_size=hidden_size)
        parts = parts_of(samples.shards, config.features.shard_tokens)
        numbers = {shard.name: number for number, shard in enumerate(samples.shards)}
        self._names = list(parts)
        self._sources = [
            _Source(numbers[part.source.name], part.number, part.parts) for part in parts.values()
        ]
        synth = stage_location(uri, "synth")
        self._tokens = lru_cache(_OPEN)(lambda number: read_tokens(synth, samples.shards[number]))
        self._everything = config.features.supervise == "all"
        assert keep is not None, "the configuration says how many shards stay"
        self.window = window_of(keep, len(parts))
        #: Shards that are consumed; the step of the checkpoint that was past them.
        self._consumed, self._past = 0, 0
        self._swept = False  # their files are gone
        counted = all_gather_or_raise(
            lambda: [len(self.outline(shard)) for shard in own_part(len(self))]
        )
        self._rows = [rows for part in counted for rows in part]

    def __len__(self) -> int:
        return len(self._names)

    def rows(self, shard: int) -> int:
        return self._rows[shard]

    def outline(self, shard: int) -> _Outline:  # type: ignore[override]
        source = self._sources[shard]
        samples = self._tokens(source.shard)
        run = cut([len(sample.token_ids) for sample in samples], source.parts)[source.number]
        usable = [samples[number] for number in run if samples[number].supervised]
        return _Outline(usable, everything=self._everything)

    def outlines(self, shards: Sequence[int]) -> Iterator[_Outline]:  # type: ignore[override]
        return map(self.outline, shards)

    def verify(self, shards: Sequence[int] | None = None) -> None:
        """Each window is verified when it is there."""

    def wait_for(self, window: int, is_stopping: Callable[[], bool] = lambda: False) -> bool:
        names = self._names[: self._end(window)]
        there = len(self._shards)
        if there >= len(names):
            return True

        def look() -> bool | None:
            seen = committed(self._location.child(SHARDS).names())
            return all(name in seen for name in names) or None

        which = f"{self._end(window) - there} shards of window {window + 1} of {self._windows}"
        if not _wait_until(look, f"waiting for features: {which}", is_stopping):
            return False
        self._shards += broadcast_from_rank0(lambda: self._entries(names[there:]))
        self._consumed, self._past = broadcast_from_rank0(lambda: last_consumed(self._location))
        if not there:
            self._settle([shard.bytes for shard in self._shards[: self._end(0)]])
        all_gather_or_raise(lambda: self._verify_new(range(there, len(names))))
        return True

    def require_after(self, step: int) -> None:
        if step < self._past:
            checkpoint = f"the checkpoint of step {self._past} is missing or damaged"
            problem = f"{checkpoint}, and the {self._consumed} shards before it were consumed"
            raise StageConflict(problem, where=self._location.uri, fix=_GONE)

    @property
    def is_over(self) -> bool:
        return 0 < len(self) <= self._consumed

    def consume(self, windows: int, *, step: int) -> None:
        names, before = self._names[: self._end(windows - 1)], self._consumed
        if len(names) > before or (
            names and not self._swept
        ):  # one that was killed may have left files
            for number, shard in enumerate(self._shards[: len(names)]):
                self._open.pop(number, None)  # an open file keeps its blocks on the disk
                if self._cache:
                    self._cache.drop(shard)
            rank0_only(lambda: consume(self._location, names, before=before, step=step))
            self._consumed, self._past, self._swept = len(names), step, True

    def consume_all(self, *, step: int) -> None:
        self.consume(self._windows, step=step)

    @property
    def _windows(self) -> int:
        assert self.window is not None
        return -(-len(self) // self.window)

    def _end(self, window: int) -> int:
        assert self.window is not None
        return min(len(self), (window + 1) * self.window)

    def _entries(self, names: Sequence[str]) -> list[Shard]:
        return [entry.shard for entry in read_entries(self._location.child(SHARDS), names)]

    def _settle(self, sizes: Sequence[int]) -> None:
        """What follows from how large shards are, as soon as the first window is there."""
        self.together = self._keep_open = shards_together(sizes)
        if self._cache and self._cache.limit < sum(sorted(sizes)[-self.together :]):
            self._cache = None

    def _verify_new(self, shards: range) -> None:
        """This process's part of them: what was committed, and of these samples."""
        left = shards[max(0, self._consumed - shards.start) :]
        part = own_part(len(left))
        own = left[part.start : part.stop]
        if not self._location.is_local:
            verify_stored(self._location, tuple(self._shards[shard] for shard in own))
        for shard in own:
            if self._location.is_local:
                verify_shard(self._location, self._shards[shard])
            expected, stored = self.outline(shard), self._checked(self._location, shard)
            same = len(expected) == len(stored) and all(
                expected.origin(index) == stored.origin(index)
                and torch.equal(expected.tokens(index)[0], stored.tokens(index)[0])
                and torch.equal(expected.final_positions(index), stored.final_positions(index))
                for index in range(len(stored))
            )
            if not same:
                fix = "run `eagle3 features --force` with this version of eagle3"
                raise CorruptShard("is not of these samples", where=self._where(shard), fix=fix)


def _wait_until(
    look: Callable[[], T | None], text: str, is_stopping: Callable[[], bool] = lambda: False
) -> T | None:
    """What rank 0 sees, once it is there, on all processes; None where one of them is to stop.

    All meet at every look, so that none waits for another longer than a group may.
    """
    pause, said = _FIRST_LOOK, False
    while True:
        outcomes = all_gather_or_raise(lambda: (look() if rank() == 0 else None, is_stopping()))
        if (value := outcomes[0][0]) is not None:
            return value
        if any(stopping for _, stopping in outcomes):
            return None
        if not said:
            notice("train", text)
            said = True
        time.sleep(pause)
        pause = min(2 * pause, _LAST_LOOK)
