"""Evaluation prompts as the target reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import parse
from pipeline.errors import TemplateError
from pipeline.records import Prompt
from pipeline.serve_eval.questions import first_question, follow_up
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
    followed = template.text(follow_up(prompt, 1, template, closed=True), special=True)
    assert followed.startswith("\n<|im_start|>tool\n4 degrees<|im_end|>")


def test_the_longest_conversation_has_its_own_system_prompt(tiny_target: Path) -> None:
    """The cache is as long as the longest needs."""
    template = load_template(tiny_target, source=str(tiny_target), system_prompt=None)
    tree = {"target": {"source": str(tiny_target)}, "eval": {"max_new_tokens": 5, "max_turns": 2}}
    prompt = Prompt(sample_id="1", source="s", license="MIT", category="c", turns=("Hi", "Why?"))
    long = prompt.model_copy(update={"system": "word " * 50})
    lengths = [_tokens(each, parse(tree), template) for each in (prompt, long)]
    assert lengths[1] > lengths[0] + 50
    first = len(template.start("Hi", system=long.system))
    assert lengths[1] == first + len(template.follow("Why?", closed=False)) + 10
