"""Conversations grow by token ids; no reply is tokenised twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.config import TargetSection
from pipeline.errors import ContractMismatch, TemplateError
from pipeline.records import match_contracts
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
    end = tokenizer.eos_token_id
    reply = [*tokenizer("It is 4.")["input_ids"], end]
    grown = [*template.start("2+2?"), *reply, *template.follow("Why?", closed=True)]
    turns = [("user", "2+2?"), ("assistant", "It is 4."), ("user", "Why?")]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert tokenizer.decode(grown) == whole
    assert template.stop_ids == (end,)


def test_a_reply_that_was_cut_is_closed_by_the_template(
    template: ChatTemplate, tokenizer: Any
) -> None:
    closing = template.follow("Why?", closed=False)
    assert closing[0] == tokenizer.eos_token_id
    assert closing[1:] == template.follow("Why?", closed=True)


def test_the_system_prompt_comes_first(tokenizer: Any) -> None:
    ids = ChatTemplate(tokenizer, source="tiny", system_prompt="Be kind.").start("Hi")
    assert tokenizer.decode(ids).startswith("<|im_start|>system\nBe kind.<|im_end|>")


def test_special_tokens_are_shown_only_on_request(template: ChatTemplate) -> None:
    ids = template.start("Hi")
    assert "<|im_start|>" not in template.text(ids)
    assert "<|im_start|>" in template.text(ids, special=True)


def test_no_template(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    message = r"target\.source=tiny: the target's tokenizer has no chat template"
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(tokenizer, source="tiny")


def test_a_template_that_rewrites_earlier_turns_is_refused_for_further_turns(
    tokenizer: Any,
) -> None:
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    )
    template = ChatTemplate(tokenizer, source="tiny")
    assert tokenizer.decode(template.start("Hi")) == "1[Hi]"
    with pytest.raises(TemplateError, match=r"rewrites earlier turns.*max_turns=1"):
        template.follow("Why?", closed=True)


def test_a_template_that_fails_is_explained(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('only one turn') }}"
    with pytest.raises(TemplateError, match="cannot be rendered: only one turn"):
        ChatTemplate(tokenizer, source="tiny").start("Hi")


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
def test_check_turns_refuses_templates_that_change_earlier_turns(
    tokenizer: Any, what: str, template: str
) -> None:
    with pytest.raises(TemplateError, match=r"rewrites earlier turns.*synth\.max_turns=1"):
        with_template(tokenizer, template).check_turns()


def test_check_turns_passes_other_templates(template: ChatTemplate, tokenizer: Any) -> None:
    template.check_turns()
    trimming = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
    with_template(tokenizer, trimming).check_turns()
    assert template.keeps(["a", "b"], [" spaced out \n"])


def test_a_template_without_an_end_of_turn_token_serves_single_turns_only(tokenizer: Any) -> None:
    plain = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
    template = with_template(tokenizer, plain)
    assert template.end_of_turn is None
    with pytest.raises(TemplateError, match=r"writes no end-of-turn token.*max_turns=1"):
        template.check_turns()


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


def test_a_conversation_s_own_system_prompt(tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer, source="tiny", system_prompt="Be kind.")
    text = tokenizer.decode(template.start("Hi", system="Be brief."))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert "kind" not in text
