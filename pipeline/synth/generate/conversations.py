"""Conversations, grown turn by turn: the target answers each user turn in its own context.

    batches     shard 0              shard 1               …      taken when a slot has nothing to do
    requests    0.0 0.1 0.2 … 0.0'   0.3 1.0 …                    ' is a second turn: it goes first
    replies     in any order
    finished    a batch is handed on once its last conversation has ended

A reply's token ids enter the sample as they were generated. A conversation ends where its turns end,
where a reply hit the length limit (a cut-off reply is no context for another turn), where the next
turn would make the prompt too long, or where the template would change what has been said.
A reply depends on its own context and seed, not on what is answered beside it or before it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pipeline.config import SynthSection
from pipeline.decoder.request import Request
from pipeline.errors import TargetError
from pipeline.records import Message, Prompt, Sample, SamplingParams, Span, digest
from pipeline.target.template import ChatTemplate

_SEED_BITS = 31

#: The next request, or None while there is none. After more replies there may be some again.
Take = Callable[[], Request | None]


@dataclass(frozen=True)
class Reply:
    """What came back for one request: generated ids, a reason to leave it out, or an error that stops the run."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: Literal["stop", "length"] = "stop"
    exact: bool = True  # False: the server gave text, which was tokenised again and checked
    rejected: str | None = None
    error: tuple[str, str] | None = None  # what is wrong, and what to do


class Answer(Protocol):
    """A generator: takes requests until there are none and everything taken is answered."""

    def __call__(self, take: Take) -> Iterator[Reply]: ...


@dataclass
class Conversation:
    """One prompt while it is being answered."""

    prompt: Prompt
    sampling: SamplingParams
    seed: int
    ids: list[int]  # everything the target has read or generated so far
    spans: list[Span] = field(default_factory=list)  # where in `ids` the generated tokens are
    replies: list[str] = field(default_factory=list)  # the same as text
    finish_reason: Literal["stop", "length"] = "stop"
    exact: bool = True

    def take(self, reply: Reply, text: str) -> None:
        """Append generated ids."""
        self.spans.append(Span(start=len(self.ids), end=len(self.ids) + len(reply.token_ids)))
        self.ids.extend(reply.token_ids)
        self.replies.append(text)
        self.finish_reason, self.exact = reply.finish_reason, self.exact and reply.exact

    def forget_reply(self) -> None:
        """Remove the last reply; the question in front of it is cut with the conversation's end."""
        self.spans.pop()
        self.replies.pop()
        self.finish_reason = "stop"

    @property
    def supervised(self) -> int:
        return sum(span.end - span.start for span in self.spans)


@dataclass
class PromptBatch:
    """Prompts that are stored together, and what became of them."""

    name: str
    prompts: Sequence[Prompt]
    samples: list[Sample] = field(default_factory=list)  # in the order of the prompts
    rejected: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)  # why the kept conversations are no longer


@dataclass
class _Open:
    """A batch under way."""

    batch: PromptBatch
    outcomes: dict[int, Sample]  # place among the prompts → its sample
    remaining: int


class Generator:
    """The target as a partner in conversation, under the run's sampling settings."""

    def __init__(
        self, section: SynthSection, template: ChatTemplate, answer: Answer, *, seed: int, name: str
    ) -> None:
        self._section, self._template, self._answer = section, template, answer
        self._seed, self._name = seed, name

    def converse(
        self, batches: Iterable[tuple[str, Sequence[Prompt]]], *, across: bool = True
    ) -> Iterator[PromptBatch]:
        """Batches as they are finished; every prompt is a sample or counted.

        `across`: begin a batch while replies to others are still being generated. Otherwise a batch
        is generated alone, which makes its replies repeatable even where they depend on their neighbours.
        """
        return _Desk(self, iter(batches), across).work(self._answer)

    def open(self, prompt: Prompt) -> Conversation:
        """The conversation up to the opening of the first reply."""
        # From the prompt, not from its place in the run: the same prompt draws the same reply.
        seed = int(digest([self._seed, prompt.source, prompt.sample_id]), 16) % 2**_SEED_BITS
        return Conversation(
            prompt,
            self._sampling(prompt),
            seed,
            self._template.start(prompt.turns[0], system=prompt.system),
        )

    def fits(self, conversation: Conversation) -> bool:
        """Whether the first turn can be answered at all."""
        return len(conversation.ids) <= self._section.max_prompt_tokens

    def request(self, request_id: str, conversation: Conversation) -> Request:
        """Ask for the next reply."""
        sampling = conversation.sampling
        return Request(
            request_id=request_id,
            prompt_ids=tuple(conversation.ids),
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=(conversation.seed + len(conversation.replies)) % 2**_SEED_BITS,
            stop_ids=self._template.stop_ids,
        )

    def hear(self, conversation: Conversation, reply: Reply) -> str | None:
        """Take the reply. Returns why the conversation ends, or None: its next turn is then appended.

        Raises TargetError when the target could not answer.
        """
        prompt = conversation.prompt
        if reply.error is not None:
            raise TargetError(
                reply.error[0],
                where=f"prompt {prompt.sample_id} of {prompt.source}",
                fix=reply.error[1],
            )
        if reply.rejected is not None:
            return reply.rejected
        conversation.take(reply, self._template.text(reply.token_ids))
        if reply.finish_reason == "length":
            return "length"
        return self._ask_next(conversation)

    def _ask_next(self, conversation: Conversation) -> str | None:
        """Append the next user turn if it can be answered; otherwise why not."""
        turns, answered, system = (
            conversation.prompt.turns,
            len(conversation.replies),
            conversation.prompt.system,
        )
        if answered >= min(len(turns), self._section.max_turns):
            return "complete"
        if conversation.ids[-1] != self._template.end_of_turn:
            return "other_stop_token"  # a server would render the usual one in its place
        said = [
            self._template.text(conversation.ids[span.start : span.end - 1], special=True)
            for span in conversation.spans
        ]
        if not self._template.keeps(turns[: answered + 1], said, system=system):
            return "template_rewrites"
        following = self._template.follow(turns[answered], closed=True, system=system)
        if len(conversation.ids) + len(following) > self._section.max_prompt_tokens:
            return "prompt_too_long"
        conversation.ids.extend(following)
        return None

    def close(self, conversation: Conversation, reason: str) -> Sample | str:
        """The finished conversation as a sample, or the reason to leave it out."""
        if reason == "length" and self._section.on_length == "drop":
            conversation.forget_reply()
        if not conversation.replies:
            return reason
        if conversation.supervised < self._section.min_new_tokens:
            return "too_short"
        prompt, end = conversation.prompt, conversation.spans[-1].end
        return Sample(
            prompt_id=prompt.sample_id,
            source=prompt.source,
            license=prompt.license,
            category=prompt.category,
            messages=tuple(self._messages(conversation)),
            token_ids=tuple(conversation.ids[:end]),
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
        """The run's settings, with those of the prompt's source in front."""
        section = self._section
        settings = {
            "temperature": section.temperature,
            "top_p": section.top_p,
            "top_k": section.top_k,
        }
        chosen = prompt.sampling.model_dump(exclude_none=True) if prompt.sampling else {}
        return SamplingParams.model_validate(
            {**settings, **chosen, "max_new_tokens": section.max_new_tokens}
        )


class _Desk:
    """Where conversations wait for their next reply."""

    def __init__(
        self, generator: Generator, batches: Iterator[tuple[str, Sequence[Prompt]]], across: bool
    ) -> None:
        self._generator, self._batches, self._across = generator, batches, across
        self._open: dict[str, _Open] = {}
        self._waiting: deque[tuple[str, int, Conversation]] = deque()  # batch, place in it
        self._asked: dict[str, tuple[str, int, Conversation]] = {}  # by request id
        self._finished: deque[PromptBatch] = deque()

    def work(self, answer: Answer) -> Iterator[PromptBatch]:
        """Everything, from the first request to the last finished batch."""
        for reply in answer(self._take):
            name, place, conversation = self._asked.pop(reply.request_id)
            reason = self._generator.hear(conversation, reply)
            if reason is None:
                self._waiting.appendleft((name, place, conversation))  # older batches finish first
            else:
                self._close(name, place, conversation, reason)
            yield from self._hand_on()
        yield from self._hand_on()
        assert not (self._asked or self._waiting or self._open), "a request was left unanswered"

    def _take(self) -> Request | None:
        while not self._waiting:
            if not self._open_batch():
                return None
        entry = self._waiting.popleft()
        name, place, conversation = entry
        id = f"{name}/{place}/{len(conversation.replies)}"
        self._asked[id] = entry
        return self._generator.request(id, conversation)

    def _open_batch(self) -> bool:
        if self._open and not self._across:
            return False
        taken = next(self._batches, None)
        if taken is None:
            return False
        name, prompts = taken
        conversations = [self._generator.open(prompt) for prompt in prompts]
        self._open[name] = _Open(PromptBatch(name, prompts), {}, len(prompts))
        for place, conversation in enumerate(conversations):
            if self._generator.fits(conversation):
                self._waiting.append((name, place, conversation))
            else:
                self._close(name, place, conversation, "prompt_too_long")
        if not prompts:
            self._finish(name)
        return True

    def _close(self, name: str, place: int, conversation: Conversation, reason: str) -> None:
        opened, outcome = self._open[name], self._generator.close(conversation, reason)
        if isinstance(outcome, str):
            opened.batch.rejected[outcome] += 1
        else:
            opened.outcomes[place] = outcome
            opened.batch.ended[reason] += 1
        opened.remaining -= 1
        if not opened.remaining:
            self._finish(name)

    def _finish(self, name: str) -> None:
        opened = self._open.pop(name)
        opened.batch.samples.extend(opened.outcomes[place] for place in sorted(opened.outcomes))
        self._finished.append(opened.batch)

    def _hand_on(self) -> Iterator[PromptBatch]:
        while self._finished:
            yield self._finished.popleft()
