"""Files of a location as a local directory, for libraries that read paths."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.store.location import Location


@contextmanager
def as_directory(location: Location, names: Sequence[str]) -> Iterator[Path]:
    """The location itself when it is local, otherwise copies of the named files for the time of the block."""
    if location.is_local:
        yield location.local_path(".")
        return
    with tempfile.TemporaryDirectory(prefix="eagle3-") as folder:
        for name in names:
            if location.exists(name):
                with open(Path(folder) / name, "wb") as file:
                    file.writelines(location.blocks(name))
        yield Path(folder)
