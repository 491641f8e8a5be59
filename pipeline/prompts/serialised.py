"""Conversations that a column holds as text, and how they differ from a prompt that is JSON.

    '[{"role": "user", …}, …]'       JSON, also JSON text of JSON text
    "[{'role': 'user', …}, …]"       what Python prints for a list
    '{"messages": […]}'              an object with a conversation inside
    '[1, 2, 3]', '{"a": 1}'          a prompt
    'Fix this: [{"role": …}]'        a prompt

The shape decides: a list of objects that all have `role` or `from` and `content`, `value` or
`text`, or one such object with a role that chat data sets use.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from pipeline.prompts.roles import is_exchange, kind_of

#: Fields that hold conversations, of records and of objects inside them.
CONTAINERS = ("messages", "conversations", "conversation")
ROLE_KEYS = ("role", "from")
CONTENT_KEYS = ("content", "value", "text")

#: Of Python's own notation, in characters: its parser takes about a hundred bytes for each.
_LONGEST_LITERAL = 1 << 20
#: Texts within texts.
MOST_LAYERS = 3

_ASSISTANT = r"assistant|gpt\w*|chatgpt|model|bot|ai"
_ROLE = r"(?:role|from)[\"'\\]*\s*[:=]\s*[\"'\\]*(?:%s)\b"
_ANY_ROLE = re.compile(_ROLE % rf"user|human|system|{_ASSISTANT}", re.IGNORECASE)
_REPLY_ROLE = re.compile(_ROLE % _ASSISTANT, re.IGNORECASE)
_CONTENT = re.compile(r"(?:content|value|text)[\"'\\]*\s*[:=]")
#: What chat templates write in front of a conversation, and the notation of Anthropic's hh-rlhf.
_RENDERED = re.compile(
    r"(?:<s>|<bos>|<\|begin_of_text\|>)?\s*(?:<\|im_start\|>\s*\w|<\|start_header_id\|>\s*\w"
    r"|\[INST\]|<start_of_turn>\s*\w|<\|(?:user|system|assistant|human)\|>"
    r"|Human:(?=[\s\S]*\n\nAssistant:))"
)


def spelled(text: str) -> list[Any] | Mapping[str, Any] | None:
    """The list or object that a text spells as JSON or as a Python literal, None without one."""
    value: Any = text
    for _ in range(MOST_LAYERS):
        value = _parsed(value.strip())
        if not isinstance(value, str):
            break
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, list | Mapping) else None


def is_conversation(value: Any, *, layers: int = MOST_LAYERS) -> bool:
    """Whether a parsed text has the shape of one, in at most so many objects or lists of one."""
    if isinstance(value, Mapping):
        if _is_message(value, known=True) or is_exchange(value):
            return True
        inner = [value[name] for name in CONTAINERS if value.get(name)]
        inner = [spelled(each) if isinstance(each, str) else each for each in inner]
        return layers > 0 and any(is_conversation(each, layers=layers - 1) for each in inner)
    if not isinstance(value, list | tuple) or not value:
        return False
    if len(value) == 1 and isinstance(value[0], list):
        return layers > 0 and is_conversation(value[0], layers=layers - 1)
    return all(map(_is_message, value)) or all(map(is_exchange, value))


def hides_conversation(text: str) -> bool:
    """Whether a text that should be one turn is a conversation, as far as can be seen."""
    begin = text.lstrip()
    if _RENDERED.match(begin):
        return True
    if not begin.removeprefix("array").lstrip("\"'( \n").startswith(("[", "{")):
        return False
    value = spelled(text)
    if value is not None:
        return is_conversation(value) or _looks(text, _REPLY_ROLE)
    return _looks(text, _ANY_ROLE) and not _quotes(text)


def _looks(text: str, role: re.Pattern[str]) -> bool:
    return role.search(text) is not None and _CONTENT.search(text) is not None


def _quotes(text: str) -> bool:
    """Whether JSON stands in front of words: `[{"role": …}] Is this valid?`"""
    begin = text.lstrip()
    try:
        _, end = json.JSONDecoder().raw_decode(begin)
    except (ValueError, RecursionError):
        return False
    return begin[end:].lstrip()[:1].isalpha()


def _is_message(item: Any, *, known: bool = False) -> bool:
    if not isinstance(item, Mapping):
        return False
    role = next((item[key] for key in ROLE_KEYS if item.get(key)), None)
    said = [item[key] for key in (*CONTENT_KEYS, "tool_calls") if key in item]
    can_be = any(isinstance(each, str | list | Mapping) or each is None for each in said)
    return isinstance(role, str) and can_be and (not known or kind_of(role) is not None)


def _parsed(text: str) -> Any:
    """JSON, else a Python literal, else None."""
    if text[:1] not in tuple("[{(\"'"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if len(text) > _LONGEST_LITERAL:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a backslash in somebody's text
        try:
            return ast.literal_eval(text)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None
