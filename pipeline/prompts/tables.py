"""Rows of Arrow tables (Parquet files, hub data sets) as the records they were written from.

A table gives each struct the fields of all, null where a record had none; so nulls are left out of
objects, at any depth. A null that a record really had cannot be told from those. JSON holds only
what was written, so records of JSONL files, and JSON texts in a table, are left as they are.
"""

from __future__ import annotations

from typing import Any


def plain(value: Any) -> Any:
    """Without nulls in objects; maps, arrays and numbers of other libraries as Python's own."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        if value and all(isinstance(each, tuple) and len(each) == 2 for each in value):
            keys = [key for key, _ in value]  # a map, whose keys may be any
            if len({str(key) for key in keys}) == len(keys):
                return plain({str(key): each for key, each in value})
        return [plain(each) for each in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return plain(value.tolist()) if hasattr(value, "tolist") else value
