"""Conversations in every encoding: read as such or refused under a reason, never as one turn."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import SourceSpec
from pipeline.prompts import load_prompts
from pipeline.prompts.bad_records import BadRecord, BadRecords
from pipeline.prompts.sources import read_source
from pipeline.records import Prompt

GOLD = "SECRET REPLY"


def user(text: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str = "Be brief.") -> dict[str, Any]:
    return {"role": "system", "content": text}


REPLY = {"role": "assistant", "content": GOLD}
CHAT = [system(), user("Hi"), REPLY, user("Why?")]
SHARE = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": GOLD}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def load(folder: Path, records: list[Any], *, parquet: bool = False, **spec: Any) -> list[Prompt]:
    path = folder / ("p.parquet" if parquet else "p.jsonl")
    if parquet:
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return load_prompts([SourceSpec(source=str(path), **spec)], seed=0)


TWO, ONE = (("Hi", "Why?"), "Be brief."), (("Hi",), None)
READ: list[tuple[dict[str, Any], tuple[tuple[str, ...], str | None]]] = [
    ({"messages": json.dumps(CHAT)}, TWO),
    ({"messages": json.dumps(json.dumps(CHAT))}, TWO),
    ({"messages": str(CHAT)}, TWO),
    ({"messages": repr(tuple(CHAT))}, TWO),
    ({"messages": [json.dumps(message) for message in CHAT]}, TWO),
    ({"messages": [str(message) for message in CHAT]}, TWO),
    ({"messages": [json.dumps(CHAT)]}, TWO),
    ({"messages": [CHAT]}, TWO),
    ({"messages": json.dumps({"messages": CHAT})}, TWO),
    ({"messages": {"conversations": json.dumps(CHAT)}}, TWO),
    ({"messages": [list(message.items()) for message in CHAT]}, TWO),
    ({"messages": {key: [m[key] for m in CHAT] for key in ("role", "content")}}, TWO),
    ({"conversations": json.dumps(SHARE)}, ONE),
    ({"conversations": str(SHARE)}, ONE),
    (
        {"conversation": json.dumps({"system": "Be brief.", "conversations": SHARE})},
        (("Hi",), "Be brief."),
    ),
    ({"conversation": {"human": "Hi", "assistant": GOLD}}, ONE),
    (
        {"conversation": [{"human": "Hi", "assistant": GOLD}, {"human": "b", "assistant": GOLD}]},
        (("Hi", "b"), None),
    ),
    (
        {"conversation": {"assistant": GOLD, "user": "Hi", "system": "Be brief."}},
        (("Hi",), "Be brief."),
    ),
    ({"prompt": json.dumps(CHAT)}, TWO),
    ({"prompt": str(SHARE)}, ONE),
    ({"prompt": json.dumps({"messages": CHAT, "model": "m"})}, TWO),
    ({"prompt": user("Hi")}, ONE),
    ({"prompt": [json.dumps(SHARE)]}, ONE),
    ({"turns": json.dumps(["a", "b"])}, (("a", "b"), None)),
    ({"turns": json.dumps(CHAT)}, TWO),
    ({"turns": [json.dumps(CHAT)]}, TWO),
    ({"messages": [], "conversations": SHARE}, ONE),
    ({"messages": "[]", "conversations": SHARE}, ONE),
    ({"messages": "", "turns": [], "prompt": "Hi"}, ONE),
    ({"messages": [None, {"role": None, "content": None}], "prompt": "Hi"}, ONE),
    ({"messages": [system(""), user()]}, ONE),
    ({"messages": [system(" "), system(), user()]}, (("Hi",), "Be brief.")),
    ({"messages": [user(), REPLY, system(""), user("Why?")]}, (("Hi", "Why?"), None)),
    ({"messages": [{"role": "User", "content": "Hi"}, {"role": "ChatGPT", "content": GOLD}]}, ONE),
    ({"messages": [{"from": "HUMAN", "value": "Hi"}, {"from": "bing", "value": GOLD}]}, ONE),
    ({"messages": [user(), {"role": "gpt-4-turbo", "content": GOLD}]}, ONE),
    (
        {"messages": [user(), {"role": "model", "content": None}, user("Why?")]},
        (("Hi", "Why?"), None),
    ),
    ({"messages": [{"role": None, "from": "human", "content": None, "value": "Hi"}]}, ONE),
    ({"messages": [{"role": "", "from": "human", "content": "", "value": "Hi"}]}, ONE),
    ({"messages": [user([{"type": "text", "text": "Hi", "image_url": None}])]}, ONE),
    ({"messages": [user(json.dumps([{"type": "text", "text": "Hi"}]))]}, ONE),
    ({"prompt": "Hi", "system": float("nan"), "id": float("nan")}, ONE),
]


@pytest.mark.parametrize(("record", "expected"), READ)
@pytest.mark.parametrize("parquet", [False, True])
def test_conversations_are_read(
    tmp_path: Path, record: dict[str, Any], expected: Any, parquet: bool
) -> None:
    (prompt,) = load(tmp_path, [record], parquet=parquet)
    assert (prompt.turns, prompt.system) == expected
    assert GOLD not in prompt.model_dump_json()


PROMPTS = [
    "[1, 2, 3]",
    '{"a": 1}',
    "{'a': 1}",
    '"Hello"',
    "[]",
    "null",
    '[{"role": "editor", "content": "c"}, 3]',
    '[{"from": "Oslo", "value": 3}, {"from": "Bergen", "value": 5}]',
    '{"users": [{"name": "Bo", "role": "user", "text": "t"}]} ',
    f"What is wrong with this? {json.dumps(CHAT)}",
    f"{json.dumps(CHAT)}\n\nIs this valid?",
    "{% for message in messages %}{{ message['role'] == 'user' }}{% endfor %}",
    "What follows <|im_start|>user in ChatML?",
    "Human: what are you?",
    "[" * 5000,
    "[" * 900 + "]" * 900,
    "-" * 5000 + "1",
    "[" + "-" * 20000 + "1]",
    " " * 50_000 + "[ x",
    "['\\d']",
]


@pytest.mark.parametrize("text", PROMPTS)
@pytest.mark.parametrize("field", ["prompt", "turns", "question", "text", "messages"])
def test_a_prompt_that_is_json_stays_a_prompt(tmp_path: Path, text: str, field: str) -> None:
    value: Any = {"turns": ["Why?", text], "messages": [user(text)]}.get(field, text)
    named: dict[str, Any] = {"field": "text"} if field == "text" else {}
    (prompt,) = load(tmp_path, [{field: value}], **named)
    assert prompt.turns == (("Why?", text) if field == "turns" else (text,))


CUT, NUMPY = json.dumps(CHAT)[:-20], "[" + " ".join(map(str, CHAT)) + "]"
REFUSED: list[tuple[str, dict[str, Any]]] = [
    *(
        ("serialised", {field: CUT})
        for field in ("messages", "conversations", "prompt", "question")
    ),
    *(("serialised", {field: NUMPY}) for field in ("messages", "prompt", "turns")),
    ("serialised", {"turns": ["Hi", json.dumps(CHAT)]}),
    ("serialised", {"turns": ["Hi", CUT]}),
    ("serialised", {"messages": [user(json.dumps(CHAT))]}),
    ("serialised", {"messages": "Hi"}),
    ("serialised", {"conversation": f"Human: Hi\n\nAssistant: {GOLD}"}),
    ("serialised", {"prompt": f"\n\nHuman: Hi\n\nAssistant: {GOLD}"}),
    ("serialised", {"prompt": f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{GOLD}"}),
    ("serialised", {"prompt": f"<s>[INST] Hi [/INST] {GOLD}</s>"}),
    ("serialised", {"prompt": json.dumps({"data": {"chat": CHAT}})}),
    ("serialised", {"prompt": "\n".join(map(json.dumps, CHAT))}),
    (
        "serialised",
        {"prompt": f"[Message(role='user', content='Hi'), Message(role='ai', content='{GOLD}')]"},
    ),
    ("serialised", {"instruction": "Go on.", "input": json.dumps(CHAT)}),
    ("serialised", {"messages": "[{'role': 'user', 'content': " + "[" * 5000}),
    ("strings", {"messages": ["Hi", GOLD, "Why?"]}),
    ("strings", {"messages": json.dumps(["Hi", GOLD])}),
    ("strings", {"conversation": ["Hi", GOLD]}),
    ("fields", {"turns": [["Hi", GOLD], ["Why?", GOLD]]}),
    ("fields", {"conversation": {"a": "Hi", "b": GOLD}}),
    ("fields", {"messages": []}),
    ("fields", {"messages": "null"}),
    ("fields", {"messages": [{"role": "user", "content": None}]}),
    ("role", {"messages": [{"role": "narrator", "content": GOLD}, user()]}),
    ("role", {"messages": [user(), {"content": GOLD}]}),
    ("role", {"messages": [user(), GOLD]}),
    ("assistant_first", {"messages": [REPLY, user()]}),
    ("assistant_first", {"messages": [system(), REPLY, user()]}),
    ("assistant_first", {"conversations": [SHARE[1], SHARE[0]]}),
    ("system_later", {"messages": [user(), REPLY, system(), user()]}),
    ("system_later", {"messages": [system(), system("Be kind."), user()]}),
    ("user_twice", {"messages": [user(), user("b"), REPLY]}),
    ("user_twice", {"messages": [user(), system(""), user("b"), REPLY]}),
    (
        "media",
        {
            "messages": [
                user(
                    [
                        {"type": "text", "text": "a"},
                        {"type": "image_url", "image_url": {"url": "u"}},
                    ]
                )
            ]
        },
    ),
    (
        "media",
        {
            "messages": [
                user([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": None}])
            ]
        },
    ),
    (
        "media",
        {
            "messages": [
                user([{"type": "text", "text": "a"}, {"type": "document", "source": {"data": "x"}}])
            ]
        },
    ),
    ("media", {"conversations": [{"from": "human", "value": "<image>\nWhat?"}], "image": "a.jpg"}),
]


@pytest.mark.parametrize(("reason", "record"), REFUSED)
def test_what_cannot_be_known_is_refused(
    tmp_path: Path, reason: str, record: dict[str, Any]
) -> None:
    with pytest.raises(BadRecord) as raised:
        load(tmp_path, [record])
    error = raised.value
    assert error.reason == f"record:{reason}" and error.fix
    assert error.where.startswith(f"{tmp_path}/p.jsonl:1") and GOLD not in str(error)


def test_nulls_of_a_table_are_no_part_of_its_tools(tmp_path: Path) -> None:
    def tool(name: str, **properties: Any) -> dict[str, Any]:
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    tools = [[tool("weather", city={"type": "string"})], [tool("add", a={"type": "number"})]]
    records = [{"prompt": "Hi", "tools": each} for each in tools]
    filled = pa.Table.from_pylist(records).to_pylist()
    assert filled != records, "the table fills structs"
    for prompts in (
        load(tmp_path, records),
        load(tmp_path, records, parquet=True),
        load(tmp_path, filled),  # a table saved as JSON
        load(tmp_path, [{**record, "tools": json.dumps(record["tools"])} for record in records]),
        load(tmp_path, [{**record, "tools": str(record["tools"])} for record in filled]),
        load(tmp_path, [{"prompt": "Hi", "tools": list(map(json.dumps, each))} for each in tools]),
    ):
        assert [json.loads(prompt.tools or "") for prompt in prompts] == tools
    own = [tool("add", a={"type": ["number", "null"], "default": None, "enum": [1, None]})]
    for written in (own, json.dumps(own)):
        (prompt,) = load(tmp_path, [{"prompt": "Hi", "tools": written}])
        assert json.loads(prompt.tools or "") == own, "JSON holds what was written"
    (prompt,) = load(tmp_path, [{"prompt": "Hi", "tools": json.dumps(own)}], parquet=True)
    assert json.loads(prompt.tools or "") == own


def test_rows_of_a_table_are_the_records_they_were(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {
            "id": 1.0,
            "messages": [user("a"), {**REPLY, "tool_calls": [{"id": "c"}]}],
            "tools": [TOOL],
            "conversations": None,
            "turns": None,
        },
        {"id": 2.0, "messages": [{"from": "human", "value": "b"}], "conversations": []},
        {"id": None, "messages": [], "conversations": [{"from": "human", "value": "c"}]},
        {"id": 4.0, "messages": None, "turns": ["d", "e"]},
    ]
    prompts = load(tmp_path, records, parquet=True)
    assert [prompt.turns for prompt in prompts] == [("a",), ("b",), ("c",), ("d", "e")]
    assert [prompt.sample_id for prompt in prompts] == ["1", "2", "p:3", "4"]
    maps = pa.array([[list(user().items())]], pa.list_(pa.map_(pa.string(), pa.string())))
    pq.write_table(pa.table({"messages": maps, "id": pa.array([b"x"])}), tmp_path / "m.parquet")
    (prompt,) = load_prompts([SourceSpec(source=str(tmp_path / "m.parquet"))], seed=0)
    assert (prompt.turns, prompt.sample_id) == (("Hi",), "x")


_TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=8)
_ROLES = st.sampled_from(["user", "human", "User", "assistant", "gpt", "system", "tool", "poet"])


@st.composite
def _conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    role, content = draw(st.sampled_from([("role", "content"), ("from", "value")]))
    roles = draw(
        st.one_of(
            st.lists(_ROLES, min_size=1, max_size=5),
            st.sampled_from([["user", "assistant"], ["system", "human", "gpt", "human"]]),
        )
    )
    texts = [GOLD if each in ("assistant", "gpt") else draw(_TEXTS) for each in roles]
    return [{role: r, content: text} for r, text in zip(roles, texts, strict=True)]


_ENCODINGS = [
    lambda chat: chat,
    json.dumps,
    lambda chat: json.dumps(chat, indent=1, ensure_ascii=False),
    str,
    lambda chat: json.dumps(json.dumps(chat)),
    lambda chat: {"messages": chat},
    lambda chat: json.dumps({"conversations": chat}),
    lambda chat: [json.dumps(message) for message in chat],
    lambda chat: [str(message) for message in chat],
    lambda chat: [chat],
    lambda chat: json.dumps(chat)[:-3],
    lambda chat: "[" + "\n ".join(map(str, chat)) + "]",
    lambda chat: "\n".join(map(json.dumps, chat)),
]


@settings(max_examples=400, deadline=None)
@given(
    chat=_conversations(),
    encode=st.sampled_from(_ENCODINGS),
    field=st.sampled_from(["messages", "conversations", "conversation", "prompt", "turns", "text"]),
    parquet=st.sampled_from([False] * 7 + [True]),
)
def test_no_reply_is_ever_in_a_prompt(chat: Any, encode: Any, field: str, parquet: bool) -> None:
    record = {field: encode(chat)}
    named: dict[str, Any] = {"field": "text"} if field == "text" else {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            prompts = load(Path(folder), [record], parquet=parquet, **named)
        except BadRecord as error:
            assert GOLD not in str(error)
            return
    (prompt,) = prompts
    assert GOLD not in prompt.model_dump_json()
    said = [next(iter(reversed(m.values()))) for m in chat if kind(m) == "user"]
    if any(kind(message) in ("user", "assistant", "gpt") for message in chat):
        assert list(prompt.turns) == said


def kind(message: dict[str, Any]) -> str:
    role = str(next(iter(message.values()))).lower()
    return {"human": "user"}.get(role, role)


def test_each_reason_is_counted(tmp_path: Path) -> None:
    good = [{"messages": CHAT}] * 20 * len(REFUSED)
    path = tmp_path / "p.jsonl"
    records = [*(record for _, record in REFUSED), *good]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    bad = BadRecords()
    prompts = list(read_source(SourceSpec(source=str(path)), bad))
    assert bad.counts == Counter(f"record:{reason}" for reason, _ in REFUSED)
    assert len(prompts) == len(good) and GOLD not in str(bad)
