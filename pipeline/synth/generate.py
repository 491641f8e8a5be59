"""Conversations, grown turn by turn: the target answers each user turn in its own context.

    turn 1   every conversation's first turn is one request; the engine batches them over its slots
    turn 2   those whose first reply ended by itself, each behind its own first reply
    …

A reply's token ids enter the sample as they were generated. A conversation ends early where a reply
hit the length limit (a cut-off reply is no context for another turn) or where the next turn would
make the prompt too long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pipeline.config import SynthSection
from pipeline.decoder.request import Completion, Request
from pipeline.errors import TargetError
from pipeline.records import Message, Prompt, Sample, Sampling, Span, digest
from pipeline.target.template import ChatTemplate

#: Requests in, completions out, in any order.
Answer = Callable[[Sequence[Request]], Iterable[Completion]]

_SEED_BITS = 31


@dataclass
class Conversation:
    """One prompt while it is being answered."""

    prompt: Prompt
    seed: int
    ids: list[int]  # everything the target has read or generated so far
    replies: list[Span] = field(default_factory=list)  # where in `ids` the generated tokens are
    closed: bool = False  # the last reply ends with an end-of-turn token

    def take(self, reply: Sequence[int], *, closed: bool) -> None:
        """Append generated ids."""
        self.replies.append(Span(start=len(self.ids), end=len(self.ids) + len(reply)))
        self.ids.extend(reply)
        self.closed = closed


class Generator:
    """The target as a partner in conversation, under the run's sampling settings."""

    def __init__(self, section: SynthSection, template: ChatTemplate, answer: Answer, *, seed: int, name: str) -> None:
        self._section, self._template, self._answer = section, template, answer
        self._seed, self._name = seed, name
        self.sampling = Sampling(temperature=section.temperature, top_p=section.top_p, top_k=section.top_k, max_new_tokens=section.max_new_tokens)

    def converse(self, prompts: Sequence[Prompt]) -> tuple[list[Sample], Counter[str]]:
        """One sample a prompt, in the order of the prompts; the others counted by reason."""
        rejected: Counter[str] = Counter()
        conversations = [self._open(prompt) for prompt in prompts]
        fitting = [conversation for conversation in conversations if len(conversation.ids) <= self._section.max_prompt_tokens]
        rejected["prompt_too_long"] = len(conversations) - len(fitting)
        waiting = fitting
        for _ in range(self._section.max_turns):
            self._reply_to(waiting)
            waiting = [conversation for conversation in waiting if self._ask_next(conversation)]
            if not waiting:
                break
        samples = [self._sample(conversation) for conversation in fitting]
        enough = [sample for sample in samples if _supervised(sample) >= self._section.min_new_tokens]
        rejected["too_short"] = len(samples) - len(enough)
        return enough, +rejected

    def _open(self, prompt: Prompt) -> Conversation:
        # From the prompt, not from its place in the run: the same prompt draws the same reply.
        seed = int(digest([self._seed, prompt.source, prompt.id]), 16) % 2**_SEED_BITS
        return Conversation(prompt, seed, self._template.start(prompt.turns[0]))

    def _reply_to(self, conversations: Sequence[Conversation]) -> None:
        requests = [self._request(index, conversation) for index, conversation in enumerate(conversations)]
        unanswered = {request.id for request in requests}
        for completion in self._answer(requests):
            unanswered.remove(completion.id)
            if completion.error is not None:
                prompt = conversations[int(completion.id)].prompt
                raise TargetError(completion.error.what, where=f"prompt {prompt.id} of {prompt.source}", fix=completion.error.fix)
            conversations[int(completion.id)].take(completion.token_ids, closed=completion.finish_reason == "stop")
        assert not unanswered, "the engine left requests unanswered"

    def _request(self, index: int, conversation: Conversation) -> Request:
        return Request(
            id=str(index),
            prompt_ids=tuple(conversation.ids),
            max_new_tokens=self._section.max_new_tokens,
            temperature=self._section.temperature,
            top_p=self._section.top_p,
            top_k=self._section.top_k,
            seed=(conversation.seed + len(conversation.replies)) % 2**_SEED_BITS,
            stop_ids=self._template.stop_ids,
        )

    def _ask_next(self, conversation: Conversation) -> bool:
        """Append the next user turn, if there is one and it can still be answered."""
        answered = len(conversation.replies)
        if not conversation.closed or answered >= min(len(conversation.prompt.turns), self._section.max_turns):
            return False
        following = self._template.follow(conversation.prompt.turns[answered], closed=conversation.closed)
        if len(conversation.ids) + len(following) > self._section.max_prompt_tokens:
            return False
        conversation.ids.extend(following)
        return True

    def _sample(self, conversation: Conversation) -> Sample:
        prompt = conversation.prompt
        return Sample(
            prompt_id=prompt.id,
            source=prompt.source,
            license=prompt.license,
            category=prompt.category,
            messages=tuple(self._messages(conversation)),
            token_ids=tuple(conversation.ids),
            supervised=tuple(conversation.replies),
            finish_reason="stop" if conversation.closed else "length",
            sampling=self.sampling,
            seed=conversation.seed,
            generator=self._name,
        )

    def _messages(self, conversation: Conversation) -> Iterator[Message]:
        if self._section.system_prompt:
            yield Message(role="system", content=self._section.system_prompt)
        for turn, reply in zip(conversation.prompt.turns, conversation.replies, strict=False):
            yield Message(role="user", content=turn)
            yield Message(role="assistant", content=self._template.text(conversation.ids[reply.start : reply.end]))


def _supervised(sample: Sample) -> int:
    return sum(span.end - span.start for span in sample.supervised)
