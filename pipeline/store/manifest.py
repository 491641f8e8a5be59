"""begin.json, manifest.json and the evaluation's report: where they are, and how they are read.

begin.json says which configuration and parent a stage's directory belongs to. The first process
creates it, with all that shapes the output; every later one compares. Work for other inputs is
refused, naming the keys that differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from pydantic import AwareDatetime, Field

from pipeline import __version__
from pipeline.config import RunConfig
from pipeline.errors import CorruptShard, MissingStage, StoreError, UnfinishedStage
from pipeline.records import (
    CHECKSUM,
    OLDEST_SCHEMA,
    SCHEMA_VERSION,
    SEALED_SCHEMA,
    Manifest,
    Record,
    Stage,
    StoredFile,
    canonical_json,
    digest,
    json_object,
    sealed_json,
    stored_file,
    take_checksum,
)
from pipeline.reports import REPORT, EvalReport
from pipeline.store.location import Location

#: Directory of train's checkpoints inside its stage's.
CHECKPOINTS = "checkpoints"
BEGIN, MANIFEST = "begin.json", "manifest.json"
#: Where training puts the head.
_HEAD = "head"
#: Characters of a value that a message shows.
_SHOWN = 60
#: Stages that hold what users said: as text, as tokens, and in states that can be read back.
_PRIVATE: frozenset[Stage] = frozenset({"synth", "features"})


def stage_location(run_uri: str, stage: Stage) -> Location:
    """The directory of `stage` in a run."""
    uri = f"{Location(run_uri).uri}/{stage}"
    return Location(uri, private=stage in _PRIVATE, closed=True)


def manifest_where(run_uri: str, stage: Stage) -> str:
    """The stage's manifest as messages show it."""
    return stage_location(run_uri, stage).where(MANIFEST)


def find_manifest(run_uri: str, stage: Stage) -> Manifest | None:
    """The stage's manifest, or None when the stage is not finished.

    Raises StoreError for another schema and CorruptShard for a file that is no manifest.
    """
    location = stage_location(run_uri, stage)
    if not location.exists(MANIFEST):
        return None
    return parse_manifest(location, location.read(MANIFEST), stage)


def finished_state(config: RunConfig, stage: Stage, parent: Manifest | None = None) -> str | None:
    """For a plan: whether the finished stage is of this config and parent; None: not finished."""
    manifest = find_manifest(config.run.uri, stage)
    if manifest is None:
        return None
    expected = config.section_hash(stage), parent.content_hash if parent else None
    if (manifest.config_hash, manifest.parent_hash) == expected:
        return "complete"
    return f"complete for another config{' or parent' if parent or manifest.parent_hash else ''}"


def parse_manifest(location: Location, data: bytes, stage: Stage) -> Manifest:
    """The manifest in `data`, read from the stage at `location`; raises as `find_manifest`."""
    where, restore = location.where(MANIFEST), f"restore the file, or run `eagle3 {stage} --force`"
    fields = json_object(data, where=where, fix=restore)
    _refuse_other_schema(where, fields.get("schema_version"))
    sealed = take_checksum(fields, data, where=where, fix=restore)
    manifest = Manifest.from_fields(fields, where=where, fix=restore)
    if manifest.schema_version >= SEALED_SCHEMA and not sealed:
        raise CorruptShard(f"has no {CHECKSUM}", where=where, fix=restore)
    if manifest.stage != stage:
        problem = f"is the manifest of {manifest.stage}"
        fix = "restore the run directory as it was written"
        raise CorruptShard(problem, where=f"{where}: stage", fix=fix)
    return manifest


def _refuse_other_schema(where: str, version: object) -> None:
    if isinstance(version, int) and not OLDEST_SCHEMA <= version <= SCHEMA_VERSION:
        age = "newer" if version > SCHEMA_VERSION else "older"
        readable = f"the {SCHEMA_VERSION} that eagle3 {__version__} reads"
        problem = f"schema_version {version} is {age} than {readable}"
        fix = "use the eagle3 that its `software` names, or choose another run.uri=…"
        raise StoreError(problem, where=f"{where}: schema_version", fix=fix)


def read_manifest(run_uri: str, stage: Stage) -> Manifest:
    """As `find_manifest`. Raises MissingStage, or UnfinishedStage for a stage that has begun."""
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


class Awaited(NamedTuple):
    """A parent that is not finished: what it is made from stands for what it will be."""

    stage: Stage
    content_hash: str

    @classmethod
    def of(cls, begun: Begin) -> Awaited:
        return cls(begun.stage, digest([begun.config_hash, begun.parent_hash, begun.made_with]))


class Begin(Record):
    """What decides a stage's output: only work on equal inputs is continued."""

    stage: Stage
    schema_version: int = SCHEMA_VERSION
    config_hash: str  # of `shaping`
    parent_hash: str | None  # `content_hash` of the parent's manifest
    shaping: dict[str, Any] | None = None  # the configuration; versions before 4 kept its hash only
    #: What else shapes the output: facts of the target, versions of filters. Those that an older
    #: version did not record are not compared.
    made_with: dict[str, str] = Field({})
    #: The time that chat templates render, for every process and attempt: when the stage was
    #: begun. None where no template reads it, and in work that older versions began.
    clock: AwareDatetime | None = None

    @classmethod
    def of(
        cls,
        config: RunConfig,
        stage: Stage,
        parent: Manifest | Awaited | None,
        made_with: Mapping[str, str],
        clock: datetime | None = None,
    ) -> Begin:
        """The record of a stage that begins now."""
        return cls(
            stage=stage,
            config_hash=config.section_hash(stage),
            parent_hash=parent.content_hash if parent else None,
            shaping=config.shaping(stage),
            made_with=dict(made_with),
            clock=clock,
        )

    def create(self, location: Location) -> Begin:
        """Write it to the stage at `location` unless there is one; returns the stored one.

        Raises CorruptShard where that cannot be read.
        """
        return _parse_begin(location, location.create(BEGIN, sealed_json(self.dump())))

    def dump(self) -> dict[str, Any]:
        without = {"clock"} if self.clock is None else None
        return self.model_dump(mode="json", exclude=without)

    def changes(self, now: Begin, config: RunConfig) -> dict[str, tuple[str, str]]:
        """Key → its value here and in `now`, where they differ; `now` was made from `config`.

        A key that did not exist then counts as today's default.
        """
        changes = {}
        if self.parent_hash != now.parent_hash:
            changes["parent"] = _short_hash(self.parent_hash), _short_hash(now.parent_hash)
        for name in self.made_with.keys() & now.made_with.keys():
            if self.made_with[name] != now.made_with[name]:
                changes[name] = (
                    _short_value(self.made_with[name]),
                    _short_value(now.made_with[name]),
                )
        if self.shaping is None or now.shaping is None:
            if self.config_hash != now.config_hash:
                changes["config"] = _short_hash(self.config_hash), _short_hash(now.config_hash)
            return changes
        before, after = dict(_leaves(self.shaping)), dict(_leaves(now.shaping))
        for keys, value in after.items():
            was = before[keys] if keys in before else config.default(keys)
            if was != value:
                changes[_key_name(keys)] = _short_value(was), _short_value(value)
        return changes


def read_begin(location: Location) -> Begin | None:
    """begin.json of the stage at `location`; None before it begins. Raises CorruptShard."""
    return _parse_begin(location, location.read(BEGIN)) if location.exists(BEGIN) else None


def _parse_begin(location: Location, data: bytes) -> Begin:
    stage = location.uri.rsplit("/", 1)[-1]
    where, fix = location.where(BEGIN), f"restore the file, or run `eagle3 {stage} --force`"
    fields = json_object(data, where=where, fix=fix)
    take_checksum(fields, data, where=where, fix=fix)
    return Begin.from_fields(fields, where=where, fix=fix)


def _leaves(
    fields: dict[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in fields.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _key_name(keys: tuple[str, ...]) -> str:
    """A key as a user writes it."""
    return "run.seed" if keys == ("seed",) else ".".join(keys)


def _short_value(value: Any) -> str:
    text = canonical_json(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _short_hash(value: str | None) -> str:
    return value[:16] if value else "none"


def head_location(run_uri: str, head: str | None = None) -> Location:
    """The directory of `head`, where one is named, or of the run's own."""
    return Location(head) if head else stage_location(run_uri, "train").child(_HEAD)


def vouched_head(run_uri: str, head: str | None = None) -> Location:
    """As `head_location`. Raises CorruptShard where the run's own is not what training wrote.

    Every byte is read. Manifests before schema 5 do not name its files.
    """
    location = head_location(run_uri, head)
    manifest = None if head else find_manifest(run_uri, "train")
    for path in manifest.files if manifest else ():
        folder, _, name = path.rpartition("/")
        if manifest and folder == _HEAD:
            file, where = (location.size(name), location.sha256(name)), location.where(name)
            check_vouched(manifest, path, file, where=where)
    return location


def read_report(source: str) -> EvalReport:
    """The report at a path or URI (….json), or of the run at a URI.

    One that lies in a stage's directory must be what the manifest there vouches for; a copy
    elsewhere is read as it is. Raises StoreError without one, MissingStage where the stage is not
    finished, CorruptShard for another file than was written.
    """
    if source.endswith(".json"):
        above, separator, name = source.rpartition("/")
        location = Location(above if separator else ".")
        in_stage = location.exists(MANIFEST) or location.exists(BEGIN)
        manifest = _manifest_beside(location, "eval") if in_stage else None
    else:
        location, name = stage_location(source, "eval"), REPORT
        manifest = read_manifest(source, "eval")
    where, data = location.where(name), location.read(name)
    if manifest:
        check_vouched(manifest, name, stored_file(data), where=where)
    return EvalReport.parse(data, where=where, fix="run `eagle3 eval` there")


def _manifest_beside(location: Location, stage: Stage) -> Manifest:
    if not location.exists(MANIFEST):
        fix = f"finish it with `eagle3 {stage}`"
        raise UnfinishedStage(f"stage {stage} is not finished", where=location.uri, fix=fix)
    return parse_manifest(location, location.read(MANIFEST), stage)


def check_vouched(manifest: Manifest, name: str, file: StoredFile, *, where: str) -> None:
    """Raise CorruptShard where the `file` called `name` is not one that the manifest vouches for.

    Manifests before schema 5 vouch for report.json alone.
    """
    fix = f"restore the file, or run `eagle3 {manifest.stage} --force`"
    expected = manifest.files.get(name)
    if expected is None and name == REPORT and "report_sha256" in manifest.details:
        expected = file[0], str(manifest.details["report_sha256"])
    if expected is None:
        raise CorruptShard("is not a file that the manifest names", where=where, fix=fix)
    if file != expected:
        problem = f"has {file[0]} bytes, SHA-256 {file[1][:16]}…; the manifest names"
        problem += f" {expected[0]}, {expected[1][:16]}…"
        raise CorruptShard(problem, where=where, fix=fix)
