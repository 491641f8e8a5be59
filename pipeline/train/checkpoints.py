"""Checkpoints that are whole or not there.

    checkpoints/step-000100/…            DeepSpeed's files
    checkpoints/step-000100.json         written last: step, position in the data, files' checksums
    checkpoints/best-000080.safetensors  the head with the highest τ so far, when training evaluates

A directory without a marker, or whose files differ from it, was cut off by a kill and is ignored.
Nothing random is drawn during training — the order of batches is a function of the seed and the
batch number — so a step and a batch number restore all there is. A best head is named by the
progress inside a marker, and stays until no marker names it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError
from safetensors.torch import load_file
from safetensors.torch import save as encode
from torch import Tensor

from pipeline.config import cache_directory
from pipeline.errors import CorruptShard, StoreError
from pipeline.records import Record, digest
from pipeline.store.location import Location
from pipeline.store.stage_run import StageRun
from pipeline.train.progress import Best, Progress
from pipeline.train.trainer import Trainer


class Marker(Record):
    """`step-000100.json`."""

    work: str  # identity: hash of the configuration and the parent
    world: int
    epoch: int  # of the next batch
    index: int  # of the next batch in its epoch
    progress: Progress
    files: dict[str, tuple[int, str]]  # name → bytes, SHA-256


def workspace(stage_run: StageRun) -> Path:
    """Directory of checkpoints and metrics: the stage's, or one in the cache for a remote run."""
    if stage_run.location.is_local:
        return stage_run.location.local_path(".")
    return cache_directory() / "train" / digest(stage_run.location.uri)[:16]


class Checkpoints:
    """The checkpoints of one run in a local directory."""

    def __init__(self, directory: Path, *, identity: str, keep: int) -> None:
        """`identity` is the hash of the configuration and the parent.

        Checkpoints of another are not read.
        """
        self._directory, self._identity, self._keep = directory, identity, keep

    def newest(self, world: int, *, sharded: bool) -> tuple[Path, Marker] | None:
        """The newest whole checkpoint of this identity, or None.

        `sharded`: every process keeps a part of the optimiser's state (ZeRO 1 and above). Such a
        checkpoint belongs to its number of processes: StoreError for another.
        """
        for path in sorted(self._directory.glob("step-*.json"), reverse=True):
            marker = self._valid(path)
            if marker is None:
                continue
            if sharded and marker.world != world:
                parts = marker.world
                problem = (
                    f"holds the optimiser's state in {parts} parts, this run has {world} processes"
                )
                only = "only train.zero_stage=0 continues on another number"
                fix = f"start {parts} processes, or begin again with --force; {only}"
                raise StoreError(problem, where=str(path), fix=fix)
            return path.with_suffix(""), marker
        return None

    def keep_best(self, step: int, weights: Mapping[str, Tensor]) -> tuple[int, str]:
        """Write the head of an evaluation; returns its size and checksum.

        Raises StoreError when the disk refuses.
        """
        data = encode(dict(weights))
        Location(str(self._directory)).write(_best_name(step), data)
        return len(data), hashlib.sha256(data).hexdigest()

    def read_best(self, best: Best) -> dict[str, Tensor]:
        """The head that `keep_best` wrote. Raises CorruptShard when it is not what it was."""
        path = self._directory / _best_name(best.step)
        if not _matches(path, *best.file):
            problem = "the best head is missing or damaged"
            raise CorruptShard(problem, where=str(path), fix="run `eagle3 train --force`")
        return load_file(path)

    def save(self, trainer: Trainer, progress: Progress, *, epoch: int, index: int) -> None:
        """Write a checkpoint, mark it, delete the oldest; `index` is the next batch's in `epoch`.

        Raises StoreError when the disk refuses.
        """
        path = self._directory / f"step-{progress.step:06d}"
        try:
            if trainer.rank == 0:
                path.with_suffix(".json").unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)
                self._directory.mkdir(parents=True, exist_ok=True)
            trainer.barrier()
            trainer.save(path)
            trainer.barrier()
            if trainer.rank == 0:
                marker = Marker(
                    work=self._identity,
                    world=trainer.world,
                    epoch=epoch,
                    index=index,
                    progress=progress,
                    files=_checksums(path),
                )
                location = Location(str(self._directory))
                location.write(f"{path.name}.json", marker.model_dump_json().encode())
                self._prune()
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            problem = f"a checkpoint cannot be written: {str(error).splitlines()[0]}"
            fix = "free some space, or choose another run.uri=…"
            raise StoreError(problem, where=str(path), fix=fix) from error

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
        """The marker at `path`, when it is of this identity and its files are what was written."""
        marker = _read_marker(path)
        if marker is None or marker.work != self._identity:
            return None
        files = {path.with_suffix("") / name: expected for name, expected in marker.files.items()}
        if best := marker.progress.best:
            files[self._directory / _best_name(best.step)] = best.file
        return marker if all(_matches(file, *files[file]) for file in files) else None


def _read_marker(path: Path) -> Marker | None:
    try:
        return Marker.model_validate(json.loads(path.read_text()))
    except (ValueError, ValidationError):
        return None


def _best_name(step: int) -> str:
    return f"best-{step:06d}.safetensors"


def _checksums(directory: Path) -> dict[str, tuple[int, str]]:
    """Bytes and SHA-256 of every file below `directory`."""
    files = [file for file in sorted(directory.rglob("*")) if file.is_file()]
    return {
        file.relative_to(directory).as_posix(): (file.stat().st_size, _sha256(file))
        for file in files
    }


def _matches(file: Path, size: int, checksum: str) -> bool:
    return file.is_file() and file.stat().st_size == size and _sha256(file) == checksum


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
