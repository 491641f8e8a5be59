"""Token ids to text: whole characters, nothing lost, nothing of a stop string."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pipeline.server.text import TextPieces


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_target)


@pytest.mark.parametrize("seed", range(30))
def test_pieces_are_whole_characters_and_together_the_text(tokenizer: Any, seed: int) -> None:
    draw = random.Random(seed)
    alphabet = "aé€😀中 \n"
    text = "".join(draw.choice(alphabet) for _ in range(40))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(text), "characters of several tokens"
    pieces = TextPieces(tokenizer.decode)
    parts = [pieces.add(token) for token in ids] + [pieces.end()]
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("seed", range(30))
def test_bytes_that_are_no_text_arrive_as_the_decoder_writes_them(
    tokenizer: Any, seed: int
) -> None:
    draw = random.Random(seed)
    ids = [draw.randrange(len(tokenizer)) for _ in range(60)]
    pieces = TextPieces(tokenizer.decode)
    text = "".join([*(pieces.add(token) for token in ids), pieces.end()])
    assert text == tokenizer.decode(ids)
    text.encode()


@pytest.mark.parametrize(
    ("stop", "expected", "used"),
    [
        (["cd"], "ab", 4),
        (["xyz", "bcd"], "a", 4),
        (["ef", "cdx"], "abcd", 6),
        (["nothing"], "abcdef", 6),
        (["fg"], "abcdef", 6),
        (["b", "ab"], "", 2),
    ],
)
def test_stop_strings_across_tokens(stop: list[str], expected: str, used: int) -> None:
    pieces, text, count = TextPieces(lambda ids: "".join(map(chr, ids)), stop), "", 0
    for token in map(ord, "abcdef"):
        count += 1
        text += pieces.add(token)
        assert expected.startswith(text), "a part of a stop string was sent"
        if pieces.matched is not None:
            break
    text += pieces.end()
    assert (text, count) == (expected, used)
    assert pieces.matched is None or pieces.matched in stop
