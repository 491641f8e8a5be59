"""Conversations, grown turn by turn: the target replies to each user turn in its own context.

    token_ids   <sys>… <user> 2+2? <assistant> 4 <end> <user> Why? <assistant> Because… <end>
                └─────── first prompt ───────┘ └reply┘ └───── next turn ─────┘ └── reply ───┘

A request's prompt is everything in front of the reply. A reply's token ids enter the sample as they
were generated. A conversation ends where its turns end, where a reply hit the length limit (what is
cut off is no context for another turn), where the next turn would make the prompt too long, where
the template would not continue it (see `ChatTemplate.follow`), or where a tool's answer comes next
and no tool was called:

    turns       Weather in Oslo?                       {"celsius": 4}          And in Rome?
    replies                       <tool_call>…<end>                  4 °C.<end>
    supervised                    └───────────────┘                  └───────┘

A reply depends on its own context and seed, not on what is generated beside it or before it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from pipeline.config import SynthSection
from pipeline.decoder.request import Request
from pipeline.errors import TargetError, TemplateError
from pipeline.records import Message, Prompt, Sample, SamplingParams, Span, digest
from pipeline.synth.generate.backend import Reply
from pipeline.synth.generate.variants import Variant, pick, variants_of
from pipeline.target.template import ChatTemplate

_SEED_BITS = 31
#: How today's models begin the call of a tool.
_TOOL_CALL = re.compile(
    r"<tool_call>|<function=|\[TOOL_CALLS\]|<\|python_tag\|>"
    r"|\A\s*[\[{][\s\S]*\"(?:name|function)\"\s*:[\s\S]*\"(?:arguments|parameters)\"\s*:"
)


@dataclass
class Conversation:
    """One prompt and the replies to it so far."""

    prompt: Prompt
    variant: Variant
    template: ChatTemplate  # the variant's, with the prompt's tools
    sampling: SamplingParams
    seed: int
    token_ids: list[int]  # everything the target has read or generated so far
    spans: list[Span] = field(default_factory=list)  # where in `token_ids` the replies are
    replies: list[str] = field(default_factory=list)  # the same as text
    finish_reason: Literal["stop", "length"] = "stop"
    exact: bool = True

    def add_reply(self, reply: Reply, text: str) -> None:
        """Append generated ids."""
        start = len(self.token_ids)
        self.spans.append(Span(start=start, end=start + len(reply.token_ids)))
        self.token_ids.extend(reply.token_ids)
        self.replies.append(text)
        self.finish_reason, self.exact = reply.finish_reason, self.exact and reply.exact

    def drop_reply(self) -> None:
        """Remove the last reply; the question in front of it is cut with the conversation's end."""
        self.spans.pop()
        self.replies.pop()
        self.finish_reason = "stop"

    @property
    def supervised(self) -> int:
        """Generated tokens."""
        return sum(span.end - span.start for span in self.spans)


class ConversationRunner:
    """Opens, continues and closes conversations, under the run's sampling settings."""

    def __init__(
        self, section: SynthSection, template: ChatTemplate, *, seed: int, name: str
    ) -> None:
        self._section, self._template = section, template
        self._variants = variants_of(section, template)
        self._seed, self._name = seed, name

    def open(self, prompt: Prompt) -> Conversation | str:
        """The conversation up to the opening of the first reply, or why there is none."""
        # From the prompt, not from its position in the run: the same prompt draws the same reply.
        drawn = int(digest([self._seed, prompt.source, prompt.sample_id]), 16)
        variant = pick(self._variants, drawn // 2**_SEED_BITS)
        template = variant.template
        if prompt.tools:
            try:
                template = template.varied(tools=json.loads(prompt.tools))
            except TemplateError:
                return "tools_not_in_template"
        try:
            token_ids = template.start(prompt.turns[0], system=prompt.system)
        except TemplateError:
            return "not_rendered"
        if len(token_ids) > self._section.max_prompt_tokens:
            return "prompt_too_long"
        sampling = self._sampling(prompt, variant)
        return Conversation(prompt, variant, template, sampling, drawn % 2**_SEED_BITS, token_ids)

    def stops_after_reply(self) -> Counter[str]:
        """Why plain conversations of some variants end with their first reply."""
        reasons = (variant.template.stops_after_reply() for variant in self._variants)
        return Counter(reason for reason in reasons if reason)

    def request(self, request_id: str, conversation: Conversation) -> Request:
        """The request for the next reply."""
        sampling = conversation.sampling
        return Request(
            request_id=request_id,
            prompt_ids=tuple(conversation.token_ids),
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=(conversation.seed + len(conversation.replies)) % 2**_SEED_BITS,
            stop_ids=self._template.stop_ids,
        )

    def add_reply(self, conversation: Conversation, reply: Reply) -> str | None:
        """Why the conversation ends with this reply, or None: its next turn is then appended.

        Raises TargetError when the target could not reply.
        """
        if reply.error is not None:
            problem, fix = reply.error
            prompt = conversation.prompt
            raise TargetError(
                problem, where=f"prompt {prompt.sample_id} of {prompt.source}", fix=fix
            )
        if reply.rejected is not None:
            return reply.rejected
        conversation.add_reply(reply, self._template.text(reply.token_ids))
        return "length" if reply.finish_reason == "length" else self._add_turn(conversation)

    def _add_turn(self, conversation: Conversation) -> str | None:
        """Append the next user turn if there may be one; otherwise why not."""
        prompt, template = conversation.prompt, conversation.template
        turns, system, replied = prompt.turns, prompt.system, len(conversation.replies)
        if replied >= min(len(turns), self._section.max_turns):
            return "complete"
        # Without their end tokens, which every reply has that is not the last.
        replies = [Span(start=span.start, end=span.end - 1) for span in conversation.spans]
        if replied in prompt.tool_turns:
            called = conversation.token_ids[replies[-1].start : replies[-1].end]
            if not _TOOL_CALL.search(template.text(called, special=True)):
                return "no_tool_call"
        turn_ids = template.follow(
            *(turns[: replied + 1], conversation.token_ids, replies),
            system=system,
            tool_turns=prompt.tool_turns,
        )
        if isinstance(turn_ids, str):
            return turn_ids
        if len(conversation.token_ids) + len(turn_ids) > self._section.max_prompt_tokens:
            return "prompt_too_long"
        conversation.token_ids.extend(turn_ids)
        return None

    def close(self, conversation: Conversation, reason: str) -> Sample | str:
        """The finished conversation as a sample, or the reason to leave it out."""
        if reason == "length" and self._section.on_length == "drop":
            conversation.drop_reply()
        if not conversation.replies:
            return reason
        if conversation.supervised < self._section.min_new_tokens:
            return "too_short"
        prompt, end = conversation.prompt, conversation.spans[-1].end
        return Sample(
            sample_id=prompt.sample_id,
            source=prompt.source,
            license=prompt.license,
            category=prompt.category,
            messages=tuple(self._messages(conversation)),
            token_ids=tuple(conversation.token_ids[:end]),
            supervised=tuple(conversation.spans),
            finish_reason=conversation.finish_reason,
            sampling=conversation.sampling,
            seed=conversation.seed,
            generator=self._name if conversation.exact else f"{self._name}, re-tokenised",
            variant=conversation.variant.name,
            tools=prompt.tools,
        )

    def _messages(self, conversation: Conversation) -> Iterator[Message]:
        prompt, variant = conversation.prompt, conversation.variant
        if system := prompt.system or variant.system_prompt:
            yield Message(role="system", content=system)
        replied = zip(prompt.turns, conversation.replies, strict=False)
        for number, (turn, reply) in enumerate(replied):
            role: Literal["tool", "user"] = "tool" if number in prompt.tool_turns else "user"
            yield Message(role=role, content=turn)
            yield Message(role="assistant", content=reply)

    def _sampling(self, prompt: Prompt, variant: Variant) -> SamplingParams:
        """The run's settings, overridden by the variant's and those by the prompt's source."""
        names = ("temperature", "top_p", "top_k", "max_new_tokens")
        settings = {name: getattr(self._section, name) for name in names}
        for override in (variant.sampling, prompt.sampling):
            settings |= override.model_dump(exclude_none=True) if override else {}
        return SamplingParams.model_validate(settings)
