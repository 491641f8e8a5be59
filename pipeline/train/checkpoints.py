"""Checkpoints that are whole or not there.

    checkpoints/step-000100/…            DeepSpeed's files
    checkpoints/step-000100.json         written last: step, place in the data, checksums of the files

A directory without a marker, or whose files differ from it, was cut off by a kill and is ignored.
Nothing random is drawn during training — the order of batches is a function of the seed and the
batch number — so a step and a batch number restore all there is.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from pydantic import Field, ValidationError

from pipeline.errors import StoreError
from pipeline.records import Record
from pipeline.store.location import Location
from pipeline.train.engine import Engine


class Window(Record):
    """Sums since the last line of metrics."""

    losses: tuple[float, ...] = ()  # of each micro-batch
    hits: tuple[int, ...] = ()  # per step of the unroll
    rows: tuple[int, ...] = ()
    tokens: int = 0


class Progress(Record):
    """How far training is."""

    step: int = 0  # optimiser steps taken
    tokens: int = 0  # read, over all epochs and processes
    labels: int = 0  # of them predicted at step 0
    window: Window = Window()
    last: dict[str, float] = Field(default_factory=dict)  # the last line of metrics


class Marker(Record):
    """`step-000100.json`."""

    work: str  # hash of the configuration and the parent
    world: int
    epoch: int  # of the next batch
    index: int  # of the next batch in its epoch
    progress: Progress
    files: dict[str, tuple[int, str]]  # name → bytes, SHA-256


class Checkpoints:
    """The checkpoints of one run in a local directory."""

    def __init__(self, directory: Path, *, work: str, keep: int) -> None:
        self._directory, self._work, self._keep = directory, work, keep

    def newest(self, world: int) -> tuple[Path, Marker] | None:
        """The newest whole checkpoint of this work, or None. Raises StoreError for another world size."""
        for path in sorted(self._directory.glob("step-*.json"), reverse=True):
            marker = self._valid(path)
            if marker is None:
                continue
            if marker.world != world:
                problem = f"was written by {marker.world} processes, this run has {world}"
                raise StoreError(problem, where=str(path), fix=f"start {marker.world} processes, or begin again with --force")
            return path.with_suffix(""), marker
        return None

    def save(self, engine: Engine, progress: Progress, *, epoch: int, index: int) -> None:
        """Write a checkpoint, mark it, delete the oldest. Raises StoreError when the disk refuses."""
        path = self._directory / f"step-{progress.step:06d}"
        try:
            if engine.rank == 0:
                path.with_suffix(".json").unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)
                self._directory.mkdir(parents=True, exist_ok=True)
            engine.barrier()
            engine.save(path)
            engine.barrier()
            if engine.rank == 0:
                files = {file.relative_to(path).as_posix(): (file.stat().st_size, _sha256(file)) for file in sorted(path.rglob("*")) if file.is_file()}
                marker = Marker(work=self._work, world=engine.world, epoch=epoch, index=index, progress=progress, files=files)
                Location(str(self._directory)).write(f"{path.name}.json", marker.model_dump_json().encode())
                self._prune()
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            problem = f"a checkpoint cannot be written: {str(error).splitlines()[0]}"
            raise StoreError(problem, where=str(path), fix="free some space, or choose another run.uri=…") from error

    def _prune(self) -> None:
        """Markers first, so that a kill in between leaves no marker without its files."""
        markers = sorted(self._directory.glob("step-*.json"))
        for path in markers[: -self._keep]:
            path.unlink()
        kept = {path.stem for path in markers[-self._keep :]}
        for directory in self._directory.iterdir():
            if directory.is_dir() and directory.name not in kept:
                shutil.rmtree(directory)

    def _valid(self, path: Path) -> Marker | None:
        try:
            marker = Marker.model_validate(json.loads(path.read_text()))
        except (ValueError, ValidationError):
            return None
        whole = all(_matches(path.with_suffix("") / name, *expected) for name, expected in marker.files.items())
        return marker if whole and marker.work == self._work else None


def _matches(file: Path, size: int, checksum: str) -> bool:
    return file.is_file() and file.stat().st_size == size and _sha256(file) == checksum


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
