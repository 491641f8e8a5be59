"""Licence gate, duplicates, decontamination: each drops what it must and counts it."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import RunConfig, SourceSpec
from pipeline.errors import ConfigError, DataError
from pipeline.prompts import load_prompts
from pipeline.prompts.records import FORBIDS_COMPETING_MODELS, to_prompt
from pipeline.records import Prompt
from pipeline.store.location import Location
from pipeline.store.samples import shard_name
from pipeline.synth.filters import (
    SeenDigests,
    apply_steps,
    decontaminate,
    first_of_its_kind,
    license_gate,
    words_of,
)
from pipeline.synth.select import Selection, select
from tests.conftest import demo_prompts


def selected(config: RunConfig) -> Selection:
    return select(config, Location(f"{config.run.uri}/synth"))


def prompt(*turns: str, license: str = "MIT") -> Prompt:
    return Prompt(sample_id="0", source="s", license=license, category="c", turns=turns)


def test_only_allowed_licenses_enter() -> None:
    given = [
        prompt("a", license="MIT"),
        prompt("b", license="apache-2.0"),
        prompt("c", license="CC-BY-NC-4.0"),
        prompt("d", license="unknown"),
    ]
    kept, rejected = apply_steps(given, [license_gate(["MIT", "Apache-2.0"])])
    assert [prompt.turns for prompt in kept] == [("a",), ("b",)]
    assert rejected == {"license:CC-BY-NC-4.0": 1, "license:unknown": 1}


def test_expressions_need_one_choice_that_is_allowed_as_a_whole() -> None:
    gate = license_gate(["MIT", "Apache-2.0", "(MIT AND BSD-3-Clause)"])
    allowed = [
        "MIT OR GPL-3.0-only",
        "mit and Apache-2.0",
        "GPL-3.0-only OR MIT AND Apache-2.0",
        "(MIT AND BSD-3-Clause)",
    ]
    refused = [
        "MIT AND GPL-3.0-only",
        "GPL-2.0-only OR GPL-3.0-only",
        "(MIT OR Apache-2.0)",
        "MIT WITH exception",
        "",
    ]
    assert [gate(prompt("a", license=license)) for license in allowed] == [None] * 4
    assert [gate(prompt("a", license=license)) for license in refused] == [
        f"license:{license}" for license in refused
    ]


def test_terms_that_forbid_competing_models_are_refused_even_when_listed() -> None:
    gate = license_gate(["MIT", FORBIDS_COMPETING_MODELS])
    assert gate(prompt("a", license=FORBIDS_COMPETING_MODELS)) == "terms:forbids_competing_models"


def test_a_source_can_be_marked_as_made_under_such_terms(
    make_config: Callable[..., RunConfig], prompts_file: Path, tmp_path: Path
) -> None:
    marked = tmp_path / "marked.jsonl"
    marked.write_text('{"turns": ["From a model"], "license": "MIT"}\n', encoding="utf-8")
    with prompts_file.open("a") as file:
        file.write(
            '{"turns": ["Marked itself"], "license": "MIT", "forbids_competing_models": true}\n'
        )
    sources = [
        {"source": str(prompts_file), "license": "MIT"},
        {"source": str(marked), "license": "MIT", "forbids_competing_models": True},
    ]
    assert selected(make_config(sources=sources)).rejected == {"terms:forbids_competing_models": 2}


@pytest.mark.parametrize(
    ("value", "forbids"),
    [
        *((value, True) for value in (True, "true", " True", "YES", 1, 1.0, "1", "1.0")),
        *((value, False) for value in (False, "false", "No", 0, 0.0, "0", "", None, float("nan"))),
    ],
)
def test_a_record_says_so_as_tables_store_it(value: Any, forbids: bool) -> None:
    record = {"prompt": "Hi", "license": "MIT", "forbids_competing_models": value}
    read = to_prompt(record, where="here", sample_id="0", source="s")
    reason = "terms:forbids_competing_models" if forbids else None
    assert license_gate(["MIT"])(read) == reason


@pytest.mark.parametrize("value", ["maybe", 2, [True], {"value": True}])
def test_a_record_that_says_neither_is_bad(value: Any) -> None:
    record = {"prompt": "Hi", "license": "MIT", "forbids_competing_models": value}
    with pytest.raises(DataError, match="forbids_competing_models: is neither true nor false"):
        to_prompt(record, where="here", sample_id="0", source="s")


def test_duplicates_are_equal_but_for_encoding_and_white_space() -> None:
    given = [
        prompt("Was heißt 2+2 für Zoë?"),
        prompt("  Was heißt\t2+2\nfür Zoë? "),
        prompt(unicodedata.normalize("NFD", "Was heißt 2+2 für Zoë?")),
    ]
    kept, rejected = apply_steps(given, [first_of_its_kind()])
    assert kept == given[:1] and rejected == {"duplicate": 2}


#: What is not the same, though it has the same letters.
DISTINCT = [
    ("12 + 7", "12 * 7", "12 - 7", "12 / 7"),
    ("What is C?", "What is C++?", "What is C#?"),
    ("a == b", "a != b", "a = b"),
    ("Is 3 < 5?", "Is 3 > 5?", "Is 3 <= 5?"),
    ("\N{DOG FACE}\N{CAT FACE}", "\N{CAT FACE}\N{DOG FACE}", "\N{DOG FACE}"),
    ("कि", "की", "कु", "क"),
    ("What is 50 %?", "What is 50 €?", "What is 50?"),
]


@pytest.mark.parametrize("texts", DISTINCT)
def test_symbols_and_marks_are_not_lost(texts: tuple[str, ...]) -> None:
    given = [prompt(text) for text in texts]
    assert apply_steps(given, [first_of_its_kind()]) == (given, {})
    assert len({tuple(words_of(text)) for text in texts}) == len(texts)
    steps = [decontaminate([given[0]])]
    assert apply_steps(given, steps) == (given[1:], {"contaminated": 1})


def test_turns_and_system_prompts_tell_prompts_apart() -> None:
    given = [
        *(prompt(*turns) for turns in (("a b",), ("a", "b"), ("ab",), ("A b",), ("a b!",))),
        *(prompt("a b").model_copy(update={"system": system}) for system in ("", "a", "a b")),
        prompt("a").model_copy(update={"system": "b"}),
    ]
    assert apply_steps(given, [first_of_its_kind()]) == (given, {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Ｈello,\n  “WORLD” — ﬁne_1!", "hello world fine_1"),  # noqa: RUF001
        ("Is 12 * 7 < 90, or not?", "is 12* 7< 90 or not"),
        ("++ C ++ (or C#)", "++ c++ or c#"),
        ("हिन्दी की किताब।", "हिन्दी की किताब"),
        ("?!… 。", ""),
        ("用Python写データ*、好吗？", "用 python 写 デー タ * 好 吗"),  # noqa: RUF001
        ("ภาษาที่ดี", "ภ า ษ า ที่ ดี"),
    ],
)
def test_words_keep_marks_and_symbols_and_lose_punctuation(text: str, words: str) -> None:
    assert words_of(text) == words.split()


LONG = "the quick brown fox jumps over the lazy dog while seven grey cats watch from behind a fence"


@pytest.mark.parametrize(
    ("turns", "contaminated"),
    [
        (("Explain why the sky is blue at noon, please.",), True),
        (("hello there", "explain why the SKY is blue at noon; please!"), True),
        # A short one contained whole.
        (("Here is a task. Explain why the sky is blue at noon, please. Thanks",), True),
        ((f"Translate: {LONG} and more",), True),
        # 13 words of the long one, and 12 of them.
        (("fox jumps over the lazy dog while seven grey cats watch from behind",), True),
        (("fox jumps over the lazy dog while seven grey cats watch from",), False),
        (("Explain why the sky is blue",), False),
        (("why",), True),  # a short excluded turn counts when it is the whole turn
        (("and why not",), False),
        (("1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16",), False),  # digits overlap by chance
    ],
)
def test_matches_of_evaluation_prompts_are_dropped(
    turns: tuple[str, ...], contaminated: bool
) -> None:
    excluded = [
        prompt("Explain why the sky is blue at noon, please.", "Why?"),
        prompt(LONG),
        prompt("0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17"),
    ]
    assert decontaminate(excluded)(prompt(*turns)) == ("contaminated" if contaminated else None)


CHINESE = "请解释一下量子力学的基本原理，并举例说明它在现代科技中的应用以及未来的发展方向。"  # noqa: RUF001
JAPANESE = "量子力学の基本原理を説明し、現代の技術における応用例を三つ挙げてください。"
THAI = "ช่วยอธิบายหลักการพื้นฐานของกลศาสตร์ควอนตัมและยกตัวอย่างการใช้งานในปัจจุบัน"
SHORT = "天空在中午为什么看起来是蓝色的？"  # noqa: RUF001


@pytest.mark.parametrize(
    ("turn", "contaminated"),
    [
        (f"{CHINESE}请用中文回答", True),
        (f"问题：{CHINESE}", True),  # noqa: RUF001
        (CHINESE.replace("未来", "今后"), True),
        (f"次の質問に答えて。{JAPANESE}短くお願いします", True),
        (f"{THAI}ครับ", True),
        (f"请问，{SHORT}谢谢", True),  # noqa: RUF001
        # Of the same topic, or with the same phrases, and other questions all the same.
        ("请解释一下相对论的基本原理，并举例说明它在卫星导航中的作用。", False),  # noqa: RUF001
        ("量子力学的基本原理是谁提出的？它在现代科技中有什么用？", False),  # noqa: RUF001
        ("量子力学の歴史を説明し、現代の技術における課題を挙げてください。", False),
        ("ช่วยอธิบายหลักการพื้นฐานของเศรษฐศาสตร์และยกตัวอย่างในประเทศไทย", False),
        ("天空在傍晚为什么看起来是红色的？", False),  # noqa: RUF001
        ("为什么", True),  # an excluded turn as a whole
        ("为什么不行", False),
    ],
)
def test_matches_are_found_where_no_space_parts_the_words(turn: str, contaminated: bool) -> None:
    excluded = [*map(prompt, (CHINESE, JAPANESE, THAI, SHORT, "为什么？"))]  # noqa: RUF001
    assert decontaminate(excluded)(prompt(turn)) == ("contaminated" if contaminated else None)


def test_every_mt_bench_prompt_is_recognised() -> None:
    bench = load_prompts([SourceSpec(source=demo_prompts("mt_bench"))], seed=0)
    step = decontaminate(bench)
    turns = [turn for question in bench for turn in question.turns]
    assert all(step(prompt("Now this:", turn.upper())) == "contaminated" for turn in turns)


def test_a_planted_mt_bench_prompt_is_dropped_and_counted(
    make_config: Callable[..., RunConfig], prompts_file: Path
) -> None:
    [question] = load_prompts([SourceSpec(source=demo_prompts("mt_bench"), limit=1)], seed=0)
    planted = question.turns[0]
    extra = [
        {"turns": [f"Please help.\n{planted}"], "license": "MIT"},
        {"turns": ["What is 0 plus 3, and why would that be so?", "Say more."], "license": "MIT"},
    ]
    extra += [{"turns": ["A fresh question"], "license": "GPL-3.0-only"}]
    with prompts_file.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in extra)
    selection = selected(
        make_config(exclude=[{"source": demo_prompts("mt_bench")}], max_prompts=20)
    )
    assert selection.rejected == {
        "contaminated": 1,
        "duplicate": 1,
        "license:GPL-3.0-only": 1,
        "max_prompts": 4,
    }
    assert selection.loaded == 27 and selection.prompts == 20


def test_no_prompt_left_is_an_error_with_the_reasons(make_config: Callable[..., RunConfig]) -> None:
    with pytest.raises(
        DataError, match=r"none of 24 prompts is left after the filters \(license:MIT 24\)"
    ):
        selected(make_config(allowed_licenses=["Apache-2.0"]))


def test_a_config_without_the_section_is_refused(make_config: Callable[..., RunConfig]) -> None:
    without: Any = make_config().model_copy(update={"synth": None})
    with pytest.raises(ConfigError, match="config: synth: required but not set"):
        selected(without)


def test_a_shard_is_named_after_its_prompts(
    make_config: Callable[..., RunConfig], prompts_file: Path
) -> None:
    names = selected(make_config(shard_prompts=10)).names
    assert [name[:6] for name in names] == ["00000-", "00001-", "00002-"]
    assert names == selected(make_config("again", shard_prompts=10)).names
    prompts_file.write_text(prompts_file.read_text().replace("Say more.", "Go on.", 1))
    changed = selected(make_config("changed", shard_prompts=10)).names
    assert [name in changed for name in names] == [False, True, True]


def test_names_sort_in_the_order_of_the_shards_however_many() -> None:
    numbers = [0, 9, 10, 99_999, 100_000, 123_456_789, 2_000_000_000]
    names = [shard_name(number, [prompt("a")]) for number in numbers]
    assert names == sorted(names)


@given(st.lists(st.integers(0, 40)))
def test_a_digest_is_new_once(numbers: list[int]) -> None:
    seen, so_far = SeenDigests(), set[int]()
    for number in numbers:
        assert seen.add(number.to_bytes(16, "big")) == (number not in so_far)
        so_far.add(number)
