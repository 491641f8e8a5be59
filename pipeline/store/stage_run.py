"""A stage's directory, from the first byte to the manifest.

    <run uri>/<stage>/begin.json      which config and parent this work belongs to; written first
                      shards/…        committed one by one, see shards.py
                      manifest.json   written last: without it the stage is not finished

Killed at any instant, the same command picks up the committed shards and ends with the same bytes.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from pipeline import __version__
from pipeline.config import RunConfig
from pipeline.errors import CorruptShard, MissingStage, StageConflict, StoreError
from pipeline.records import SCHEMA_VERSION, Manifest, Shard, Stage, TargetContract, canonical_json
from pipeline.store.location import Location
from pipeline.store.shards import (
    SHARDS,
    Entry,
    committed,
    read_shard,
    uncommit,
    verify_shard,
    verify_sizes,
    write_shard,
)

__all__ = [
    "StageRun",
    "find_manifest",
    "open_stage",
    "read_manifest",
    "read_shard",
    "stage_location",
    "verify_shard",
]

MANIFEST = "manifest.json"
BEGIN = "begin.json"
_SOFTWARE = ("torch", "transformers", "triton", "safetensors", "pyarrow", "numpy", "deepspeed")


class Work(NamedTuple):
    """What decides a stage's output; equal work may be continued, other work never."""

    config_hash: str
    parent_hash: str | None


def stage_location(run_uri: str, stage: Stage) -> Location:
    """The directory of `stage` in a run."""
    return Location(run_uri).child(stage)


def find_manifest(run_uri: str, stage: Stage) -> Manifest | None:
    """The stage's manifest, or None when the stage is not finished.

    Raises StoreError for a newer schema and CorruptShard for a file that is no manifest.
    """
    location = stage_location(run_uri, stage)
    if not location.exists(MANIFEST):
        return None
    where = location.where(MANIFEST)
    fields = _read_json(location, MANIFEST, stage)
    version = fields.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        problem = f"schema_version {version} is newer than the {SCHEMA_VERSION} that eagle3 {__version__} reads"
        raise StoreError(
            problem,
            where=f"{where}: schema_version",
            fix="upgrade eagle3, or choose another run.uri=…",
        )
    try:
        manifest = Manifest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise CorruptShard(
            f"not a manifest: {first['msg']}",
            where=f"{where}: {field}",
            fix=f"restore the file, or run `eagle3 {stage} --force`",
        ) from None
    if manifest.stage != stage:
        raise CorruptShard(
            f"is the manifest of {manifest.stage}",
            where=f"{where}: stage",
            fix="restore the run directory as it was written",
        )
    return manifest


def read_manifest(run_uri: str, stage: Stage) -> Manifest:
    """The stage's manifest; MissingStage when it is not finished. Raises as `find_manifest` does."""
    manifest = find_manifest(run_uri, stage)
    if manifest is None:
        where = stage_location(run_uri, stage).where(MANIFEST)
        raise MissingStage(
            f"stage {stage} is not finished",
            where=where,
            fix=f"run `eagle3 {stage}` first, with the same run.uri",
        )
    return manifest


def open_stage(config: RunConfig, stage: Stage, parent: Manifest | None) -> StageRun:
    """Begin, continue or recognise as complete the stage's work for this config and parent.

    Raises StageConflict when the directory holds other work and `run.force` is off, and
    CorruptShard when committed files are not what they were. With `run.force` both are discarded.
    """
    work = Work(config.section_hash(stage), parent.content_hash if parent else None)
    location = stage_location(config.run.uri, stage)
    try:
        return _open(config, stage, work, location, parent)
    except (StageConflict, CorruptShard):
        if not config.run.force:
            raise
    _discard(location)
    return _open(config, stage, work, location, parent)


class StageRun:
    """Work on one stage. `manifest` is set when there is nothing left to do."""

    def __init__(
        self,
        location: Location,
        stage: Stage,
        work: Work,
        parent_uri: str | None,
        entries: Mapping[str, Entry],
        manifest: Manifest | None,
    ) -> None:
        self.location = location
        self.manifest = manifest
        self.shards: dict[str, Shard] = {
            shard.name: shard
            for shard in (
                manifest.shards if manifest else (entry.shard for entry in entries.values())
            )
        }
        self._stage, self._work, self._parent_uri = stage, work, parent_uri
        self._seconds = sum(entry.seconds for entry in entries.values())
        self._mark = time.monotonic()
        self._lock = threading.Lock()

    def commit(
        self,
        name: str,
        data: bytes,
        *,
        rows: int,
        tokens: int,
        rejected: Mapping[str, int] | None = None,
    ) -> Shard:
        """Store one shard for good: data, size and checksum compared, entry. Zero rows are legal.

        Shards may be committed in any order and from several threads; the manifest lists them by name.
        A shard that was committed before with other bytes loses its entry first: a kill in between leaves an orphan,
        not an entry that its file contradicts.
        """
        assert self.manifest is None, "the stage is finished"
        if name in self.shards:
            uncommit(self.location, name)
        seconds = self._lap()
        shard = write_shard(
            self.location,
            name,
            data,
            rows=rows,
            tokens=tokens,
            rejected=dict(rejected or {}),
            seconds=seconds,
        )
        with self._lock:
            self.shards[name] = shard
        return shard

    def finish(
        self,
        *,
        contract: TargetContract,
        licenses: Mapping[str, int],
        sources: Mapping[str, int],
        details: Mapping[str, Any] | None = None,
        rejected_extra: Mapping[str, int] | None = None,
    ) -> Manifest:
        """Write the manifest. `rejected_extra` counts records that were left out before any shard."""
        assert self.manifest is None, "the stage is finished"
        shards = tuple(self.shards[name] for name in sorted(self.shards))
        rejected: Counter[str] = Counter(rejected_extra or {})
        for shard in shards:
            rejected.update(shard.rejected)
        self._lap()
        manifest = Manifest(
            stage=self._stage,
            config_hash=self._work.config_hash,
            parent_uri=self._parent_uri,
            parent_hash=self._work.parent_hash,
            contract=contract,
            shards=shards,
            rejected=dict(sorted(rejected.items())),
            licenses=dict(sorted(licenses.items())),
            sources=dict(sorted(sources.items())),
            details=dict(details or {}),
            software=_software(),
            wall_seconds=round(self._seconds, 3),
        )
        text = json.dumps(
            manifest.model_dump(mode="json"), indent=2, sort_keys=True, ensure_ascii=False
        )
        self.location.write(MANIFEST, text.encode() + b"\n")
        self.manifest = manifest
        return manifest

    def _lap(self) -> float:
        """Seconds since the last lap, which are added to the stage's."""
        with self._lock:
            now = time.monotonic()
            passed, self._mark = now - self._mark, now
            self._seconds += passed
        return passed


def _open(
    config: RunConfig, stage: Stage, work: Work, location: Location, parent: Manifest | None
) -> StageRun:
    parent_uri = stage_location(config.run.uri, parent.stage).uri if parent else None
    _sweep(location)
    manifest = find_manifest(config.run.uri, stage)
    if manifest:
        _refuse_other_work(
            location, Work(manifest.config_hash, manifest.parent_hash), work, "finished"
        )
        _verify_finished(location, manifest, thorough=config.run.force)
        return StageRun(location, stage, work, parent_uri, {}, manifest)
    begun = _read_begin(location, stage)
    if begun:
        _refuse_other_work(location, begun, work, "begun")
        return StageRun(location, stage, work, parent_uri, committed(location), None)
    # Shards without begin.json are what an interrupted --force left; nobody can tell whose they are.
    location.child(SHARDS).delete_tree()
    location.write(
        BEGIN,
        canonical_json(
            {"stage": stage, "schema_version": SCHEMA_VERSION, **work._asdict()}
        ).encode(),
    )
    return StageRun(location, stage, work, parent_uri, {}, None)


def _sweep(location: Location) -> None:
    location.sweep()
    location.child(SHARDS).sweep()


def _verify_finished(location: Location, manifest: Manifest, *, thorough: bool) -> None:
    """Sizes are one listing and are checked always; checksums read every byte, when `--force` asks for sound output."""
    verify_sizes(location, manifest.shards)
    if thorough:
        for shard in manifest.shards:
            verify_shard(location, shard)


def _refuse_other_work(location: Location, old: Work, new: Work, state: str) -> None:
    if old == new:
        return
    names = {"config_hash": "config", "parent_hash": "parent"}
    changes = [
        f"{names[field]} {_short(was)} → {_short(now)}"
        for field, was, now in zip(Work._fields, old, new, strict=True)
        if was != now
    ]
    problem = f"holds {state} work for another {' and '.join(change.split()[0] for change in changes)}: {', '.join(changes)}"
    raise StageConflict(
        problem,
        where=location.uri,
        fix="pass --force to discard that work, or keep it and choose another run.uri=…",
    )


def _short(value: str | None) -> str:
    return value[:16] if value else "none"


def _read_begin(location: Location, stage: Stage) -> Work | None:
    if not location.exists(BEGIN):
        return None
    fields = _read_json(location, BEGIN, stage)
    try:
        return Work(str(fields["config_hash"]), fields["parent_hash"])
    except KeyError as error:
        raise CorruptShard(
            "not a begin record",
            where=f"{location.where(BEGIN)}: {error.args[0]}",
            fix=f"run `eagle3 {stage} --force`",
        ) from None


def _read_json(location: Location, name: str, stage: Stage) -> dict[str, Any]:
    try:
        fields = json.loads(location.read(name))
    except ValueError as error:
        raise CorruptShard(
            f"not JSON: {error}",
            where=location.where(name),
            fix=f"restore the file, or run `eagle3 {stage} --force`",
        ) from None
    if not isinstance(fields, dict):
        raise CorruptShard(
            "not a JSON object",
            where=location.where(name),
            fix=f"restore the file, or run `eagle3 {stage} --force`",
        )
    return fields


def _discard(location: Location) -> None:
    """Empty the directory so that a kill in between never looks complete and never mixes two works:
    the manifest goes first, begin.json — which says whose the rest is — last."""
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
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
