"""Where the bytes of a committed shard are; manifests that vouch for what a test has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.records import CHECKSUM, sealed_json, stored_file
from pipeline.store.location import Location
from pipeline.store.shards import ENTRY, read_entry


def stored(folder: Path | Location, name: str) -> str:
    """The file of shard `name` in the shards' directory `folder`."""
    where = folder if isinstance(folder, Location) else Location(str(folder))
    return read_entry(where, name + ENTRY).shard.path


def stored_path(folder: Path, name: str) -> Path:
    """As `stored`, in a local directory."""
    return folder / stored(folder, name)


def reseal(stage: Path, **changes: object) -> None:
    """Rewrite fields of a stage's manifest, with the hashes of the files that are there now."""
    path = stage / "manifest.json"
    fields = {**json.loads(path.read_text()), **changes}
    fields["files"] = {name: stored_file((stage / name).read_bytes()) for name in fields["files"]}
    path.write_bytes(resealed(fields))


def resealed(fields: dict[str, Any]) -> bytes:
    """A manifest's file with other fields, and their checksum."""
    return sealed_json({name: fields[name] for name in fields.keys() - {CHECKSUM}})
