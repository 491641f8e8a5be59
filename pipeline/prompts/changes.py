"""Whether files of prompts are still those that a run has read.

A run takes its prompts once and never reads a source again: files may be moved, and a file with
other content is worth a word, as its changes are not in the run. Of a data set on the Hub the
commit says what was read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import SourceSpec
from pipeline.console import notice
from pipeline.documents import local_path
from pipeline.prompts.sources import hub_commits, source_at

#: A file of more blocks than that is told by so many of them, evenly spread, and its size.
_BLOCKS, _BLOCK = 256, 1 << 20
_COMMIT = "commit:"


def fingerprints(specs: Sequence[SourceSpec]) -> tuple[str | None, ...]:
    """Size of each local file and a SHA-256 over it, `commit:…` of a hub data set as it is read;
    None where there is none to read."""
    return tuple(
        f"{_COMMIT}{commits[source_at(spec)]}"
        if source_at(spec) in (commits := hub_commits([spec]))
        else _fingerprint(spec.source)
        for spec in specs
    )


def commits_in(specs: Sequence[SourceSpec], before: Sequence[str | None]) -> dict[str, str]:
    """Of `fingerprints` the commits, by source."""
    pairs = zip(specs, before, strict=False)
    return {
        source_at(spec): then.removeprefix(_COMMIT)
        for spec, then in pairs
        if then and then.startswith(_COMMIT)
    }


def notice_changes(stage: str, specs: Sequence[SourceSpec], before: Sequence[str | None]) -> None:
    """One line for each file that is there and no longer what it was; `before` may be empty."""
    reported = set()
    for spec, then in zip(specs, before, strict=False):
        if then is None or then.startswith(_COMMIT) or spec.source in reported:
            continue
        now = _fingerprint(spec.source, old_size=int(then.split(":")[0]))
        if now is not None and now != then:
            reported.add(spec.source)
            size, old_size = (each.split(":")[0] for each in (now, then))
            what = (
                "other bytes" if size == old_size else f"{int(size):,} bytes, not {int(old_size):,}"
            )
            consequence = "this run keeps the prompts that it has selected"
            notice(stage, f"{spec.source} has changed since then ({what}); {consequence}")


def _fingerprint(source: str, old_size: int | None = None) -> str | None:
    """`size:sha256`; without the sum where the size alone differs from the one it had."""
    local = local_path(source)
    if local is None:
        return None
    path = Path(local)
    try:
        if not path.is_file():
            return None
        size = path.stat().st_size
        if old_size not in (None, size):
            return f"{size}:"
        count = min(_BLOCKS, -(-size // _BLOCK))
        checksum = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            for index in range(count):
                offset = index * (size - _BLOCK) // max(1, count - 1) if size > _BLOCK else 0
                checksum.update(os.pread(file.fileno(), _BLOCK, offset))
        return f"{size}:{checksum.hexdigest()}"
    except OSError:  # whoever reads the prompts says what is wrong
        return None
