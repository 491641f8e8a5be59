"""One raw record of a file or hub data set → Prompt.

The user's turns are taken from the first of `_FIELDS` that the record has, or from the one that the
source's `field` names. A field's value, whatever its name, decides how it is read (`instruction`
has `input` or `context` put after it):

    "…"                                   one turn
    ["…", "…"]                            turns
    [{role, content}] or [{from, value}]  messages: those of the user, and a system prompt in front

`content` may also be a list of parts, as OpenAI's API has it, when all of them are text. A system
prompt is also taken from the fields `system` and `system_prompt`. Replies are never looked at.

Where the record lists `tools`, as OpenAI's API or as its JSON text, the tools' answers among the
messages are turns, too; several in a row are one. Otherwise they are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.prompts.bad_records import BadRecord, Reason
from pipeline.records import Prompt, canonical_json

#: In place of the licence of a text whose generator's terms forbid training other models with it.
FORBIDS_COMPETING_MODELS = "LicenseRef-forbids-competing-models"

_USER_ROLES = frozenset({"user", "human", "prompter"})
_SYSTEM_ROLES = frozenset({"system", "developer"})
_TOOL_ROLES = frozenset({"tool", "function", "observation", "ipython"})
_FIELDS = (
    *("turns", "messages", "conversations", "conversation"),
    *("prompt", "instruction", "question", "query"),
)
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
    tools = _tools(record, where)
    turns, system = _texts(record, where, field)
    tool_turns = tuple(number for number, turn in enumerate(turns) if isinstance(turn, _ToolTurn))
    for number, turn in enumerate(turns, start=1):
        _check(turn, f"user turn {number}", where)
        _check_resolved(turn, number, where)
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


def _texts(record: Mapping[str, Any], where: str, wanted: str | None) -> tuple[list[Any], Any]:
    """(user turns, system prompt or None)."""
    field = wanted or next((name for name in _FIELDS if record.get(name) is not None), None)
    if field is None:
        fix = "add `turns`, a list of the user's turns, or set the source's `field`"
        raise BadRecord(f"has none of the fields {', '.join(_FIELDS)}", where=where, fix=fix)
    where = f"{where}: {field}"
    value = record.get(field)
    if wanted and value is None:
        fix = f"correct the source's `field`; the record has {', '.join(map(str, record))}"
        raise BadRecord("is missing", where=where, fix=fix)
    turns, system = _turns_of(value, field, record, where)
    if not turns:
        raise BadRecord("has no user turn", where=where, fix="add one, or remove the record")
    own = next((record[name] for name in _SYSTEM_FIELDS if record.get(name)), None)
    return turns, own if system is None else system


def _turns_of(
    value: Any, field: str, record: Mapping[str, Any], where: str
) -> tuple[list[Any], str | None]:
    """User turns and system prompt in the `value` of the record's `field`."""
    if isinstance(value, str):
        if field == "turns":
            fix = "write `turns` as a list, or use `prompt`"
            raise BadRecord("is a str, not a list", where=where, fix=fix)
        return [_with_input(value, record) if field == "instruction" else value], None
    if not isinstance(value, Sequence):
        problem = f"is a {type(value).__name__}, not a list"
        raise BadRecord(problem, where=where, fix=f"write `{field}` as a list")
    if any(isinstance(item, Mapping) for item in value):
        return _from_messages(value, where, with_tools=bool(record.get("tools")))
    return list(value), None


def _with_input(instruction: str, record: Mapping[str, Any]) -> str:
    """Instruction data sets keep the text that the instruction is about in a field of its own."""
    for name in ("input", "context"):
        if isinstance(record.get(name), str) and record[name].strip():
            return f"{instruction}\n\n{record[name]}"
    return instruction


class _ToolTurn(str):
    """What a tool answered."""


def _from_messages(
    messages: Sequence[Any], where: str, *, with_tools: bool
) -> tuple[list[str], str | None]:
    """The user's messages and those of tools, and the system prompt when it stands first."""
    roles = [_role(message, where) for message in messages]
    turns: list[str] = []
    for index, (message, role) in enumerate(zip(messages, roles, strict=True)):
        if role in _USER_ROLES:
            turns.append(_content(message, where))
        elif role in _TOOL_ROLES and with_tools:
            answer = _content(message, where)
            goes_on = index and roles[index - 1] in _TOOL_ROLES
            turns.append(_ToolTurn(f"{turns.pop()}\n{answer}" if goes_on else answer))
    if turns and isinstance(turns[0], _ToolTurn):
        fix = "begin with what the user asked"
        raise BadRecord("begins with a tool's answer", where=where, fix=fix)
    system = _content(messages[0], where) if roles and roles[0] in _SYSTEM_ROLES else None
    return turns, system if system and system.strip() else None


def _role(message: Any, where: str) -> str:
    role = message.get("role", message.get("from")) if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        fix = "write messages as {role, content}"
        raise BadRecord("has a message without a role", where=where, fix=fix)
    return role.lower()


def _content(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content", message.get("value"))
    if isinstance(content, Sequence) and not isinstance(content, str) and content:
        all_text = all(_is_text_part(part) for part in content)
        content = "\n".join(part["text"] for part in content) if all_text else None
    if not isinstance(content, str):
        fix = "write messages as {role, content} with a text as content"
        raise BadRecord("has a user message without text", where=where, fix=fix)
    return content


def _is_text_part(part: Any) -> bool:
    is_text = isinstance(part, Mapping) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)


def _tools(record: Mapping[str, Any], where: str) -> str | None:
    """The record's tools as canonical JSON, None without any."""
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError:
            tools = [None]
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        fix = 'write [{"type": "function", "function": {"name": …}}], or leave `tools` out'
        raise BadRecord("is not a list of tools", where=f"{where}: tools", fix=fix)
    return canonical_json(tools)


def _license(record: Mapping[str, Any], where: str) -> str:
    if record.get("forbids_competing_models") is True:
        return FORBIDS_COMPETING_MODELS
    return _text_field(record, "license", "unknown", where)


def _text_field(record: Mapping[str, Any], field: str, default: str, where: str) -> str:
    value = record.get(field)
    if value is None:
        return default
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    problem, reason = _problem(text)
    if problem:
        fix = f"write `{field}` as a non-empty text, or leave it out"
        raise BadRecord(f"is {problem}", where=f"{where}: {field}", fix=fix, reason=reason)
    return str(text)
