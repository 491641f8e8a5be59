"""Conversations → token ids, through the target's own chat template.

A multi-turn conversation is grown, never re-tokenised: the ids of a reply are those that were
generated, and only the text between two replies is rendered.

    start("2+2?")     <sys>…<end><user>2+2?<end><assistant>
    generated                                              4<end>
    follow("Why?")                                               \\n<user>Why?<end><assistant>

That is what a server would read only if the template, given the longer conversation, renders the
shorter one unchanged in front. `check_turns` tries it before a run, `keeps` for a conversation.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.errors import TargetError, TemplateError

# Private-use characters: no template gives them a meaning and no user types them.
_REPLY = "\ue000reply\ue001"
_TURNS = tuple(f"\ue000turn {number}\ue001" for number in range(1, 5))

_CANNOT_CONTINUE = "so a conversation cannot be continued token by token"


class ChatTemplate:
    """The target's template with the run's system prompt and template variables.

    A `system` given to a method takes the place of the run's.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        source: str,
        system_prompt: str | None = None,
        stop_ids: tuple[int, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        where: str = "target",
    ) -> None:
        self._tokenizer, self._where = tokenizer, where
        self._source = source
        self._system = system_prompt
        self._kwargs = dict(kwargs or {})
        if not tokenizer.chat_template:
            fix = "use an instruct model, or add chat_template.jinja to its directory"
            raise self._error("the target's tokenizer has no chat template", fix=fix)
        self._check_kwargs()
        ids = {*stop_ids, tokenizer.eos_token_id} - {None}
        if not ids:
            fix = "set eos_token_id in generation_config.json"
            raise self._error("the target names no end-of-turn token", fix=fix)
        self.stop_ids: tuple[int, ...] = tuple(sorted(ids))

    def varied(
        self,
        *,
        system_prompt: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        where: str = "target",
    ) -> ChatTemplate:
        """The same with another system prompt, further variables, or tools that may be called.

        Raises TemplateError where the template reads no such variable; `where` is the section that
        names them.
        """
        return ChatTemplate(
            self._tokenizer,
            source=self._source,
            system_prompt=system_prompt or self._system,
            stop_ids=self.stop_ids,
            kwargs={**self._kwargs, **(kwargs or {}), **({"tools": list(tools)} if tools else {})},
            where=where,
        )

    def start(self, turn: str, *, system: str | None = None) -> list[int]:
        """Ids of the system prompt, the first user turn and the opening of the reply."""
        return self.encode(self._render([turn], [], system))

    def follow(
        self, turn: str, *, closed: bool, system: str | None = None, by_tool: bool = False
    ) -> list[int]:
        """Ids that lead from the end of a reply to the opening of the next one.

        `closed`: the reply's ids end with the end-of-turn token already; it is not repeated.
        `by_tool`: the turn is what a tool answered.
        """
        opening, tool_turns = self._render([_TURNS[0]], [], system), {1} if by_tool else ()
        grown = self._render([_TURNS[0], turn], [_REPLY], system, tool_turns)
        before, reply, after = grown.partition(_REPLY)
        if not reply or before != opening:
            raise self._rewrites()
        if closed:
            for stop in self.stop_ids:
                after = after.removeprefix(self._tokenizer.decode([stop]))
        return self.encode(after)

    def keeps(
        self,
        turns: Sequence[str],
        replies: Sequence[str],
        *,
        system: str | None = None,
        tool_turns: Collection[int] = (),
    ) -> bool:
        """Whether rendering `turns`, with `replies` to all but the last, keeps the earlier turns.

            before   <user>2+2?<end><assistant>
            now      <user>2+2?<end><assistant>4<end><user>Why?<end><assistant>
                     └ a prefix of `now` ─────┘└ and here the reply; space around it may be trimmed

        False for templates that move the system prompt, number the turns, or cut reasoning out of
        all replies but the last.
        """
        before = self._render(turns[:-1], replies[:-1], system, tool_turns)
        now = self._render(turns, replies, system, tool_turns)
        reply = now.removeprefix(before).lstrip()
        return now.startswith(before) and reply.startswith(replies[-1].strip())

    def check_turns(self) -> None:
        """Raise TemplateError when this template's conversations cannot grow token by token."""
        for turns in range(2, len(_TURNS) + 1):
            if not self.keeps(_TURNS[:turns], [_REPLY] * (turns - 1)):
                raise self._rewrites()
        self.follow(_TURNS[1], closed=True)
        if self.end_of_turn is None:
            problem = "the chat template writes no end-of-turn token behind a reply"
            token = "the token that it writes as an eos_token_id in generation_config.json"
            fix = f"set synth.max_turns=1, or name {token}"
            raise self._error(f"{problem}, {_CANNOT_CONTINUE}", fix=fix)

    @cached_property
    def end_of_turn(self) -> int | None:
        """The stop token that the template writes behind a reply; None when it writes none."""
        after = self._render(_TURNS[:2], [_REPLY], None).partition(_REPLY)[2].lstrip()
        for stop in self.stop_ids:
            if after.startswith(self._tokenizer.decode([stop])):
                return stop
        return None

    def text(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Ids as text; special tokens only show with `special`."""
        return str(
            self._tokenizer.decode(
                list(ids),
                skip_special_tokens=not special,
                clean_up_tokenization_spaces=False,  # it rewrites " ." and " n't" in code and prose
            )
        )

    def is_byte(self, token: int) -> bool:
        """Whether it is one byte, as SentencePiece spells what its vocabulary lacks: `<0x0A>`."""
        name = self._tokenizer.convert_ids_to_tokens(token)
        return name is not None and re.fullmatch(r"<0x[0-9A-F]{2}>", name) is not None

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Ids of a text that already holds every special token that belongs there, unless the
        tokenizer is to add those that it begins a text with."""
        return list(self._tokenizer(text, add_special_tokens=add_special)["input_ids"])

    def conversation(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a whole conversation, each message with `role` and `content`, and the opening of
        the next reply: what a server reads. Raises TemplateError."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        if any(message["role"] == "system" for message in messages):
            system = []
        return self.encode(self._rendered([*system, *messages]))

    def _render(
        self,
        turns: Sequence[str],
        replies: Sequence[str],
        system: str | None,
        tool_turns: Collection[int] = (),
    ) -> str:
        """Turns and replies in alternation, then the opening of the next reply."""
        assert len(turns) == len(replies) + 1
        system = system or self._system
        messages = [{"role": "system", "content": system}] if system else []
        for index, turn in enumerate(turns):
            role = "tool" if index in tool_turns else "user"
            messages.append({"role": role, "content": turn})
            if index < len(replies):
                messages.append({"role": "assistant", "content": replies[index]})
        return self._rendered(messages)

    def _rendered(self, messages: Sequence[Mapping[str, str]]) -> str:
        from jinja2 import TemplateError as JinjaError

        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **self._kwargs
            )
        except (JinjaError, TypeError, ValueError) as error:
            problem = f"the chat template cannot be rendered: {error}"
            fix = "correct the template or drop the system prompt"
            raise self._error(problem, fix=fix) from error
        return str(text)

    def _check_kwargs(self) -> None:
        """A variable that the template does not read would be ignored without a word."""
        template = self._tokenizer.chat_template
        text = " ".join(template.values()) if isinstance(template, dict) else str(template)
        for name in self._kwargs:
            if not re.search(rf"\b{re.escape(name)}\b", text):
                problem = f"the chat template reads no variable {name!r}"
                where = f"{self._where}.chat_template_kwargs.{name}"
                raise TemplateError(problem, where=where, fix="correct the name or leave it out")

    def _rewrites(self) -> TemplateError:
        problem = f"the chat template rewrites earlier turns, {_CANNOT_CONTINUE}"
        return self._error(problem, fix="set synth.max_turns=1 (and eval.max_turns=1)")

    def _error(self, problem: str, *, fix: str) -> TemplateError:
        return TemplateError(problem, where=f"target.source={self._source}", fix=fix)


def load_template(
    directory: Path,
    *,
    source: str,
    system_prompt: str | None,
    kwargs: Mapping[str, Any] | None = None,
) -> ChatTemplate:
    """Tokenizer and stop ids of a resolved target directory."""
    from transformers import AutoTokenizer, GenerationConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (ValueError, OSError, KeyError) as error:
        problem = f"the tokenizer cannot be loaded: {str(error).splitlines()[0]}"
        fix = "save the tokenizer beside the weights"
        raise TargetError(problem, where=f"target.source={source}", fix=fix) from error
    stops: tuple[int, ...] = ()
    if (directory / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(directory).eos_token_id
        if eos is not None:
            stops = tuple(eos) if isinstance(eos, list) else (eos,)
    return ChatTemplate(
        tokenizer, source=source, system_prompt=system_prompt, stop_ids=stops, kwargs=kwargs
    )
