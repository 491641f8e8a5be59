"""manifest.json: where it is, and how it is read."""

from __future__ import annotations

import json
from contextlib import suppress

from pipeline import __version__
from pipeline.errors import CorruptShard, MissingStage, StoreError, UnfinishedStage
from pipeline.records import OLDEST_SCHEMA, SCHEMA_VERSION, Manifest, Stage
from pipeline.store.begin import BEGIN
from pipeline.store.location import Location

MANIFEST = "manifest.json"


#: Stages that hold what users said: as text, as tokens, and in states that can be read back.
_PRIVATE: frozenset[Stage] = frozenset({"synth", "features"})


def stage_location(run_uri: str, stage: Stage) -> Location:
    """The directory of `stage` in a run."""
    return Location(f"{Location(run_uri).uri}/{stage}", private=stage in _PRIVATE)


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
    return parse_manifest(location, location.read(MANIFEST), stage)


def parse_manifest(location: Location, data: bytes, stage: Stage) -> Manifest:
    """The manifest in `data`, read from the stage at `location`; raises as `find_manifest`."""
    where, restore = location.where(MANIFEST), f"restore the file, or run `eagle3 {stage} --force`"
    try:
        manifest = Manifest.parse(data, where=where, fix=restore)
    except CorruptShard:
        _refuse_other_schema(where, _schema_version(data))
        raise
    _refuse_other_schema(where, manifest.schema_version)
    if manifest.stage != stage:
        problem = f"is the manifest of {manifest.stage}"
        fix = "restore the run directory as it was written"
        raise CorruptShard(problem, where=f"{where}: stage", fix=fix)
    return manifest


def _schema_version(data: bytes) -> object:
    """Of what cannot be read as a manifest of this schema."""
    with suppress(ValueError, AttributeError):
        return json.loads(data).get("schema_version")
    return None


def _refuse_other_schema(where: str, version: object) -> None:
    if isinstance(version, int) and not OLDEST_SCHEMA <= version <= SCHEMA_VERSION:
        age = "newer" if version > SCHEMA_VERSION else "older"
        readable = f"the {SCHEMA_VERSION} that eagle3 {__version__} reads"
        problem = f"schema_version {version} is {age} than {readable}"
        fix = "use the eagle3 that its `software` names, or choose another run.uri=…"
        raise StoreError(problem, where=f"{where}: schema_version", fix=fix)


def read_manifest(run_uri: str, stage: Stage) -> Manifest:
    """As `find_manifest`; MissingStage when there is none, UnfinishedStage when it is begun."""
    manifest = find_manifest(run_uri, stage)
    if manifest is None:
        if stage_location(run_uri, stage).exists(BEGIN):
            problem = f"stage {stage} has been begun and is not finished"
            fix = f"run the same command again when it is; `eagle3 {stage}` goes on with it"
            raise UnfinishedStage(problem, where=manifest_where(run_uri, stage), fix=fix)
        problem = f"stage {stage} is not finished"
        fix = f"run `eagle3 {stage}` first, with the same run.uri"
        raise MissingStage(problem, where=manifest_where(run_uri, stage), fix=fix)
    return manifest
