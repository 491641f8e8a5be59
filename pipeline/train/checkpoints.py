"""Checkpoints that are whole or not there.

    checkpoints/step-000100/…            DeepSpeed's files
    checkpoints/step-000100.json         written last: step, place in the data, checksums of the files
    checkpoints/best-000080.safetensors  the head with the highest τ so far, when training evaluates

A directory without a marker, or whose files differ from it, was cut off by a kill and is ignored.
Nothing random is drawn during training — the order of batches is a function of the seed and the
batch number — so a step and a batch number restore all there is. A best head is named by the progress
inside a marker, and stays until no marker names it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field, ValidationError
from safetensors.torch import load_file
from safetensors.torch import save as encode
from torch import Tensor

from pipeline.config import cache_directory
from pipeline.errors import CorruptShard, StoreError
from pipeline.records import Record, digest
from pipeline.store.location import Location
from pipeline.store.stage_run import StageRun
from pipeline.train.trainer import Trainer


class Window(Record):
    """Sums since the last line of metrics."""

    losses: tuple[float, ...] = ()  # of each micro-batch
    hits: tuple[int, ...] = ()  # per step of the unroll
    rows: tuple[int, ...] = ()
    tokens: int = 0


class Best(Record):
    """The evaluation with the highest τ so far, the earlier one of two that are equal."""

    step: int
    tau: float
    alpha: tuple[float, ...]
    measured: dict[str, float]  # loss and accuracies of the line of metrics that carries it
    file: tuple[int, str]  # bytes and SHA-256 of its head


class Progress(Record):
    """How far training is."""

    step: int = 0  # optimiser steps taken
    batches: int = 0  # read, over all epochs and processes; the next one has this number
    tokens: int = 0  # read, over all epochs and processes
    labels: int = 0  # of them predicted at step 0
    window: Window = Window()
    last: dict[str, float] = Field(default_factory=dict)  # the last line of metrics
    evaluations: int = 0
    stale: int = 0  # evaluations since the best one
    best: Best | None = None


class Marker(Record):
    """`step-000100.json`."""

    work: str  # hash of the configuration and the parent
    world: int
    epoch: int  # of the next batch
    index: int  # of the next batch in its epoch
    progress: Progress
    files: dict[str, tuple[int, str]]  # name → bytes, SHA-256


def workspace(work: StageRun) -> Path:
    """Where checkpoints and metrics are written: the stage's directory, or a place in the cache for a remote run."""
    if work.location.is_local:
        return work.location.local_path(".")
    return cache_directory() / "train" / digest(work.location.uri)[:16]


class Checkpoints:
    """The checkpoints of one run in a local directory."""

    def __init__(self, directory: Path, *, work: str, keep: int) -> None:
        self._directory, self._work, self._keep = directory, work, keep

    def newest(self, world: int, *, sharded: bool) -> tuple[Path, Marker] | None:
        """The newest whole checkpoint of this work, or None.

        `sharded`: every process keeps a part of the optimiser's state (ZeRO 1 and above). Such a
        checkpoint belongs to its number of processes: StoreError for another.
        """
        for path in sorted(self._directory.glob("step-*.json"), reverse=True):
            marker = self._valid(path)
            if marker is None:
                continue
            if sharded and marker.world != world:
                problem = f"holds the optimiser's state in {marker.world} parts, this run has {world} processes"
                fix = f"start {marker.world} processes, or begin again with --force; only train.zero_stage=0 continues on another number"
                raise StoreError(problem, where=str(path), fix=fix)
            return path.with_suffix(""), marker
        return None

    def keep_best(self, step: int, weights: Mapping[str, Tensor]) -> tuple[int, str]:
        """Write the head of an evaluation; returns its size and checksum. Raises StoreError when the disk refuses."""
        data = encode(dict(weights))
        Location(str(self._directory)).write(_best_name(step), data)
        return len(data), hashlib.sha256(data).hexdigest()

    def read_best(self, best: Best) -> dict[str, Tensor]:
        """The head that `keep_best` wrote. Raises CorruptShard when it is not what it was."""
        path = self._directory / _best_name(best.step)
        if not _matches(path, *best.file):
            raise CorruptShard(
                "the best head is missing or damaged",
                where=str(path),
                fix="run `eagle3 train --force`",
            )
        return load_file(path)

    def save(self, engine: Trainer, progress: Progress, *, epoch: int, index: int) -> None:
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
                files = {
                    file.relative_to(path).as_posix(): (file.stat().st_size, _sha256(file))
                    for file in sorted(path.rglob("*"))
                    if file.is_file()
                }
                marker = Marker(
                    work=self._work,
                    world=engine.world,
                    epoch=epoch,
                    index=index,
                    progress=progress,
                    files=files,
                )
                Location(str(self._directory)).write(
                    f"{path.name}.json", marker.model_dump_json().encode()
                )
                self._prune()
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            problem = f"a checkpoint cannot be written: {str(error).splitlines()[0]}"
            raise StoreError(
                problem, where=str(path), fix="free some space, or choose another run.uri=…"
            ) from error

    def _prune(self) -> None:
        """Markers first, so that a kill in between leaves no marker without its files."""
        markers = sorted(self._directory.glob("step-*.json"))
        for path in markers[: -self._keep]:
            path.unlink()
        kept = {path.stem for path in markers[-self._keep :]}
        for directory in self._directory.iterdir():
            if directory.is_dir() and directory.name not in kept:
                shutil.rmtree(directory)
        self._prune_best(markers[-self._keep :])

    def _prune_best(self, markers: Sequence[Path]) -> None:
        named = {
            _best_name(marker.progress.best.step)
            for path in markers
            if (marker := _read_marker(path)) and marker.progress.best
        }
        for file in self._directory.glob("best-*.safetensors"):
            if file.name not in named:
                file.unlink()

    def _valid(self, path: Path) -> Marker | None:
        marker = _read_marker(path)
        if marker is None or marker.work != self._work:
            return None
        best = marker.progress.best
        whole = all(
            _matches(path.with_suffix("") / name, *expected)
            for name, expected in marker.files.items()
        )
        return (
            marker
            if whole
            and (best is None or _matches(self._directory / _best_name(best.step), *best.file))
            else None
        )


def _read_marker(path: Path) -> Marker | None:
    try:
        return Marker.model_validate(json.loads(path.read_text()))
    except (ValueError, ValidationError):
        return None


def _best_name(step: int) -> str:
    return f"best-{step:06d}.safetensors"


def _matches(file: Path, size: int, checksum: str) -> bool:
    return file.is_file() and file.stat().st_size == size and _sha256(file) == checksum


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
