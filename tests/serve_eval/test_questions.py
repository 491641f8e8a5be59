"""Evaluation prompts as the target reads them."""

from __future__ import annotations

from pathlib import Path

from pipeline.records import Prompt
from pipeline.serve_eval.questions import first_question
from pipeline.target.template import load_template


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
