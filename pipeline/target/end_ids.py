"""Which tokens end a reply: those that transformers stops at, and the tokenizer's own.

    generation_config.json   `eos_token_id`, an id or a list: where it names one, config.json's are
                             no end ids for transformers
    config.json              otherwise
    tokenizer                its `eos_token` beside them, since vLLM and SGLang stop there as well

Both files are read as JSON: settings of sampling in them are none of ours, and never fail here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import TargetError

_END_ID_FILES = ("generation_config.json", "config.json")
#: Under these names config.json of a model with several parts keeps that of its decoder.
_DECODERS = ("decoder", "generator", "text_config")
_END_IDS_FIX = "name the ids of the tokens that end a reply, as eos_token_id: 2 or eos_token_id: [2, 32]"


@dataclass(frozen=True)
class EndIds:
    """What a target's files name."""

    ids: frozenset[int]
    vocabulary: int | None  # rows of its embedding; None where config.json does not say

    def with_own(self, tokenizer: Any) -> tuple[int, ...]:
        """These and the tokenizer's, where that is a row of the embedding; ascending."""
        own, most = tokenizer.eos_token_id, self.vocabulary
        known = own is not None and (most is None or own < most)
        return tuple(sorted(self.ids | {own} if known else self.ids))


def read_end_ids(directory: Path, *, source: str) -> EndIds:
    """Of the target in `directory`.

    Raises TargetError, which names file and field, for what is no id of its vocabulary.
    """
    files = {name: _read_settings(directory / name, source) for name in _END_ID_FILES}
    vocabulary = _decoder_field(files["config.json"], "vocab_size")
    most = vocabulary if isinstance(vocabulary, int) else None
    for name, fields in files.items():
        if (value := _decoder_field(fields, "eos_token_id")) is not None:
            where = f"target.source={source}, {name}: eos_token_id"
            return EndIds(frozenset(_checked_ids(value, most, where)), most)
    return EndIds(frozenset(), most)


def _read_settings(path: Path, source: str) -> dict[str, Any]:
    """A file's fields, none where there is no such file. Raises TargetError."""
    if not path.is_file():
        return {}
    where = f"target.source={source}, {path.name}"
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        fix = "download the file again"
        raise TargetError(f"cannot be read as JSON: {error}", where=where, fix=fix) from error
    if not isinstance(fields, dict):
        fix = 'it is an object of settings, such as {"eos_token_id": 2}: download the file again'
        raise TargetError(f"holds a JSON {type(fields).__name__}", where=where, fix=fix)
    return fields


def _decoder_field(fields: dict[str, Any], name: str) -> Any:
    """A field's value, or that of the decoder's own part of a configuration."""
    if fields.get(name) is not None:
        return fields[name]
    parts = (fields.get(part) for part in _DECODERS)
    part = next((each for each in parts if each), None)
    return part.get(name) if isinstance(part, dict) else None


def _checked_ids(value: Any, most: int | None, where: str) -> list[int]:
    """The ids that a file names. Raises TargetError."""
    ids = value if isinstance(value, list) else [value]
    if not ids:
        raise TargetError("is an empty list", where=where, fix=_END_IDS_FIX)
    for each in ids:
        if type(each) is not int:  # True is an int
            shown = json.dumps(each)
            raise TargetError(f"{shown} is not a token id", where=where, fix=_END_IDS_FIX)
        if each < 0 or (most is not None and each >= most):
            problem = f"{each} is outside the vocabulary" + (f" of {most}" if most else "")
            raise TargetError(problem, where=where, fix=_END_IDS_FIX)
    return ids
