"""Conversations → token ids, through the target's own chat template, and the ids that end a reply.

The ids of a reply are those that were generated. What follows a reply is cut out of the whole
rendering, tokenised at once as a server does, so that no fragment is tokenised as if it began a
text:

    start              <sys>…<end><user>2+2?<end><assistant>
    generated                                                4<end>
    whole rendering    <sys>…<end><user>2+2?<end><assistant> 4<end>\\n<user>Why?<end><assistant>
    follow                                                         └────────────────────────┘

That holds only where the longer rendering begins with the shorter one, and what stands before the
cut decodes to what was read and generated. Where it does not, `follow` says why, and the
conversation ends with that reply.

A reply ends with the tokens at which transformers stops, and the tokenizer's own:

    generation_config.json   `eos_token_id`, an id or a list: where it names one, config.json's are
                             no end ids for transformers
    config.json              otherwise
    tokenizer                its `eos_token` as well, since vLLM and SGLang stop there too

Both files are read as JSON: their sampling settings are ignored and never fail here.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.documents import read_json
from pipeline.errors import TargetError, TemplateError, brief
from pipeline.records import Span
from pipeline.target.rendering import CannotRender, TooCostly, render

# Private-use characters: no template gives them a meaning and no user types them.
_REPLY = "\ue000reply\ue001"
_TURNS = tuple(f"\ue000turn {number}\ue001" for number in range(1, 5))
#: What a decoder writes for bytes that are no character.
_BROKEN = "\ufffd"
#: Takes the place of transformers' own `strftime_now`, which reads this machine's clock and time
#: zone. Template variables cannot: transformers turns functions among them into text. The newline
#: is the last tag's own, so that what follows is trimmed as at the beginning of a template.
_FIXED_CLOCK = (
    "{%- macro strftime_now(format) -%}"
    "{%- set written = namespace(text=format | replace('%%', '\ue002')) -%}"
    "{%- for code, value in eagle3_clock.items() -%}"
    "{%- set written.text = written.text | replace(code, value) -%}"
    "{%- endfor -%}"
    "{{- written.text | replace('\ue002', '%') -}}"
    "{%- endmacro %}\n"
)
_END_ID_FILES = ("generation_config.json", "config.json")
#: Under these names config.json of a model with several parts keeps that of its decoder.
_DECODERS = ("decoder", "generator", "text_config")
_END_IDS_FIX = (
    "name the ids of the tokens that end a reply, as eos_token_id: 2 or eos_token_id: [2, 32]"
)


@dataclass
class _Clock:
    """The time that templates render; None: now."""

    moment: datetime | None = None

    @cached_property
    def codes(self) -> dict[str, str]:
        """Each code of strftime that means something, and what is written for it."""
        assert self.moment is not None
        moment = self.moment.astimezone(UTC).replace(tzinfo=None)
        codes = [f"%{flag}{letter}" for flag in ("", *"-_0^#") for letter in string.ascii_letters]
        written = {code: moment.strftime(code) for code in codes}
        return {code: text for code, text in written.items() if not text.startswith("%")}


class ChatTemplate:
    """The target's template with the run's system prompt and template variables.

    A method's `system` replaces the run's.
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
        file: str = "",
        clock: _Clock | None = None,
    ) -> None:
        """`file` is the template's, as errors name it; `where` the section of the variables."""
        self._tokenizer, self._where, self._file = tokenizer, where, file
        self._clock = clock or _Clock()
        self._source = source
        self._system = system_prompt
        self._kwargs = dict(kwargs or {})
        if not tokenizer.chat_template:
            fix = "set target.chat_template to a template's file, or use an instruct model"
            raise self._error("the target's tokenizer has no chat template", fix=fix)
        written = tokenizer.chat_template
        texts = written.values() if isinstance(written, dict) else [written]
        if not all(isinstance(text, str) for text in texts):
            fix = "write it as text, best in chat_template.jinja"
            raise self._error("the target's chat template is not a text", fix=fix)
        self._check_kwargs()
        ids = set(stop_ids) or {tokenizer.eos_token_id} - {None}
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

        Raises TemplateError where the template reads no such variable, or cannot render a plain
        conversation with it; `where` is the section that names them.
        """
        varied = ChatTemplate(
            self._tokenizer,
            source=self._source,
            system_prompt=system_prompt or self._system,
            stop_ids=self.stop_ids,
            kwargs={**self._kwargs, **(kwargs or {}), **({"tools": list(tools)} if tools else {})},
            where=where,
            file=self._file,
            clock=self._clock,
        )
        if not tools:  # those are a record's own
            varied.check()
        return varied

    def check(self) -> None:
        """Raise TemplateError where not even one user turn can be rendered."""
        turn = "Hello."
        if turn not in self._render([turn], [], None):
            fix = "correct the template: it writes `content` of each of the `messages`"
            raise self._error("the chat template writes nothing of what a user says", fix=fix)

    @property
    def reads_clock(self) -> bool:
        """Whether what it renders may depend on when that is."""
        return "strftime_now" in self._source_text

    def set_clock(self, moment: datetime | None) -> None:
        """Render dates as of `moment`, with all that were or will be `varied` from this one."""
        if self._clock.moment != moment:
            self._clock.__dict__.pop("codes", None)
            self._clock.moment = moment

    def start(self, turn: str, *, system: str | None = None) -> list[int]:
        """Ids of the system prompt, the first user turn and the opening of the reply."""
        return self.encode(self._render([turn], [], system))

    def follow(
        self,
        turns: Sequence[str],
        token_ids: Sequence[int],
        replies: Sequence[Span],
        *,
        system: str | None = None,
        tool_turns: Collection[int] = (),
    ) -> list[int] | str:
        """Ids that lead from the end of a conversation to the opening of its next reply, or why
        there are none.

        `turns` are the user's, up to the one that comes next; `token_ids` is the conversation,
        which ends with a reply and, unless that was cut off, its end token; `replies` are the spans
        of its replies without their end tokens. Of a reply that was cut off, the end token comes
        first. `tool_turns` are turns by tools.

            not_rendered         the template fails on this conversation
            template_rewrites    it changes earlier turns or the reply
            other_stop_token     the reply ended with another token than the template writes
            not_aligned          the tokens of the whole rendering are of another text
        """
        texts = [self.text(token_ids[each.start : each.end], special=True) for each in replies]
        closed = replies[-1].end < len(token_ids)
        try:
            grown = self._grown(turns, texts, system, tool_turns)
        except TemplateError:
            return "not_rendered"
        if grown is None:
            return "template_rewrites"
        rendered, after = grown
        end = self._first_stop(after)
        if closed and token_ids[-1] != end:
            return "other_stop_token"
        if end is None or (not closed and texts[-1].endswith(_BROKEN)):  # half a character
            return "not_aligned"
        whole, count = self.encode(rendered), self.encode(after).count(end)
        # Tokenizers split a text at added tokens before anything else, so that there are as many
        # in what follows the reply as among the last of the whole.
        places = [index for index, token in enumerate(whole) if token == end]
        if not 0 < count <= len(places):
            return "not_aligned"
        place = places[-count]
        if not self._decodes_to(whole[:place], token_ids, replies):
            return "not_aligned"
        return whole[place + closed :]

    def stops_after_reply(self) -> str | None:
        """Why a plain conversation of several turns ends with its first reply; None: it does not.

        The reasons are those of `follow`. A conversation may still be cut for what is in it.
        """
        try:
            for turns in range(2, len(_TURNS) + 1):
                if self._grown(_TURNS[:turns], [_REPLY] * (turns - 1)) is None:
                    return "template_rewrites"
        except TemplateError:
            return "not_rendered"
        return "other_stop_token" if self.end_of_turn is None else None

    def count_tokens(
        self, turns: Sequence[str], *, system: str | None = None, tool_turns: Collection[int] = ()
    ) -> int:
        """Tokens of these turns with short replies between them. Raises TemplateError."""
        return len(self.encode(self._render(turns, ["x"] * (len(turns) - 1), system, tool_turns)))

    def _grown(
        self,
        turns: Sequence[str],
        replies: Sequence[str],
        system: str | None = None,
        tool_turns: Collection[int] = (),
    ) -> tuple[str, str] | None:
        """The rendering of `turns` with `replies` to all but the last, and what of it comes after
        the last reply; None where it does not begin with what was rendered before.

            before   <user>2+2?<end><assistant>
            now      <user>2+2?<end><assistant>4<end><user>Why?<end><assistant>
                     └ a prefix of `now` ─────┘└ and here the reply; space around it is no matter

        None for templates that move the system prompt, number the turns, or cut reasoning out of
        all replies but the last. Raises TemplateError.
        """
        before = self._render(turns[:-1], replies[:-1], system, tool_turns).rstrip()
        now = self._render(turns, replies, system, tool_turns)
        rest, reply = now.removeprefix(before).lstrip(), replies[-1].strip()
        if not now.startswith(before) or not rest.startswith(reply):
            return None
        return now, rest[len(reply) :]

    def _first_stop(self, text: str) -> int | None:
        """The stop token that a text begins with, space aside."""
        text = text.lstrip()
        begun = [stop for stop, written in self._stop_texts.items() if text.startswith(written)]
        return max(begun, key=lambda stop: len(self._stop_texts[stop]), default=None)

    @cached_property
    def _stop_texts(self) -> dict[int, str]:
        texts = {stop: self.text([stop], special=True).strip() for stop in self.stop_ids}
        return {stop: text for stop, text in texts.items() if text}

    def _decodes_to(
        self, rendered: Sequence[int], token_ids: Sequence[int], replies: Sequence[Span]
    ) -> bool:
        """Whether tokens of a rendering have the text of a conversation up to its last reply's end.

        Space before and after a reply may differ: templates trim or add it.
        """
        text, cuts = self.text(rendered, special=True), [0]
        for span in replies:
            cuts += [span.start, span.end]
        for start, end in pairwise(cuts):
            text, piece = text.lstrip(), self.text(token_ids[start:end], special=True).strip()
            if not text.startswith(piece):
                return False
            text = text[len(piece) :]
        return not text.strip()

    @cached_property
    def end_of_turn(self) -> int | None:
        """The stop token that the template writes after a reply; None when it writes none."""
        try:
            rendered = self._render(_TURNS[:2], [_REPLY], None)
        except TemplateError:  # it takes one turn alone
            return None
        return self._first_stop(rendered.partition(_REPLY)[2])

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
        tokenizer, variables = self._tokenizer, self._kwargs
        try:
            template = tokenizer.get_chat_template(None, variables.get("tools"))
            if self._clock.moment is not None and self.reads_clock:
                template = _FIXED_CLOCK + template
                variables = {**variables, "eagle3_clock": self._clock.codes}
            text = render(template, messages, {**tokenizer.special_tokens_map, **variables})
        except TooCostly as error:
            fix = "correct the template, or set target.chat_template to another one"
            raise TargetError(f"the chat template {error}", where=self._place, fix=fix) from None
        except (CannotRender, ValueError, TypeError) as error:
            problem = f"the chat template cannot be rendered: {brief(error)}"
            fix = "correct the template, or set or drop the system prompt"
            raise self._error(problem, fix=fix) from error
        if not text:
            fix = "correct the template: it writes `content` of each of the `messages`"
            raise self._error("the chat template renders an empty text", fix=fix)
        return str(text)

    @property
    def _source_text(self) -> str:
        template = self._tokenizer.chat_template
        return " ".join(template.values()) if isinstance(template, dict) else template

    def _check_kwargs(self) -> None:
        """A variable that the template does not read would be ignored without a word."""
        text = self._source_text
        for name in self._kwargs:
            if not re.search(rf"\b{re.escape(name)}\b", text):
                problem = f"the chat template reads no variable {name!r}"
                where = f"{self._where}.chat_template_kwargs.{name}"
                raise TemplateError(problem, where=where, fix="correct the name or leave it out")

    def _error(self, problem: str, *, fix: str) -> TemplateError:
        return TemplateError(problem, where=self._place, fix=fix)

    @property
    def _place(self) -> str:
        """Target and file of the template, as errors name them."""
        return f"target.source={self._source}" + (f", {self._file}" if self._file else "")


def load_template(
    directory: Path,
    *,
    source: str,
    system_prompt: str | None,
    kwargs: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
) -> ChatTemplate:
    """Tokenizer, template and end ids of a resolved target directory; `chat_template` takes the
    place of its own. Raises TargetError, and TemplateError for a template that cannot render even
    one user turn."""
    from transformers import AutoTokenizer

    end_ids = read_end_ids(directory, source=source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # the tokenizers library has no type of its own
        problem = f"the tokenizer cannot be loaded: {brief(error)}"
        fix = "save the tokenizer beside the weights"
        raise TargetError(problem, where=f"target.source={source}", fix=fix) from error
    if not isinstance(tokenizer.model_max_length, int | float):
        problem = f"model_max_length {tokenizer.model_max_length!r:.60} is not a number"
        where = f"target.source={source}, tokenizer_config.json"
        raise TargetError(problem, where=where, fix="correct it or leave it out")
    own = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    file = next((name for name in own if (directory / name).is_file()), "")
    if chat_template is not None:
        tokenizer.chat_template, file = chat_template, "target.chat_template"
    template = ChatTemplate(
        tokenizer,
        source=source,
        system_prompt=system_prompt,
        stop_ids=end_ids.with_tokenizer(tokenizer),
        kwargs=kwargs,
        file=file,
    )
    template.check()
    return template


@dataclass(frozen=True)
class EndIds:
    """What a target's files name."""

    ids: frozenset[int]
    vocabulary: int | None  # rows of its embedding; None where config.json does not say

    def with_tokenizer(self, tokenizer: Any) -> tuple[int, ...]:
        """Also the tokenizer's, where that is a row of the embedding; ascending."""
        eos, vocabulary = tokenizer.eos_token_id, self.vocabulary
        known = eos is not None and (vocabulary is None or eos < vocabulary)
        return tuple(sorted(self.ids | {eos} if known else self.ids))


def read_end_ids(directory: Path, *, source: str) -> EndIds:
    """Of the target in `directory`.

    Raises TargetError, which names file and field, for what is no id of its vocabulary.
    """
    files = {name: read_settings(directory / name, source) for name in _END_ID_FILES}
    vocabulary = _decoder_field(files["config.json"], "vocab_size")
    most = vocabulary if isinstance(vocabulary, int) else None
    for name, fields in files.items():
        if (value := _decoder_field(fields, "eos_token_id")) is not None:
            where = f"target.source={source}, {name}: eos_token_id"
            return EndIds(frozenset(_checked_ids(value, most, where)), most)
    return EndIds(frozenset(), most)


def read_settings(path: Path, source: str) -> dict[str, Any]:
    """A file's fields, none where there is no such file. Raises TargetError."""
    if not path.is_file():
        return {}
    where = f"target.source={source}, {path.name}"
    try:
        fields = read_json(path, finite=False)
    except (ValueError, OSError) as error:
        fix = "download the file again"
        raise TargetError(f"cannot be read as JSON: {error}", where=where, fix=fix) from error
    if not isinstance(fields, dict):
        fix = 'it is an object of settings, such as {"eos_token_id": 2}: download the file again'
        raise TargetError(f"holds a JSON {type(fields).__name__}", where=where, fix=fix)
    return fields


def _decoder_field(fields: dict[str, Any], name: str) -> Any:
    """A field's value, or that of the decoder's own part of a configuration."""
    if fields.get(name) is not None:
        return fields[name]
    parts = (fields.get(part) for part in _DECODERS)
    part = next((each for each in parts if each), None)
    return part.get(name) if isinstance(part, dict) else None


def _checked_ids(value: Any, most: int | None, where: str) -> list[int]:
    """The ids that a file names. Raises TargetError."""
    ids = value if isinstance(value, list) else [value]
    if not ids:
        raise TargetError("is an empty list", where=where, fix=_END_IDS_FIX)
    for each in ids:
        if type(each) is not int:  # True is an int
            shown = json.dumps(each)
            raise TargetError(f"{shown} is not a token id", where=where, fix=_END_IDS_FIX)
        if each < 0 or (most is not None and each >= most):
            problem = f"{each} is outside the vocabulary" + (f" of {most}" if most else "")
            raise TargetError(problem, where=where, fix=_END_IDS_FIX)
    return ids
