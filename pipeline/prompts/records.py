"""One raw record of a file or hub data set → Prompt.

The user's turns are taken from the first of `_FIELDS` that the record has filled, or from the one
that the source's `field` names. A field's value, whatever its name, decides how it is read
(`instruction` has `input` or `context` put after it):

    "…"                                   one turn; in `messages` and its like: JSON or a literal
    ["…", "…"]                            turns, but not in `messages` and its like
    [{role, content}] or [{from, value}]  messages: those of the user, and a system prompt in front

A text that spells messages is read as those (`serialised`), and so are the shapes of `messages`.
`content` may also be a list of parts, as OpenAI's API has it, when all of them are text. A system
prompt is also taken from the fields `system` and `system_prompt`. Replies are never looked at, and
a text that holds some is never a turn.

Where the record lists `tools`, as OpenAI's API or as its JSON text, the tools' answers among the
messages are turns, too; several in a row are one. Otherwise they are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.prompts.bad_records import BadRecord, Reason
from pipeline.prompts.messages import MEDIA, ToolTurn, from_messages, is_empty, listed
from pipeline.prompts.serialised import (
    CONTAINERS,
    MOST_LAYERS,
    hides_conversation,
    is_conversation,
    spelled,
)
from pipeline.records import Prompt, canonical_json

#: In place of the licence of a text whose generator's terms forbid training other models with it.
FORBIDS_COMPETING_MODELS = "LicenseRef-forbids-competing-models"

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
    record: Mapping[str, Any], where: str, wanted: str | None
) -> tuple[list[Any], Any, str | None]:
    """(user turns, system prompt or None, tools or None)."""
    field = wanted or _filled_field(record)
    if field is None:
        fix = "add `turns`, a list of the user's turns, or set the source's `field`"
        raise BadRecord(f"has none of the fields {', '.join(_FIELDS)}", where=where, fix=fix)
    at, value = f"{where}: {field}", record.get(field)
    if wanted and value is None:
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
    """The record's tools as canonical JSON, None without any."""
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
        return canonical_json(_without_null_properties(tools)) if tools else None
    except RecursionError:
        fix = "correct the text, or remove the record"
        raise BadRecord("is nested too deeply", where=f"{where}: tools", fix=fix) from None
    except (TypeError, ValueError):  # a Python literal can hold what JSON cannot
        fix = "write the tools as JSON, or remove the record"
        raise BadRecord("cannot be written as JSON", where=f"{where}: tools", fix=fix) from None


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
    if record.get("forbids_competing_models") is True:
        return FORBIDS_COMPETING_MODELS
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
