"""One raw record of a file or hub data set → Prompt.

The user's turns are taken from the first of `_FIELDS` that the record has filled, or from the one
that the source's `field` names. The field's value, whatever its name, decides how it is read
(`instruction` has `input` or `context` appended):

    "…"                                   one turn; in `messages` and its like: JSON or a literal
    ["…", "…"]                            turns, but not in `messages` and its like
    [{role, content}] or [{from, value}]  messages: those of the user, and a leading system prompt

Some columns hold a conversation as text. Its shape tells it from a prompt that is JSON: a list of
objects that all have `role` or `from` and `content`, `value` or `text`, or one such object with a
role that chat data sets use.

    '[{"role": "user", …}, …]'       JSON, also JSON text of JSON text
    "[{'role': 'user', …}, …]"       what Python prints for a list
    '{"messages": […]}'              an object with a conversation inside
    '[1, 2, 3]', '{"a": 1}'          a prompt
    'Fix this: [{"role": …}]'        a prompt

`content` may also be a list of parts, as in OpenAI's API, when all of them are text. A system
prompt is also taken from the fields `system` and `system_prompt`. Replies are never read, and a
text that contains some is never a turn. An order of messages that the target could not have met is
refused with a reason of its own: joining messages or dropping one would invent a conversation.

Where the record lists `tools`, as OpenAI's API does or as its JSON text, the tools' answers among
the messages are turns, too; several in a row are one. Otherwise they are left out.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pipeline.documents import BrokenDocument, parse_record
from pipeline.prompts.bad_records import BadRecord, Reason
from pipeline.records import Prompt

#: In place of the licence of a text whose generator's terms forbid training other models with it.
FORBIDS_COMPETING_MODELS = "LicenseRef-forbids-competing-models"
#: Fields that hold conversations, of records and of objects inside them.
CONTAINERS = ("messages", "conversations", "conversation")
#: Whose bare texts would be the user's and the assistant's by turns.
_CONVERSATIONS = frozenset({*CONTAINERS, "dialog", "dialogue", "chat", "history"})
_FIELDS = ("turns", *CONTAINERS, "prompt", "instruction", "question", "query")
#: Texts of fields that hold lists, where they hold nothing.
_NOTHING = frozenset({"[]", "{}", "null", "None"})
_SYSTEM_FIELDS = ("system", "system_prompt")
#: What SPEED-Bench publishes in place of texts that it may not (NVIDIA/Model-Optimizer,
#: specdec_bench/datasets/speed.py).
_UNRESOLVED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


def to_prompt(
    record: Any, *, where: str, sample_id: str, source: str, field: str | None = None
) -> Prompt:
    """A checked Prompt; `field` names the field to read.

    `sample_id` and `source` serve when the record has none of its own. Raises BadRecord naming
    `where` and the field.
    """
    if not isinstance(record, Mapping):
        problem = f"is a {type(record).__name__}, not an object"
        fix = 'write one object a record, for example {"turns": ["…"]}'
        raise BadRecord(problem, where=where, fix=fix, reason="not_object")
    record = {name: value for name, value in record.items() if not _is_nan(value)}
    turns, system, tools = _texts(record, where, field)
    tool_turns = tuple(number for number, turn in enumerate(turns) if isinstance(turn, ToolTurn))
    for number, turn in enumerate(turns, start=1):
        _check(turn, f"user turn {number}", where)
        _check_resolved(turn, number, where)
        if not isinstance(turn, ToolTurn):
            _check_one_turn(turn, f"user turn {number}", where)
            _check_no_image(turn, number, record, where)
    if system is not None:
        _check(system, "the system prompt", where)
    question_id = _text_field(record, "question_id", sample_id, where)
    return Prompt(
        sample_id=_text_field(record, "id", question_id, where),
        source=_text_field(record, "source", source, where),
        license=_license(record, where),
        category=_text_field(record, "category", source, where),
        turns=tuple(turns),
        tool_turns=tool_turns,
        tools=tools,
        system=system,
    )


def _is_nan(value: Any) -> bool:
    """Some tables write it for what is missing."""
    return isinstance(value, float) and value != value


def _check(text: Any, name: str, where: str) -> None:
    problem, reason = _problem(text)
    if problem:
        fix = "correct the text, or remove the record"
        raise BadRecord(f"{name} is {problem}", where=where, fix=fix, reason=reason)


def _check_resolved(turn: str, number: int, where: str) -> None:
    if turn.lstrip().startswith(_UNRESOLVED):
        problem = f"user turn {number} is a placeholder of SPEED-Bench, not a prompt"
        fix = (
            "run prepare_data.py of specdec_bench (NVIDIA/Model-Optimizer, examples): it fetches "
            "the texts from their sources; name the file that it writes"
        )
        raise BadRecord(problem, where=where, fix=fix, reason="placeholder")


def _check_one_turn(text: str, name: str, where: str) -> None:
    if hides_conversation(text):
        problem = f"{name} is the text of a conversation, its replies with it"
        fix = "write the conversation as a list of {role, content}, or remove the record"
        raise BadRecord(problem, where=where, fix=fix, reason="serialised")


def _check_no_image(text: str, number: int, record: Mapping[str, Any], where: str) -> None:
    if "<image>" in text and any(not is_empty(record.get(name)) for name in MEDIA):
        problem, fix = f"user turn {number} is about an image", "remove the record"
        raise BadRecord(problem, where=where, fix=fix, reason="media")


def _problem(text: Any) -> tuple[str, Reason]:
    if not isinstance(text, str):
        return "not a text", "fields"
    if not text.strip():
        return "blank", "blank"
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which no file can hold
        return "not valid Unicode", "not_unicode"
    return "", "fields"


def _texts(
    record: Mapping[str, Any], where: str, requested: str | None
) -> tuple[list[Any], Any, str | None]:
    """(user turns, system prompt or None, tools or None)."""
    field = requested or _filled_field(record)
    if field is None:
        fix = "add `turns`, a list of the user's turns, or set the source's `field`"
        raise BadRecord(f"has none of the fields {', '.join(_FIELDS)}", where=where, fix=fix)
    at, value = f"{where}: {field}", record.get(field)
    if requested and value is None:
        fix = f"correct the source's `field`; the record has {', '.join(map(str, record))}"
        raise BadRecord("is missing", where=at, fix=fix)
    value = _read(value, field, at)
    for _ in range(MOST_LAYERS):  # objects around the conversation may hold its system and tools
        inner = isinstance(value, Mapping) and next(
            (name for name in CONTAINERS if not is_empty(value.get(name))), None
        )
        if not inner:
            break
        own = {name: value[name] for name in (*_SYSTEM_FIELDS, "tools") if value.get(name)}
        record, value = {**record, **own}, _read(value[inner], inner, at)
    tools = _tools(record, where)
    turns, system = _turns_of(value, field, record, at, with_tools=tools is not None)
    if not turns:
        raise BadRecord("has no user turn", where=at, fix="add one, or remove the record")
    own_system = next((record[name] for name in _SYSTEM_FIELDS if record.get(name)), None)
    return turns, own_system if system is None else system, tools


def _filled_field(record: Mapping[str, Any]) -> str | None:
    """The first that holds something, else the first that is there."""
    present = [name for name in _FIELDS if record.get(name) is not None]
    filled = (name for name in present if not _holds_nothing(record[name]))
    return next(filled, present[0] if present else None)


def _holds_nothing(value: Any) -> bool:
    return is_empty(value) or (isinstance(value, str) and value.strip() in _NOTHING)


def _read(value: Any, field: str, where: str) -> Any:
    """A text that spells a conversation as what it spells, also where it is a list's only one or
    each of a list's texts is a message."""
    holds_list = field in _CONVERSATIONS or field == "turns"
    if isinstance(value, str):
        parsed = spelled(value)
        if holds_list and parsed is None:
            if _holds_nothing(value):
                return []
            problem, fix = "is a text, not a list", "write a list, or use `prompt` for one turn"
            raise BadRecord(problem, where=where, fix=fix, reason="serialised")
        return parsed if holds_list or is_conversation(parsed) else value
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        parsed = [spelled(item) for item in value]
        if len(parsed) == 1 and is_conversation(parsed[0]):
            return parsed[0]
        return parsed if is_conversation(parsed) else value
    return value


def _turns_of(
    value: Any, field: str, record: Mapping[str, Any], where: str, *, with_tools: bool
) -> tuple[list[Any], str | None]:
    """User turns and system prompt in the `value` of the record's `field`."""
    if isinstance(value, str):
        return [_with_input(value, record, where) if field == "instruction" else value], None
    messages = listed(value)
    if messages is None:
        problem = f"is a {type(value).__name__}, not a list"
        raise BadRecord(problem, where=where, fix=f"write `{field}` as a list")
    if any(isinstance(item, Mapping) for item in messages):
        return from_messages(messages, where, with_tools=with_tools)
    if field in _CONVERSATIONS and any(isinstance(item, str) for item in messages):
        problem = "is a list of texts that do not say who speaks"
        fix = "write messages as {role, content}, or the user's turns alone as `turns`"
        raise BadRecord(problem, where=where, fix=fix, reason="strings")
    return list(value) if messages else [], None


def _with_input(instruction: str, record: Mapping[str, Any], where: str) -> str:
    """Instruction data sets keep the text that the instruction is about in a field of its own."""
    for name in ("input", "context"):
        if isinstance(record.get(name), str) and record[name].strip():
            _check_one_turn(record[name], f"`{name}`", where)
            return f"{instruction}\n\n{record[name]}"
    return instruction


def _tools(record: Mapping[str, Any], where: str) -> str | None:
    """The record's tools as JSON, None without any. Keys stay in order: templates write them so."""
    tools = record.get("tools")
    if _holds_nothing(tools):
        return None
    tools = spelled(tools) if isinstance(tools, str) else tools
    if isinstance(tools, list):
        tools = [spelled(tool) if isinstance(tool, str) else tool for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        fix = 'write [{"type": "function", "function": {"name": …}}], or leave `tools` out'
        raise BadRecord("is not a list of tools", where=f"{where}: tools", fix=fix)
    try:
        tools = _without_null_properties(tools)
        text = json.dumps(tools, separators=(",", ":"), ensure_ascii=False) if tools else None
        _ = text and text.encode()
    except RecursionError:
        fix = "correct the text, or remove the record"
        raise BadRecord("is nested too deeply", where=f"{where}: tools", fix=fix) from None
    except (TypeError, ValueError):  # a Python literal can hold what JSON cannot, and JSON halves
        # of surrogate pairs, which no file can
        fix = "write the tools as JSON, or remove the record"
        raise BadRecord("cannot be written as JSON", where=f"{where}: tools", fix=fix) from None
    return text


def _without_null_properties(value: Any, *, of_properties: bool = False) -> Any:
    """A schema has no null in place of a property's schema; a table that was saved as JSON has."""
    if isinstance(value, Mapping):
        return {
            key: _without_null_properties(
                each, of_properties=key == "properties" and not of_properties
            )
            for key, each in value.items()
            if not (of_properties and each is None)
        }
    return [_without_null_properties(each) for each in value] if isinstance(value, list) else value


def _license(record: Mapping[str, Any], where: str) -> str:
    forbids = str(record.get("forbids_competing_models") or "").strip().lower()
    if forbids in ("true", "1", "1.0", "yes"):  # as tables store it
        return FORBIDS_COMPETING_MODELS
    if forbids not in ("", "false", "0", "0.0", "no", "nan", "none", "null"):
        at, fix = f"{where}: forbids_competing_models", "write true or false"
        raise BadRecord("is neither true nor false", where=at, fix=fix)
    return _text_field(record, "license", "unknown", where)


def _text_field(record: Mapping[str, Any], field: str, default: str, where: str) -> str:
    value = record.get(field)
    if value is None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a table's numbers are floats where one is missing
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    problem, reason = _problem(text)
    if problem:
        fix = f"write `{field}` as a non-empty text, or leave it out"
        raise BadRecord(f"is {problem}", where=f"{where}: {field}", fix=fix, reason=reason)
    return str(text)


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
            answer = _content(message, at, spelled_parts=False)
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
    message_keys = {*ROLE_KEYS, *CONTENT_KEYS}
    if not all(isinstance(key, str) for key in keys) or len(message_keys & set(keys)) < 2:
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


def _content(message: Mapping[str, Any], at: str, *, spelled_parts: bool = True) -> str:
    """Text parts joined; also those that a text spells, but not in what a tool answered: that may
    be any JSON."""
    content = _first(message, CONTENT_KEYS)
    parts = spelled(content) if isinstance(content, str) and spelled_parts else content
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


Kind = Literal["user", "assistant", "system", "tool"]
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "model", "bot", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(("chatgpt", "bing", "bard", "claude", "gemini"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call", "tool_calls"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
    **dict.fromkeys(("tool_response", "function_response"), "tool"),
}


def kind_of(role: str) -> Kind | None:
    """None for a role that has no known name."""
    name = role.strip().lower().replace("-", "_").replace(" ", "_")
    return "assistant" if name.startswith("gpt") else _KINDS.get(name)


def is_exchange(value: Any) -> bool:
    """Whether it is {"human": "…", "assistant": "…"}: roles as keys, the user's among them."""
    if not isinstance(value, Mapping):
        return False
    texts = {key: text for key, text in value.items() if text is not None}
    kinds = [kind_of(key) if isinstance(key, str) else None for key in texts]
    distinct = len(set(kinds)) == len(kinds)
    all_text = all(isinstance(text, str) for text in texts.values())
    return {"user", "assistant"} <= set(kinds) and None not in kinds and distinct and all_text


def messages_of(exchange: Mapping[str, Any]) -> list[dict[str, str]]:
    """An exchange's messages, in the order in which they are said."""
    said: dict[Kind | None, str] = {kind_of(key): key for key, text in exchange.items() if text}
    order: tuple[Kind, ...] = ("system", "user", "tool", "assistant")
    return [{"role": kind, "content": exchange[said[kind]]} for kind in order if kind in said]


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
        return parse_record(text)
    except BrokenDocument as error:
        if not error.is_syntax or len(text) > _LONGEST_LITERAL:
            return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a backslash in somebody's text
        try:
            literal = ast.parse(text, mode="eval")
            return (
                None if any(map(_has_key_twice, ast.walk(literal))) else ast.literal_eval(literal)
            )
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None


def _has_key_twice(node: ast.AST) -> bool:
    keys = (
        [key.value for key in node.keys if isinstance(key, ast.Constant)]
        if isinstance(node, ast.Dict)
        else []
    )
    return len(set(keys)) < len(keys)
