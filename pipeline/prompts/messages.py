"""A conversation's messages → the user's turns, those of tools, and the system prompt in front.

Replies are never looked at. An order that the target could not have met is refused, with a reason
of its own: joining messages or leaving one out would make a conversation that nobody had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.prompts.bad_records import BadRecord
from pipeline.prompts.roles import Kind, is_exchange, kind_of, messages_of
from pipeline.prompts.serialised import CONTENT_KEYS, ROLE_KEYS, spelled

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
#: Kinds of content that is no text, and the fields that hold it.
MEDIA = ("image", "images", "image_url", "audio", "video", "file", "document", "pdf")


class ToolTurn(str):
    """What a tool answered."""


def listed(value: Any) -> list[Any] | None:
    """The messages of one of the shapes below as a list; None for another shape.

    [message, …]   [[message, …]]   message   {"role": […], "content": […]}
    {"human": "…", "assistant": "…"}, one or a list   a message as a list of pairs

    Empty objects are left out: tables fill lists up with them.
    """
    if isinstance(value, Mapping):
        if any(isinstance(value.get(key), str) for key in ROLE_KEYS):
            return [value]
        return messages_of(value) if is_exchange(value) else _rows(value)
    if not isinstance(value, Sequence) or isinstance(value, str):
        return None
    if len(value) == 1 and _is_list(value[0]) and any(isinstance(e, Mapping) for e in value[0]):
        value = value[0]
    messages: list[Any] = []
    for item in value:
        message = _from_pairs(item)
        if is_exchange(message):
            messages += messages_of(message)
        elif isinstance(message, str) or not is_empty(message):
            messages.append(message)
    return messages


def is_empty(value: Any) -> bool:
    """Whether it holds nothing: null, or an object or list of such, or a blank text."""
    if isinstance(value, Mapping):
        return all(each is None for each in value.values())
    if isinstance(value, str):
        return not value.strip()
    if _is_list(value):
        return all(each is None or (isinstance(each, Mapping) and is_empty(each)) for each in value)
    return value is None


def from_messages(
    messages: Sequence[Any], where: str, *, with_tools: bool
) -> tuple[list[str], str | None]:
    """(turns, system prompt or None). Raises BadRecord naming the message."""
    turns: list[str] = []
    system: str | None = None
    last: Kind | None = None
    for number, message in enumerate(messages, start=1):
        at = f"{where}: message {number}"
        kind = _kind(message, where, at)
        if kind == "system":
            text = _system_text(message, at)
            if text is None:
                continue
            if last is not None or system is not None:
                problem = "is a system message after the first message"
                fix = "let one system message begin the conversation"
                raise BadRecord(problem, where=at, fix=fix, reason="system_later")
            system = text
            continue
        if kind == "assistant":
            if last is None:
                problem = "is the assistant's, and the user has said nothing yet"
                fix = "remove the greeting or the record; the target never wrote it"
                raise BadRecord(problem, where=at, fix=fix, reason="assistant_first")
        elif kind == "user":
            if last == "user":
                problem = "is the user's, and so is the one before it"
                fix = "join the two, or remove the record"
                raise BadRecord(problem, where=at, fix=fix, reason="user_twice")
            turns.append(_content(message, at))
        elif not with_tools:
            last = kind if turns else last  # left out, and still between two messages of the user
            continue
        elif not turns:
            fix = "begin with what the user asked"
            raise BadRecord("begins with a tool's answer", where=where, fix=fix)
        else:
            answer = _content(message, at)
            turns.append(ToolTurn(f"{turns.pop()}\n{answer}" if last == "tool" else answer))
        last = kind
    return turns, system


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _rows(columns: Mapping[str, Any]) -> list[Any] | None:
    """A list of structs as some tables store it: one list a field."""
    filled = {key: value for key, value in columns.items() if _is_list(value)}
    lengths = {len(value) for value in filled.values()}
    has_role = any(key in filled for key in ROLE_KEYS)
    if not has_role or len(lengths) != 1 or not any(key in filled for key in CONTENT_KEYS):
        return None
    return [dict(zip(filled, row, strict=True)) for row in zip(*filled.values(), strict=True)]


def _from_pairs(item: Any) -> Any:
    """[["role", "user"], ["content", "…"]], as tables give their maps, as an object."""
    if not _is_list(item) or not all(_is_list(pair) and len(pair) == 2 for pair in item):
        return item
    keys = [pair[0] for pair in item]
    wanted = {*ROLE_KEYS, *CONTENT_KEYS}
    if not all(isinstance(key, str) for key in keys) or len(wanted & set(keys)) < 2:
        return item
    return {key: value for key, value in item} if len(set(keys)) == len(keys) else item


def _kind(message: Any, where: str, at: str) -> Kind:
    role = _first(message, ROLE_KEYS) if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        fix = "write messages as {role, content}"
        raise BadRecord("has a message without a role", where=where, fix=fix, reason="role")
    kind = kind_of(role)
    if kind is None:
        problem = "has a role of no known name"
        fix = "write user, assistant, system or tool, or remove the record"
        raise BadRecord(problem, where=at, fix=fix, reason="role")
    return kind


def _first(message: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """The first of these that is filled: tables give each message the fields of all."""
    values = [message[key] for key in keys if message.get(key) is not None]
    return next((value for value in values if not is_empty(value)), next(iter(values), None))


def _system_text(message: Mapping[str, Any], at: str) -> str | None:
    if is_empty(_first(message, CONTENT_KEYS)):
        return None
    text = _content(message, at)
    return text if text.strip() else None


def _content(message: Mapping[str, Any], at: str) -> str:
    content = _first(message, CONTENT_KEYS)
    parts = spelled(content) if isinstance(content, str) else content
    parts = [parts] if isinstance(parts, Mapping) else parts
    if _is_list(parts) and parts and all(_is_part(part) or _has_media(part) for part in parts):
        if any(map(_has_media, parts)):
            fix = "remove the record: the target reads text"
            raise BadRecord("has more than text", where=at, fix=fix, reason="media")
        content = "\n".join(part["text"] for part in parts)
    if not isinstance(content, str):
        fix = "write messages as {role, content} with a text as content"
        raise BadRecord("has no text", where=at, fix=fix)
    return content


def _is_part(part: Any) -> bool:
    is_text = isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS
    return is_text and isinstance(part.get("text"), str)


def _has_media(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    named = isinstance(kind, str) and kind.removeprefix("input_") in MEDIA
    return named or ("type" in part and any(not is_empty(part.get(key)) for key in MEDIA))
