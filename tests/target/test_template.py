"""Conversations grow by token ids; no reply is tokenised twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import TemplateError
from pipeline.target.template import ChatTemplate, load_template


@pytest.fixture
def template(tiny_target: Path) -> ChatTemplate:
    return load_template(tiny_target, source="tiny", system_prompt=None)


@pytest.fixture
def tokenizer(tiny_target: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_target)


def test_a_grown_conversation_reads_like_the_rendered_one(template: ChatTemplate, tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    reply = [*tokenizer("It is 4.")["input_ids"], end]
    grown = [*template.start("2+2?"), *reply, *template.follow("Why?", closed=True)]
    turns = [("user", "2+2?"), ("assistant", "It is 4."), ("user", "Why?")]
    whole = tokenizer.apply_chat_template([{"role": role, "content": content} for role, content in turns], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(grown) == whole
    assert template.stop_ids == (end,)


def test_a_reply_that_was_cut_is_closed_by_the_template(template: ChatTemplate, tokenizer: Any) -> None:
    closing = template.follow("Why?", closed=False)
    assert closing[0] == tokenizer.eos_token_id
    assert closing[1:] == template.follow("Why?", closed=True)


def test_the_system_prompt_comes_first(tokenizer: Any) -> None:
    ids = ChatTemplate(tokenizer, source="tiny", system_prompt="Be kind.").start("Hi")
    assert tokenizer.decode(ids).startswith("<|im_start|>system\nBe kind.<|im_end|>")


def test_special_tokens_are_shown_only_on_request(template: ChatTemplate) -> None:
    ids = template.start("Hi")
    assert "<|im_start|>" not in template.text(ids) and "<|im_start|>" in template.text(ids, special=True)


def test_no_template(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match=r"target\.source=tiny: the target's tokenizer has no chat template"):
        ChatTemplate(tokenizer, source="tiny")


def test_a_template_that_rewrites_earlier_turns_is_refused_for_further_turns(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    template = ChatTemplate(tokenizer, source="tiny")
    assert tokenizer.decode(template.start("Hi")) == "1[Hi]"
    with pytest.raises(TemplateError, match=r"rewrites earlier turns.*max_turns=1"):
        template.follow("Why?", closed=True)


def test_a_template_that_fails_is_explained(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('only one turn') }}"
    with pytest.raises(TemplateError, match="cannot be rendered: only one turn"):
        ChatTemplate(tokenizer, source="tiny").start("Hi")
