"""Some of many prompts: evenly over categories or whatever else groups them, or by shares."""

from __future__ import annotations

import random
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heapreplace
from itertools import compress
from operator import attrgetter
from types import MappingProxyType
from typing import IO, NamedTuple

from pipeline.errors import StoreError
from pipeline.records import Prompt

#: Prompts that wait for a draw are on the disk when they are more than this.
IN_MEMORY = 32 << 20

#: The group of a prompt.
Group = Callable[[Prompt], str]
by_category: Group = attrgetter("category")


class Balance(NamedTuple):
    """How much of which group a draw takes: of all as much, or by shares."""

    group: Group = by_category
    #: Of a category, relative to the 1 of those not in here; groups begin with it then, before a
    #: tab.
    shares: Mapping[str, float] = MappingProxyType({})

    def share(self, group: str) -> float:
        """Of one group, above 0."""
        return self.shares.get(group.partition("\t")[0], 1.0)


EVEN = Balance()


def balanced(prompts: Sequence[Prompt], limit: int | None, seed: int) -> list[Prompt]:
    """At most `limit` prompts, spread evenly over categories, in their original order.

    The draw depends on the prompts and the seed alone, and a smaller draw is part of a larger one.
    """
    if limit is None:
        return list(prompts)
    categories = (prompt.category for prompt in prompts)
    return list(compress(prompts, _marks(categories, limit, seed, EVEN)))


def draw(
    prompts: Iterable[Prompt], limit: int | None, seed: int, balance: Balance = EVEN
) -> Iterator[Prompt]:
    """As `balanced`, by any balance, of more prompts than memory holds: nine bytes each there.

    With a limit nothing comes before all prompts have been read; they wait in a file in TMPDIR that
    has no name and vanishes with the process. Raises StoreError when its disk is full.
    """
    if limit is None:
        yield from prompts
        return
    try:
        with tempfile.SpooledTemporaryFile(IN_MEMORY) as aside:
            marks = _marks(_put_aside(prompts, aside, balance.group), limit, seed, balance)
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


def _marks(groups: Iterable[str], limit: int, seed: int, balance: Balance) -> bytearray:
    """1 for each prompt that is drawn, 0 for the others.

    The next one is of the group that has the fewest for its share, the first by name of several.
    """
    total = 0
    by_group: dict[str, array[int]] = {}
    for total, group in enumerate(groups, start=1):
        by_group.setdefault(group, array("Q")).append(total - 1)
    if total <= limit:
        return bytearray(b"\1") * total
    for group, indices in by_group.items():
        # A generator per group: adding a group does not reshuffle the others.
        random.Random(f"{seed}:{group}").shuffle(indices)
    marks, taken = bytearray(total), Counter[str]()
    queue = [(0.0, group) for group in sorted(by_group)]
    for _ in range(limit):
        _, group = queue[0]
        marks[by_group[group].pop()] = 1
        taken[group] += 1
        if by_group[group]:
            heapreplace(queue, (taken[group] / balance.share(group), group))
        else:
            heappop(queue)
    return marks
