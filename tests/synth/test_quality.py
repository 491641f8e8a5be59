"""Each quality filter drops what it must under its reason, and nothing else."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import QualitySection, RunConfig
from pipeline.errors import ConfigError, DataError
from pipeline.records import Prompt
from pipeline.synth.filters import (
    _REFUSAL,
    apply_steps,
    max_length,
    near_duplicates,
    prompt_steps,
    repeated_share,
)
from pipeline.synth.select import PromptStream

WORDS = [f"word{number}" for number in range(20)]
LETTERS = [chr(97 + number) * (number + 1) for number in range(26)]
GERMAN = (
    "Erkläre mir bitte in einfachen Worten, warum der Himmel am Abend rot aussieht und nicht blau."
)
ENGLISH = (
    "Please explain to me in simple words why the sky looks red in the evening and not blue at all."
)


def prompt(*turns: str) -> Prompt:
    return Prompt(sample_id="0", source="s", license="MIT", category="c", turns=turns)


def rejected(config: RunConfig) -> dict[str, int]:
    assert config.synth
    stream = PromptStream(config.synth, config.run.seed)
    passed = list(stream)
    assert stream.loaded == len(passed) + stream.rejected.total()
    return stream.rejected


def outcome(given: list[Prompt], **switches: Any) -> tuple[list[tuple[str, ...]], dict[str, int]]:
    kept, rejected = apply_steps(given, prompt_steps(QualitySection.model_validate(switches)))
    return [prompt.turns for prompt in kept], dict(rejected)


def test_length_is_counted_over_all_turns() -> None:
    given = [prompt("ab"), prompt("  a "), prompt("a", "b")]
    assert outcome(given, min_characters=2) == ([("ab",), ("a", "b")], {"short": 1})
    assert outcome(given) == ([prompt.turns for prompt in given], {}), (
        "nothing is dropped by default"
    )


def test_languages_that_are_not_listed_are_dropped_but_short_texts_stay() -> None:
    given = [prompt(ENGLISH), prompt(GERMAN), prompt("Hallo du")]
    assert outcome(given, languages=["en"]) == ([(ENGLISH,), ("Hallo du",)], {"language:de": 1})
    assert outcome(given, languages=["DE", "en"])[1] == {}


def test_near_duplicates_of_earlier_prompts_are_dropped() -> None:
    text = " ".join(WORDS * 3)
    given = [
        prompt(text),
        prompt(text + " indeed"),
        prompt(" ".join(reversed(WORDS * 3))),
        prompt("Why?"),
        prompt("why"),
    ]
    kept, rejected = outcome(given, near_duplicates=0.8)
    assert rejected == {"near_duplicate": 2} and [turns[0] for turns in kept] == [
        text,
        given[2].turns[0],
        "Why?",
    ]


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("", 0.0),
        ("a b c", 0.0),
        (" ".join(WORDS), 0.0),
        (" ".join([*WORDS[:8], *WORDS[:8], "x", "y"]), 8 / 18),
        ("loop " * 100, 0.99),
        ("我喜欢吃苹果和香蕉" * 12, 99 / 108),
        ("今天天气很好我们去公园散步，明天天气很好我们去公园跑步", 0.0),  # noqa: RUF001
    ],
)
def test_the_repeated_share_is_that_of_words_seen_before(text: str, share: float) -> None:
    assert repeated_share(text) == pytest.approx(share)


def test_repeating_prompts_are_dropped() -> None:
    assert outcome([prompt("fine"), prompt("loop " * 50)], max_prompt_repetition=0.5) == (
        [("fine",)],
        {"repetition": 1},
    )


@pytest.mark.parametrize(
    ("reply", "refuses"),
    [
        ("I'm sorry, but I can't assist with that request.", True),
        ("I cannot help you with this.", True),
        ("As an AI language model, I am unable to provide medical advice.", True),
        ("Unfortunately, I can\u2019t fulfill that.", True),
        ("I apologize, but I cannot generate such content.", True),
        ("I can help with that.", False),
        ("Cats cannot taste sweetness.", False),
        ("I'm sorry to hear that. Here is what you can do.", False),
        ("The plan: you can't help your friend by writing it yourself.", False),
    ],
)
def test_refusals_are_told_from_other_replies(reply: str, refuses: bool) -> None:
    assert bool(_REFUSAL.match(reply)) is refuses


def test_the_config_switches_the_steps(
    make_config: Callable[..., RunConfig], prompts_file: Path
) -> None:
    lines = prompts_file.read_text().splitlines()
    prompts_file.write_text(
        "\n".join([*lines, lines[0].replace('"id": "0"', '"id": "again"')]) + "\n"
    )
    assert rejected(make_config()) == {"duplicate": 1}
    with pytest.raises(
        Exception, match=r"none of 25 prompts is left after the filters \(long 25\)"
    ):
        rejected(make_config(max_characters=3))


def test_system_prompt_and_turns_count_for_the_longest_prompt() -> None:
    given = prompt("abcd", "ef").model_copy(update={"system": "ghi"})
    assert max_length(9)(given) is None and max_length(8)(given) == "long"


def test_near_duplicates_are_found_where_no_space_parts_the_words() -> None:
    text = "请解释一下量子力学的基本原理并举例说明它在现代科技中的应用以及未来可能的发展方向"
    other = "请介绍一下唐代诗歌的主要流派并举例说明它们对后来文学的影响以及今天的研究现状"
    given = [prompt(text), prompt(f"{text}呢"), prompt(other)]
    assert outcome(given, near_duplicates=0.8) == ([(text,), (other,)], {"near_duplicate": 1})


def test_near_duplicates_are_remembered_outside_of_pythons_memory() -> None:
    """An index in memory takes 4.6 KB for each."""
    step = near_duplicates(0.8)
    words = random.Random(0)
    given = [prompt(" ".join(words.choices(LETTERS, k=40))) for _ in range(1000)]
    assert step(given[0]) is None
    tracemalloc.start()
    try:
        assert not [text for text in given[1:] if step(text)]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 500 * len(given)
    assert step(given[0]) == step(given[-1]) == "near_duplicate"


def test_draws_are_even_over_languages_in_each_category(
    make_config: Callable[..., RunConfig], prompts_file: Path
) -> None:
    records = [
        {"id": f"{code} {kind} {n}", "category": kind, "turns": [f"{text} {kind} {n}"]}
        for code, text, times in (("en", ENGLISH, 20), ("de", GERMAN, 3))
        for kind in ("math", "chat")
        for n in range(times)
    ]
    prompts_file.write_text("".join(json.dumps(record) + "\n" for record in records))

    source = {"source": str(prompts_file), "license": "MIT"}

    def drawn(*balance: str) -> Counter[str]:
        config = make_config(sources=[source], max_prompts=8, balance=balance)
        assert config.synth
        return Counter(p.sample_id.rpartition(" ")[0] for p in PromptStream(config.synth, 0))

    four = {"en math": 2, "en chat": 2, "de math": 2, "de chat": 2}
    assert drawn("category", "language") == four
    assert sum(n for name, n in drawn("language").items() if name.startswith("de")) == 4
    by_category = drawn("category")
    assert by_category["en math"] + by_category["de math"] == 4
    limited = make_config(sources=[{**source, "limit": 8}], balance=["language"])
    assert limited.synth
    ids = [prompt.sample_id[:2] for prompt in PromptStream(limited.synth, 0)]
    assert Counter(ids) == {"en": 4, "de": 4}


def test_shares_of_categories(make_config: Callable[..., RunConfig], prompts_file: Path) -> None:
    """In draws of a source and of all; languages within a category stay even."""
    records = [
        {"id": f"{kind} {n}", "category": kind, "turns": [f"{text} {kind} {n}"]}
        for text in (ENGLISH, GERMAN)
        for kind in ("math", "chat")
        for n in range(20)
    ]
    prompts_file.write_text("".join(json.dumps(record) + "\n" for record in records))
    source = {"source": str(prompts_file), "license": "MIT"}

    def drawn(**section: Any) -> Counter[str]:
        config = make_config(**{"sources": [source], **section})
        assert config.synth
        prompts = PromptStream(config.synth, 0)
        return Counter(f"{prompt.category} {prompt.turns[0][:3]}" for prompt in prompts)

    shares = {"chat": 3}
    both = drawn(max_prompts=8, category_shares=shares)
    assert sum(n for name, n in both.items() if name.startswith("chat")) == 6
    of_source = drawn(sources=[{**source, "limit": 8}], category_shares=shares)
    assert sum(n for name, n in of_source.items() if name.startswith("chat")) == 6
    languages = drawn(max_prompts=8, category_shares=shares, balance=["category", "language"])
    assert sorted(languages.values()) == [1, 1, 3, 3]
    with pytest.raises(DataError, match=r"category_shares\.code.*there are.*chat, math"):
        drawn(max_prompts=8, category_shares={"code": 2})
    with pytest.raises(ConfigError, match="set max_prompts"):
        drawn(category_shares=shares)
    with pytest.raises(ConfigError, match="needs category"):
        drawn(max_prompts=8, category_shares=shares, balance=["language"])
    with pytest.raises(ConfigError, match="greater than 0"):
        drawn(max_prompts=8, category_shares={"chat": 0})
