"""A row of the leaderboard: `experiments/NAME.yaml`, a few lines that say what differs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeline.config import RunConfig, load
from pipeline.documents import parse_yaml, read_file
from pipeline.errors import ConfigError
from pipeline.records import Record


class PeerSettings(Record):
    """What another trainer is told; everything else is its default."""

    trainer: Literal["specforge", "speculators"]
    rate: float
    passes: int
    steps: int  # of the unrolling
    decay: float  # weight of a step's loss over the one before
    batch_tokens: int = 0  # of whole samples in an optimiser step; 0: one sample


class Experiment(Record):
    """What a file says; `name` is the file's."""

    name: str
    about: str  # one sentence for the table
    against: str = "default"  # the row whose changes it has too, and that it is compared with
    changes: dict[str, Any] = Field(default_factory=dict)  # a tree as in a configuration
    peer: PeerSettings | None = None  # trained by another trainer, from the same samples

    def overrides(self) -> list[str]:
        """As the command line takes them."""
        return list(_flat(self.changes))


def read_experiments(folder: Path, rows: Sequence[str]) -> list[Experiment]:
    """The rows with these names, or all, `default` first. ConfigError for a missing file."""
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if missing := sorted(set(rows) - set(names)):
        fix = f"choose from {', '.join(names)}, or add {folder}/{missing[0]}.yaml"
        raise ConfigError(f"no experiment {missing[0]}", where="--rows", fix=fix)
    chosen = [name for name in names if not rows or name in rows]
    return [_read(folder / f"{name}.yaml") for name in sorted(chosen, key=_default_first)]


def configured(base: Path, experiment: Experiment, overrides: Sequence[str]) -> RunConfig:
    """The base with the row's changes; `overrides` come last."""
    return load(base, [*experiment.overrides(), *overrides])


def _default_first(name: str) -> tuple[bool, str]:
    return name != "default", name


def _read(path: Path, readers: tuple[str, ...] = ()) -> Experiment:
    fix = "use only `about`, `against`, `changes` and `peer`"
    tree = {"name": path.stem, **parse_yaml(read_file(path))}
    own = Experiment.from_fields(tree, where=str(path), fix=fix)
    if own.name == "default":
        return own
    rival, readers = path.with_name(f"{own.against}.yaml"), (*readers, path.stem)
    if not rival.exists() or own.against in readers:
        problem, fix = f"no other experiment {own.against}", f"add {rival}, or remove `against`"
        raise ConfigError(problem, where=str(path), fix=fix)
    return own.model_copy(update={"changes": _merged(_read(rival, readers).changes, own.changes)})


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both trees; `above` wins, and an empty tree in it removes what is below."""
    merged = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict) and above[key]:
            merged[key] = _merged(below[key], above[key])
    return merged


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value)}"
