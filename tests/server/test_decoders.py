"""Streamed text is transformers' decode of all ids at once, whatever the tokenizer's decoder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipeline.server.text import TextPieces
from pipeline.target.template import ChatTemplate

_WORDS = ["▁", "▁▁", "▁a", "▁bc", "a", "b", "c", "▁.", ".", "€", "▁中", "x▁y", "\ufffd"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_MANY = ["Ġa", "Ã©", "ĠâĤ¬", "Ġ", "â", "Ĥ", "¬"]  # byte-level: the last three are one character
_PADDED = 7  # ids that only the model's vocabulary has


def _strip() -> Any:
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*spaces, decoders.Strip(" ", 1, 0)])


def _metaspace(scheme: str) -> Any:
    space = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)
    return decoders.Sequence([decoders.ByteFallback(), space])


_DECODERS: dict[str, Callable[[], Any]] = {
    "strip": _strip,
    "metaspace-first": functools.partial(_metaspace, "first"),
    "metaspace-always": functools.partial(_metaspace, "always"),
    "metaspace-never": functools.partial(_metaspace, "never"),
    "byte-level": decoders.ByteLevel,
    "unigram": functools.partial(decoders.Metaspace, replacement="▁", prepend_scheme="always"),
    "none": lambda: None,
}


@functools.cache
def _tokenizer(kind: str) -> Any:
    words = ["<unk>", "<s>", "</s>", *_BYTES, *_WORDS]
    if kind == "unigram":
        scored = [(word, -float(rank)) for rank, word in enumerate(words)]
        tokenizer = Tokenizer(models.Unigram(scored, unk_id=0))
    else:
        if kind == "byte-level":
            words = [
                "<unk>",
                "</s>",
                *sorted(pre_tokenizers.ByteLevel.alphabet()),
                *_MANY[:3],
            ]
        ids = {word: index for index, word in enumerate(words)}
        tokenizer = Tokenizer(models.BPE(ids, [], unk_token="<unk>", byte_fallback=True))
    if decoder := _DECODERS[kind]():
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>", "<|mark|>"])
    tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("<a b>", lstrip=True), " gap "])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", chat_template="{{ messages }}"
    )  # type: ignore[no-untyped-call]


def _served(
    kind: str, ids: Sequence[int], stop: Sequence[str] = (), *, special: bool = False
) -> list[str]:
    template = ChatTemplate(_tokenizer(kind), source="tiny")
    text = functools.partial(template.text, special=special)
    assert text(ids) == _tokenizer(kind).decode(list(ids), skip_special_tokens=not special), "whole"
    pieces = TextPieces(text, stop, template.is_byte)
    parts = []
    for token in ids:
        parts.append(pieces.add(token))
        if pieces.matched is not None:
            break
    return [*parts, pieces.end()]


@pytest.mark.parametrize("kind", _DECODERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), special=st.booleans())
def test_pieces_are_the_decode_of_all_ids(kind: str, data: st.DataObject, special: bool) -> None:
    tokenizer = _tokenizer(kind)
    any_id = st.integers(0, len(tokenizer) + _PADDED - 1)
    hidden = st.sampled_from([*tokenizer.all_special_ids, len(tokenizer), len(tokenizer) + 1])
    names = [*_WORDS, *_MANY, "<tool>", " gap ", "<0xE2>", "<0x82>", "<0xAC>", "<0xE2>", "<0xAC>"]
    known = [token for token in tokenizer.convert_tokens_to_ids(names) if token is not None]
    text = st.sampled_from(known)
    ids = data.draw(st.lists(st.one_of(any_id, hidden, text, text), max_size=40))
    whole = tokenizer.decode(ids, skip_special_tokens=not special)
    assert "".join(_served(kind, ids, special=special)) == whole
    begin = data.draw(st.integers(0, max(0, len(whole) - 1)))
    stop = whole[begin : begin + data.draw(st.integers(1, 4))]
    if stop:
        assert "".join(_served(kind, ids, [stop], special=special)) == whole[: whole.index(stop)]


@pytest.mark.parametrize("kind", ["strip", "metaspace-first", "metaspace-always", "unigram"])
@pytest.mark.parametrize("hidden", ["</s>", "<|mark|>", None])
@pytest.mark.parametrize("times", [1, 2, 5])
def test_the_space_after_a_hidden_id_stays(kind: str, hidden: str | None, times: int) -> None:
    tokenizer = _tokenizer(kind)
    between = len(tokenizer) + 3 if hidden is None else tokenizer.convert_tokens_to_ids(hidden)
    first, second = tokenizer.convert_tokens_to_ids(["▁a", "▁bc"])
    ids = [between, first, *[between] * times, second, *[between] * times, second]
    assert "".join(_served(kind, ids)) == "a bc bc"


def test_a_run_of_bytes_is_sent_when_it_has_ended_and_other_text_at_once() -> None:
    tokenizer = _tokenizer("strip")
    euro = tokenizer.convert_tokens_to_ids(["<0xE2>", "<0x82>", "<0xAC>"])
    wrong, word = tokenizer.convert_tokens_to_ids(["<0xFF>", "▁bc"])
    assert _served("strip", [word, *euro, word, word]) == ["bc", "", "", "", "€ bc", " bc", ""]
    assert _served("strip", [word, *euro, wrong, word])[-2:] == ["\ufffd" * 4 + " bc", ""]
    assert _served("strip", [word, *euro])[-1] == "€"
