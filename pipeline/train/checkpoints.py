"""Checkpoints in the run's directory, whole or not there, read and written by the first process.

    <run>/train/checkpoints/step-000100-<nonce>/weights.safetensors     fp32 masters of the weights
                                                moments.safetensors     the optimiser's state
                                                metrics.jsonl           all lines so far
                            best-000080-<sha256>.safetensors            head to export so far
                            step-000100.json                            the marker, last

The marker holds the progress, the position in the data, and size and SHA-256 of every file. Without
one, or with files that differ from it, a checkpoint was cut off by a kill and is ignored; the next
older one is taken. The files of an attempt have names of its own, so that two attempts at once,
maybe one on a node that was given up for lost, never mix theirs; and an attempt deletes no others
than its own, and those that a marker named. The rest is left to `eagle3 gc`.

Of a remote run the files are also in this machine's cache, and are fetched where they are not, or
differ: what counts is the marker in the store.

Nothing random is drawn during training — the order of batches is a function of the seed and the
batch number — so these files restore all there is, on any number of processes. Reading them
executes nothing: they are tensors and JSON.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple

from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from safetensors.torch import save as encode
from torch import Tensor, tensor

from pipeline.config import cache_directory
from pipeline.console import notice
from pipeline.documents import check_header
from pipeline.errors import CorruptShard, StoreError
from pipeline.records import Record, StoredFile, digest, stored_file
from pipeline.store.disk import replace_file
from pipeline.store.location import Location
from pipeline.store.manifest import CHECKPOINTS
from pipeline.train.metrics import METRICS
from pipeline.train.progress import Best, Progress
from pipeline.train.trainer import TrainingState

WEIGHTS, MOMENTS = "weights.safetensors", "moments.safetensors"
#: Of everything here; a marker's last.
_STEP = re.compile(r"(?:step|best)-(\d+)[-.]")
_MARKER = re.compile(r"step-\d+\.json")
_FOLDER = r"^step-\d+-[0-9a-f]{16}$"


_DAMAGED = "delete the checkpoint; training then goes on from the one before it"


class Marker(Record):
    """`step-000100.json`."""

    work: str  # identity: hash of the configuration and the parent that the stage was begun with
    epoch: int  # of the next batch
    index: int  # of the next batch in its epoch
    progress: Progress
    folder: str = Field(pattern=_FOLDER)
    files: dict[Annotated[str, Field(pattern=r"^[a-z]+\.(safetensors|jsonl)$")], StoredFile]


class Checkpoint(NamedTuple):
    """A whole one; its files are on the disk of the first process."""

    marker: Marker
    directory: Path

    @property
    def name(self) -> str:
        return _marker_name(self.marker.progress.step).removesuffix(".json")

    def metrics(self) -> bytes:
        """The lines up to its step."""
        return (self.directory / METRICS).read_bytes()

    def state(self) -> TrainingState:
        """What the trainer is to take back. Raises CorruptShard for files that hold no tensors."""
        try:
            check_header(self.directory / MOMENTS)
            check_header(self.directory / WEIGHTS)
            moments = load_file(self.directory / MOMENTS)
            step = int(moments.pop("step"))
            return TrainingState(load_file(self.directory / WEIGHTS), moments, step)
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            problem, fix = f"not a checkpoint: {error}", "run `eagle3 train --force`"
            raise CorruptShard(problem, where=str(self.directory), fix=fix) from None


class StoredCheckpoints(NamedTuple):
    """What the markers of a stage vouch for."""

    files: dict[str, StoredFile]  # markers and their files, by path below the stage's directory
    prefixes: dict[str, StoredFile]  # what metrics.jsonl begins with, once there is a marker


def stored_checkpoints(stage: Location) -> StoredCheckpoints:
    """Of all checkpoints of the `stage`. Raises CorruptShard for a marker that is none."""
    store, files = stage.child(CHECKPOINTS), dict[str, StoredFile]()
    prefixes: dict[str, StoredFile] = {}
    for name in sorted(filter(_MARKER.fullmatch, store.names()), key=_step_of):
        data = store.read(name)
        marker = Marker.parse(data, where=store.where(name), fix=_DAMAGED)
        files[f"{CHECKPOINTS}/{name}"] = stored_file(data)
        files |= {f"{CHECKPOINTS}/{path}": file for path, file in _files_of(marker)}
        prefixes = {METRICS: marker.files[METRICS]} if METRICS in marker.files else {}
    return StoredCheckpoints(files, prefixes)


def workspace(stage: Location) -> Path:
    """Where files are written: the stage's directory, or one in the cache for a remote run."""
    if stage.is_local:
        return stage.local_path(".")
    return cache_directory() / "train" / digest(stage.uri)[:16]


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        stage: Location,
        *,
        identity: str,
        keep: int,
        require_own: Callable[[], None] = lambda: None,
    ) -> None:
        """`identity` is the hash of the configuration and the parent.

        Checkpoints of another are not read. `require_own` is called before anything is written or
        deleted, and raises where that is no longer this process's to do.
        """
        self._store = stage.child(CHECKPOINTS)
        self._local = workspace(stage) / CHECKPOINTS
        self._identity, self._keep, self.require_own = identity, keep, require_own
        self._own: set[str] = set()  # folders and heads that this attempt has written

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint of this identity, its files on this disk; None without one.

        Raises StoreError when the store cannot be read.
        """
        for name in reversed(self._marker_names()):
            marker = self._read(name)
            if marker is None:
                continue
            lacking = next((file for file in _files_of(marker) if not self._fetch(*file)), None)
            if lacking is None:
                return Checkpoint(marker, self._local / marker.folder)
            notice("train", f"{self._store.where(name)} is passed over: {lacking[0]} is damaged")
        return None

    def keep_best(self, step: int, weights: Mapping[str, Tensor]) -> StoredFile:
        """Write the head of an evaluation; returns its size and checksum.

        Raises StoreError when the store refuses.
        """
        self.require_own()
        data = encode(dict(weights))
        file = stored_file(data)
        self._own.add(_best_name(step, file))
        for place in self._places():
            place.write(_best_name(step, file), data)
        return file

    def read_best(self, best: Best) -> dict[str, Tensor]:
        """The head that `keep_best` wrote. Raises CorruptShard when it is not what it was."""
        name = _best_name(best.step, best.file)
        if not self._fetch(name, best.file):
            problem, where = "the best head is missing or damaged", self._store.where(name)
            raise CorruptShard(problem, where=where, fix="run `eagle3 train --force`")
        return load_file(self._local / name)

    def save(
        self, state: TrainingState, progress: Progress, *, epoch: int, index: int, metrics: bytes
    ) -> None:
        """Write a checkpoint, mark it, delete the oldest; `index` is the next batch's in `epoch`.

        Raises StoreError when disk or store refuse.
        """
        name = _marker_name(progress.step)
        folder = f"{name.removesuffix('.json')}-{secrets.token_hex(8)}"
        directory = self._local / folder
        self.require_own()
        self._own.add(folder)
        try:
            files = _write_files(directory, state, metrics)
        except (OSError, SafetensorError) as error:
            self.require_own()
            shutil.rmtree(directory, ignore_errors=True)
            problem = f"a checkpoint cannot be written: {str(error).splitlines()[0]}"
            fix = "free some space, or choose another run.uri=…"
            raise StoreError(problem, where=str(directory), fix=fix) from error
        if not self._store.is_local:
            for file in files:
                self._store.child(folder).put_file(file, directory / file)
        marker = Marker(
            work=self._identity,
            epoch=epoch,
            index=index,
            progress=progress,
            folder=folder,
            files=files,
        )
        self.require_own()
        self._store.write(name, marker.model_dump_json().encode())
        self._prune(progress.step)

    def _prune(self, step: int) -> None:
        """Delete what `step` leaves behind, markers first: none is ever without its files.

        A later step's is another attempt's, or is passed over again, and does not count.
        """
        retained: list[Marker] = []
        ours = set(self._own)
        for name in reversed(self._marker_names()):
            marker = self._read(name)
            if marker and sum(newer.progress.step <= step for newer in retained) < self._keep:
                retained.append(marker)
            else:
                ours |= _names_of(marker) if marker else set()
                self._store.delete(name)
        retired = ours - {each for marker in retained for each in _names_of(marker)}
        deleted = {name for name in retired if 0 <= _step_of(name) <= step}
        for place in self._places():
            for folder in deleted.intersection(place.subdirectories()):
                place.child(folder).delete_tree()
            for name in deleted.intersection(place.names()):
                place.delete(name)
        self._own -= deleted

    def _places(self) -> Iterator[Location]:
        """Where files are: the store, and this machine's copy of a remote one."""
        yield self._store
        if not self._store.is_local:
            yield Location(str(self._local))

    def _marker_names(self) -> list[str]:
        """By step."""
        return sorted(filter(_MARKER.fullmatch, self._store.names()), key=_step_of)

    def _read(self, name: str) -> Marker | None:
        """The marker, if it is one, and of this identity."""
        try:
            where = self._store.where(name)
            marker = Marker.parse(self._store.read(name), where=where, fix=_DAMAGED)
        except CorruptShard:
            return None
        except StoreError:
            if self._store.exists(name):
                raise
            return None  # another attempt has deleted it since it was listed
        ours = marker.work == self._identity and _marker_name(marker.progress.step) == name
        return marker if ours else None

    def _fetch(self, name: str, file: StoredFile) -> bool:
        """Whether the file `name` is on this disk with that size and checksum, maybe only now."""
        path = self._local / name
        if _matches(path, *file):
            return True
        folder, _, name = name.rpartition("/")
        source = self._store.child(folder) if folder else self._store
        if source.is_local:
            return False
        info = source.info_if_there(name)
        if info is None or info.size != file[0]:
            return False

        def fill(opened: BinaryIO) -> None:
            opened.writelines(source.blocks(name))

        replace_file(path, fill, durable=False)
        return _matches(path, *file)


def _files_of(marker: Marker) -> Iterator[tuple[str, StoredFile]]:
    """All that the marker promises, the head of its progress among them."""
    for name, file in marker.files.items():
        yield f"{marker.folder}/{name}", file
    if best := marker.progress.best:
        yield _best_name(best.step, best.file), best.file


def _names_of(marker: Marker) -> set[str]:
    """Its folder, and the head of its progress."""
    return {name.partition("/")[0] for name, _ in _files_of(marker)}


def _write_files(directory: Path, state: TrainingState, metrics: bytes) -> dict[str, StoredFile]:
    """Bytes and SHA-256 of each file, once it is on the disk."""
    directory.mkdir(parents=True)
    save_file(dict(state.weights), directory / WEIGHTS)
    save_file({**state.moments, "step": tensor(state.step)}, directory / MOMENTS)
    (directory / METRICS).write_bytes(metrics)
    files = {}
    for name in (WEIGHTS, MOMENTS, METRICS):
        path = directory / name
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        files[name] = path.stat().st_size, _sha256(path)
    return files


def _step_of(name: str) -> int:
    """-1 for what is not of a step."""
    matched = _STEP.match(f"{name}.")
    return int(matched[1]) if matched else -1


def _marker_name(step: int) -> str:
    return f"step-{step:06d}.json"


def _best_name(step: int, file: StoredFile) -> str:
    return f"best-{step:06d}-{file[1][:16]}.safetensors"


def _matches(path: Path, size: int, checksum: str) -> bool:
    return path.is_file() and path.stat().st_size == size and _sha256(path) == checksum


def _sha256(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
