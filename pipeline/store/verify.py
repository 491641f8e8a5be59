"""`eagle3 verify`: every byte of a run, and how its stages hang together.

Of each shard: present, size, SHA-256, readable as what it is, with the rows, tokens and width that
its manifest promises. Of selected prompts the same; those of a finished stage may be gone, as
`eagle3 gc` removes them. Of every other file: that it is what the manifest names, and that there is
none that it does not name. Of the chain: schema versions, the same contract throughout, and that
each stage was made from the parent that stands beside it. All problems are collected; none stops
the rest.

    file                                        checked against
    shards, entries, begin.json, selection,     the manifest
    audit, datasheet, metrics, checkpoints,
    head, report.json
    manifest.json, servers/*.json, report.html, the checksum in the file itself: all but the first
    report.md, consumed/*.json                  are written after the manifest
    begin.json and entries of a begun stage     the checksum in the file itself
    checkpoints and metrics of a begun stage    the markers of the checkpoints; metrics by prefix

States that training has consumed are gone: their entries, and the records that name them, are not.

Checksums find damage and careless edits. They are no signatures: whoever may write the run can
write all of them anew.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from pipeline.console import ProgressBar, progress_bar
from pipeline.documents import check_header, read_json
from pipeline.errors import (
    ConsumedShard,
    CorruptShard,
    Eagle3Error,
    MissingStage,
    StoreError,
)
from pipeline.records import (
    SEALED_SCHEMA,
    STAGES,
    Manifest,
    Record,
    Shard,
    Stage,
    StoredFile,
    is_sealed_page,
    json_object,
    match_contracts,
    take_checksum,
)
from pipeline.reports import EVIDENCE, MARKDOWN, PAGE, SERVERS, EvalReport, ServerResult
from pipeline.store.gc import TEMPORARY, find_orphans
from pipeline.store.location import Location
from pipeline.store.manifest import (
    BEGIN,
    MANIFEST,
    check_vouched,
    find_manifest,
    read_begin,
    stage_location,
)
from pipeline.store.samples import (
    PROMPTS,
    SELECTION,
    Selection,
    decode_samples,
    find_selection,
    load_prompt_shard,
)
from pipeline.store.shards import (
    CONSUMED,
    ENTRY,
    SHARDS,
    check_record,
    download_shard,
    read_consumed,
    read_entry,
    verify_shard,
)
from pipeline.store.stage_run import CLAIMS

_PARENTS: dict[Stage, Stage] = {"features": "synth", "train": "features", "eval": "train"}
#: Where training puts a copy of its shards for the tools that load heads.
_HEAD = "head"
#: Folders of a stage that no manifest vouches for, and what is in them.
UNCOVERED = {CLAIMS: "claims of processes on shards", "wandb": "written by Weights & Biases"}


class BegunFiles(Protocol):
    """What an unfinished stage vouches for, by path."""

    @property
    def files(self) -> Mapping[str, StoredFile]: ...
    @property
    def prefixes(self) -> Mapping[str, StoredFile]: ...  # of files that are being appended to


class RunCheck(NamedTuple):
    """The outcome for a run. `problems` is empty for a sound one."""

    problems: tuple[str, ...]  # one line each, as error messages are
    finished: tuple[Stage, ...]
    begun: tuple[Stage, ...]  # stages without a manifest; their committed shards were checked
    shards: int
    files: int  # others that were checked
    consumed: int  # shards that training is past; their files need not be there
    bytes: int
    uncovered: tuple[str, ...]  # one line each: what is there and was not checked


class _StageCheck:
    """A stage as far as it can be read, and its problems so far."""

    def __init__(self, run_uri: str, stage: Stage) -> None:
        self.stage, self.location = stage, stage_location(run_uri, stage)
        self.manifest: Manifest | None = None
        self.problems: list[str] = []
        self.uncovered: list[str] = []
        self.no_files: set[str] = set()  # paths of pipes, devices and links that lead out
        self.files = 0
        with self.collecting():
            self.manifest = find_manifest(run_uri, stage)
        self.is_begun = self.manifest is None and not self.problems and self.location.exists(BEGIN)
        shards = self.manifest.shards if self.manifest else tuple(self._entries())
        if self.is_begun:
            with self.collecting():
                read_begin(self.location)
        self.consumed: set[str] = set()
        if stage == "features" and (self.manifest or self.is_begun):
            there = self.location.child(SHARDS).sizes()
            with self.collecting():  # after the listing: a record is there before a file goes
                self.consumed = read_consumed(self.location)
            gone = self.consumed - {shard.name for shard in shards if shard.path in there}
            shards = tuple(shard for shard in shards if shard.name not in gone)
        #: Those whose files are there, or should be.
        self.shards = shards
        self.selection: Selection | None = None
        if stage == "synth" and (self.manifest or self.is_begun):
            with self.collecting():
                self.selection = find_selection(self.location)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Note an error of the data and go on."""
        try:
            yield
        except Eagle3Error as error:
            self.problems.append(str(error))

    def _entries(self) -> Iterator[Shard]:
        """The committed shards of a stage without a readable manifest."""
        folder = self.location.child(SHARDS)
        for name in folder.names():
            if name.endswith(ENTRY):
                with self.collecting():
                    yield read_entry(folder, name).shard


def verify_run(
    run_uri: str, begun_files: Mapping[Stage, Callable[[Location], BegunFiles]] | None = None
) -> RunCheck:
    """Check all of the run at `run_uri`. Raises MissingStage when there is nothing of a run.

    `begun_files` says what unfinished stages vouch for.
    """
    checks = [_StageCheck(run_uri, stage) for stage in STAGES]
    checks = [check for check in checks if check.manifest or check.is_begun or check.problems]
    if not checks:
        fix = "pass the run.uri of a run, the directory above synth, features, train and eval"
        raise MissingStage("holds no stage of a run", where=run_uri, fix=fix)
    orphans: list[str] = []
    with suppress(Eagle3Error):  # of what cannot be read: each stage's check says so
        orphans = [each.where for each in find_orphans(run_uri)]
    size = sum(shard.bytes for check in checks for shard in check.shards)
    finished = [check.manifest for check in checks if check.manifest]
    size += sum(file[0] for manifest in finished for file in manifest.files.values())
    with progress_bar("verify", unit="bytes", total=size) as bar:
        for check in checks:
            _verify_prompts(check)
            _verify_shards(check, bar)
            with check.collecting():
                _verify_files(check, orphans, bar)
            if check.is_begun and begun_files and check.stage in begun_files:
                with check.collecting():
                    _verify_begun(check, begun_files[check.stage])
    _verify_chain({check.stage: check for check in checks})
    return RunCheck(
        problems=tuple(problem for check in checks for problem in check.problems),
        finished=tuple(check.stage for check in checks if check.manifest),
        begun=tuple(check.stage for check in checks if check.is_begun),
        shards=sum(len(check.shards) for check in checks),
        files=sum(check.files for check in checks),
        consumed=sum(len(check.consumed) for check in checks),
        bytes=size,
        uncovered=(
            *(line for check in checks for line in check.uncovered),
            *(f"{where}: left by a writer that was killed, see `eagle3 gc`" for where in orphans),
            *_beside_stages(run_uri),
        ),
    )


def _beside_stages(run_uri: str) -> Iterator[str]:
    """What lies in the run's directory and is of no stage."""
    location = Location(run_uri)
    for name in (*location.names(), *location.subdirectories(), *location.others()):
        if name not in STAGES:
            yield f"{location.where(name)}: of no stage"


def _verify_prompts(check: _StageCheck) -> None:
    if check.selection is None:
        return
    there = check.location.child(PROMPTS).sizes() if check.manifest else {}
    for shard in check.selection.shards:
        if check.manifest is None or shard.file in there:
            with check.collecting():
                load_prompt_shard(check.location, shard)
    names = tuple(shard.name for shard in check.shards)
    if check.manifest and names != check.selection.names:
        where = check.location.where(SELECTION)
        check.problems.append(str(_corrupt("names other shards than the manifest", where)))


def _verify_files(check: _StageCheck, orphans: Collection[str], bar: ProgressBar) -> None:
    """All but shards: what the manifest names, what seals itself, and what should not be there."""
    location, manifest = check.location, check.manifest
    present = {path for path in _paths(check) if location.where(path) not in orphans}
    for folder, content in UNCOVERED.items():
        if inside := {path for path in present if path.startswith(f"{folder}/")}:
            check.uncovered.append(f"{location.where(folder)}: {content}, {len(inside)} files")
            present -= inside
    if manifest is None:
        _verify_sealed(check, present)
        if check.is_begun:
            text = "its manifest, which will name all files, is not written yet"
            check.uncovered.append(f"{location.uri}: {text}; its shards were checked")
        return
    if manifest.schema_version < SEALED_SCHEMA:
        text = f"its manifest, of schema {manifest.schema_version}, names shards alone"
        check.uncovered.append(f"{location.uri}: {text}; other files were not checked")
        return
    sealed = _verify_sealed(check, present)
    for path, expected in sorted(manifest.files.items()):
        with check.collecting():
            if path not in check.no_files:
                _expect_file(location, manifest, path, is_there=path in present)
        bar.advance(expected[0], note=f"{check.stage}/{path}")
    check.files += len(manifest.files)
    selected = check.selection.shards if check.selection else ()
    prompts = (f"{PROMPTS}/{shard.file}" for shard in selected)
    shards = (f"{SHARDS}/{shard.path}" for shard in manifest.shards)
    for path in sorted(present - {MANIFEST, *manifest.files, *sealed, *prompts, *shards}):
        fix, problem = "delete it, or move it out of the run", "is not a file that the stage wrote"
        check.problems.append(str(CorruptShard(problem, where=location.where(path), fix=fix)))


def _paths(check: _StageCheck, above: str = "") -> Iterator[str]:
    """Of all files of a stage, those of writers left out; what is no file is a problem."""
    location = check.location.child(above.rstrip("/")) if above else check.location
    forged = (name for name in location.temporaries() if not TEMPORARY.fullmatch(name))
    yield from (f"{above}{name}" for name in (*location.names(), *forged))
    if above.split("/")[0] not in UNCOVERED:  # such as links of Weights & Biases to its logs
        for name, problem in location.others().items():
            fix = "delete it, or put the file itself there"
            where = location.where(name)
            check.problems.append(str(CorruptShard(problem, where=where, fix=fix)))
            check.no_files.add(f"{above}{name}")
    for folder in location.subdirectories():
        yield from _paths(check, f"{above}{folder}/")


def _expect_file(location: Location, manifest: Manifest, path: str, *, is_there: bool) -> None:
    where = location.where(path)
    if not is_there:
        raise _corrupt("the file is missing", where)
    check_vouched(manifest, path, (location.size(path), location.sha256(path)), where=where)


def _verify_sealed(check: _StageCheck, present: Collection[str]) -> set[str]:
    """Check what is written after the manifest, and carries its own checksum; returns it.

    Of eval that are pages and results of servers, of features what training says of the shards.
    """
    location = check.location
    records = {path for path in present if re.fullmatch(rf"{CONSUMED}/\d+\.json", path)}
    if check.stage == "features" and records:
        check.files += len(records)
        known = {shard.name for shard in check.manifest.shards} if check.manifest else set()
        for path in records if check.manifest else ():
            with check.collecting():
                where = location.where(path)
                if others := set(check_record(location.read(path), where).shards) - known:
                    problem = f"names {min(others)}, which is no shard of the manifest"
                    raise _corrupt(problem, where)
        return records
    if check.stage != "eval":
        return set()
    named = check.manifest.files if check.manifest else {}
    results = {path for path in present if re.fullmatch(rf"{SERVERS}/[^/]+\.json", path)}
    # Evidence of a failed check is written whenever one fails; earlier versions named it.
    evidence = {path for path in EVIDENCE if path in present and path not in named}
    pages = {path for path in (PAGE, MARKDOWN) if check.manifest or path in present}
    pages |= {path for path in evidence if path.endswith(".html")}
    for path in sorted(results | evidence | pages):
        where, check.files = location.where(path), check.files + 1
        with check.collecting():
            data = location.read(path) if path in present else b""
            if path in pages and not is_sealed_page(data):
                problem = "is not the page that was written" if data else "the file is missing"
                fix = "run `eagle3 eval` again; it writes the page anew"
                raise CorruptShard(problem, where=where, fix=fix)
            if path not in pages:
                fix = "restore the file, or delete it and evaluate again"
                fields = json_object(data, where=where, fix=fix)
                sealed = take_checksum(fields, data, where=where, fix=fix)
                kind: type[Record] = ServerResult if path in results else EvalReport
                kind.from_fields(fields, where=where, fix=fix)
                if not sealed:
                    check.uncovered.append(f"{where}: of an earlier version, without a checksum")
    return results | evidence | pages


def _verify_begun(check: _StageCheck, read_files: Callable[[Location], BegunFiles]) -> None:
    """What the unfinished stage vouches for; what it has replaced meanwhile is no problem."""
    location, before, wrong = check.location, read_files(check.location), dict[str, str]()
    for path, file in before.files.items():
        try:
            there = location.size(path), location.sha256(path)
            problem = "" if there == file else "is not what the checkpoint's marker names"
        except StoreError as error:
            problem = error.problem
        wrong |= {path: problem} if problem else {}
        check.files += 1
    for path, (size, checksum) in before.prefixes.items():
        data = location.read(path) if location.exists(path) else b""
        if hashlib.sha256(data[:size]).hexdigest() != checksum:
            wrong[path] = "does not begin with the lines of the newest checkpoint"
    after = read_files(location)
    fix = "delete the checkpoint, or run `eagle3 train --force`"
    for path, problem in wrong.items():
        was = before.files.get(path) or before.prefixes.get(path)
        if was in (after.files.get(path), after.prefixes.get(path)):
            check.problems.append(str(CorruptShard(problem, where=location.where(path), fix=fix)))


def _verify_shards(check: _StageCheck, bar: ProgressBar) -> None:
    for shard in check.shards:
        gone = suppress(ConsumedShard)  # meanwhile
        with check.collecting(), gone, _local_stage(check.location, shard) as local:
            _verify_content(check, shard, local)
            if check.stage == "train" and check.manifest and not check.manifest.files:
                _verify_head(check.location.child(_HEAD), shard)
        bar.advance(shard.bytes, note=f"{check.stage}/{shard.name}")


@contextmanager
def _local_stage(location: Location, shard: Shard) -> Iterator[Location]:
    """A local stage directory that holds the shard's bytes, whose checksum is right.

    Messages name the shard where it came from.
    """
    if location.is_local:
        verify_shard(location, shard)
        yield location
        return
    with tempfile.TemporaryDirectory(prefix="eagle3-verify-") as scratch:
        download_shard(location, shard, Path(scratch) / SHARDS / shard.path, thorough=True)
        try:
            yield Location(scratch)
        except Eagle3Error as error:
            where = error.where.replace(scratch, location.uri)
            raise type(error)(error.problem, where=where, fix=error.fix) from error


def _verify_content(check: _StageCheck, shard: Shard, local: Location) -> None:
    """That the file is what its name says, with what the manifest says. Raises CorruptShard."""
    if check.stage == "features":
        _verify_states(check, shard, local)
        return
    path = local.child(SHARDS).local_path(shard.path)
    where = str(path)
    if path.suffix == ".parquet":
        _expect_equal(len(decode_samples(path.read_bytes(), where)), shard.rows, "rows", where)
    elif path.suffix == ".safetensors":
        _verify_safetensors(path, where)
    elif path.suffix == ".json":
        try:
            read_json(path)
        except ValueError as error:
            raise _corrupt(str(error), where) from None


def _verify_states(check: _StageCheck, shard: Shard, local: Location) -> None:
    from pipeline.store.states import StatesReader

    reader = StatesReader(local, shard)
    where = local.child(SHARDS).where(shard.path)
    _expect_equal(len(reader), shard.rows, "samples", where)
    _expect_equal(sum(reader.lengths), shard.tokens, "tokens", where)
    expected = check.manifest.contract.hidden_size if check.manifest else reader.hidden_size
    if reader.hidden_size != expected:
        problem = f"holds states of hidden_size {reader.hidden_size}"
        raise _corrupt(f"{problem}, the target of the manifest's contract has {expected}", where)
    for index in range(len(reader)):
        reader.sample(index, decode=False)


def _verify_safetensors(path: Path, where: str) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        check_header(path)
        with safe_open(path, framework="numpy") as tensors:
            tensors.keys()
    except (SafetensorError, OSError, ValueError) as error:
        problem = f"not a safetensors file: {' '.join(str(error).split())[:200]}"
        raise _corrupt(problem, where) from None


def _verify_head(folder: Location, shard: Shard) -> None:
    """The head that tools load must be the one that was committed."""
    if not folder.exists(shard.name) or folder.sha256(shard.name) != shard.sha256:
        where, fix = folder.where(shard.name), "run `eagle3 train` again; it restores the file"
        raise CorruptShard("is not the committed file", where=where, fix=fix)


def _verify_chain(checks: dict[Stage, _StageCheck]) -> None:
    """One contract throughout, and each finished stage's parent beside it."""
    first: Manifest | None = None
    for stage, check in checks.items():
        manifest = check.manifest
        if manifest is None:
            continue
        where = check.location.where(MANIFEST)
        # Without a parent it is a head of another run, evaluated here, maybe of another target.
        if first and manifest.parent_hash:
            with check.collecting():
                match_contracts(first.contract, manifest.contract, where=where)
        first = first or manifest
        parent = _PARENTS.get(stage)
        if parent and manifest.parent_hash:
            before = checks[parent].manifest if parent in checks else None
            with check.collecting():
                if parent not in checks and manifest.parent_uri:  # states of another run
                    before = find_manifest(manifest.parent_uri.rpartition("/")[0], parent)
                _verify_parent(manifest.parent_hash, before, parent, where)


def _verify_parent(expected: str, before: Manifest | None, parent: Stage, where: str) -> None:
    where = f"{where}: parent_hash"
    if before is None:
        problem = f"was made from {parent}, which has no readable manifest here"
        raise MissingStage(problem, where=where, fix=f"restore {parent}'s directory")
    if before.content_hash != expected:
        hashes = f"{expected[:16]}…, which is now {before.content_hash[:16]}…"
        fix = f"restore {parent}'s directory, or run the stage again with --force"
        raise CorruptShard(f"was made from {parent} {hashes}", where=where, fix=fix)


def _expect_equal(actual: int, promised: int, what: str, where: str) -> None:
    if actual != promised:
        raise _corrupt(f"holds {actual} {what}, {promised} were committed", where)


def _corrupt(problem: str, where: str) -> CorruptShard:
    fix = "restore the file, or run the stage that wrote it with --force"
    return CorruptShard(problem, where=where, fix=fix)
