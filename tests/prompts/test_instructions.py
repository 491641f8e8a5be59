"""The demo's instructions: distinct, complete, licensed, and nobody's evaluation questions."""

from __future__ import annotations

from pipeline.config import SourceSpec
from pipeline.prompts import load_prompts
from pipeline.synth.filters import apply_steps, decontaminate
from tests.conftest import demo_prompts


def test_every_template_is_filled_and_no_prompt_comes_twice() -> None:
    prompts = load_prompts([SourceSpec(source=demo_prompts("instructions"))], seed=0)
    turns = [turn for prompt in prompts for turn in prompt.turns]
    ids, texts = {prompt.sample_id for prompt in prompts}, {prompt.turns for prompt in prompts}
    assert len(ids) == len(texts) == len(prompts) > 700
    assert not any("{" in turn or "|" in turn or not turn.strip() for turn in turns)
    assert {prompt.license for prompt in prompts} == {"Apache-2.0"}
    assert len({prompt.category for prompt in prompts}) >= 6
    assert any(len(prompt.turns) == 2 for prompt in prompts)


def test_none_of_them_is_an_evaluation_question() -> None:
    evaluation = load_prompts(
        [SourceSpec(source=demo_prompts(name)) for name in ("mt_bench", "human_eval")],
        seed=0,
    )
    prompts = load_prompts([SourceSpec(source=demo_prompts("instructions"))], seed=0)
    kept, rejected = apply_steps([*prompts, evaluation[0]], [decontaminate(evaluation)])
    assert kept == prompts
    assert rejected.total() == 1, "a planted evaluation question is found"
