"""The pair of source and id: one prompt's alone, and the same however sources are ordered."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig, SourceSpec
from pipeline.prompts import load_prompts
from pipeline.prompts.sources import source_names
from pipeline.records import Prompt
from pipeline.serve_eval.questions import load_evaluation_prompts
from pipeline.synth.select import PromptStream


def names(*sources: str | dict[str, str]) -> list[str]:
    specs = [each if isinstance(each, dict) else {"source": each} for each in sources]
    return source_names([SourceSpec(**each) for each in specs])


def write(path: Path, *records: dict[str, Any] | str) -> dict[str, str]:
    """A source; a text stands for a record of one turn."""
    lines = [{"turns": [each]} if isinstance(each, str) else each for each in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    licensed = (json.dumps({"license": "MIT", **line}) + "\n" for line in lines)
    path.write_text("".join(licensed), encoding="utf-8")
    return {"source": str(path)}


def load(*sources: dict[str, str]) -> list[Prompt]:
    return load_prompts([SourceSpec(**each) for each in sources], seed=0)


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (["/home/anna/train.jsonl", "test.jsonl.gz"], ["train", "test"]),
        (["x/a/train.jsonl", "x/b/train.jsonl", "y/test.jsonl"], ["a/train", "b/train", "test"]),
        (["x/a/p.jsonl", "y/a/p.jsonl"], ["x/a/p", "y/a/p"]),
        (["gs://one/a/p.jsonl", "gs://two/b/p.jsonl"], ["a/p", "b/p"]),
        (["a/p.jsonl", "a/p.parquet"], ["p.jsonl", "p.parquet"]),
        (["p.jsonl", "p.jsonl"], ["p", "p"]),
        (
            [{"source": "hub:o/n"}, {"source": "hub:o/n", "split": "test"}],
            ["o/n/train", "o/n/test"],
        ),
    ],
)
def test_sources_have_the_shortest_names_that_tell_them_apart(
    sources: list[Any], expected: list[str]
) -> None:
    for order in itertools.permutations(range(len(sources))):
        assert names(*(sources[at] for at in order)) == [expected[at] for at in order]


def test_a_file_may_be_called_as_a_hub_data_set_is() -> None:
    first, second, third = names("hub:org/name", "org/name.jsonl", "other/name.jsonl")
    assert (first, third) == ("org/name/train", "other/name") and second.startswith("name~")


def test_equal_paths_in_two_buckets_differ_and_name_neither() -> None:
    one, two = names("gs://team-one/p.jsonl", "gs://team-two/p.jsonl")
    assert one != two and {name[:2] for name in (one, two)} == {"p~"} and "team" not in one + two


def test_ids_are_unique_and_do_not_depend_on_the_order_of_sources(tmp_path: Path) -> None:
    sources = [
        write(tmp_path / "a/train.jsonl", "A1", "A2", {"id": "7", "turns": ["A3"]}),
        write(tmp_path / "b/train.jsonl", "B1", {"id": "7", "turns": ["B2"]}),
        write(tmp_path / "c/other.jsonl", {"source": "a/train", "id": "x", "turns": ["C1"]}),
    ]
    one, other = load(*sources), load(*reversed(sources))
    assert [(prompt.source, prompt.sample_id) for prompt in one] == [
        ("a/train", "a/train:1"),
        ("a/train", "a/train:2"),
        ("a/train", "7"),
        ("b/train", "b/train:1"),
        ("b/train", "7"),
        ("a/train", "x"),
    ]
    assert sorted(one, key=lambda prompt: prompt.turns) == sorted(
        other, key=lambda prompt: prompt.turns
    )


def test_a_repeated_id_costs_no_prompt(tmp_path: Path) -> None:
    """Not even where the text is the same: whether that is a duplicate is for the filter to say."""
    records = [{"id": "1", "turns": [text]} for text in ("A", "B", "C", "B", "B", "A")]
    prompts = load(write(tmp_path / "p.jsonl", *records))
    assert [prompt.turns[0] for prompt in prompts] == ["A", "B", "C", "B", "B", "A"]
    ids = [prompt.sample_id for prompt in prompts]
    assert ids[0] == "1" and len(set(ids)) == 6 and all(each.startswith("1~") for each in ids[1:])
    assert ids[3:5] == [f"{ids[1]}-2", f"{ids[1]}-3"]
    shorter = load(write(tmp_path / "p.jsonl", records[0], *records[2:3], records[1]))
    assert shorter[2].sample_id == ids[1], "it comes from the text"


def test_a_run_has_no_two_prompts_of_one_id(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    sources = [
        write(tmp_path / "a/p.jsonl", "A", {"id": "p:1", "turns": ["B"]}),
        write(tmp_path / "b/p.jsonl", "A2", {"source": "a/p", "id": "a/p:1", "turns": ["B2"]}),
    ]
    config = make_config(sources=sources)
    assert config.synth
    pairs = [(each.source, each.sample_id) for each in PromptStream(config.synth, 0)]
    assert len(pairs) == len(set(pairs)) == 4 and pairs[0] == ("a/p", "a/p:1")


def test_an_evaluation_keeps_every_prompt_of_an_id(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    source = write(tmp_path / "p.jsonl", *({"id": "1", "turns": [text]} for text in "ABCD"))
    config = make_config()
    section = config.eval.model_copy(update={"prompts": source["source"], "max_prompts": 3})
    measured, others = load_evaluation_prompts(config.model_copy(update={"eval": section}))
    assert (len(measured), len(others)) == (3, 1)
