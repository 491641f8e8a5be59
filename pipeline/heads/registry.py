"""Algorithms by name, and heads of any of them: opened, written and made.

Ours are listed here; a distribution adds a `HeadAlgorithm` by an entry point of `eagle3.heads`:

    [project.entry-points."eagle3.heads"]
    toy = "toy_head:ALGORITHM"

This module imports no torch until a head is opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import HEAD_GROUP, TrainSection
from pipeline.errors import ConfigError
from pipeline.heads.algorithm import HeadAlgorithm
from pipeline.records import TargetContract
from pipeline.store.location import Location, as_directory

if TYPE_CHECKING:
    from pipeline.heads.base import DraftingHead, DraftShape
    from pipeline.heads.checkpoint import ForeignHead, HeadCard

#: Packages, and the names of their algorithms. The order is that in which a foreign directory is
#: looked at, and in which algorithms that share a class are asked whether a head is theirs.
_OURS = (
    ("dflash", "DSPARK"),
    ("dflash", "ALGORITHM"),
    ("mtp", "ALGORITHM"),
    ("eagle3", "ALGORITHM"),
)


@cache
def algorithms() -> dict[str, HeadAlgorithm]:
    """All algorithms by name, third parties' first.

    Raises ConfigError for an entry point that takes a name of ours or is no algorithm.
    """
    listed = (getattr(import_module(f"pipeline.heads.{package}"), name) for package, name in _OURS)
    ours = {each.name: each for each in listed}
    others: dict[str, HeadAlgorithm] = {}
    for point in entry_points(group=HEAD_GROUP):
        algorithm, where = point.load(), f"entry point {point.value} of {HEAD_GROUP}"
        if not isinstance(algorithm, HeadAlgorithm) or algorithm.name != point.name:
            problem = f"is not a HeadAlgorithm named {point.name}"
            raise ConfigError(problem, where=where, fix="see docs/heads.md")
        if point.name in ours:
            problem = f"{point.name} is a name of this package"
            raise ConfigError(problem, where=where, fix="choose another name")
        others[point.name] = algorithm
    return others | ours


def algorithm(section: TrainSection) -> HeadAlgorithm:
    """The algorithm that a configuration trains. Raises ConfigError for an unknown name."""
    if (name := section.head_algorithm) in algorithms():
        return algorithms()[name]
    fix = f"choose one of {', '.join(sorted(algorithms()))}"
    raise ConfigError(f"there is no algorithm {name}", where="train.algorithm", fix=fix)


def solves_least_squares(section: TrainSection) -> bool:
    """Whether a new head's weights are solved on the first batches."""
    return not section.start_from and algorithm(section).settings(section).least_squares


def algorithm_of(head: DraftingHead) -> HeadAlgorithm:
    """The algorithm of a head."""
    every = (each for each in algorithms().values() if type(head) is each.head_type)
    return next(each for each in every if each.owns(head.shape))


def check_algorithm(section: TrainSection, head: DraftingHead, *, where: str) -> None:
    """Raise ConfigError where `train.algorithm` is not that of the head at `where`.

    One EAGLE-3 head and a chain are both `algorithm: eagle3`; `head_config.heads` tells them apart.
    """
    earlier = algorithm_of(head).name
    if "mtp" in (earlier, section.head_algorithm) and section.algorithm == "eagle3":
        return
    if earlier != section.head_algorithm:
        raise ConfigError(
            f"the head that training starts from has algorithm {earlier} ({where})",
            where="train.algorithm",
            fix=f"set train.algorithm={earlier}, or start from another head",
        )


def empty_head(shape: DraftShape) -> DraftingHead:
    """A head of the algorithm whose shape this is, with undefined weights."""
    return next(a for a in algorithms().values() if type(shape) is a.shape_type).head_type(shape)


def open_head(
    location: Location | str, *, expected: TargetContract | None = None
) -> tuple[DraftingHead, HeadCard]:
    """Read the head at a directory or URI, of any algorithm, in float32.

    Every field of its config.json is honoured or refused, every tensor is checked. Raises HeadError
    with file, field and fix, or ContractMismatch when it is for another target than `expected`.
    """
    with head_directory(location) as directory:
        return load_head(directory, expected=expected)


@contextmanager
def head_directory(location: Location | str) -> Iterator[Path]:
    """A head's files as a local directory, for the time of the block."""
    from pipeline.heads.checkpoint import HEAD_FILES

    place = Location(location) if isinstance(location, str) else location
    with as_directory(place, HEAD_FILES) as directory:
        yield directory


def load_head(
    directory: Path, *, expected: TargetContract | None = None
) -> tuple[DraftingHead, HeadCard]:
    """`open_head` of a local directory."""
    from pipeline.heads.checkpoint import (
        CONFIG,
        check_card,
        fill_head,
        open_files,
        read_json,
        read_tensors,
    )
    from pipeline.heads.fields import architectures_of

    where = f"head {directory}: {CONFIG}"
    card, body = open_files(directory, expected), read_json(directory / CONFIG)
    architectures = architectures_of(body, where)
    every = algorithms()
    chosen = next((a for a in every.values() if a.architecture in architectures), every["eagle3"])
    tensors = cache(lambda: read_tensors(directory))
    shape, layers = chosen.checkpoint.read_config(body, where, tensors)
    check_card(card, shape, layers, where)
    head = fill_head(chosen.head_type, shape, tensors(), where=f"head {directory}")
    return head, card


def save_head(directory: Path, head: DraftingHead, card: HeadCard) -> None:
    """Write a new directory of a head of any algorithm atomically, in bfloat16."""
    from pipeline.heads.checkpoint import write_files

    config = algorithm_of(head).checkpoint.head_config(head.shape, card.contract)
    write_files(directory, config, head.state_dict(), card)


def encode_head(head: DraftingHead, card: HeadCard) -> dict[str, bytes]:
    """The files that `save_head` writes, by name."""
    from pipeline.heads.checkpoint import encode_files

    config = algorithm_of(head).checkpoint.head_config(head.shape, card.contract)
    return encode_files(config, head.state_dict(), card)


def read_foreign(directory: Path) -> ForeignHead:
    """Read a directory that another trainer wrote. Raises HeadError with file, field and fix."""
    for each in algorithms().values():
        if (foreign := each.checkpoint.read_foreign(directory)) is not None:
            return foreign
    raise AssertionError("EAGLE-3 comes last, and refuses what it does not know")
