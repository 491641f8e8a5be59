"""Where a head is written: an empty place, local or remote."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.eagle3.checkpoint import CARD
from pipeline.errors import StoreError
from pipeline.store.location import Location


@contextmanager
def publishing(out: str) -> Iterator[Path]:
    """A local directory to write a head to; a remote `out` receives its files when the block ends without an error.

    Raises StoreError when `out` holds anything: it may be the head itself, or somebody's home.
    """
    location = Location(out)
    if location.is_local and location.local_path(".").is_file():
        raise StoreError("is a file", where=f"--out {out}", fix="choose another directory")
    if location.names() or location.subdirectories():
        raise StoreError(
            "is not empty",
            where=f"--out {out}",
            fix="choose another directory, or delete this one first",
        )
    if location.is_local:
        yield location.local_path(
            "."
        ).absolute()  # `--out .` needs a name that a neighbour can be made of
        return
    with tempfile.TemporaryDirectory(prefix="eagle3-") as folder:
        path = Path(folder) / "head"
        yield path
        # The card is what makes a directory a head of ours, so it goes last.
        for name in sorted(file.name for file in path.iterdir()):
            if name != CARD:
                location.put_file(name, path / name)
        location.put_file(CARD, path / CARD)
