"""Conversations grow by token ids; no reply is tokenised twice."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import TargetSection
from pipeline.errors import ContractMismatch, TemplateError
from pipeline.records import Span, match_contracts
from pipeline.target.open import open_target
from pipeline.target.template import ChatTemplate, load_template
from tests.conftest import CHATML


@pytest.fixture
def template(tiny_target: Path) -> ChatTemplate:
    return load_template(tiny_target, source="tiny", system_prompt=None)


@pytest.fixture
def tokenizer(tiny_target: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_target)


def test_a_grown_conversation_reads_like_the_rendered_one(
    template: ChatTemplate, tokenizer: Any
) -> None:
    end, first = tokenizer.eos_token_id, template.start("2+2?")
    ids = [*first, *tokenizer("It is 4.")["input_ids"], end]
    spans = [Span(start=len(first), end=len(ids) - 1)]
    grown = [*ids, *followed(template, ["2+2?", "Why?"], ids, spans)]
    turns = [("user", "2+2?"), ("assistant", "It is 4."), ("user", "Why?")]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert tokenizer.decode(grown) == whole
    assert template.stop_ids == (end,)
    closing = followed(template, ["2+2?", "Why?"], ids[:-1], spans)
    assert closing == [end, *grown[len(ids) :]], "a reply that was cut is closed by the template"


def followed(template: ChatTemplate, turns: list[str], ids: list[int], spans: Any) -> list[int]:
    tail = template.follow(turns, ids, spans)
    assert isinstance(tail, list)
    return tail


def test_special_tokens_are_shown_only_on_request(template: ChatTemplate) -> None:
    ids = template.start("Hi")
    assert "<|im_start|>" not in template.text(ids)
    assert "<|im_start|>" in template.text(ids, special=True)


def with_template(tokenizer: Any, template: str, **kwargs: Any) -> ChatTemplate:
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer, source="tiny", kwargs=kwargs)


@pytest.mark.parametrize(
    ("what", "template"),
    [
        ("counts the turns", "{{ messages | length }}" + CHATML),
        ("puts the first message last", CHATML.replace("in messages", "in messages | reverse")),
        (
            "opens a reply as no reply looks later",
            CHATML.replace("assistant\n{% endif %}", "assistant\n<think></think>{% endif %}"),
        ),
        (
            "drops all replies but the last",
            CHATML.replace(
                "{{ m.content }}", "{{ m.content if m.role == 'user' or loop.revindex < 3 }}"
            ),
        ),
    ],
)
def test_templates_that_change_earlier_turns_are_named(
    tokenizer: Any, what: str, template: str
) -> None:
    rewriting = with_template(tokenizer, template)
    assert rewriting.stops_after_reply() == "template_rewrites"
    ids = [*rewriting.start("Hi"), *rewriting.encode("So."), tokenizer.eos_token_id]
    spans = [Span(start=len(rewriting.start("Hi")), end=len(ids) - 1)]
    if "drops" not in what:  # that one does from the third turn on
        assert rewriting.follow(["Hi", "Why?"], ids, spans) == "template_rewrites"


def test_other_templates_continue(template: ChatTemplate, tokenizer: Any) -> None:
    assert template.stops_after_reply() is None
    trimming = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
    assert with_template(tokenizer, trimming).stops_after_reply() is None


def test_a_template_without_an_end_of_turn_token_serves_single_turns_only(tokenizer: Any) -> None:
    plain = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
    template = with_template(tokenizer, plain)
    assert template.end_of_turn is None
    assert template.stops_after_reply() == "other_stop_token"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{% for m in messages %}{{ m.content.split('x')[5] }}{% endfor %}", "an empty text"),
        ("{% for m in messages %}{{ m.contents }}.{% endfor %}", "nothing of what a user says"),
        ("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", "cannot be rendered"),
        ("{% for m in messages %}{{ m.content }", "cannot be rendered"),
        ("{{ messages[7].content.foo.bar }}", "cannot be rendered"),
        ("{{ 1 // 0 }}", "cannot be rendered: integer division or modulo by zero"),
        ("{{ raise_exception('only one turn') }}", "cannot be rendered: only one turn"),
        ("{{ m() }}", "cannot be rendered"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "cannot be rendered"),
        ({"rag": CHATML, "tool_use": CHATML}, "cannot be rendered"),
        (7, "is not a text"),
    ],
)
def test_a_template_that_renders_nothing_plain_is_refused_at_once(
    tiny_target: Path, tmp_path: Path, text: Any, problem: str
) -> None:
    fields = json.loads((tiny_target / "tokenizer_config.json").read_text())
    if isinstance(text, dict):
        text = [{"name": name, "template": each} for name, each in text.items()]
    fields["chat_template"] = text
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    shutil.copy(tiny_target / "tokenizer.json", tmp_path)
    with pytest.raises(TemplateError, match=problem):
        load_template(tmp_path, source="tiny", system_prompt=None)


DATED = "{%- if x %}{% endif %}\n{{ strftime_now('%d %b %Y, %H:%M%%, %-d %q') }}\n" + CHATML


def test_dates_are_as_of_one_moment(
    tokenizer: Any, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What transformers renders at that moment."""
    moment = datetime(2024, 7, 6, 23, 5, tzinfo=UTC)

    class Then(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return moment.replace(tzinfo=None)

    dated = with_template(tokenizer, DATED)
    varied = dated.varied(system_prompt="Be kind.", kwargs={"x": True})
    assert dated.reads_clock and not template.reads_clock
    today = tokenizer.decode(dated.start("Hi"))
    dated.set_clock(moment.astimezone(timezone(timedelta(hours=14))))
    ours = [tokenizer.decode(each.start("Hi")) for each in (dated, varied)]
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Then)
    user, system = ({"role": "user", "content": "Hi"}, {"role": "system", "content": "Be kind."})
    assert ours == [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more)
        for messages, more in (([user], {}), ([system, user], {"x": True}))
    ]
    assert ours[0].startswith("06 Jul 2024, 23:05%, 6 %q\n<|im_start|>") and today != ours[0]


@pytest.mark.parametrize(
    "text", ["  {% if true %}{{ 1 }}{% endif %}", "\n\n  {{ 1 }}", "{#- a #}\n b"]
)
def test_a_fixed_clock_changes_nothing_else(tokenizer: Any, text: str) -> None:
    rest = "{{ '' if true else strftime_now('%d') }}" + CHATML
    template = with_template(tokenizer, text + rest)
    before = template.start("Hi")
    template.set_clock(datetime.now(UTC))
    assert template.start("Hi") == before


def test_variables_choose_a_mode_and_must_exist(tokenizer: Any) -> None:
    thinking = CHATML.replace(
        "assistant\n{% endif %}", "assistant\n{% if enable_thinking %}<think>{% endif %}{% endif %}"
    )
    on, off = (with_template(tokenizer, thinking, enable_thinking=value) for value in (True, False))
    assert tokenizer.decode(on.start("Hi")).endswith("assistant\n<think>")
    assert tokenizer.decode(off.start("Hi")).endswith("assistant\n")
    message = r"target\.chat_template_kwargs\.enable_thinkin: the chat template reads no variable"
    with pytest.raises(TemplateError, match=message):
        with_template(tokenizer, thinking, enable_thinkin=True)


def test_the_contract_holds_the_variables(tiny_target: Path) -> None:
    plain = TargetSection(source=str(tiny_target))
    thinking = plain.model_copy(update={"chat_template_kwargs": {"enable_thinking": True}})
    target, other = (open_target(section).contract for section in (plain, thinking))
    made_for = r'made for a target with chat_template_kwargs \{"enable_thinking":true\}'
    with pytest.raises(ContractMismatch, match=rf"contract\.chat_template_kwargs: {made_for}"):
        match_contracts(target, other, where="manifest.json")


def test_the_system_prompt_comes_first_and_a_conversation_s_own_replaces_it(
    tokenizer: Any,
) -> None:
    template = ChatTemplate(tokenizer, source="tiny", system_prompt="Be kind.")
    for system, written in ((None, "Be kind."), ("Be brief.", "Be brief.")):
        text = tokenizer.decode(template.start("Hi", system=system))
        assert text.startswith(f"<|im_start|>system\n{written}<|im_end|>")
        assert text.count("Be ") == 1
