"""Conversations, grown turn by turn: the target replies to each user turn in its own context.

    token_ids   <sys>… <user> 2+2? <assistant> 4 <end> <user> Why? <assistant> Because… <end>
                └─────── first prompt ───────┘ └reply┘ └───── next turn ─────┘ └── reply ───┘

A request's prompt is everything in front of the reply. A reply's token ids enter the sample as they
were generated. A conversation ends where its turns end, where a reply hit the length limit (what is
cut off is no context for another turn), where the next turn would make the prompt too long, or
where the template would change earlier turns. A reply depends on its own context and seed, not on
what is generated beside it or before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from pipeline.config import SynthSection
from pipeline.decoder.request import Request
from pipeline.errors import TargetError
from pipeline.records import Message, Prompt, Sample, SamplingParams, Span, digest
from pipeline.synth.generate.backend import Reply
from pipeline.target.template import ChatTemplate

_SEED_BITS = 31


@dataclass
class Conversation:
    """One prompt and the replies to it so far."""

    prompt: Prompt
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
        self._seed, self._name = seed, name

    def open(self, prompt: Prompt) -> Conversation:
        """The conversation up to the opening of the first reply."""
        # From the prompt, not from its position in the run: the same prompt draws the same reply.
        seed = int(digest([self._seed, prompt.source, prompt.sample_id]), 16) % 2**_SEED_BITS
        token_ids = self._template.start(prompt.turns[0], system=prompt.system)
        return Conversation(prompt, self._sampling(prompt), seed, token_ids)

    def fits(self, conversation: Conversation) -> bool:
        """Whether the first turn is short enough to be generated for."""
        return len(conversation.token_ids) <= self._section.max_prompt_tokens

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
        turns, system = conversation.prompt.turns, conversation.prompt.system
        replied = len(conversation.replies)
        if replied >= min(len(turns), self._section.max_turns):
            return "complete"
        if conversation.token_ids[-1] != self._template.end_of_turn:
            return "other_stop_token"  # a server would render the usual one instead
        replies = [
            self._template.text(conversation.token_ids[span.start : span.end - 1], special=True)
            for span in conversation.spans
        ]
        if not self._template.keeps(turns[: replied + 1], replies, system=system):
            return "template_rewrites"
        turn_ids = self._template.follow(turns[replied], closed=True, system=system)
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
        )

    def _messages(self, conversation: Conversation) -> Iterator[Message]:
        system = conversation.prompt.system or self._section.system_prompt
        if system:
            yield Message(role="system", content=system)
        for turn, reply in zip(conversation.prompt.turns, conversation.replies, strict=False):
            yield Message(role="user", content=turn)
            yield Message(role="assistant", content=reply)

    def _sampling(self, prompt: Prompt) -> SamplingParams:
        """The run's settings, overridden by those of the prompt's source."""
        names = ("temperature", "top_p", "top_k", "max_new_tokens")
        settings = {name: getattr(self._section, name) for name in names}
        override = prompt.sampling.model_dump(exclude_none=True) if prompt.sampling else {}
        return SamplingParams.model_validate(settings | override)
