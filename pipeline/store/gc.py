"""Files that killed writers left in a run: found and removed by `eagle3 gc`.

    temporary files    .NAME.<pid>-<hex>.tmp: a local file that was not finished
    orphaned shards    shards/NAME without an entry in a stage that has begun: killed before it
    unowned shards     shards/ of a stage with neither begin.json nor manifest
    unselected prompts files of synth's prompts/ that selection.json does not name
    needless prompts   all of prompts/ once synth has its manifest: they were not screened
    needless claims    those on shards of a finished stage
    consumed states    files of shards that training is past, killed before it had deleted them
    unmarked files     of train's checkpoints/, which no marker there names

Committed data — what a manifest lists, or an entry or an unfinished stage's selection names — is
never touched, nor is anything that may belong to a running writer: a file must have been left alone
for a while. Uploads in parts that were never completed are invisible in Google Cloud Storage, cost
nothing and expire by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import NamedTuple

from pipeline.documents import parse_json
from pipeline.errors import CorruptShard, StoreError
from pipeline.records import STAGES, Stage
from pipeline.store.backend import FileInfo
from pipeline.store.location import Location
from pipeline.store.manifest import BEGIN, CHECKPOINTS, MANIFEST, find_manifest, stage_location
from pipeline.store.samples import PROMPTS, SELECTION, find_selection
from pipeline.store.shards import (
    ENTRY,
    SHARDS,
    committed,
    consumed_files,
    read_consumed,
    read_entries,
)
from pipeline.store.stage_run import CLAIMS

_Clock = Callable[[], float]
#: Below train's checkpoints/: markers, and what they name.
_MARKER = re.compile(r"step-\d+\.json")
_STEP, _BEST = (
    re.compile(r"step-\d+-[0-9a-f]{16}"),
    re.compile(r"best-\d+-[0-9a-f]{16}\.safetensors"),
)
TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp")


class Orphan(NamedTuple):
    """A file that belongs to nothing."""

    folder: Location
    name: str
    size: int
    reason: str
    age: float | None  # seconds since it was written; None where the store does not say

    @property
    def where(self) -> str:
        return self.folder.where(self.name)

    def is_quiet(self, minutes: float) -> bool:
        """Whether no writer has touched it for `minutes`; of an unknown age, only for 0 minutes."""
        return minutes <= 0 or (self.age is not None and self.age >= 60 * minutes)


def find_orphans(run_uri: str) -> list[Orphan]:
    """All orphans of a run, whatever their age.

    Raises StoreError when `run_uri` holds no stage of a run, and as `find_manifest` and
    `find_selection` do for what cannot be read.
    """
    begun = [stage for stage in STAGES if _is_begun(run_uri, stage)]
    if not begun:
        fix = "pass the run.uri of a run, the directory above synth, features, train and eval"
        raise StoreError("holds no stage of a run", where=run_uri, fix=fix)
    now = cache(Location(run_uri).now)  # the store's clock; asked once, and only if need be
    orphans: list[Orphan] = []
    for stage in STAGES:
        orphans += _temporaries(stage_location(run_uri, stage), now)
    for stage in STAGES:
        orphans += _shards(run_uri, stage, now, begun=stage in begun)
        orphans += _claims(run_uri, stage, now)
    orphans += _prompts(run_uri, now)
    orphans += _checkpoints(run_uri, now)
    return orphans


def remove(orphans: list[Orphan]) -> None:
    """Delete them; one that is already gone is fine."""
    for orphan in orphans:
        orphan.folder.delete(orphan.name)


def _is_begun(run_uri: str, stage: Stage) -> bool:
    location = stage_location(run_uri, stage)
    return location.exists(BEGIN) or location.exists(MANIFEST)


def _temporaries(folder: Location, now: _Clock) -> Iterator[Orphan]:
    """Of `folder` and all below; object stores have none."""
    if not folder.is_local:
        return
    for name, info in folder.temporaries().items():
        if TEMPORARY.fullmatch(name):
            yield _orphan(folder, name, info, "unfinished temporary file", now)
    for name in folder.subdirectories():
        yield from _temporaries(folder.child(name), now)


def _shards(run_uri: str, stage: Stage, now: _Clock, *, begun: bool) -> Iterator[Orphan]:
    manifest = find_manifest(run_uri, stage)
    folder = stage_location(run_uri, stage).child(SHARDS)
    files = folder.files()
    entries = [] if manifest else read_entries(folder, committed(folder.names()))
    shards = manifest.shards if manifest else [entry.shard for entry in entries]
    referenced = {shard.path for shard in shards}
    consumed = set(consumed_files(files, read_consumed(stage_location(run_uri, stage))))
    for name, info in files.items():
        if not begun:
            reason = "of a stage with neither begin.json nor manifest"
            yield _orphan(folder, name, info, reason, now)
        elif name in consumed:
            yield _orphan(folder, name, info, "states that training has consumed", now)
        elif not name.endswith(ENTRY) and name not in referenced:
            yield _orphan(folder, name, info, "shard without an entry", now)


def _claims(run_uri: str, stage: Stage, now: _Clock) -> Iterator[Orphan]:
    """In an unfinished stage the next process that makes the shard takes its claim over."""
    location = stage_location(run_uri, stage)
    folder = location.child(CLAIMS)
    for name, info in folder.files().items() if location.exists(MANIFEST) else ():
        yield _orphan(folder, name, info, "claim on a shard of a finished stage", now)


def _prompts(run_uri: str, now: _Clock) -> Iterator[Orphan]:
    location = stage_location(run_uri, "synth")
    folder = location.child(PROMPTS)
    files = folder.files()
    if not files:
        return
    if find_manifest(run_uri, "synth"):
        referenced, reason = set(), "prompts of a finished stage, not screened"
    else:
        selection = find_selection(location)
        referenced = {shard.file for shard in selection.shards} if selection else set()
        reason = f"prompts that no {SELECTION} names"
    # A process that selects for hours leaves its first files alone while it writes its last.
    newest = max(files.values(), key=lambda info: info.modified or 0.0)
    for name, info in files.items():
        if name not in referenced:
            yield _orphan(folder, name, info._replace(modified=newest.modified), reason, now)


def _checkpoints(run_uri: str, now: _Clock) -> Iterator[Orphan]:
    """Files of a folder are as old as its newest: a large checkpoint is written for minutes.

    None is older than the claim of a training at work: its best head may wait for a marker.
    """
    location = stage_location(run_uri, "train")
    store = location.child(CHECKPOINTS)
    heads = {name: info for name, info in store.files().items() if _BEST.fullmatch(name)}
    folders = [name for name in store.subdirectories() if _STEP.fullmatch(name)]
    if not (heads or folders):
        return
    named = {
        each for name in store.names() if _MARKER.fullmatch(name) for each in _named(store, name)
    }
    reason = "of a checkpoint that no marker names"
    renewed = _newest(location.child(CLAIMS).files().values())
    for name in sorted(set(heads) - named):
        yield _orphan(store, name, _as_young(heads[name], renewed), reason, now)
    for folder in map(store.child, sorted(set(folders) - named)):
        files = folder.files()
        newest = max(renewed, _newest(files.values()))
        for name, info in files.items():
            yield _orphan(folder, name, _as_young(info, newest), reason, now)


def _newest(files: Iterable[FileInfo]) -> float:
    return max((info.modified or 0.0 for info in files), default=0.0)


def _as_young(info: FileInfo, date: float) -> FileInfo:
    """As if it had been written at `date`, if it was before; not where the store says no date."""
    return info if info.modified is None else info._replace(modified=max(info.modified, date))


def _named(store: Location, marker: str) -> set[str]:
    """The folder and the best head of a checkpoint; nothing for a marker that has gone meanwhile.

    Raises CorruptShard for one that cannot be read: its files may be sound.
    """
    try:
        fields = parse_json(store.read(marker))
        best = fields["progress"].get("best")
        named = {str(fields["folder"])}
        return named | (
            {f"best-{int(best['step']):06d}-{best['file'][1][:16]}.safetensors"} if best else set()
        )
    except StoreError:
        if store.exists(marker):
            raise
        return set()
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        fix = "delete the checkpoint; training then goes on from the one before it"
        raise CorruptShard("not a marker", where=store.where(marker), fix=fix) from None


def _orphan(folder: Location, name: str, info: FileInfo, reason: str, now: _Clock) -> Orphan:
    age = None if info.modified is None else now() - info.modified
    return Orphan(folder, name, info.size, reason, age)
