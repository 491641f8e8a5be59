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

What a text spells stays text: a control token is one only where the template writes it or the
target generated it (`ControlTokens`).
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
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


class ControlTokens:
    """Control tokens of a tokenizer and its template, told from texts that spell them.

        content      Say <|im_end|> twice
        marked       Say <N|im_end|> twice                   N: twenty random digits
        rendering    <|im_start|>user⏎Say <N|im_end|> twice<|im_end|>⏎
        renamed      «1»user⏎Say <|im_end|> twice«2»⏎        tokenised by a copy of the tokenizer
                                                             that knows its tokens as «1» and «2»

    A control token is special, ends a reply, is listed in the tokenizer's `chat_control_tokens`, or
    is another added token in the template's source (`<tool_call>`), white space excepted. The mark
    follows every character that one begins with, so that a template can neither join pieces to a
    token nor take one for its own. The copy reads a text only where the tokenizer
    itself takes something in it for a control token, also after its normaliser; all other ids are
    transformers' own. transformers 5.23 does likewise on request (`sanitize_control_tokens`), but
    tokenises what stands around such a text in pieces.
    """

    def __init__(self, tokenizer: Any, source_text: str, stop_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        numbers = (f"{secrets.randbelow(10**20):020d}" for _ in range(3))
        self.mark, self.other_mark, self._nonce = numbers
        added = {
            id: token
            for id, token in tokenizer.added_tokens_decoder.items()
            if len(token.content) > 1  # a mark has to go in between
        }
        listed = getattr(tokenizer, "chat_control_tokens", None) or ()
        forging = {id for id, token in added.items() if token.special or id in stop_ids}
        written = {
            id
            for id, token in added.items()
            if token.content in listed
            or (token.content in source_text and not token.content.isspace())
        }
        self._ids = {str(added[id].content): id for id in sorted(forging | written)}
        self._values = frozenset(self._ids.values())
        self._regex = _any_of(self._ids)
        own_words = [text for text, id in self._ids.items() if id not in forging]
        self._beginnings = {False: _beginnings(self._ids), True: _beginnings(self._ids, own_words)}

    def marked(self, value: Any, *, reply: bool = False) -> Any:
        """A text with marks, or the same of all texts in an object of JSON.

        A `reply` is in a chat's history: what of it is not special and ends none is the target's
        own word, such as </think>.
        """
        if isinstance(value, str):
            return self._beginnings[reply].sub(rf"\g<0>{self.mark}", value)
        if isinstance(value, Mapping):
            return {self.marked(name): self.marked(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(each) for each in value]
        return value

    def unmarked(self, text: str) -> str:
        """The text without marks."""
        return text.replace(self.mark, "")

    def spelt_in(self, text: str) -> bool:
        """Whether it spells a control token."""
        return self._regex.search(text) is not None

    def encode(self, marked: str) -> list[int]:
        """Ids of a rendering; what is marked in it is text.

        Raises ValueError where this kind of tokenizer cannot keep it so.
        """
        own = [self._ids[text] for text in self._regex.findall(marked)]
        ids = list(self._tokenizer(self.unmarked(marked), add_special_tokens=False)["input_ids"])
        if [id for id in ids if id in self._values] == own:
            return ids
        renamed = self._regex.sub(lambda match: self._names[match[0]], marked)
        read: list[int] = self._copy.encode(self.unmarked(renamed), add_special_tokens=False).ids
        return [self._copied_ids.get(id, id) for id in read]

    def marked_text(self, ids: Sequence[int], text: str) -> str | None:
        """`text`, that of `ids`, with what only spells a control token marked.

        None where the tokens cannot be found in it.
        """
        own = [place for place, id in enumerate(ids) if id in self._values]
        spelt = list(self._regex.finditer(text))
        if [self._ids[match[0]] for match in spelt] == [ids[place] for place in own]:
            return text
        starts = {len(self._decoded(ids[:place])): ids[place] for place in own}
        real = {
            match.start() for match in spelt if starts.get(match.start()) == self._ids[match[0]]
        }
        if len(real) < len(own):
            return None
        return self._regex.sub(
            lambda match: match[0] if match.start() in real else self.marked(match[0]), text
        )

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    @cached_property
    def _names(self) -> dict[str, str]:
        """Control token → its name in the copy: nobody can guess it, no normaliser changes it."""
        return {text: f"<{self._nonce}.{id}.>" for text, id in self._ids.items()}

    @cached_property
    def _copied_ids(self) -> dict[int, int]:
        """Id in the copy → the tokenizer's, of control tokens."""
        return {self._copy.token_to_id(self._names[text]): id for text, id in self._ids.items()}

    @cached_property
    def _copy(self) -> Any:
        """The tokenizer with its control tokens renamed."""
        from tokenizers import Tokenizer

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ValueError("a message spells a control token, which this tokenizer cannot split")
        fields = json.loads(backend.to_str())
        for token in fields["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
        model, names = fields["model"], self._names
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(text, text): id for text, id in model["vocab"].items()}
        else:  # Unigram's [piece, score]
            model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in names]
        fields["post_processor"] = None  # it adds what begins a text, under the old names
        return Tokenizer.from_str(json.dumps(fields))


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """The longest of `texts` that begins at a place, as tokenizers choose."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _beginnings(texts: Collection[str], but: Collection[str] = ()) -> re.Pattern[str]:
    """Characters that one of `texts` begins with, where none of those that are to stay begins."""
    first = "|".join(map(re.escape, sorted({text[0] for text in texts}))) or "(?!)"
    return re.compile(f"(?!{_any_of(but).pattern})(?:{first})")


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
        control: ControlTokens | None = None,
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
        self._control = control or ControlTokens(tokenizer, self._source_text, ids)

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
            control=self._control,
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
        return self.encode_marked(self._render([turn], [], system))

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

            not_rendered         the template fails on this conversation, or makes a control token
                                 of what it says
            template_rewrites    it changes earlier turns or the reply
            other_stop_token     the reply ended with another token than the template writes
            not_aligned          the tokens of the whole rendering are of another text
        """
        said = [self.marked_text(token_ids[each.start : each.end]) for each in replies]
        texts = [text for text in said if text is not None]
        if len(texts) < len(said):
            return "not_aligned"
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
        try:
            whole, count = self.encode_marked(rendered), self.encode_marked(after).count(end)
        except TemplateError:
            return "not_rendered"
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
        return len(
            self.encode_marked(self._render(turns, ["x"] * (len(turns) - 1), system, tool_turns))
        )

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

    @cached_property
    def longest_token(self) -> int:
        """Characters that a token stands for, at most."""
        return max(map(len, self._tokenizer.get_vocab()))

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
        return self.encode_marked(
            self._rendered(
                [
                    {**each, "content": self._marked(each["content"], each["role"])}
                    for each in (*system, *messages)
                ]
            )
        )

    def spells_control_token(self, text: str) -> bool:
        """Whether a text holds what would be a control token if the template had written it."""
        return self._control.spelt_in(text)

    def marked_text(self, ids: Sequence[int]) -> str | None:
        """Ids as text with special tokens; what only spells a control token is marked for
        `encode_marked`. None where that cannot be told."""
        return self._control.marked_text(ids, self.text(ids, special=True))

    def encode_marked(self, text: str) -> list[int]:
        """Ids of a text, or of a rendering, in which what only spells a control token is marked.

        Raises TemplateError where the tokenizer cannot keep that a text.
        """
        try:
            return self._control.encode(text)
        except ValueError as error:
            fix = "drop such records, or save the target's tokenizer as tokenizer.json"
            raise self._error(str(error), fix=fix) from error

    def _render(
        self,
        turns: Sequence[str],
        replies: Sequence[str],
        system: str | None,
        tool_turns: Collection[int] = (),
    ) -> str:
        """Turns and replies in alternation, then the opening of the next reply; with marks, those
        of the replies included."""
        assert len(turns) == len(replies) + 1
        system = system or self._system
        messages = [{"role": "system", "content": self._marked(system, "system")}] if system else []
        for index, turn in enumerate(turns):
            role = "tool" if index in tool_turns else "user"
            messages.append({"role": role, "content": self._marked(turn, role)})
            if index < len(replies):
                messages.append({"role": "assistant", "content": replies[index]})
        return self._rendered(messages)

    def _marked(self, content: str, role: str) -> str:
        return str(self._control.marked(content, reply=role == "assistant"))

    def _rendered(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Of messages with marks, with marks. Raises TemplateError."""
        control, kwargs = self._control, self._kwargs
        marked_kwargs = {name: control.marked(value) for name, value in kwargs.items()}

        def with_contents(change: Callable[[str], str]) -> list[dict[str, str]]:
            return [{**each, "content": change(each["content"])} for each in messages]

        marked = self._apply(messages, marked_kwargs)
        plain_messages = with_contents(control.unmarked)
        if plain_messages == messages and marked_kwargs == kwargs:
            return marked
        if control.unmarked(marked) == self._apply(plain_messages, kwargs):
            return marked
        # The template looks for control tokens in texts, and is shown texts that hold none; but it
        # may not take the marks apart.
        mark, other = control.mark, control.other_mark
        swapped = self._apply(with_contents(lambda text: text.replace(mark, other)), marked_kwargs)
        if swapped.replace(mark, other) == marked.replace(mark, other):
            return marked
        fix = "remove the control token from the text, or do not rewrite texts in the template"
        raise self._error("the chat template rewrites a text that spells a control token", fix=fix)

    def _apply(self, messages: Sequence[Mapping[str, str]], kwargs: Mapping[str, Any]) -> str:
        """What transformers would render. Raises TemplateError, TargetError."""
        tokenizer, variables = self._tokenizer, kwargs
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
