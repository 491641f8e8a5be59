"""Which safetensors files of a model directory hold the model, and what their bytes are.

They are those that transformers loads:

    config.json: transformers_weights     that file, or the shards of that index; else
    model.safetensors                     alone, whatever lies beside it; else
    model.safetensors.index.json          the shards that it names
    anything else                         an error that says what is there

A backup, an average, `consolidated.safetensors` or an adapter beside them is no part of the model.
Of a tensor that several shards hold, the last one in the order of the list counts. There is no
torch and no transformers in this module.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Lock
from typing import Any

from pipeline.config import cache_directory
from pipeline.console import progress_bar
from pipeline.documents import read_json
from pipeline.errors import Eagle3Error, HeadError, TargetError
from pipeline.records import digest

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SUFFIX, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_SHA256 = r"[0-9a-f]{64}"
_BLOCK = 4 << 20
#: More bytes than this are read under a bar.
_LONG = 1 << 30
#: Seconds after which a file system's clock has surely moved on from the last change.
_SETTLED = 2.0
#: Of the figure of earlier versions.
_SAMPLE_BYTES, _SAMPLES = 1 << 20, 64
#: What writes a model again; no class of transformers has a draft head.
_SAVE: dict[type[Eagle3Error], str] = {
    TargetError: "save the model again with `save_pretrained` (safetensors is its default)",
    HeadError: "download or export the head again",
}


def weight_files(directory: Path, *, error: type[Eagle3Error] = TargetError) -> list[Path]:
    """The files in `directory` whose tensors are the model, in the order they are read.

    Raises `error` for a directory without such files, a shard that is missing, and an index that
    cannot be read or that names files outside of the directory.
    """
    files = [directory / name for name in weight_names(directory, error=error)]
    for file in files:
        if not file.is_file():
            problem, fix = f"{file.name} is missing", "download or copy the whole model again"
            raise error(f"{problem}, a file of the model's weights", where=str(file), fix=fix)
    return files


def weight_names(directory: Path, *, error: type[Eagle3Error] = TargetError) -> list[str]:
    """As `weight_files`, by names relative to `directory`; shards may be missing.

    This is what a download of the model needs, once config, index and `model.safetensors`, where
    the model has them, are in `directory`.
    """
    chosen = _chosen_in_config(directory, error)
    if chosen is None:
        chosen = WHOLE if (directory / WHOLE).is_file() else INDEX
        if chosen == INDEX and not (directory / INDEX).is_file():
            names = [path.name for path in directory.glob("*")]
            raise without_weights(names, str(directory), error=error)
    return _shards(directory, chosen, error) if chosen.endswith(_INDEX_SUFFIX) else [chosen]


def _chosen_in_config(directory: Path, error: type[Eagle3Error]) -> str | None:
    """The file that config.json names as the model's weights, which few do."""
    path = directory / "config.json"
    if not path.is_file():
        return None
    name = _read_json(path, error).get("transformers_weights")
    if name is None:
        return None
    if not isinstance(name, str) or not name.endswith((_SUFFIX, _INDEX_SUFFIX)):
        problem = f"transformers_weights={name!r} is no safetensors file or index"
        raise error(problem, where=str(path), fix=f"correct it or leave it out ({WHOLE})")
    _require_inside(name, path, error)
    return name


def _shards(directory: Path, index: str, error: type[Eagle3Error]) -> list[str]:
    path = directory / index
    tree = _read_json(path, error)
    shards = tree.get("weight_map")
    names: set[Any] = set(shards.values()) if isinstance(shards, dict) and shards else {None}
    if not isinstance(tree.get("metadata"), dict) or not all(isinstance(n, str) for n in names):
        problem = "needs `metadata`, and `weight_map` from names of tensors to names of files"
        raise error(problem, where=str(path), fix=_SAVE[error])
    for name in sorted(names):
        _require_inside(name, path, error)
        if not name.endswith(_SUFFIX):
            raise error(f"names {name!r}, no safetensors file", where=str(path), fix=_SAVE[error])
    return sorted(names)


def _read_json(path: Path, error: type[Eagle3Error]) -> dict[str, Any]:
    try:
        tree = read_json(path, finite=False)
    except (OSError, ValueError) as reason:
        fix = "download or write it again"
        raise error(f"cannot be read as JSON: {reason}", where=str(path), fix=fix) from None
    if not isinstance(tree, dict):
        raise error("is no JSON object", where=str(path), fix="download or write it again")
    return tree


def _require_inside(name: str, path: Path, error: type[Eagle3Error]) -> None:
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts:
        fix = "name files of this directory alone"
        raise error(
            f"names {name!r}, which lies outside of {path.parent}", where=str(path), fix=fix
        )


def without_weights(
    names: Sequence[str], where: str, *, error: type[Eagle3Error] = TargetError
) -> Eagle3Error:
    """What is among `names` of a directory instead of weights that transformers would load."""
    stored = sorted(name for name in names if name.endswith(_SUFFIX))
    pickles = sorted(name for name in names if Path(name).suffix in (".bin", ".pt", ".pth"))
    pickles.sort(key=lambda name: not name.startswith("pytorch_model"))  # not an optimizer's
    save = fix = _SAVE[error]
    if any("-of-" in name for name in stored):
        problem = f"has shards of weights ({stored[0]}, …) and no {INDEX}"
        fix = f"add the model's {INDEX}, or {save}"
    elif stored:
        problem = f"has {', '.join(stored[:3])} and neither {WHOLE} nor {INDEX}"
        fix = f"name the model's weights {WHOLE}, or {save}"
    elif pickles:
        problem = f"has no {WHOLE}, only weights as pickle ({pickles[0]})"
        # A whole file, whose name means nothing to a shell.
        is_plain = "-of-" not in pickles[0] and re.fullmatch(r"[\w.-]+", pickles[0], re.ASCII)
        if error is HeadError and is_plain:
            fix = f'run there, or in a copy: python -c "{_CONVERT.format(pickles[0])}"'
    else:
        problem = f"has no weights: neither {WHOLE} nor {INDEX}"
    return error(problem, where=where, fix=fix)


#: Tensors of a pickle may share memory or lie across it, which safetensors refuses.
_CONVERT = (
    "import torch, safetensors.torch as s; "
    "t = torch.load('{}', map_location='cpu', weights_only=True); "
    f"s.save_file({{{{n: t[n].contiguous().clone() for n in t}}}}, '{WHOLE}')"
)


def fingerprint(files: Sequence[Path]) -> str:
    """SHA-256 over every byte of the files, and their names: `sha256:` and 64 hex digits."""
    sums = sha256_of(files)
    return "sha256:" + digest([[path.name, sums[path]] for path in files])


def sampled_fingerprint(files: Sequence[Path]) -> str:
    """What earlier versions called the fingerprint: of each file its size, 64 evenly spaced blocks
    of 1 MiB, and the last one."""
    return digest([[path.name, _sampled(path)] for path in files])


def sha256_of(files: Sequence[Path]) -> dict[Path, str]:
    """SHA-256 of each whole file, in hex digits.

    A file that the hub's own sum vouches for is not read, nor one that this machine has read since
    it was last changed. Several threads read the others, under a bar where that takes long.
    """
    sums = {path: known for path in files if (known := _hub_sum(path))}
    rest = [path for path in files if path not in sums]
    total = sum(path.stat().st_size for path in rest)
    threads = max(1, min(len(rest), 8, os.cpu_count() or 1))
    note = "SHA-256 of the target's weights"
    bar = progress_bar("target", unit="bytes", total=total, note=note)
    with bar if total > _LONG else nullcontext() as progress, ThreadPoolExecutor(threads) as pool:
        lock = Lock()

        def advance(count: int) -> None:
            if progress is not None:
                with lock:
                    progress.advance(count)

        return sums | dict(zip(rest, pool.map(lambda path: _sum(path, advance), rest), strict=True))


def _sum(path: Path, advance: Callable[[int], None]) -> str:
    """Of a file, from the cache where it has not changed since it was read."""
    path = path.resolve()
    name = hashlib.sha256(str(path).encode()).hexdigest()[:32]
    entry = cache_directory() / "fingerprints" / f"{name}.json"
    with _alone(entry.with_suffix(".lock")):
        before = _state(path)
        with suppress(OSError, ValueError, TypeError, KeyError):
            tree = read_json(entry)
            if tree["state"] == before and re.fullmatch(_SHA256, tree["sha256"]):
                advance(path.stat().st_size)
                return str(tree["sha256"])
        state = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                state.update(block)
                advance(len(block))
        # A file that changes while it is read, or within the clock's own step after, is not cached.
        if before == _state(path) and time.time() - path.stat().st_ctime > _SETTLED:
            with suppress(OSError):
                tree = {"path": str(path), "state": before, "sha256": state.hexdigest()}
                partial = entry.with_suffix(f".{os.getpid()}")
                partial.write_text(json.dumps(tree), encoding="utf-8")
                partial.replace(entry)
    return state.hexdigest()


def _state(path: Path) -> list[int]:
    """What changes with a file's bytes: ctime also where somebody has set mtime back."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process of a machine reads a file; the others wait for its sum in the cache."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError:  # a cache that cannot be written
        yield
        return
    with file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _hub_sum(path: Path) -> str | None:
    """The SHA-256 that the hub gave when it sent this file, unless it has changed since.

    In the hub's cache a snapshot's file is a link to a blob that is named by its sum, made right
    after it; in a directory that `hf download --local-dir` wrote, the sum is in a file of metadata.
    """
    with suppress(OSError, ValueError, IndexError):
        if path.is_symlink():
            blob = path.resolve()
            if blob.parent.name == "blobs" and re.fullmatch(_SHA256, blob.name):
                return blob.name if blob.stat().st_ctime <= path.lstat().st_ctime + 1 else None
        metadata = path.parent / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
        _, etag, written = metadata.read_text(encoding="utf-8").splitlines()[:3]
        if re.fullmatch(_SHA256, etag) and path.stat().st_ctime <= float(written) + 1:
            return etag
    return None


def _sampled(path: Path) -> str:
    size = path.stat().st_size
    state = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        step = max(_SAMPLE_BYTES, -(-size // _SAMPLES))
        for offset in (*range(0, size, step), max(0, size - _SAMPLE_BYTES)):
            file.seek(offset)
            state.update(file.read(_SAMPLE_BYTES))
    return state.hexdigest()
