"""Conversations, turn by turn, and the scheduler that keeps many of them in flight.

    token_ids   <sys>… <user> 2+2? <assistant> 4 <end> <user> Why? <assistant> Because… <end>
                └─────── first prompt ───────┘ └reply┘ └───── next turn ─────┘ └── reply ───┘

A request's prompt is everything before the reply. A reply's token ids enter the sample as they
were generated. A conversation ends where its turns end, where a reply hit the length limit (a
truncated reply is no context for another turn), where the next turn would make the prompt too long,
where the template would not continue it (see `ChatTemplate.follow`), or where a tool's answer comes
next and no tool was called:

    turns       Weather in Oslo?                       {"celsius": 4}          And in Rome?
    replies                       <tool_call>…<end>                  4 °C.<end>
    supervised                    └───────────────┘                  └───────┘

A reply depends on its own context and seed, not on what is generated beside it or before it. With
`synth.mix` each prompt falls into a variant, by a number drawn from its source and id:

    shares   2 concise │ 1 thinking │ 1 warm
             0 ─────────────── 0.5 ─────── 0.75 ─── 1

The scheduler works batch by batch of prompts:

    batches     shard 0              shard 1               …      opened when no turn is waiting
    requests    0.0 0.1 0.2 … 0.0'   0.3 1.0 …                    ' is a second turn: it goes first
    replies     in any order
    finished    a batch is yielded once its last conversation has ended
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

from pipeline.config import SynthSection
from pipeline.decoder.request import Request
from pipeline.errors import TargetError, TemplateError
from pipeline.records import Message, Prompt, Sample, SamplingOverride, SamplingParams, Span, digest
from pipeline.synth.generate.backend import GeneratorBackend, Reply
from pipeline.target.template import ChatTemplate

_SEED_BITS = 31
#: How today's models begin the call of a tool.
_TOOL_CALL = re.compile(
    r"<tool_call>|<function=|\[TOOL_CALLS\]|<\|python_(?:tag|start)\|>"
    r"|<\|tool_calls?(?:_section)?(?:_begin|_start)?\|>"  # Granite 3, Phi-4-mini, Kimi, LFM
    r"|<｜tool▁calls?▁begin｜>|\bto=functions\.\w|<\|START_ACTION\|>"  # noqa: RUF001  DeepSeek, gpt-oss, Command R7B
    r"|\A\s*[\[{][\s\S]*\"(?:name|function)\"\s*:[\s\S]*\"(?:arguments|parameters)\"\s*:"
    r"|\A\s*\[\s*[A-Za-z_][\w.]*\([\s\S]*\)\s*\]\s*\Z"  # Llama 4, as Python writes it
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


_DRAWS = 2**32


@dataclass(frozen=True)
class Variant:
    """How a part of the prompts is asked. Its name is None where there is no mix."""

    name: str | None
    share: float
    system_prompt: str | None
    template: ChatTemplate
    sampling: SamplingOverride | None


def variants_of(section: SynthSection, template: ChatTemplate) -> tuple[Variant, ...]:
    """Of a run whose own template is `template`. Raises TemplateError for unknown variables."""
    if not section.mix:
        return (Variant(None, 1.0, section.system_prompt, template, None),)
    return tuple(
        Variant(
            spec.name,
            spec.share,
            spec.system_prompt or section.system_prompt,
            template.varied(
                system_prompt=spec.system_prompt,
                kwargs=spec.chat_template_kwargs,
                where=f"synth.mix.{spec.name}",
            ),
            spec.sampling,
        )
        for spec in section.mix
    )


def pick(variants: Sequence[Variant], drawn: int) -> Variant:
    """By shares, evenly over many numbers `drawn`."""
    ends = list(accumulate(variant.share for variant in variants))
    at = drawn % _DRAWS / _DRAWS * ends[-1]
    return next(variant for variant, end in zip(variants, ends, strict=True) if at < end)


@dataclass
class PromptBatch:
    """Prompts that are stored together, and what became of them."""

    name: str
    unfinished: int  # conversations that have not ended
    by_position: dict[int, Sample] = field(default_factory=dict)  # position among the prompts
    rejected: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)  # why the kept conversations are no longer

    @property
    def samples(self) -> list[Sample]:
        """In the order of the prompts."""
        return [sample for _, sample in sorted(self.by_position.items())]


class _Turn(NamedTuple):
    """A conversation whose next reply is wanted."""

    batch: PromptBatch
    position: int  # of its prompt in the batch
    conversation: Conversation


class ConversationScheduler:
    """Runs the conversations of all batches. Every prompt becomes a sample or is counted.

    `across_shards`: open a batch while replies to others are still being generated. Otherwise a
    batch is generated alone, and its replies can be repeated even where the backend is not
    batch-invariant. `advance` is given how many conversations have ended since it was last called.
    """

    def __init__(
        self,
        runner: ConversationRunner,
        batches: Iterable[tuple[str, Sequence[Prompt]]],
        *,
        across_shards: bool = True,
        advance: Callable[[int], None] = lambda ended: None,
    ) -> None:
        self._runner, self._batches, self._across_shards = runner, iter(batches), across_shards
        self._advance = advance
        self._waiting: deque[_Turn] = deque()
        self._running: dict[str, _Turn] = {}  # by request id
        self._open_batches = 0
        self._finished: deque[PromptBatch] = deque()

    def run(self, backend: GeneratorBackend) -> Iterator[PromptBatch]:
        """Batches as they are finished, from the first request to the last reply."""
        for reply in backend.generate(self._next_request):
            turn = self._running.pop(reply.request_id)
            reason = self._runner.add_reply(turn.conversation, reply)
            if reason is None:
                self._waiting.appendleft(turn)  # older batches finish first
            else:
                self._close(turn, reason)
            yield from self._take_finished()
        yield from self._take_finished()
        assert not (self._running or self._waiting or self._open_batches), "a request got no reply"

    def _next_request(self) -> Request | None:
        while not self._waiting:
            if not self._open_batch():
                return None
        turn = self._waiting.popleft()
        request_id = f"{turn.batch.name}/{turn.position}/{len(turn.conversation.replies)}"
        self._running[request_id] = turn
        return self._runner.request(request_id, turn.conversation)

    def _open_batch(self) -> bool:
        """Queue the conversations of the next batch, if there is one and it may be opened now."""
        if self._open_batches and not self._across_shards:
            return False
        name, prompts = next(self._batches, (None, ()))
        if name is None:
            return False
        batch = PromptBatch(name, unfinished=len(prompts))
        self._open_batches += 1
        for position, prompt in enumerate(prompts):
            opened = self._runner.open(prompt)
            if isinstance(opened, str):
                self._end(batch, rejected=opened)
            else:
                self._waiting.append(_Turn(batch, position, opened))
        if not prompts:
            self._finish(batch)
        return True

    def _close(self, turn: _Turn, reason: str) -> None:
        batch, outcome = turn.batch, self._runner.close(turn.conversation, reason)
        if isinstance(outcome, str):
            self._end(batch, rejected=outcome)
        else:
            batch.by_position[turn.position] = outcome
            batch.ended[reason] += 1
            self._end(batch)

    def _end(self, batch: PromptBatch, *, rejected: str | None = None) -> None:
        """One conversation less is under way, or was not begun."""
        if rejected:
            batch.rejected[rejected] += 1
        batch.unfinished -= 1
        self._advance(1)
        if not batch.unfinished:
            self._finish(batch)

    def _finish(self, batch: PromptBatch) -> None:
        self._open_batches -= 1
        self._finished.append(batch)

    def _take_finished(self) -> Iterator[PromptBatch]:
        while self._finished:
            yield self._finished.popleft()
