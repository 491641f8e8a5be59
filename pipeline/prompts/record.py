"""One raw record of a file or hub data set → Prompt.

The user's turns are taken from the first of these fields that the record has:

    turns                      list of str
    prompt                     str
    messages, conversations    list of {role, content} or {from, value}: those of the user
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import DataError
from pipeline.records import Prompt

_USER_ROLES = frozenset({"user", "human", "prompter"})
_FIELDS = ("turns", "prompt", "messages", "conversations")


def to_prompt(record: Any, *, where: str, id: str, source: str) -> Prompt:
    """A checked Prompt; `id` and `source` serve when the record has none of its own.

    Raises DataError naming `where` and the field.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"is a {type(record).__name__}, not an object", where=where, fix='write one object a record, for example {"turns": ["…"]}')
    turns = _user_turns(record, where)
    for number, turn in enumerate(turns, start=1):
        problem = _problem(turn)
        if problem:
            raise DataError(f"user turn {number} is {problem}", where=where, fix="correct the text, or remove the record")
    return Prompt(
        id=_label(record, "id", _label(record, "question_id", id, where), where),
        source=_label(record, "source", source, where),
        license=_label(record, "license", "unknown", where),
        category=_label(record, "category", source, where),
        turns=tuple(turns),
    )


def _problem(turn: Any) -> str | None:
    if not isinstance(turn, str):
        return "not a text"
    if not turn.strip():
        return "blank"
    try:
        turn.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which no file can hold
        return "not valid Unicode"
    return None


def _user_turns(record: Mapping[str, Any], where: str) -> list[Any]:
    field = next((name for name in _FIELDS if record.get(name) is not None), None)
    if field is None:
        raise DataError(f"has none of the fields {', '.join(_FIELDS)}", where=where, fix="add `turns`, a list of the user's turns")
    value = record[field]
    if field == "prompt":
        turns = [value]
    elif not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"is a {type(value).__name__}, not a list", where=f"{where}: {field}", fix=f"write `{field}` as a list")
    else:
        turns = list(value) if field == "turns" else [_content(message, f"{where}: {field}") for message in value if _is_user(message, f"{where}: {field}")]
    if not turns:
        raise DataError("has no user turn", where=f"{where}: {field}", fix="add one, or remove the record")
    return turns


def _is_user(message: Any, where: str) -> bool:
    role = message.get("role", message.get("from")) if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        raise DataError("has a message without a role", where=where, fix="write messages as {role, content}")
    return role.lower() in _USER_ROLES


def _content(message: Mapping[str, Any], where: str) -> Any:
    content = message.get("content", message.get("value"))
    if not isinstance(content, str):
        raise DataError("has a user message without text", where=where, fix="write messages as {role, content} with a text as content")
    return content


def _label(record: Mapping[str, Any], field: str, default: str, where: str) -> str:
    value = record.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"is {value!r}, not a text", where=f"{where}: {field}", fix=f"write `{field}` as a non-empty text, or leave it out")
    return str(value)
