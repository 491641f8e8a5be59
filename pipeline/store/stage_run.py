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
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from pydantic import ValidationError

from pipeline import __version__
from pipeline.config import RunConfig
from pipeline.console import notice
from pipeline.errors import CorruptShard, MissingStage, StageConflict, StoreError
from pipeline.records import (
    OLDEST_SCHEMA,
    SCHEMA_VERSION,
    Arithmetic,
    Manifest,
    Shard,
    Stage,
    TargetContract,
    canonical_json,
)
from pipeline.store.location import Location
from pipeline.store.shards import (
    SHARDS,
    committed,
    delete_entry,
    verify_shard,
    verify_sizes,
    write_shard,
)

MANIFEST = "manifest.json"
BEGIN = "begin.json"
_SOFTWARE = ("torch", "transformers", "triton", "safetensors", "pyarrow", "numpy", "deepspeed")


class StageInputs(NamedTuple):
    """What decides a stage's output: work on equal inputs is continued, on others never."""

    config_hash: str
    parent_hash: str | None


def stage_location(run_uri: str, stage: Stage) -> Location:
    """The directory of `stage` in a run."""
    return Location(run_uri).child(stage)


def manifest_where(run_uri: str, stage: Stage) -> str:
    """How messages call the stage's manifest."""
    return stage_location(run_uri, stage).where(MANIFEST)


def find_manifest(run_uri: str, stage: Stage) -> Manifest | None:
    """The stage's manifest, or None when the stage is not finished.

    Raises StoreError for another schema and CorruptShard for a file that is no manifest.
    """
    location = stage_location(run_uri, stage)
    if not location.exists(MANIFEST):
        return None
    where = location.where(MANIFEST)
    fields = _read_json(location, MANIFEST, stage)
    version = fields.get("schema_version")
    if isinstance(version, int) and not OLDEST_SCHEMA <= version <= SCHEMA_VERSION:
        age = "newer" if version > SCHEMA_VERSION else "older"
        readable = f"the {SCHEMA_VERSION} that eagle3 {__version__} reads"
        problem = f"schema_version {version} is {age} than {readable}"
        fix = "use the eagle3 that its `software` names, or choose another run.uri=…"
        raise StoreError(problem, where=f"{where}: schema_version", fix=fix)
    try:
        manifest = Manifest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        problem = f"not a manifest: {first['msg']}"
        raise CorruptShard(problem, where=f"{where}: {field}", fix=_restore(stage)) from None
    if manifest.stage != stage:
        problem = f"is the manifest of {manifest.stage}"
        fix = "restore the run directory as it was written"
        raise CorruptShard(problem, where=f"{where}: stage", fix=fix)
    return manifest


def read_manifest(run_uri: str, stage: Stage) -> Manifest:
    """As `find_manifest`; MissingStage when the stage is not finished."""
    manifest = find_manifest(run_uri, stage)
    if manifest is None:
        problem = f"stage {stage} is not finished"
        fix = f"run `eagle3 {stage}` first, with the same run.uri"
        raise MissingStage(problem, where=manifest_where(run_uri, stage), fix=fix)
    return manifest


def open_stage(config: RunConfig, stage: Stage, parent: Manifest | None) -> StageRun:
    """Begin, continue or recognise as complete the stage's work for this config and parent.

    Raises StageConflict when the directory holds other work and `run.force` is off, and
    CorruptShard when committed files are not what they were. With `run.force` both are discarded.
    """
    try:
        return _open(config, stage, parent)
    except (StageConflict, CorruptShard):
        if not config.run.force:
            raise
    _discard(stage_location(config.run.uri, stage))
    return _open(config, stage, parent)


class StageRun:
    """Work on one stage. `manifest` is set when there is nothing left to do."""

    def __init__(
        self,
        location: Location,
        stage: Stage,
        inputs: StageInputs,
        parent_uri: str | None,
        *,
        shards: Iterable[Shard] = (),
        arithmetic: Mapping[str, Arithmetic | None] | None = None,
        seconds: float = 0.0,
        manifest: Manifest | None = None,
    ) -> None:
        self.location, self.manifest = location, manifest
        self.shards = {shard.name: shard for shard in shards}
        self._computed_by = dict(arithmetic or {})  # shard → what computed it
        self._arithmetic: Arithmetic | None = None  # of this attempt
        self._earlier: tuple[Arithmetic, ...] = ()
        self._stage, self._inputs, self._parent_uri = stage, inputs, parent_uri
        self._seconds = seconds
        self._counted_until = time.monotonic()
        self._lock = threading.Lock()

    def compute_with(
        self, arithmetic: Arithmetic, *, why: str = "", earlier: Iterable[Arithmetic] = ()
    ) -> None:
        """Say, in `why` with what reason, what the shards from now on are computed with.

        Their entries and the manifest keep it, the manifest also what uncommitted work of `earlier`
        attempts was computed with. Shards of another arithmetic stay as they are.
        """
        self._earlier = tuple(earlier)
        self._arithmetic = arithmetic
        promise = "; the same command may give other results" * (arithmetic.repeatable == "no")
        notice(self._stage, f"arithmetic: {arithmetic}{why}{promise}")
        computed_by = self._computed_by.values()
        if others := Counter(one for one in computed_by if not (one and one.agrees(arithmetic))):
            counts = "; ".join(f"{count} by {_told(one)}" for one, count in others.items())
            stay = "they stay, and the rest need not be what an uninterrupted run gives"
            notice(self._stage, f"of {len(computed_by)} committed shards {counts}: {stay}")

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

        Shards may be committed in any order and from several threads; the manifest lists them by
        name. A shard that was committed before with other bytes loses its entry first: a kill in
        between leaves an orphan, not an entry that its file contradicts.
        """
        assert self.manifest is None, "the stage is finished"
        if name in self.shards:
            delete_entry(self.location, name)
        counts, seconds = dict(rejected or {}), self._count_seconds()
        shard = write_shard(
            self.location,
            name,
            data,
            rows=rows,
            tokens=tokens,
            rejected=counts,
            seconds=seconds,
            arithmetic=self._arithmetic,
        )
        with self._lock:
            self.shards[name], self._computed_by[name] = shard, self._arithmetic
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
        """Write the manifest. `rejected_extra` counts what was left out before any shard."""
        assert self.manifest is None, "the stage is finished"
        shards = tuple(self.shards[name] for name in sorted(self.shards))
        rejected: Counter[str] = Counter(rejected_extra or {})
        for shard in shards:
            rejected.update(shard.rejected)
        self._count_seconds()
        manifest = Manifest(
            stage=self._stage,
            config_hash=self._inputs.config_hash,
            parent_uri=self._parent_uri,
            parent_hash=self._inputs.parent_hash,
            contract=contract,
            shards=shards,
            rejected=dict(sorted(rejected.items())),
            licenses=dict(sorted(licenses.items())),
            sources=dict(sorted(sources.items())),
            details=dict(details or {}),
            software=_software(),
            arithmetic=self._all_arithmetic(),
            wall_seconds=round(self._seconds, 3),
        )
        fields = manifest.model_dump(mode="json")
        text = json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False)
        self.location.write(MANIFEST, text.encode() + b"\n")
        self.manifest = manifest
        return manifest

    def _all_arithmetic(self) -> tuple[Arithmetic, ...]:
        """Each that a shard was computed with, or this attempt's, once."""
        each = {*self._computed_by.values(), *self._earlier, self._arithmetic}
        return tuple(sorted((one for one in each if one), key=lambda one: one.model_dump_json()))

    def _count_seconds(self) -> float:
        """Seconds since the last call, which are added to the stage's."""
        with self._lock:
            now = time.monotonic()
            seconds, self._counted_until = now - self._counted_until, now
            self._seconds += seconds
        return seconds


def _open(config: RunConfig, stage: Stage, parent: Manifest | None) -> StageRun:
    inputs = StageInputs(config.section_hash(stage), parent.content_hash if parent else None)
    location = stage_location(config.run.uri, stage)
    parent_uri = stage_location(config.run.uri, parent.stage).uri if parent else None
    location.sweep()
    location.child(SHARDS).sweep()
    manifest = find_manifest(config.run.uri, stage)
    if manifest:
        finished = StageInputs(manifest.config_hash, manifest.parent_hash)
        _refuse_other_inputs(location, finished, inputs, "finished")
        verify_sizes(location, manifest.shards)  # from one listing
        for shard in manifest.shards if config.run.force else ():  # reads every byte
            verify_shard(location, shard)
        shards = manifest.shards
        return StageRun(location, stage, inputs, parent_uri, shards=shards, manifest=manifest)
    begun = _read_begin(location, stage)
    if begun:
        _refuse_other_inputs(location, begun, inputs, "begun")
        entries = committed(location)
        return StageRun(
            location,
            stage,
            inputs,
            parent_uri,
            shards=[entry.shard for entry in entries.values()],
            arithmetic={name: entry.arithmetic for name, entry in entries.items()},
            seconds=sum(entry.seconds for entry in entries.values()),
        )
    # Shards without begin.json are left by an interrupted --force; nobody can tell whose they are.
    location.child(SHARDS).delete_tree()
    begin = {"stage": stage, "schema_version": SCHEMA_VERSION, **inputs._asdict()}
    location.write(BEGIN, canonical_json(begin).encode())
    return StageRun(location, stage, inputs, parent_uri)


def _refuse_other_inputs(
    location: Location, old: StageInputs, new: StageInputs, state: str
) -> None:
    """Raises StageConflict, which names what differs with both hashes."""
    pairs = zip(("config", "parent"), old, new, strict=True)
    changes = {name: f"{_short(was)} → {_short(now)}" for name, was, now in pairs if was != now}
    if not changes:
        return
    hashes = ", ".join(f"{name} {change}" for name, change in changes.items())
    problem = f"holds {state} work for another {' and '.join(changes)}: {hashes}"
    fix = "pass --force to discard that work, or keep it and choose another run.uri=…"
    raise StageConflict(problem, where=location.uri, fix=fix)


def _told(arithmetic: Arithmetic | None) -> str:
    """Enough to tell one machine's from another's."""
    if arithmetic is None:
        return "an older version"
    return f"{arithmetic} ({arithmetic.processor}, {arithmetic.threads} threads)"


def _short(value: str | None) -> str:
    return value[:16] if value else "none"


def _read_begin(location: Location, stage: Stage) -> StageInputs | None:
    if not location.exists(BEGIN):
        return None
    fields = _read_json(location, BEGIN, stage)
    try:
        return StageInputs(str(fields["config_hash"]), fields["parent_hash"])
    except KeyError as error:
        where = f"{location.where(BEGIN)}: {error.args[0]}"
        fix = f"run `eagle3 {stage} --force`"
        raise CorruptShard("not a begin record", where=where, fix=fix) from None


def _read_json(location: Location, name: str, stage: Stage) -> dict[str, Any]:
    where = location.where(name)
    try:
        fields = json.loads(location.read(name))
    except ValueError as error:
        raise CorruptShard(f"not JSON: {error}", where=where, fix=_restore(stage)) from None
    if not isinstance(fields, dict):
        raise CorruptShard("not a JSON object", where=where, fix=_restore(stage))
    return fields


def _restore(stage: Stage) -> str:
    return f"restore the file, or run `eagle3 {stage} --force`"


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
