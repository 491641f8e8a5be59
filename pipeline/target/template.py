"""Conversations → token ids, through the target's own chat template.

A multi-turn conversation is grown, never re-tokenised: the ids of a reply are those that were
generated, and only the text between two replies is rendered.

    start("2+2?")     <sys>…<end><user>2+2?<end><assistant>
    generated                                              4<end>
    follow("Why?")                                               \\n<user>Why?<end><assistant>
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import TargetError, TemplateError

# Private-use characters: no template gives them a meaning and no user types them.
_REPLY = "\ue000reply\ue001"
_FIRST_TURN = "\ue000turn\ue001"


class ChatTemplate:
    """The target's template with one fixed system prompt."""

    def __init__(self, tokenizer: Any, *, source: str, system_prompt: str | None = None, stop_ids: tuple[int, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        if not tokenizer.chat_template:
            raise TemplateError(
                "the target's tokenizer has no chat template",
                where=f"target.source={source}",
                fix="use an instruct model, or add chat_template.jinja to its directory",
            )
        ids = {*stop_ids, tokenizer.eos_token_id} - {None}
        if not ids:
            raise TemplateError("the target names no end-of-turn token", where=f"target.source={source}", fix="set eos_token_id in generation_config.json")
        self.stop_ids: tuple[int, ...] = tuple(sorted(ids))

    def start(self, turn: str) -> list[int]:
        """Ids of the system prompt, the first user turn and the opening of the reply."""
        return self._encode(self._render([{"role": "user", "content": turn}]))

    def follow(self, turn: str, *, closed: bool) -> list[int]:
        """Ids that lead from the end of a reply to the opening of the next one.

        `closed`: the reply's ids already end with the end-of-turn token, which is then not repeated.
        """
        opening = self._render([{"role": "user", "content": _FIRST_TURN}])
        whole = self._render(
            [
                {"role": "user", "content": _FIRST_TURN},
                {"role": "assistant", "content": _REPLY},
                {"role": "user", "content": turn},
            ]
        )
        before, found, after = whole.partition(_REPLY)
        if not found or before != opening:
            raise TemplateError(
                "the chat template rewrites earlier turns, so a conversation cannot be continued token by token",
                where=f"target.source={self._source}",
                fix="set synth.max_turns=1 (and eval.max_turns=1)",
            )
        if closed:
            for stop in self.stop_ids:
                after = after.removeprefix(self._tokenizer.decode([stop]))
        return self._encode(after)

    def text(self, ids: list[int] | tuple[int, ...], *, special: bool = False) -> str:
        """Ids as text; special tokens only show with `special`."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))

    def _render(self, messages: list[dict[str, str]]) -> str:
        from jinja2 import TemplateError as JinjaError

        try:
            return str(self._tokenizer.apply_chat_template(self._system + messages, tokenize=False, add_generation_prompt=True))
        except (JinjaError, TypeError, ValueError) as error:
            raise TemplateError(
                f"the chat template cannot be rendered: {error}", where=f"target.source={self._source}", fix="correct the template or drop the system prompt"
            ) from error

    def _encode(self, text: str) -> list[int]:
        # The template has written every special token that belongs there.
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def load_template(directory: Path, *, source: str, system_prompt: str | None) -> ChatTemplate:
    """Tokenizer and stop ids of a resolved target directory."""
    from transformers import AutoTokenizer, GenerationConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (ValueError, OSError, KeyError) as error:
        raise TargetError(
            f"the tokenizer cannot be loaded: {str(error).splitlines()[0]}", where=f"target.source={source}", fix="save the tokenizer beside the weights"
        ) from error
    stops: tuple[int, ...] = ()
    if (directory / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(directory).eos_token_id
        stops = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    return ChatTemplate(tokenizer, source=source, system_prompt=system_prompt, stop_ids=stops)
