"""Whether samples hold the ids that a server would read: their messages rendered once more.

    messages    system, user, assistant, user, assistant
    token_ids   <sys>… <user> 2+2? <assistant> 4 <end> <user> Why? <assistant> Because… <end>
                └────── one rendering ───────┘ └──┘    └─ cut out of ─┘        generated
                                             generated   the whole one

Prompts and what stands between replies must be what the chat template gives for these messages
today; replies are the target's own and stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pipeline.errors import DataError, TemplateError
from pipeline.records import Manifest, Sample, Span
from pipeline.target.template import ChatTemplate

#: Samples of a shard that are rendered again, evenly spread.
_RENDERED = 32


class Rendering:
    """The template as synth used it, from what synth's manifest says."""

    def __init__(self, template: ChatTemplate, parent: Manifest) -> None:
        """`template` is the target's, without a system prompt: samples hold their own."""
        facts = parent.details.get("template")
        clock = (facts or {}).get("clock")
        # Samples of older versions name neither the template's variables nor the clock it read.
        self._known = facts is not None and (bool(clock) or not template.reads_clock)
        if clock:
            template.set_clock(datetime.fromisoformat(clock))
        self._template = template
        mix = parent.details.get("sampling", {}).get("mix") or ()
        self._variants = {each["name"]: each.get("chat_template_kwargs") or {} for each in mix}

    def check(self, samples: Sequence[Sample]) -> int:
        """How many samples were rendered. Raises DataError for the first of other ids."""
        if not self._known or not samples:
            return 0
        chosen = samples[:: -(-len(samples) // _RENDERED)]
        for sample in chosen:
            if problem := self._problem(sample):
                raise DataError(
                    problem,
                    where=f"sample {sample.sample_id} of {sample.source}",
                    fix="the target's tokenizer or chat template is another than synth used, or an "
                    "older version tokenised the turns one by one; make the samples again with "
                    "`eagle3 synth --force`",
                )
        return len(chosen)

    def _problem(self, sample: Sample) -> str:
        roles = [message.role for message in sample.messages]
        system = sample.messages[0].content if roles[:1] == ["system"] else None
        asked = [each for each in sample.messages if each.role in ("user", "tool")]
        turns = [message.content for message in asked]
        tool_turns = [number for number, each in enumerate(asked) if each.role == "tool"]
        spans = sample.supervised
        try:
            template = self._template_of(sample)
            first = template.start(turns[0], system=system)
        except TemplateError as error:
            return f"its messages cannot be rendered again: {error.problem}"
        if tuple(first) != sample.token_ids[: spans[0].start]:
            return "its first prompt is not what the chat template gives for its messages"
        replies = [Span(start=span.start, end=span.end - 1) for span in spans]
        for number in range(1, len(spans)):
            before = sample.token_ids[: spans[number - 1].end]
            rendered = template.follow(
                *(turns[: number + 1], before, replies[:number]),
                system=system,
                tool_turns=tool_turns,
            )
            between = sample.token_ids[spans[number - 1].end : spans[number].start]
            if isinstance(rendered, str) or tuple(rendered) != between:
                return (
                    f"the ids between its replies {number} and {number + 1} are not those of the "
                    "whole conversation, rendered and tokenised at once"
                )
        return ""

    def _template_of(self, sample: Sample) -> ChatTemplate:
        kwargs: Mapping[str, Any] = self._variants.get(sample.variant, {})
        tools = json.loads(sample.tools) if sample.tools else ()
        if not kwargs and not tools:
            return self._template
        return self._template.varied(kwargs=kwargs, tools=tools)
