"""Evaluation prompts, one decodable question for each of their turns."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar

from pipeline.config import RunConfig, SourceSpec
from pipeline.console import notice
from pipeline.decoder.request import Completion
from pipeline.errors import ConfigError, TemplateError
from pipeline.prompts import balanced, load_prompts
from pipeline.records import Prompt, Span, Stage
from pipeline.store.manifest import read_begin, stage_location
from pipeline.target.template import ChatTemplate

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Question:
    """One user turn in its context: the ids up to the opening of the reply."""

    request_id: str
    category: str
    context: tuple[int, ...]
    source: str = ""
    turn: int = 1
    replies: tuple[Span, ...] = ()  # where in `context`, without their end tokens

    @property
    def prompt(self) -> str:
        """The id of the prompt that it is a turn of: that of its first turn."""
        return self.request_id.removesuffix(f"#{self.turn}") if self.turn > 1 else self.request_id


class LeftOut(NamedTuple):
    """A question that is not measured.

    prompt_too_long         there is no room for its reply
    tools_not_in_template   the prompt lists tools, which the chat template does not show
    not_rendered, template_rewrites, other_stop_token, not_aligned    as `ChatTemplate.follow`
    """

    request_id: str
    reason: str


def clock_of(config: RunConfig, *stages: Stage) -> datetime:
    """What time it was for the first of these stages of the run that says so; otherwise now."""
    for stage in stages:
        begun = read_begin(stage_location(config.run.uri, stage))
        if begun and begun.clock:
            return begun.clock
    return datetime.now(UTC)


def evaluation_sources(config: RunConfig) -> tuple[SourceSpec, ...]:
    """Of `eval.prompts`, when set, otherwise `eval.sources`. Raises ConfigError without any."""
    section = config.eval
    sources = (
        (SourceSpec(source=section.prompts),)
        if section.prompts
        else tuple(each.as_source() for each in section.sources)
    )
    if not sources:
        raise ConfigError(
            "no evaluation prompts",
            where="eval.sources",
            fix="set eval.prompts=FILE.jsonl, or list sources as in configs/demo.yaml",
        )
    return sources


def load_evaluation_prompts(config: RunConfig) -> tuple[list[Prompt], list[Prompt]]:
    """What is measured of `eval.prompts`, when set, otherwise of `eval.sources`; and all others.

    At most `eval.max_prompts` are measured, even over categories. Raises ConfigError without any.
    """
    section = config.eval
    prompts = load_prompts(evaluation_sources(config), seed=config.run.seed)
    measured = balanced(prompts, section.max_prompts, config.run.seed)
    names = {(prompt.source, prompt.sample_id) for prompt in measured}
    return measured, [each for each in prompts if (each.source, each.sample_id) not in names]


def readable(
    prompts: Sequence[Prompt], templates: Sequence[ChatTemplate]
) -> tuple[list[Prompt], list[LeftOut]]:
    """The prompts whose first turn all of the templates can render, and the others with a reason.

    Raises ConfigError where none is left.
    """
    rendered, left_out = list[Prompt](), list[LeftOut]()
    for prompt in prompts:
        reasons = [reason for each in templates if (reason := _unreadable(prompt, each))]
        if reasons:
            left_out.append(LeftOut(_name(prompt), reasons[0]))
        else:
            rendered.append(prompt)
    if left_out:
        counts = Counter(each.reason for each in left_out).most_common()
        reasons = [f"{reason} {count:,}" for reason, count in counts]
        notice("eval", f"{len(left_out):,} prompts are left out: {', '.join(reasons)}")
    if prompts and not rendered:
        problem = f"the chat template renders none of the {len(prompts):,} prompts"
        fix = "choose prompts without system prompts and tools that the template refuses"
        raise ConfigError(problem, where="eval.sources", fix=fix)
    return rendered, left_out


def first_question(prompt: Prompt, template: ChatTemplate) -> Question:
    """The prompt's first turn. Raises TemplateError for what the template does not render."""
    context = tuple(_with_tools(template, prompt).start(prompt.turns[0], system=prompt.system))
    return Question(_name(prompt), prompt.category, context, prompt.source)


def next_question(
    question: Question, reply: Completion, prompt: Prompt, turn: int, template: ChatTemplate
) -> Question | LeftOut:
    """Turn number `turn` (from 1), in the context of the target's own reply to the one before."""
    name = f"{_name(prompt)}#{turn + 1}"
    token_ids, start = (*question.context, *reply.token_ids), len(question.context)
    end = len(token_ids) - (reply.finish_reason == "stop")
    replies = (*question.replies, Span(start=start, end=end))
    followed = _with_tools(template, prompt).follow(
        *(prompt.turns[: turn + 1], token_ids, replies),
        system=prompt.system,
        tool_turns=prompt.tool_turns,
    )
    if isinstance(followed, str):
        return LeftOut(name, followed)
    context = (*token_ids, *followed)
    return Question(name, prompt.category, context, prompt.source, turn + 1, replies)


def longest_context(prompt: Prompt, turns: int, template: ChatTemplate) -> int:
    """Tokens of its first `turns` turns without those of replies, at least."""
    first = len(first_question(prompt, template).context)
    try:
        whole = _with_tools(template, prompt).count_tokens(
            prompt.turns[:turns], system=prompt.system, tool_turns=prompt.tool_turns
        )
    except TemplateError:  # the conversation ends before
        return first
    return max(first, whole)


def fill_context(questions: Sequence[tuple[int, ...]], index: int, context: int) -> tuple[int, ...]:
    """Question number `index` behind as much of the others as makes `context` tokens."""
    tokens = list(questions[index])[-context:]
    others = (questions[(index + step) % len(questions)] for step in range(1, 10**6))
    while len(tokens) < context:
        tokens = [*next(others), *tokens][-context:]
    return tuple(tokens)


def _name(prompt: Prompt) -> str:
    return f"{prompt.source}/{prompt.sample_id}"


def _unreadable(prompt: Prompt, template: ChatTemplate) -> str | None:
    try:
        template = _with_tools(template, prompt)
    except TemplateError:
        return "tools_not_in_template"
    try:
        template.start(prompt.turns[0], system=prompt.system)
    except TemplateError:
        return "not_rendered"
    return None


def _with_tools(template: ChatTemplate, prompt: Prompt) -> ChatTemplate:
    return template.varied(tools=json.loads(prompt.tools)) if prompt.tools else template


def evenly(values: Sequence[_Value], most: int) -> list[_Value]:
    """At most `most` of them, spread over all."""
    count = min(most, len(values))
    return [values[index * len(values) // count] for index in range(count)]
