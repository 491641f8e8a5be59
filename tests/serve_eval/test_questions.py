"""Evaluation prompts as the target reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import parse
from pipeline.decoder.request import Completion, Statistics
from pipeline.errors import ConfigError, TemplateError
from pipeline.records import Prompt
from pipeline.serve_eval.questions import (
    LeftOut,
    Question,
    first_question,
    next_question,
    readable,
)
from pipeline.serve_eval.stage import _tokens
from pipeline.target.template import load_template
from tests.conftest import CHATML


def test_a_prompts_own_system_prompt_stands_in_its_question(tiny_target: Path) -> None:
    template = load_template(tiny_target, source=str(tiny_target), system_prompt="Be brief.")
    plain = Prompt(
        sample_id="1", source="s", license="MIT", category="c", turns=("What is 1 plus 4?",)
    )
    asked = [
        template.text(first_question(prompt, template).context)
        for prompt in (plain, plain.model_copy(update={"system": "Be kind."}))
    ]
    assert "Be brief." in asked[0] and "Be kind." not in asked[0]
    assert "Be kind." in asked[1] and "Be brief." not in asked[1]


def test_tools_stand_in_the_question_and_their_answers_in_the_next(tiny_target: Path) -> None:
    template = load_template(tiny_target, source=str(tiny_target), system_prompt=None)
    prompt = Prompt(
        sample_id="1",
        source="s",
        license="MIT",
        category="c",
        turns=("Weather in Oslo?", "4 degrees"),
        tool_turns=(1,),
        tools='[{"name":"weather"}]',
    )
    with pytest.raises(TemplateError, match="reads no variable 'tools'"):
        first_question(prompt, template)
    shows_tools = "{{ tools | tojson if tools }}" + CHATML
    template._tokenizer.chat_template = shows_tools
    question = first_question(prompt, template)
    assert '[{"name": "weather"}]' in template.text(question.context)
    reply = Completion("", (*template.encode("Hm."), *template.stop_ids), "stop", Statistics())
    following = next_question(question, reply, prompt, 1, template)
    assert isinstance(following, Question)
    followed = following.context[len(question.context) + len(reply.token_ids) :]
    text = template.text(followed, special=True)
    assert text.startswith("\n<|im_start|>tool\n4 degrees<|im_end|>")


def test_the_longest_conversation_has_its_own_system_prompt(tiny_target: Path) -> None:
    """The cache is as long as the longest needs."""
    template = load_template(tiny_target, source=str(tiny_target), system_prompt=None)
    tree = {"target": {"source": str(tiny_target)}, "eval": {"max_new_tokens": 5, "max_turns": 2}}
    prompt = Prompt(sample_id="1", source="s", license="MIT", category="c", turns=("Hi", "Why?"))
    long = prompt.model_copy(update={"system": "word " * 50})
    lengths = [_tokens(each, parse(tree), template) for each in (prompt, long)]
    assert lengths[1] > lengths[0] + 50
    first = len(template.start("Hi", system=long.system))
    question = first_question(long, template)
    reply = Completion("", (9, 9, 9, 9, 9), "length", Statistics())
    following = next_question(question, reply, long, 1, template)
    assert isinstance(following, Question) and len(question.context) == first
    assert len(following.context) + 5 <= lengths[1] <= len(following.context) + 6


REFUSING = "{{ raise_exception('no system') if messages[0].role == 'system' }}" + CHATML


def test_prompts_that_the_template_refuses_are_left_out_by_reason(
    tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = load_template(tiny_target, source=str(tiny_target), system_prompt=None)
    template._tokenizer.chat_template = REFUSING
    plain = Prompt(sample_id="1", source="s", license="MIT", category="c", turns=("Hi",))
    system = plain.model_copy(update={"sample_id": "2", "system": "Be kind."})
    tools = plain.model_copy(update={"sample_id": "3", "tools": '[{"name":"f"}]'})
    kept, left_out = readable([system, plain, tools], [template])
    assert kept == [plain]
    assert left_out == [LeftOut("s/2", "not_rendered"), LeftOut("s/3", "tools_not_in_template")]
    told = capsys.readouterr()
    assert "2 prompts are left out: not_rendered 1, tools_not_in_template 1" in told.out + told.err
    with pytest.raises(ConfigError, match="the chat template renders none of the 1 prompts"):
        readable([system], [template])


def test_a_turn_that_the_template_rewrites_is_left_out(tiny_target: Path) -> None:
    template = load_template(tiny_target, source=str(tiny_target), system_prompt=None)
    prompt = Prompt(sample_id="1", source="s", license="MIT", category="c", turns=("Hi", "Why?"))
    reply = Completion("", (*template.encode("Hm."), *template.stop_ids), "stop", Statistics())
    template._tokenizer.chat_template = "{{ messages | length }}" + CHATML
    following = next_question(first_question(prompt, template), reply, prompt, 1, template)
    assert following == LeftOut("s/1#2", "template_rewrites")
