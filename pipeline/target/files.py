"""Which safetensors files of a model directory hold the model: those that transformers loads.

    config.json: transformers_weights     that file, or the shards of that index; else
    model.safetensors                     alone, whatever lies beside it; else
    model.safetensors.index.json          the shards that it names
    anything else                         an error that says what is there

A backup, an average, `consolidated.safetensors` or an adapter beside them is no part of the model.
Of a tensor that several shards hold, the last one in the order of the list counts. There is no
torch and no transformers in this module.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.errors import Eagle3Error, TargetError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SUFFIX, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_SAVE = "save the model again with `save_pretrained`"


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
            raise _without_weights(directory, error)
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
        raise error(problem, where=str(path), fix=_SAVE)
    for name in sorted(names):
        _require_inside(name, path, error)
        if not name.endswith(_SUFFIX):
            raise error(f"names {name!r}, no safetensors file", where=str(path), fix=_SAVE)
    return sorted(names)


def _read_json(path: Path, error: type[Eagle3Error]) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
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


def _without_weights(directory: Path, error: type[Eagle3Error]) -> Eagle3Error:
    """What is in a directory instead of weights that transformers would load."""
    stored = sorted(path.name for path in directory.glob(f"*{_SUFFIX}"))
    pickles = sorted(directory.glob("*.bin")) + sorted(directory.glob("*.pt*"))
    fix = "save the model with `save_pretrained` (safetensors is its default)"
    if any("-of-" in name for name in stored):
        problem = f"has shards of weights ({stored[0]}, …) and no {INDEX}"
        fix = f"add the model's {INDEX}, or {_SAVE}"
    elif stored:
        problem = f"has {', '.join(stored[:3])} and neither {WHOLE} nor {INDEX}"
        fix = f"name the model's weights {WHOLE}, or {_SAVE}"
    elif pickles:
        problem = f"has no {WHOLE}, only weights as pickle ({pickles[0].name})"
    else:
        problem = f"has no weights: neither {WHOLE} nor {INDEX}"
    return error(problem, where=str(directory), fix=fix)
