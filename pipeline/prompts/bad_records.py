"""Records that cannot be used, in sources that can.

Where every record counts, as in an evaluation, the first one is an error. Where prompts are many,
it is counted under its reason and left out. Damage, as long as a source has little of it:

    record:not_utf8     bytes that are no UTF-8
    record:not_json     a line that is no JSON, or says two values of one key
    record:too_long     a line of more than 16 MiB
    record:not_object   a number, a list or a text in place of an object
    record:fields       no field with turns, or one that holds something else than it should
    record:blank        a turn or a system prompt without text
    record:not_unicode  half of a surrogate pair, which no file can hold
    record:placeholder  a note where a benchmark's text belongs
    record:serialised   a turn that is a conversation's text, or a text in place of messages
    record:strings      messages that are bare texts: who speaks is not said

and conversations of an order or kind that no head is trained on, of which a source may have many:

    record:role             a message without a role, or with one of no known name
    record:assistant_first  the assistant speaks before the user
    record:system_later     a system message after the first message
    record:user_twice       two messages of the user without a reply between them
    record:media            images, audio or files in the user's message
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NoReturn

from pipeline.errors import DataError
from pipeline.records import Prompt

#: Of a source's records, that may be damaged; more of them are no accident.
_MOST = 0.05
#: A source whose first records are all bad is not read further: its `field` may be wrong.
_AT_THE_START = 100
_SHOWN = 3

Reason = Literal[
    "not_utf8",
    "not_json",
    "too_long",
    "not_object",
    "fields",
    "blank",
    "not_unicode",
    "placeholder",
    "serialised",
    "strings",
    "role",
    "assistant_first",
    "system_later",
    "user_twice",
    "media",
]

#: Sound records that cannot be trained on: chat data sets have far more than one in twenty.
_UNSUITED = frozenset(
    f"record:{reason}"
    for reason in ("role", "assistant_first", "system_later", "user_twice", "media")
)


class BadRecord(DataError):
    """One record that cannot be used."""

    def __init__(self, problem: str, *, where: str, fix: str, reason: Reason = "fields") -> None:
        super().__init__(problem, where=where, fix=fix)
        self.reason = f"record:{reason}"


class BadRecords:
    """How many were left out, by reason, and where the first ones stand."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._first: list[str] = []

    def add(self, record: BadRecord) -> None:
        """Leave it out."""
        self.counts[record.reason] += 1
        if len(self._first) < _SHOWN:
            self._first.append(f"{record.where}: {record.problem}")

    def __str__(self) -> str:
        """As a notice says it: places and reasons, nothing of what the records hold."""
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(self.counts.items()))
        first = "; ".join(self._first)
        return f"records left out: {self.counts.total():,} ({reasons}), first {first}"


def usable(
    records: Iterable[tuple[str, Any]],
    read: Callable[[int, str, Any], Prompt],
    bad: BadRecords | None,
) -> Iterator[Prompt]:
    """The prompts that `read` makes of the records of one source: of number, place and content.

    Raises DataError that names the first bad record: at once without `bad`, otherwise when more
    than one in twenty is damaged, also among the first hundred where none is usable, or when no
    record is usable at all.
    """
    first: BadRecord | None = None
    first_damaged: BadRecord | None = None
    total = left_out = damaged = 0
    for total, (where, record) in enumerate(records, start=1):
        try:
            prompt = read(total, where, record)
        except BadRecord as error:
            if bad is None:
                raise
            bad.add(error)
            first, left_out = first or error, left_out + 1
            if error.reason not in _UNSUITED:
                first_damaged, damaged = first_damaged or error, damaged + 1
            if left_out == total == _AT_THE_START and first_damaged and damaged > _MOST * total:
                _refuse(first_damaged, damaged, f"the first {total}")
            continue
        yield prompt
    if first_damaged and damaged > _MOST * total:
        _refuse(first_damaged, damaged, f"{total:,}")
    if first and left_out == total:
        _refuse(first, left_out, f"{total:,}")


def _refuse(first: BadRecord, count: int, of: str) -> NoReturn:
    share = f"{count:,} of {of} records of this source cannot be used"
    problem = f"{first.problem}; {share}, this is the first"
    raise DataError(problem, where=first.where, fix=first.fix)
