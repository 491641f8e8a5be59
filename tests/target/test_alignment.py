"""What follows a reply is what transformers makes of the whole conversation, tokenised at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from pipeline.records import Span
from pipeline.target.template import ChatTemplate
from tests.conftest import CHATML
from tests.target.tokenizers import KINDS, wrapped


def mistral(reply: str) -> str:
    user = "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    reply = "{% elif m.role == 'assistant' %}" + reply
    return "{{ bos_token }}{% for m in messages %}" + user + reply + "{% endif %}{% endfor %}"


OPENING = "{% if add_generation_prompt %}"
TEMPLATES = {
    "ChatML": (CHATML, "<|im_end|>"),
    "ChatML that strips": (
        CHATML.replace("{{ m.content }}", "{{ m.content | trim }}"),
        "<|im_end|>",
    ),
    "TinyLlama": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}"
        "{% endfor %}" + OPENING + "{{ '<|assistant|>\n' }}{% endif %}",
        "</s>",
    ),
    "Phi-3": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        + OPENING
        + "{{ '<|assistant|>\n' }}{% endif %}",
        "<|end|>",
    ),
    "Mistral v0.1": (mistral("{{ m.content + eos_token + ' ' }}"), "</s>"),
    "Mistral v0.2": (mistral("{{ ' ' + m.content + eos_token }}"), "</s>"),
    "Mistral v0.3": (mistral("{{ ' ' + m.content | trim + eos_token }}"), "</s>"),
    "Llama 2": (
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}{% else %}"
        "{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}",
        "</s>",
    ),
    "Vicuna": (
        "{{ bos_token }}{% for m in messages %}{{ m.role | upper + ': ' + m.content }}"
        "{{ eos_token if m.role == 'assistant' else ' ' }}{% endfor %}"
        + OPENING
        + "ASSISTANT:{% endif %}",
        "</s>",
    ),
    "Vicuna with a space after its opening": (
        "{{ bos_token }}{% for m in messages %}{{ m.role | upper + ': ' + m.content }}"
        "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
        + OPENING
        + "{{ 'ASSISTANT: ' }}{% endif %}",
        "</s>",
    ),
}
TURNS = ["What is 1 plus 4?", "and why would that </i><|_end|> be so?", " Really?", "so"]
#: As text; each is tokenised as a reply of its own, which is one of the ways of generating it.
REPLIES = ["It is 4.", " It is 4 times 3 ", "\nWhy?\n"]


@cache
def tokenizer_of(kind: str) -> Any:
    return KINDS[kind]()


def template_of(kind: str, name: str) -> tuple[Any, ChatTemplate, int]:
    """A tokenizer, its template, and the token that ends a turn."""
    tokenizer, (text, end) = tokenizer_of(kind), TEMPLATES[name]
    tokenizer.chat_template = text
    end_id = tokenizer.convert_tokens_to_ids(end)
    return tokenizer, ChatTemplate(tokenizer, source=kind, stop_ids=(end_id,)), end_id


def after_last_reply(
    tokenizer: Any, turns: Sequence[str], replies: Sequence[str], end: int
) -> list[int]:
    """What transformers has after the end token of the last reply, found by its characters."""
    messages = []
    for turn, reply in zip(turns, [*replies, None], strict=True):
        messages.append({"role": "user", "content": turn})
        if reply is not None:
            messages.append({"role": "assistant", "content": reply})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert encoded["input_ids"] == whole, "as apply_chat_template tokenises"
    before = tokenizer.apply_chat_template(
        messages[:-2], tokenize=False, add_generation_prompt=True
    )
    written = tokenizer.convert_ids_to_tokens(end)
    at = text.index(written, len(before.rstrip()) + len(replies[-1].strip()))
    [place] = [
        index
        for index, (token, (start, stop)) in enumerate(
            zip(whole, encoded["offset_mapping"], strict=True)
        )
        if token == end and start <= at < stop
    ]
    return list(whole[place + 1 :])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_turn_differs_from_the_whole_rendering(kind: str, name: str) -> None:
    tokenizer, template, end = template_of(kind, name)
    for closed in (True, False):
        ids, spans = template.start(TURNS[0]), list[Span]()
        for turn, reply in enumerate(REPLIES, 1):
            generated = template.encode(reply)
            spans.append(Span(start=len(ids), end=len(ids) + len(generated)))
            ids += [*generated, end] if closed else generated
            followed = template.follow(TURNS[: turn + 1], ids, spans)
            assert isinstance(followed, list), followed
            said = [template.text(ids[each.start : each.end], special=True) for each in spans]
            expected = after_last_reply(tokenizer, TURNS[: turn + 1], said, end)
            assert followed == (expected if closed else [end, *expected])
            ids += followed
        assert all(before.end < after.start for before, after in pairwise(spans))


def start(template: ChatTemplate, reply: Sequence[int]) -> tuple[list[int], list[Span]]:
    """A conversation of one turn, answered with `reply`."""
    ids = template.start(TURNS[0])
    return [*ids, *reply], [Span(start=len(ids), end=len(ids) + len(reply))]


def test_reasoning_that_a_template_drops_ends_the_conversation_there() -> None:
    tokenizer, _, end = template_of("byte-level", "ChatML")
    text = "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", text)
    template = ChatTemplate(tokenizer, source="R1", stop_ids=(end,))
    for reply, reason in (("<think>hm</think>4", "template_rewrites"), ("4", None)):
        ids, spans = start(template, template.encode(reply))
        followed = template.follow(TURNS[:2], [*ids, end], spans)
        assert followed == reason if reason else isinstance(followed, list)
    assert template.stops_after_reply() is None, "most conversations go on"


def test_half_a_character_at_the_cut_ends_the_conversation() -> None:
    _, template, _ = template_of("byte-level", "ChatML")
    ids, spans = start(template, template.encode("It costs 4 €")[:-1])
    assert template.text(ids).endswith("\ufffd")
    assert template.follow(TURNS[:2], ids, spans) == "not_aligned"


def test_a_reply_that_a_server_would_read_otherwise_ends_the_conversation() -> None:
    """Its tokenizer lowers letters; the model wrote capitals."""
    from tokenizers import Tokenizer, normalizers

    backend = Tokenizer.from_str(tokenizer_of("byte-level").backend_tokenizer.to_str())
    backend.normalizer = normalizers.Lowercase()
    tokenizer = wrapped(backend)
    tokenizer.chat_template = CHATML
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    template = ChatTemplate(tokenizer, source="lower", stop_ids=(end,))
    capital, small = tokenizer.convert_tokens_to_ids(["A", "a"])
    for letter, cut in ((capital, True), (small, False)):
        ids, spans = start(template, [letter])
        followed = template.follow(TURNS[:2], [*ids, end], spans)
        assert followed == "not_aligned" if cut else isinstance(followed, list)


def test_a_turn_on_which_the_template_fails_ends_the_conversation() -> None:
    tokenizer, _, end = template_of("byte-level", "ChatML")
    tokenizer.chat_template = "{{ 1 // (3 - messages | length) if messages[2:] }}" + CHATML
    template = ChatTemplate(tokenizer, source="odd", stop_ids=(end,))
    ids, spans = start(template, template.encode("4"))
    assert template.follow(TURNS[:2], [*ids, end], spans) == "not_rendered"
    assert template.stops_after_reply() == "not_rendered" and template.end_of_turn is None


def test_another_stop_token_ends_the_conversation() -> None:
    tokenizer, _, end = template_of("byte-level", "ChatML")
    other = tokenizer.eos_token_id
    template = ChatTemplate(tokenizer, source="two", stop_ids=(end, other))
    ids, spans = start(template, template.encode("4"))
    assert template.follow(TURNS[:2], [*ids, other], spans) == "other_stop_token"
    assert isinstance(template.follow(TURNS[:2], [*ids, end], spans), list)


@pytest.mark.parametrize("kind", ["unigram", "metaspace, first", "byte-level"])
def test_text_is_not_tidied_up(kind: str) -> None:
    """Older tokenizers carry a flag to drop spaces before punctuation when they decode."""
    tokenizer = KINDS[kind]()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.chat_template = CHATML
    template = ChatTemplate(tokenizer, source=kind)
    assert template.text(template.encode("It is 4 . So ?")) == "It is 4 . So ?"
