"""`eagle3 verify`: every byte of a run, and how its stages hang together.

Of each shard: present, size, SHA-256, readable as what it is, with the rows, tokens and width that its
manifest promises. Of the chain: schema versions, the same contract throughout, and that each stage was
made from the parent that stands beside it. All problems are collected; none stops the rest.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pipeline.console import ProgressBar, progress_bar
from pipeline.errors import CorruptShard, Eagle3Error, MissingStage
from pipeline.records import STAGES, Manifest, Shard, Stage, match_contracts
from pipeline.store.cache import download_shard
from pipeline.store.location import Location
from pipeline.store.samples import decode_samples
from pipeline.store.shards import ENTRY, SHARDS, read_entry, verify_shard
from pipeline.store.stage_run import BEGIN, MANIFEST, find_manifest, stage_location

PARENTS: dict[Stage, Stage] = {"features": "synth", "train": "features", "eval": "train"}
#: Where training puts a copy of its shards for the tools that load heads.
_HEAD = "head"


class Verified(NamedTuple):
    """What was found. `problems` is empty for a sound run."""

    problems: tuple[str, ...]  # one line each, as error messages are
    finished: tuple[Stage, ...]
    begun: tuple[Stage, ...]  # stages without a manifest; their committed shards were checked
    shards: int
    bytes: int


class _Found:
    """What a stage has on storage, as far as it can be read."""

    def __init__(self, run_uri: str, stage: Stage) -> None:
        self.stage, self.location = stage, stage_location(run_uri, stage)
        self.manifest: Manifest | None = None
        self.shards: tuple[Shard, ...] = ()
        self.problems: list[str] = []
        with self.collecting():
            self.manifest = find_manifest(run_uri, stage)
        self.is_begun = self.manifest is None and not self.problems and self.location.exists(BEGIN)
        self.shards = self.manifest.shards if self.manifest else tuple(self._entries())

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


def verify_run(run_uri: str) -> Verified:
    """Check all of the run at `run_uri`. Raises MissingStage when there is nothing of a run."""
    stages = [_Found(run_uri, stage) for stage in STAGES]
    stages = [found for found in stages if found.manifest or found.is_begun or found.problems]
    if not stages:
        raise MissingStage(
            "holds no stage of a run",
            where=run_uri,
            fix="pass the run.uri of a run, the directory above synth, features, train and eval",
        )
    size = sum(shard.bytes for found in stages for shard in found.shards)
    with progress_bar("verify", unit="bytes", total=size) as bar:
        for found in stages:
            _verify_shards(found, bar)
    _verify_chain({found.stage: found for found in stages})
    return Verified(
        problems=tuple(problem for found in stages for problem in found.problems),
        finished=tuple(found.stage for found in stages if found.manifest),
        begun=tuple(found.stage for found in stages if found.is_begun),
        shards=sum(len(found.shards) for found in stages),
        bytes=size,
    )


def _verify_shards(found: _Found, bar: ProgressBar) -> None:
    for shard in found.shards:
        with found.collecting(), _held(found.location, shard) as held:
            _verify_content(found, shard, held)
            if found.stage == "train" and found.manifest:
                _verify_head(found.location.child(_HEAD), shard)
        bar.advance(shard.bytes, note=f"{found.stage}/{shard.name}")


@contextmanager
def _held(location: Location, shard: Shard) -> Iterator[Location]:
    """A local stage directory that holds the shard's bytes, whose checksum is right. Messages name the shard where it came from."""
    if location.is_local:
        verify_shard(location, shard)
        yield location
        return
    with tempfile.TemporaryDirectory(prefix="eagle3-verify-") as scratch:
        download_shard(location, shard, Path(scratch) / SHARDS / shard.name, thorough=True)
        try:
            yield Location(scratch)
        except Eagle3Error as error:
            raise type(error)(
                error.problem, where=error.where.replace(scratch, location.uri), fix=error.fix
            ) from error


def _verify_content(found: _Found, shard: Shard, held: Location) -> None:
    """That the file is what its name says, and holds what the manifest says. Raises CorruptShard."""
    if found.stage == "features":
        _verify_states(found, shard, held)
        return
    path = held.child(SHARDS).local_path(shard.name)
    where = str(path)
    if path.suffix == ".parquet":
        _expect_equal(len(decode_samples(path.read_bytes(), where)), shard.rows, "rows", where)
    elif path.suffix == ".safetensors":
        _verify_safetensors(path, where)
    elif path.suffix == ".json":
        try:
            json.loads(path.read_bytes())
        except ValueError as error:
            raise _corrupt(f"not JSON: {error}", where) from None


def _verify_states(found: _Found, shard: Shard, held: Location) -> None:
    from pipeline.store.states import StatesReader

    reader = StatesReader(held, shard)
    where = held.child(SHARDS).where(shard.name)
    _expect_equal(len(reader), shard.rows, "samples", where)
    _expect_equal(sum(reader.lengths), shard.tokens, "tokens", where)
    expected = found.manifest.contract.hidden_size if found.manifest else reader.hidden_size
    if reader.hidden_size != expected:
        raise _corrupt(
            f"holds states of hidden_size {reader.hidden_size}, the target of the manifest's contract has {expected}",
            where,
        )
    for index in range(len(reader)):
        reader.sample(index, decode=False)


def _verify_safetensors(path: Path, where: str) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as tensors:
            tensors.keys()
    except (SafetensorError, OSError) as error:
        raise _corrupt(
            f"not a safetensors file: {' '.join(str(error).split())[:200]}", where
        ) from None


def _verify_head(folder: Location, shard: Shard) -> None:
    """The head that tools load must be the one that was committed."""
    if not folder.exists(shard.name) or folder.sha256(shard.name) != shard.sha256:
        raise CorruptShard(
            "is not the committed file",
            where=folder.where(shard.name),
            fix="run `eagle3 train` again; it restores the file",
        )


def _verify_chain(stages: dict[Stage, _Found]) -> None:
    """One contract throughout, and each finished stage's parent beside it."""
    first: Manifest | None = None
    for stage, found in stages.items():
        manifest = found.manifest
        if manifest is None:
            continue
        where = found.location.where(MANIFEST)
        if (
            first and manifest.parent_hash
        ):  # a head of another run, evaluated here, may be of another target
            with found.collecting():
                match_contracts(first.contract, manifest.contract, where=where)
        first = first or manifest
        parent = PARENTS.get(stage)
        if parent and manifest.parent_hash:
            before = stages[parent].manifest if parent in stages else None
            with found.collecting():
                _verify_parent(manifest.parent_hash, before, parent, where)


def _verify_parent(expected: str, before: Manifest | None, parent: Stage, where: str) -> None:
    if before is None:
        raise MissingStage(
            f"was made from {parent}, which has no readable manifest here",
            where=f"{where}: parent_hash",
            fix=f"restore {parent}'s directory",
        )
    if before.content_hash != expected:
        problem = (
            f"was made from {parent} {expected[:16]}…, which is now {before.content_hash[:16]}…"
        )
        raise CorruptShard(
            problem,
            where=f"{where}: parent_hash",
            fix=f"restore {parent}'s directory, or run the stage again with --force",
        )


def _expect_equal(found: int, promised: int, what: str, where: str) -> None:
    if found != promised:
        raise _corrupt(f"holds {found} {what}, {promised} were committed", where)


def _corrupt(problem: str, where: str) -> CorruptShard:
    return CorruptShard(
        problem, where=where, fix="restore the file, or run the stage that wrote it with --force"
    )
