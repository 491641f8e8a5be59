"""What killed writers leave behind in a run, found and removed by `eagle3 gc`.

    temporary files    .NAME.<pid>-<hex>.tmp: a local file that was not finished
    orphaned shards    shards/NAME without an entry in a stage that has begun: killed before it
    unowned shards     shards/ of a stage with neither begin.json nor manifest

Committed data — what a manifest lists, or an entry names — is never touched, nor is anything that
may belong to a running writer: a file must have been left alone for a while. Uploads in parts that
were never completed are invisible in Google Cloud Storage, cost nothing and expire by themselves.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import NamedTuple

from pipeline.errors import StoreError
from pipeline.records import STAGES, Stage
from pipeline.store.backend import FileInfo
from pipeline.store.location import Location
from pipeline.store.shards import ENTRY, SHARDS
from pipeline.store.stage_run import BEGIN, MANIFEST, find_manifest, stage_location

_TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp")


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

    Raises StoreError when `run_uri` holds no stage of a run, and as `find_manifest` does for a
    manifest that cannot be read.
    """
    begun = [stage for stage in STAGES if _is_begun(run_uri, stage)]
    if not begun:
        fix = "pass the run.uri of a run, the directory above synth, features, train and eval"
        raise StoreError("holds no stage of a run", where=run_uri, fix=fix)
    orphans: list[Orphan] = []
    for stage in STAGES:
        orphans += _temporaries(stage_location(run_uri, stage))
    for stage in STAGES:
        orphans += _shards(run_uri, stage, begun=stage in begun)
    return orphans


def remove(orphans: list[Orphan]) -> None:
    """Delete them; one that is already gone is fine."""
    for orphan in orphans:
        orphan.folder.delete(orphan.name)


def _is_begun(run_uri: str, stage: Stage) -> bool:
    location = stage_location(run_uri, stage)
    return location.exists(BEGIN) or location.exists(MANIFEST)


def _temporaries(folder: Location) -> Iterator[Orphan]:
    """Of `folder` and all below; object stores have none."""
    if not folder.is_local:
        return
    for name, info in folder.temporaries().items():
        if _TEMPORARY.fullmatch(name):
            yield _orphan(folder, name, info, "unfinished temporary file")
    for name in folder.subdirectories():
        yield from _temporaries(folder.child(name))


def _shards(run_uri: str, stage: Stage, *, begun: bool) -> Iterator[Orphan]:
    manifest = find_manifest(run_uri, stage)
    folder = stage_location(run_uri, stage).child(SHARDS)
    files = folder.files()
    kept = {shard.name for shard in manifest.shards} if manifest else set()
    for name, info in files.items():
        if not begun:
            yield _orphan(folder, name, info, "of a stage with neither begin.json nor manifest")
        elif not name.endswith(ENTRY) and name not in kept and name + ENTRY not in files:
            yield _orphan(folder, name, info, "shard without an entry")


def _orphan(folder: Location, name: str, info: FileInfo, reason: str) -> Orphan:
    age = None if info.modified is None else time.time() - info.modified
    return Orphan(folder, name, info.size, reason, age)
