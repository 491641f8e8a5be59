"""A stage's directory, from the first byte to the manifest.

    <run uri>/<stage>/begin.json      which config and parent this work belongs to; written first
                      claims/…        which process is making which shard
                      shards/…        committed one by one, see shards.py
                      manifest.json   written last: without it the stage is not finished

Killed at any instant, the same command picks up the committed shards and ends with the same bytes.

    claims/NAME.0000.json   created exclusively by the process that makes the shard, and rewritten
                            while it does, so that its date stays young
           NAME.0001.json   the next process's, once the first has grown old; and so on

The guarantee is the commit's (shards.py): a claim that is taken over too early costs work and
nothing else. A claim's age is the difference of two times of the store, so two machines' clocks are
never compared; a claim of a process on this machine is also abandoned when that process has ended,
and any that has not changed for so long while this process watched, whatever its date.

Training and evaluation are one piece of work each, claimed as a whole: another attempt waits. One
that was silent for so long that another has taken over (it was stopped, or its node was cut off)
writes nothing more. Nor does any process into a stage that `--force` has discarded and begun anew;
`--force` itself is refused while a claim is alive.

    names     a b c d e f g h …      all start at the front; a process that meets another's claim
    process 1 ▐a▌▐b▌▐e▌              continues at a random place, so that processes seldom meet
    process 2 ▐c▌       ▐g▌          twice
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import random
import re
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from pipeline import __version__
from pipeline.config import RunConfig, RunSection
from pipeline.console import notice, one_line
from pipeline.documents import parse_json
from pipeline.errors import (
    ConsumedShard,
    CorruptShard,
    Eagle3Error,
    StageConflict,
    StageIncomplete,
    StoreError,
    TakenOver,
)
from pipeline.records import (
    Arithmetic,
    Manifest,
    Shard,
    Stage,
    StoredFile,
    TargetContract,
    canonical_json,
    digest,
    sealed_json,
)
from pipeline.store.location import Location
from pipeline.store.manifest import (
    BEGIN,
    MANIFEST,
    Awaited,
    Begin,
    find_manifest,
    parse_manifest,
    read_begin,
    stage_location,
)
from pipeline.store.shards import (
    ENTRY,
    SHARDS,
    Entry,
    committed,
    consumed_count,
    read_committed,
    read_entries,
    verify_shard,
    verify_sizes,
    write_shard,
)

#: What a key that differs belongs to, by its first word, where that is not the configuration.
_KINDS = {"server": "server", "parent": "parent", "target": "target", "pii": "filter"}
#: Committed shards of which the arithmetic is looked up when a stage is continued.
_LOOKED_AT = 64
CLAIMS = "claims"
#: A claim's file: what is claimed, and how many claims on it were taken over before.
_CLAIM = re.compile(r"(.+)\.([0-9]+)\.json")
#: A claim is renewed so many times before it counts as abandoned.
_RENEWALS = 4
#: Seconds of the first wait for shards that others are making; waits double.
_FIRST_WAIT = 0.25
_SOFTWARE = ("torch", "transformers", "triton", "safetensors", "pyarrow", "numpy", "deepspeed")


def open_stage(
    config: RunConfig,
    stage: Stage,
    parent: Manifest | Awaited | None,
    *,
    made_with: Mapping[str, str] | None = None,
    clock: datetime | None = None,
) -> StageRun:
    """Begin, continue or recognise as complete the stage's work for this config and parent.

    `made_with` is what else shapes the output: the target, versions of filters; `clock`: see
    `StageRun.clock`, for a stage that begins now. Raises StageConflict when the
    directory holds other work and `run.force` is off, and CorruptShard when committed files are not
    what they were. With `run.force` both are discarded.
    """
    inputs = Begin.of(config, stage, parent, made_with or {}, clock)
    try:
        return _open(config, inputs, parent)
    except (StageConflict, CorruptShard):
        if not config.run.force:
            raise
    location = stage_location(config.run.uri, stage)
    _refuse_at_work(location, config.run.claim_seconds)
    files = location.child(SHARDS).files()
    size = sum(info.size for info in files.values())
    contents = f"{len(files)} files of shards, {size:,} bytes"
    notice(stage, f"--force: deletes what {location.uri} holds ({contents})")
    _discard(location)
    return _open(config, inputs, parent)


class StageRun:
    """Work on one stage. `manifest` is set when there is nothing left to do."""

    def __init__(
        self,
        location: Location,
        inputs: Begin,
        parent_uri: str | None,
        *,
        committed: Iterable[str] = (),
        manifest: Manifest | None = None,
    ) -> None:
        self.location, self.manifest = location, manifest
        #: Names of the shards that are known to be committed, by any process.
        self.committed = set(committed)
        #: Those that this process has committed or read.
        self.shards = {shard.name: shard for shard in manifest.shards} if manifest else {}
        self._entries: dict[str, StoredFile] = {}  # shard → its entry's file
        self._computed_by: set[Arithmetic | None] = set()
        self._arithmetic: Arithmetic | None = None  # of this attempt
        self._earlier: tuple[Arithmetic, ...] = ()
        self.stage, self._inputs, self._parent_uri = inputs.stage, inputs, parent_uri
        self._begun = None if manifest else inputs
        #: The time that chat templates render: when the stage was begun, for all its processes.
        #: None where the stage has none.
        self.clock = inputs.clock
        #: Hash of what shapes the output.
        self.work = digest([inputs.config_hash, inputs.parent_hash])
        self._seconds = 0.0
        self._counted_until = time.monotonic()
        self._lock = threading.Lock()
        self._claims: Claims | None = None
        self._claimed = ""

    def claim(self, name: str, seconds: float) -> None:
        """Wait until the claim `name` on the whole stage is this process's, or the stage finished.

        Until `release`, what writes into the stage raises TakenOver once another process has it.
        """
        self._claims, self._claimed = Claims(self.location, seconds), name
        self.wait_for_claim()

    def wait_for_claim(self) -> None:
        """As `claim`, once more."""
        assert self._claims is not None, "nothing was claimed"
        self._claims.wait_for(
            self._claimed,
            self.is_finished,
            lambda: notice(self.stage, f"waiting for another process at {self.location.uri}"),
        )

    def outlast(self, error: TakenOver) -> None:
        """Wait until the attempt that took over has finished; raises `error` where it has ended."""
        notice(self.stage, error.problem)
        self.wait_for_claim()
        if not self.is_finished():
            raise error

    def release(self) -> None:
        """Give up what was claimed; without a claim nothing happens."""
        if self._claims is not None:
            self._claims.close()
            self._claims = None

    def is_finished(self) -> bool:
        """Whether any process has written the manifest."""
        return self.location.exists(MANIFEST)

    def require_own(self) -> None:
        """Raises StageConflict where the stage is no longer the one that was begun, TakenOver where
        another process has the claim: what this process has made is not to be written."""
        if self._begun is not None and read_begin(self.location) != self._begun:
            problem = "has been begun anew by another process, with --force"
            fix = "let that one go on, or choose another run.uri=…"
            raise StageConflict(problem, where=self.location.uri, fix=fix)
        if self._claims is not None and not self._claims.holds(self._claimed):
            problem = "was silent for too long, and another process has taken its work over"
            fix = "let that one go on; if it has ended as well, run the same command again"
            raise TakenOver(problem, where=self.location.uri, fix=fix)

    def compute_with(
        self, arithmetic: Arithmetic, *, why: str = "", earlier: Iterable[Arithmetic] = ()
    ) -> None:
        """Print and record what the following shards are computed with; `why` follows the notice.

        Entries and the manifest record it, the manifest also that of `earlier` attempts whose work
        was not committed. Shards of another arithmetic stay as they are.
        """
        self._earlier = tuple(earlier)
        self._arithmetic = arithmetic
        promise = "; the same command may give other results" * (arithmetic.repeatable == "no")
        notice(self.stage, f"arithmetic: {arithmetic}{why}{promise}")
        before = self._computed_before()
        if others := Counter(one for one in before if not (one and one.agrees(arithmetic))):
            counts = "; ".join(f"{count} by {_machine_text(one)}" for one, count in others.items())
            stay = "they stay, and the rest need not be what an uninterrupted run gives"
            notice(self.stage, f"of {len(before)} committed shards {counts}: {stay}")

    def _computed_before(self) -> list[Arithmetic | None]:
        """Arithmetic of the committed shards, of at most _LOOKED_AT of them."""
        folder, names = self.location.child(SHARDS), sorted(self.committed)[:_LOOKED_AT]
        return [entry.arithmetic for entry in read_entries(folder, names)]

    def commit(
        self,
        name: str,
        data: bytes,
        *,
        rows: int,
        tokens: int,
        rejected: Mapping[str, int] | None = None,
        tallies: Mapping[str, Any] | None = None,
    ) -> Shard:
        """Store one shard for good: data, size and checksum compared, entry. Zero rows are legal.

        `tallies` are further counts of the stage: JSON, stored in the entry.

        Shards may be committed in any order, from several threads and from several processes; the
        manifest lists them by name. The first commit of a name counts: its shard is returned,
        whose bytes need not be `data`.
        """
        assert self.manifest is None, "the stage is finished"
        self.require_own()
        counts, seconds = dict(rejected or {}), self._count_seconds()
        entry = write_shard(
            self.location,
            name,
            data,
            rows=rows,
            tokens=tokens,
            rejected=counts,
            seconds=seconds,
            arithmetic=self._arithmetic,
            tallies=tallies,
        )
        with self._lock:
            self.shards[name], self._entries[name] = entry.shard, entry.file
            self.committed.add(name)
            self._computed_by.add(entry.arithmetic)
        return entry.shard

    def refresh(self) -> set[str]:
        """Names of the shards that others have committed since the last look, from one listing."""
        names = committed(self.location.child(SHARDS).names())
        with self._lock:
            new = names - self.committed
            self.committed |= new
        return new

    def is_committed(self, name: str) -> bool:
        """Whether any process has committed shard `name`."""
        if name not in self.committed and self.location.child(SHARDS).exists(name + ENTRY):
            with self._lock:
                self.committed.add(name)
        return name in self.committed

    def collect(self, names: Sequence[str]) -> Iterator[Entry]:
        """The entries of all shards of the stage, of all processes, in the order of `names`.

        The manifest is made from these. Raises StageIncomplete while some are
        missing, and CorruptShard for one that is not what was committed.
        """
        self.refresh()
        missing = [name for name in names if name not in self.committed]
        if missing:
            count = f"{len(missing)} of {len(names)} shards are missing"
            problem = f"this process has committed its part; {count}, the first is {missing[0]}"
            fix = "run the same command again when the others have ended, or at once without shard"
            raise StageIncomplete(problem, where=self.location.uri, fix=fix)
        mine, self.shards = self.shards, {}
        for entry in read_committed(self.location, names, trusted=mine):
            name = entry.shard.name
            self.shards[name], self._entries[name] = entry.shard, entry.file
            self._computed_by.add(entry.arithmetic)
            self._seconds += 0.0 if name in mine else entry.seconds
            yield entry

    def write_once(self, name: str, data: bytes) -> None:
        """Write a file that follows from the shards. Raises StageConflict for another one."""
        self.require_own()
        if self.location.create(name, data) != data:
            problem = "is not what follows from the shards; another version of eagle3 wrote it"
            fix = "use that version, or pass --force to make the stage again"
            raise StageConflict(problem, where=self.location.where(name), fix=fix)

    def finish(
        self,
        *,
        contract: TargetContract,
        licenses: Mapping[str, int],
        sources: Mapping[str, int],
        details: Mapping[str, Any] | None = None,
        rejected_extra: Mapping[str, int] | None = None,
        files: Iterable[str] = (),
        known: Mapping[str, StoredFile] | None = None,
        parent_hash: str | None = None,
    ) -> Manifest:
        """Write the manifest of `shards`, by name, and of all other files that the stage wrote.

        Those are begin.json, entries, the `files` named, which are read here, and `known` ones by
        path. `rejected_extra` counts what was rejected before any shard. `parent_hash` is that of a
        parent which was awaited when the stage was begun. A manifest that another process has
        written stays if it describes the same output.
        """
        assert self.manifest is None, "the stage is finished"
        shards = tuple(self.shards[name] for name in sorted(self.shards))
        rejected: Counter[str] = Counter(rejected_extra or {})
        for shard in shards:
            rejected.update(shard.rejected)
        written = {name: _stored_at(self.location, name) for name in (BEGIN, *files)}
        entries = {f"{SHARDS}/{name}{ENTRY}": self._entries[name] for name in self.shards}
        self._count_seconds()
        manifest = Manifest(
            stage=self.stage,
            config_hash=self._inputs.config_hash,
            parent_uri=self._parent_uri,
            parent_hash=parent_hash or self._inputs.parent_hash,
            contract=contract,
            shards=shards,
            rejected=dict(sorted(rejected.items())),
            licenses=dict(sorted(licenses.items())),
            sources=dict(sorted(sources.items())),
            details=dict(details or {}),
            software=_software(),
            arithmetic=self._all_arithmetic(),
            wall_seconds=round(self._seconds, 3),
            files=written | entries | dict(known or {}),
        )
        self.require_own()
        there = self.location.create(MANIFEST, sealed_json(manifest.model_dump(mode="json")))
        first = parse_manifest(self.location, there, self.stage)
        if first.content_hash != manifest.content_hash:
            problem = "another process has finished this stage, with other output"
            fix = "keep that one, or pass --force to discard it"
            raise StageConflict(problem, where=self.location.where(MANIFEST), fix=fix)
        self.manifest = first
        return first

    def _all_arithmetic(self) -> tuple[Arithmetic, ...]:
        """Each that a shard was computed with, or this attempt's, once."""
        each = {*self._computed_by, *self._earlier, self._arithmetic}
        return tuple(sorted((one for one in each if one), key=lambda one: one.model_dump_json()))

    def _count_seconds(self) -> float:
        """Seconds since the last call, which are added to the stage's."""
        with self._lock:
            now = time.monotonic()
            seconds, self._counted_until = now - self._counted_until, now
            self._seconds += seconds
        return seconds


def _stored_at(location: Location, name: str) -> StoredFile:
    return location.size(name), location.sha256(name)


def _open(config: RunConfig, inputs: Begin, parent: Manifest | Awaited | None) -> StageRun:
    stage = inputs.stage
    location = stage_location(config.run.uri, stage)
    home = config.states_uri if stage == "train" else config.run.uri
    parent_uri = stage_location(home, parent.stage).uri if parent else None
    location.sweep()
    names = committed(location.child(SHARDS).sweep())
    manifest, begun = find_manifest(config.run.uri, stage), read_begin(location)
    if manifest:
        hashes = {"config_hash": manifest.config_hash, "parent_hash": manifest.parent_hash}
        finished = begun or Begin(stage=stage, **hashes)
        _refuse_other_inputs(location, finished.changes(inputs, config), "finished")
        verify_sizes(location, manifest.shards)  # from one listing
        for shard in manifest.shards if config.run.force else ():  # reads every byte
            with suppress(ConsumedShard):
                verify_shard(location, shard)
        return StageRun(location, inputs, parent_uri, committed=names, manifest=manifest)
    if begun is None:
        _refuse_unowned(location, names)
        begun = inputs.create(location)  # of several processes at once, one is first
    _refuse_other_inputs(location, begun.changes(inputs, config), "begun")
    return StageRun(location, begun, parent_uri, committed=names)


def _refuse_unowned(location: Location, names: Collection[str]) -> None:
    """Raises StageConflict for committed shards without begin.json: their inputs are unknown.

    Files without an entry are left by killed writers, and stay for `eagle3 gc`.
    """
    if names:
        problem = f"holds {len(names)} committed shards, and no {BEGIN} that says whose they are"
        fix = f"restore {BEGIN}, pass --force to discard the shards, or choose another run.uri=…"
        raise StageConflict(problem, where=location.uri, fix=fix)


def _refuse_other_inputs(
    location: Location, changes: Mapping[str, tuple[str, str]], state: str
) -> None:
    """Raises StageConflict, which names the keys that differ, with both values."""
    if not changes:
        return
    each = ", ".join(f"{name} {was} → {now}" for name, (was, now) in changes.items())
    kinds = {_KINDS.get(name.split(".")[0], "config") for name in changes}
    problem = f"holds {state} work for another {' and '.join(sorted(kinds))}: {each}"
    fix = "pass --force to discard that work, or keep it and choose another run.uri=…"
    raise StageConflict(problem, where=location.uri, fix=fix)


def _refuse_at_work(location: Location, claim_seconds: float) -> None:
    """Raises StageConflict where another process makes what is to be discarded."""
    holders = Claims(location, claim_seconds).holders()
    if holders:
        problem = f"another process is at work on it: {', '.join(sorted(holders))}"
        fix = (
            f"stop it and run the same command again, {claim_seconds:g} s later if it was on "
            "another machine; or choose another run.uri=…"
        )
        raise StageConflict(problem, where=location.uri, fix=fix)


def _machine_text(arithmetic: Arithmetic | None) -> str:
    """With what tells one machine from another."""
    if arithmetic is None:
        return "an older version"
    return f"{arithmetic} ({arithmetic.processor}, {arithmetic.threads} threads)"


def _discard(location: Location) -> None:
    """Empty the directory so that a kill in between never looks complete and never mixes inputs.

    The manifest goes first, begin.json — which says whose the rest is — last.
    """
    location.delete(MANIFEST)
    for folder in location.subdirectories():
        location.child(folder).delete_tree()
    for name in location.names():
        if name != BEGIN:
            location.delete(name)
    location.delete(BEGIN)


def _software() -> dict[str, str]:
    versions = {"eagle3": __version__, "python": platform.python_version()}
    for package in _SOFTWARE:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def make_shards(
    stage_run: StageRun,
    names: Sequence[str],
    run: RunSection,
    make: Callable[[Iterator[str]], None],
    others: Callable[[set[str]], None] = lambda names: None,
    *,
    keep: int | None = None,
) -> None:
    """Have `make` commit those of the shards `names` that are this process's to make.

    With `run.shard` those are every n-th. Otherwise `make` gets the names that can be claimed,
    until all are committed by some process; it commits every name that it takes. `others` is called
    with the shards that other processes have committed meanwhile.

    With `keep`, `make` gets a name only while at most so many shards are made and not consumed:

        consumed    made, or being made    not before one more is consumed
        a b c d     e f g h i j            k l m n …                        keep: 6
    """
    mine = [name for index, name in enumerate(names) if run.owns(index)] if run.shard else names
    wait, said = _Wait(run.claim_seconds), ""
    with Claims(stage_run.location, run.claim_seconds) as claims:
        if run.shard:  # `--force` looks for claims
            claims.take(f"shard-{run.shard.replace('/', '-of-')}")
        while missing := [name for name in mine if name not in stage_run.committed]:
            within = set(names)
            if keep is not None:
                within = set(names[: consumed_count(stage_run.location) + keep])
            possible = [name for name in missing if name in within]
            if run.shard:
                make(iter(possible))
                progress = len(possible)
            else:
                taken = _Taken(claims, stage_run, possible)
                make(iter(taken))
                claims.release_all()
                progress = taken.count
            if progress:
                wait, said = _Wait(run.claim_seconds), ""
            else:
                kind, text = "others", f"waiting for {len(missing)} shards of other processes"
                if not possible:
                    held = f"{keep} shards (features.keep_shards) lie in the run"
                    kind, text = "full", f"the window is full: {held}; waiting for training"
                if said != kind:
                    notice(stage_run.stage, text)
                    said = kind
                wait.sleep()
            others(stage_run.refresh())


class _Wait:
    """Pauses that double, up to the interval at which claims are renewed."""

    def __init__(self, claim_seconds: float) -> None:
        self._seconds, self._most = _FIRST_WAIT, claim_seconds / _RENEWALS

    def sleep(self) -> None:
        time.sleep(min(self._seconds, self._most))
        self._seconds *= 2


class _Taken:
    """Shards, each claimed when the iterator reaches it."""

    def __init__(self, claims: Claims, stage_run: StageRun, names: Sequence[str]) -> None:
        self.count = 0
        self._claims, self._stage_run = claims, stage_run
        self._names = deque(name for name in names if name not in stage_run.committed)

    def __iter__(self) -> Iterator[str]:
        alone = True
        while self._names:
            self._claims.release(self._stage_run.committed)
            name = self._names.popleft()
            if name in self._stage_run.committed:
                continue
            if self._claims.take(name):
                # It may have been committed, and its claim released, since this process looked.
                if not self._stage_run.is_committed(name):
                    self.count += 1
                    yield name
            elif alone:
                alone = False
                self._names.rotate(random.randrange(len(self._names) + 1))


class Claims:
    """The claims of this process in the stage at `location`, renewed in the background.

    After `seconds` without renewal the next process may take a claim over.
    """

    def __init__(self, location: Location, seconds: float) -> None:
        self._folder, self._seconds = location.child(CLAIMS), seconds
        self._files: dict[str, str] = {}  # shard → file
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._watched: dict[str, tuple[float, float]] = {}  # file → its date, seen first when
        self._claim = canonical_json(
            {
                "claim": secrets.token_hex(8),
                "host": socket.gethostname(),
                "machine": process_namespace(),
                "pid": os.getpid(),
            }
        ).encode()

    def __enter__(self) -> Claims:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release all, and renew nothing more."""
        self._over.set()
        if self._thread:
            self._thread.join()
        with suppress(Eagle3Error):  # a claim that stays grows old
            self.release_all()

    def wait_for(
        self, name: str, is_done: Callable[[], bool], waiting: Callable[[], None] | None = None
    ) -> None:
        """Block until `is_done`, or until this process holds the claim `name`.

        `waiting` is called once, before the first pause.
        """
        wait = _Wait(self._seconds)
        while not is_done() and not self.take(name):
            if waiting is not None:
                waiting()
                waiting = None
            wait.sleep()

    def holds(self, name: str) -> bool:
        """Whether the claim `name` is still this process's, by a look at the store."""
        file = self._files.get(name)
        if file is None or _newest(name, self._folder.names()) != file:
            return False
        return self._folder.exists(file) and self._folder.read(file) == self._claim

    def holders(self) -> set[str]:
        """Host and process of each claim that is alive."""
        alive, files = set(), {file for file in self._folder.names() if _CLAIM.fullmatch(file)}
        for file in files:
            with suppress(StoreError):  # released meanwhile
                data = self._folder.read(file)
                if _successor(file) not in files and not self._is_abandoned(file, data):
                    alive.add(_holder_of(data))
        return alive

    def take(self, name: str) -> bool:
        """Whether this process now holds the claim on shard `name`.

        Of several the one of the highest number counts, whatever a killed process left below it.
        """
        while True:
            before = _newest(name, self._folder.names())
            file = _claim_file(name, 0) if before is None else before
            there = self._folder.create(file, self._claim)
            if there != self._claim:
                if not self._is_abandoned(file, there):
                    return False
                file = _successor(file)
                there = self._folder.create(file, self._claim)
            if there == self._claim and _newest(name, self._folder.names()) == file:
                with self._lock:
                    self._files[name] = file
                self._renew_in_background()
                return True

    def release(self, names: set[str]) -> None:
        """Give up the claims on shards in `names`."""
        for name in [name for name in self._files if name in names]:
            with self._lock:
                is_held, file = self.holds(name), self._files.pop(name)
                if is_held:  # and abandoned ones before it; one taken over is its successor's
                    for number in range(_number(file) + 1):
                        self._folder.delete(_claim_file(name, number))

    def release_all(self) -> None:
        self.release(set(self._files))

    def _is_abandoned(self, file: str, data: bytes) -> bool:
        """Whether the process that wrote the claim `data` has ended, or no longer renews it."""
        with suppress(ValueError, KeyError, TypeError, OSError):
            holder = parse_json(data)
            if holder["machine"] == process_namespace() and not _runs(int(holder["pid"])):
                return True
        info = self._folder.info_if_there(file)
        if info is None or info.modified is None:
            return False  # released: the next look can take it
        # A clock that was set back leaves dates in the future, which do not grow old.
        now = time.monotonic()
        date, since = self._watched.get(file, (None, now))
        if date != info.modified:
            self._watched[file], since = (info.modified, now), now
        is_unchanged = now - since > self._seconds
        return is_unchanged or self._folder.now() - info.modified > self._seconds

    def _renew_in_background(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._renew, name="claims", daemon=True)
            thread.start()  # which fails where memory is short
            self._thread = thread

    def _renew(self) -> None:
        while not self._over.wait(self._seconds / _RENEWALS):
            for name in list(self._files):
                with self._lock:
                    if name not in self._files:
                        continue
                    try:
                        if not self.holds(name):  # this process was stopped for a while
                            del self._files[name]
                            continue
                        self._folder.write(self._files[name], self._claim)
                    except Eagle3Error as error:  # at worst the shard is made twice
                        notice("storage", f"a claim could not be renewed: {error}")


def _claim_file(name: str, number: int) -> str:
    return f"{name}.{number:04d}.json"


def _successor(file: str) -> str:
    """That of the process which takes the claim `file` over."""
    return _claim_file(file.rsplit(".", 2)[0], _number(file) + 1)


def _number(file: str) -> int:
    return int(file.rsplit(".", 2)[1])


def _newest(name: str, files: Iterable[str]) -> str | None:
    """Of the claims on shard `name` among `files`, the one that took all others over."""
    parts = (_CLAIM.fullmatch(file) for file in files)
    own = [int(each[2]) for each in parts if each and each[1] == name]
    return _claim_file(name, max(own)) if own else None


def _holder_of(data: bytes) -> str:
    try:
        holder = parse_json(data)
        return f"process {int(holder['pid'])} on {one_line(str(holder['host']), 80)}"
    except (ValueError, KeyError, TypeError):
        return "a process that has left no name"


def _runs(pid: int) -> bool:
    """Whether a process of this machine has not ended; one that waits for its parent has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def process_namespace() -> str:
    """The same for two processes only if each can see whether the other runs."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return secrets.token_hex(8)
