"""Benchmarks in the layouts in which their owners publish them: made-up records, none of theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as parquet  # type: ignore[import-untyped]
import pytest

from pipeline.config import SourceSpec, parse
from pipeline.errors import DataError
from pipeline.prompts import load_prompts
from pipeline.serve_eval.questions import load_evaluation_prompts

NOTE = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
SPEED_BENCH: list[dict[str, Any]] = [
    {
        "question_id": "rag_0001",
        "category": "rag",
        "sub_category": "dialogue",
        "turns": ["Context: a river. Where does it end?", "And where does it begin?"],
        "source": "org/some-set",
        "src_id": "test_17",
        "difficulty": None,
        "multiturn": True,
    },
    {
        "question_id": "coding_0002",
        "category": "coding",
        "sub_category": "python",
        "turns": ["Write a function that adds."],
        "source": "https://example.org/set.json",
        "src_id": "x",
        "difficulty": "easy",
        "multiturn": False,
    },
]


def _write(path: Path, records: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("name", ["speed.jsonl", "speed.parquet"])
def test_speed_bench(tmp_path: Path, name: str) -> None:
    file = _write(tmp_path / name, SPEED_BENCH)
    first, second = load_prompts([SourceSpec(source=str(file))], seed=0)
    assert (first.sample_id, first.category, first.source) == ("rag_0001", "rag", "org/some-set")
    assert first.turns == tuple(SPEED_BENCH[0]["turns"]) and first.system is None
    assert (second.category, len(second.turns)) == ("coding", 1)


@pytest.mark.parametrize("name", ["speed.jsonl", "speed.parquet"])
@pytest.mark.parametrize("turn", [0, 1])
def test_what_speed_bench_may_not_publish_is_no_prompt(
    tmp_path: Path, name: str, turn: int
) -> None:
    turns = [*SPEED_BENCH[0]["turns"]]
    turns[turn] = f"{NOTE}\n\nAnswer the question: {{question}}"
    file = _write(tmp_path / name, [SPEED_BENCH[1], {**SPEED_BENCH[0], "turns": turns}])
    config = parse({"target": {"source": "x"}, "eval": {"prompts": str(file)}})
    with pytest.raises(DataError, match=f"user turn {turn + 1} is a placeholder") as caught:
        load_evaluation_prompts(config)
    assert caught.value.where.startswith(str(file)) and "prepare_data.py" in caught.value.fix


@pytest.mark.parametrize(
    ("record", "field", "turns"),
    [
        # MT-bench of FastChat
        ({"question_id": 81, "category": "writing", "turns": ["a", "b"]}, None, ("a", "b")),
        # HumanEval of OpenAI
        ({"task_id": "T/0", "prompt": "def f():", "canonical_solution": "no"}, None, ("def f():",)),
        # GSM8K
        ({"question": "How many?", "answer": "#### 3"}, None, ("How many?",)),
        # MBPP
        ({"text": "Write f.", "code": "no", "task_id": 11}, "text", ("Write f.",)),
        # summaries, CNN/DailyMail
        ({"article": "Long.", "highlights": "no", "id": "7"}, "article", ("Long.",)),
        # Natural Questions and other QA
        ({"question": "who?", "answers": ["no"]}, None, ("who?",)),
        # chats
        ({"messages": [{"role": "user", "content": "Hi"}]}, None, ("Hi",)),
    ],
)
def test_other_sets(
    tmp_path: Path, record: dict[str, Any], field: str | None, turns: tuple[str, ...]
) -> None:
    file = _write(tmp_path / "set.jsonl", [record])
    (prompt,) = load_prompts([SourceSpec(source=str(file), field=field)], seed=0)
    assert prompt.turns == turns
