"""Where the bytes of a committed shard are."""

from __future__ import annotations

from pathlib import Path

from pipeline.store.location import Location
from pipeline.store.shards import ENTRY, read_entry


def stored(folder: Path | Location, name: str) -> str:
    """The file of shard `name` in the shards' directory `folder`."""
    where = folder if isinstance(folder, Location) else Location(str(folder))
    return read_entry(where, name + ENTRY).shard.path


def stored_path(folder: Path, name: str) -> Path:
    """As `stored`, in a local directory."""
    return folder / stored(folder, name)
