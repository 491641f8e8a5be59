"""One finding of personal data, and how several about the same characters become one.

    text        mail anna@example.com or 10.0.0.1
    findings         EMAIL_ADDRESS 1.0   IP_ADDRESS 0.95
                          └ URL 0.5 ┘                        overlaps the e-mail, scores less: gone

A finding holds offsets and a type, never the characters themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple


class Finding(NamedTuple):
    """Characters [start, end) of a text look like an `entity`, with a score between 0 and 1."""

    start: int
    end: int
    entity: str
    score: float
    reserved: bool = False
    """A value that is nobody's (reserved.py)."""


#: Reads one text. Finders are pure functions of it.
Finder = Callable[[str], Iterable[Finding]]


def pattern_finder(
    entity: str,
    patterns: Sequence[tuple[str, float]],
    flags: re.RegexFlag = re.IGNORECASE,
    *,
    digits: int = 0,
) -> Finder:
    """A finder for (regex, score) pairs; where a regex has a group `value`, that is the finding.

    Texts without so many digits close to each other are not searched.
    """
    compiled = [(re.compile(regex, flags), score) for regex, score in patterns]

    needed = re.compile(rf"\d(?:\D{{0,4}}\d){{{digits - 1}}}" if digits else "")

    def find(text: str) -> Iterator[Finding]:
        if not needed.search(text):
            return
        for regex, score in compiled:
            group = "value" if "value" in regex.groupindex else 0
            for match in regex.finditer(text):
                yield Finding(*match.span(group), entity, score)

    return find


def above_threshold(
    findings: Iterable[Finding], threshold: float, by_entity: Mapping[str, float]
) -> list[Finding]:
    """Findings that reach their entity's threshold, or the general one."""
    return [f for f in findings if f.score >= by_entity.get(f.entity, threshold)]


def without_overlap(findings: Iterable[Finding]) -> list[Finding]:
    """Findings in text order; of overlapping ones the best score gives the type, all the extent."""
    merged: list[Finding] = []
    for finding in sorted(findings, key=lambda f: (f.start, -f.end, f.entity)):
        if not merged or finding.start >= merged[-1].end:
            merged.append(finding)
            continue
        before = merged[-1]
        best = finding if finding.score > before.score else before
        merged[-1] = Finding(before.start, max(before.end, finding.end), best.entity, best.score)
    return merged
