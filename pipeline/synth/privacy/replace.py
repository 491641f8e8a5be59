"""What stands in place of a finding: its type, or an invented value.

    text           Ask Anna Schmidt (anna@firm.com). Anna knows.
    redacted       Ask <PERSON> (<EMAIL_ADDRESS>). <PERSON> knows.
    pseudonymised  Ask Fictus Sampleworth (person1@example.com). Fictus knows.

Invented values come from ranges that are reserved for examples (RFC 2606 domains, RFC 5737
addresses, 555-01xx numbers, social-security area 000) and names are made up, so none of them is
anybody's, and a reply that repeats one can be told from a leak (reserved.py). They are numbered by
appearance and never computed from the original, so they say nothing about it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pipeline.records import digest
from pipeline.synth.privacy.finding import Finding
from pipeline.synth.privacy.reserved import FIRST_NAMES, LAST_NAMES

#: Entity → the invented value with this number, counted from 1.
_INVENTED: dict[str, Callable[[int], str]] = {
    "EMAIL_ADDRESS": lambda number: f"person{number}@example.com",
    "PHONE_NUMBER": lambda number: f"202-555-01{number % 100:02d}",
    "CREDIT_CARD": lambda number: f"0000 0000 0000 {number:04d}",
    "US_SSN": lambda number: f"000-00-{number:04d}",
    "IP_ADDRESS": lambda number: f"192.0.2.{number % 256}",
    "ADDRESS": lambda number: f"{number} Example Street, Sampletown",
    "URL": lambda number: f"https://example.com/{number}",
}


def redacted(text: str, findings: Sequence[Finding]) -> str:
    """`text` with `<ENTITY_TYPE>` in place of every finding.

    Findings are in text order and do not overlap.
    """
    return _replaced(text, findings, lambda entity, _: f"<{entity}>")


class Pseudonyms:
    """The invented values of one conversation: in all its turns the same one for the same value."""

    def __init__(self, seed: int, conversation: tuple[str, str]) -> None:
        # An offset, so that not every conversation is about the same person.
        self._offset = int(digest([seed, *conversation])[:8], 16)
        self._assigned: dict[tuple[str, str], str] = {}
        self._numbers: dict[str, int] = {}

    def apply(self, text: str, findings: Sequence[Finding]) -> str:
        """`text` with an invented value in place of every finding."""
        return _replaced(text, findings, self._value)

    def _value(self, entity: str, original: str) -> str:
        key = (entity, normal_form(original))
        if key not in self._assigned:
            self._assigned[key] = self._invent(entity)
            if entity == "PERSON":
                self._assign_name_parts(original, self._assigned[key])
        return self._assigned[key]

    def _invent(self, entity: str) -> str:
        number = self._numbers[entity] = self._numbers.get(entity, 0) + 1
        if entity == "PERSON":
            index = self._offset + number - 1
            return f"{FIRST_NAMES[index % len(FIRST_NAMES)]} {LAST_NAMES[index % len(LAST_NAMES)]}"
        return _INVENTED[entity](number) if entity in _INVENTED else f"EXAMPLE-{entity}-{number}"

    def _assign_name_parts(self, original: str, invented: str) -> None:
        """A later "Anna" is the Anna Schmidt of before."""
        words = original.split()
        if len(words) > 1:
            for word, part in zip((words[0], words[-1]), invented.split(), strict=True):
                self._assigned.setdefault(("PERSON", normal_form(word)), part)


def normal_form(value: str) -> str:
    """The same value in another spelling: letters in one case, without separators."""
    return re.sub(r"[\W_]+", "", value.casefold()) or value


def _replaced(text: str, findings: Sequence[Finding], value: Callable[[str, str], str]) -> str:
    pieces, position = [], 0
    for finding in findings:
        original = text[finding.start : finding.end]
        pieces += [text[position : finding.start], value(finding.entity, original)]
        position = finding.end
    return "".join([*pieces, text[position:]])
