"""Evaluation prompts, one decodable question for each of their turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config import RunConfig, SourceSpec
from pipeline.decoder.request import Completion
from pipeline.errors import ConfigError
from pipeline.prompts import balanced, load_prompts
from pipeline.records import Prompt
from pipeline.target.template import ChatTemplate


@dataclass(frozen=True)
class Question:
    """One user turn in its context: the ids up to the opening of the reply."""

    request_id: str
    category: str
    context: tuple[int, ...]
    source: str = ""
    turn: int = 1

    @property
    def prompt(self) -> str:
        """The id of the prompt that it is a turn of: that of its first turn."""
        return self.request_id.removesuffix(f"#{self.turn}") if self.turn > 1 else self.request_id


def read_prompts(config: RunConfig) -> tuple[list[Prompt], list[Prompt]]:
    """What is measured of `eval.prompts`, when set, otherwise of `eval.sources`; and all others.

    At most `eval.max_prompts` are measured, even over categories. Raises ConfigError without any.
    """
    section = config.eval
    sources = (SourceSpec(source=section.prompts),) if section.prompts else section.sources
    if not sources:
        raise ConfigError(
            "no evaluation prompts",
            where="eval.sources",
            fix="set eval.prompts=FILE.jsonl, or list sources as in configs/demo.yaml",
        )
    prompts = load_prompts(sources, seed=config.run.seed)
    measured = balanced(prompts, section.max_prompts, config.run.seed)
    names = {(prompt.source, prompt.sample_id) for prompt in measured}
    return measured, [each for each in prompts if (each.source, each.sample_id) not in names]


def first_question(prompt: Prompt, template: ChatTemplate) -> Question:
    """The prompt's first turn. Raises TemplateError for tools that the template does not know."""
    context = tuple(_with_tools(template, prompt).start(prompt.turns[0], system=prompt.system))
    name = f"{prompt.source}/{prompt.sample_id}"
    return Question(name, prompt.category, context, prompt.source)


def next_question(
    question: Question, reply: Completion, prompt: Prompt, turn: int, template: ChatTemplate
) -> Question:
    """Turn number `turn` (from 1), in the context of the target's own reply to the one before."""
    closed = reply.finish_reason == "stop"
    followed = follow_up(prompt, turn, template, closed=closed)
    context = (*question.context, *reply.token_ids, *followed)
    name = f"{prompt.source}/{prompt.sample_id}#{turn + 1}"
    return Question(name, prompt.category, context, prompt.source, turn + 1)


def follow_up(prompt: Prompt, turn: int, template: ChatTemplate, *, closed: bool) -> list[int]:
    """Ids of turn number `turn` (from 1) behind a reply; `closed`: that has its end token."""
    by_tool = turn in prompt.tool_turns
    template = _with_tools(template, prompt)
    return template.follow(prompt.turns[turn], closed=closed, system=prompt.system, by_tool=by_tool)


def fill_context(questions: Sequence[tuple[int, ...]], index: int, context: int) -> tuple[int, ...]:
    """Question number `index` behind as much of the others as makes `context` tokens."""
    tokens = list(questions[index])[-context:]
    others = (questions[(index + step) % len(questions)] for step in range(1, 10**6))
    while len(tokens) < context:
        tokens = [*next(others), *tokens][-context:]
    return tuple(tokens)


def _with_tools(template: ChatTemplate, prompt: Prompt) -> ChatTemplate:
    return template.varied(tools=json.loads(prompt.tools)) if prompt.tools else template
