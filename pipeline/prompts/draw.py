"""Some of many prompts, evenly over categories or whatever else groups them."""

from __future__ import annotations

import random
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from operator import attrgetter
from typing import IO

from pipeline.errors import StoreError
from pipeline.records import Prompt

#: Prompts that wait for a draw are on the disk when they are more than this.
IN_MEMORY = 32 << 20

#: The group of a prompt; draws are even over groups.
Group = Callable[[Prompt], str]
by_category: Group = attrgetter("category")


def balanced(prompts: Sequence[Prompt], limit: int | None, seed: int) -> list[Prompt]:
    """At most `limit` prompts, spread evenly over categories, in their original order.

    The draw depends on the prompts and the seed alone, and a smaller draw is part of a larger one.
    """
    if limit is None:
        return list(prompts)
    return list(compress(prompts, _marks((prompt.category for prompt in prompts), limit, seed)))


def draw(
    prompts: Iterable[Prompt], limit: int | None, seed: int, group: Group = by_category
) -> Iterator[Prompt]:
    """As `balanced`, of more prompts than memory holds: each costs nine bytes there.

    With a limit nothing comes before all prompts have been read; they wait in a file in TMPDIR that
    has no name and vanishes with the process. Raises StoreError when its disk is full.
    """
    if limit is None:
        yield from prompts
        return
    try:
        with tempfile.SpooledTemporaryFile(IN_MEMORY) as aside:
            marks = _marks(_put_aside(prompts, aside, group), limit, seed)
            aside.seek(0)
            yield from map(Prompt.model_validate_json, compress(aside, marks))
    except OSError as error:
        problem = f"prompts cannot be put aside: {error.strerror or error}"
        fix = "free some space there, or set TMPDIR to a directory of a larger disk"
        raise StoreError(problem, where=tempfile.gettempdir(), fix=fix) from error


def _put_aside(prompts: Iterable[Prompt], aside: IO[bytes], group: Group) -> Iterator[str]:
    """The group of each prompt, which is then a line of the file."""
    for prompt in prompts:
        aside.write(prompt.model_dump_json().encode() + b"\n")
        yield group(prompt)


def _marks(groups: Iterable[str], limit: int, seed: int) -> bytearray:
    """1 for each prompt that is drawn, 0 for the others."""
    total = 0
    by_group: dict[str, array[int]] = {}
    for total, group in enumerate(groups, start=1):
        by_group.setdefault(group, array("Q")).append(total - 1)
    if total <= limit:
        return bytearray(b"\1") * total
    for group, indices in by_group.items():
        # A generator per group: adding a group does not reshuffle the others.
        random.Random(f"{seed}:{group}").shuffle(indices)
    marks, left = bytearray(total), limit
    while left:
        for group in sorted(by_group)[:left]:
            marks[by_group[group].pop()] = 1
            left -= 1
        by_group = {group: indices for group, indices in by_group.items() if indices}
    return marks
