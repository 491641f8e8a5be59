"""`eagle3 pii-score`: the figures are those that can be counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.cli.pii_score import FULL_NAME, score_files
from pipeline.config import PiiSection


def labelled(
    text: str, *spans: tuple[str, str], meta: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A record whose spans are given as (type, characters)."""
    gold = [
        {"start": text.index(part), "end": text.index(part) + len(part), "type": kind}
        for kind, part in spans
    ]
    return {"text": text, "spans": gold, "meta": meta}


ONLY_SSN = {"entity_under_test": "US_SSN"}
RECORDS = [
    labelled("Mail anna@firm.com now", ("EMAIL_ADDRESS", "anna@firm.com")),
    labelled("Mail bob@firm.com now"),  # found, not labelled: against precision
    labelled("Mail nobody now", ("EMAIL_ADDRESS", "nobody")),  # labelled, not found: against recall
    # An alias, and one common character suffices.
    labelled("Pay DE89370400440532013000", ("IBAN", "DE89")),
    labelled("My name is Anna Schmidt", ("PERSON", "Anna Schmidt")),
    # The e-mail is not scored.
    labelled("carl@firm.com 219-09-9999", ("US_SSN", "219-09-9999"), meta=ONLY_SSN),
]
PROMPTS = [{"turns": ["Hello", "there"]}, {"turns": ["Hello", "call me on 212-839-0187"]}]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "data.jsonl"
    lines = [json.dumps(record) + "\n" for record in [*RECORDS, *PROMPTS]]
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def test_recall_precision_and_false_alarms(file: str) -> None:
    score = score_files([file], PiiSection()).as_json()
    entities = score["entities"]
    half = {"recall": 0.5, "precision": 0.5, "gold": 2, "found": 2}
    assert entities["EMAIL_ADDRESS"] == half
    assert entities["IBAN_CODE"] == {"recall": 1.0, "precision": 1.0, "gold": 1, "found": 1}
    assert entities["US_SSN"]["recall"] == 1.0
    assert entities["PERSON"]["recall"] == entities[FULL_NAME]["recall"] == 1.0
    assert score["prompts"] == {
        "records": 2,
        "flagged": 1,
        "false_positive_rate": 0.5,
        "by_entity": {"PHONE_NUMBER": 1},
    }
    assert set(score["per_second"]) == {
        "all entities, with spaCy's entity recogniser",
        "policy, patterns and secrets",
    }
    assert score["labelled_records"] == 6


def test_the_command_prints_a_table_and_json(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pii-score", file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entities"]["EMAIL_ADDRESS"]["recall"] == 0.5
    assert main(["pii-score", file]) == 0
    printed = capsys.readouterr().out
    assert "EMAIL_ADDRESS" in printed
    assert "1 of 2 prompts flagged (50.00%): PHONE_NUMBER 1" in printed


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ("[1]", "is neither labelled nor a prompt"),
        ('{"text": "a"}', "is neither labelled nor a prompt"),
        ('{"text": "a", "spans": [{}]}', "a span without start"),
    ],
)
def test_other_records_are_refused_with_their_line(
    tmp_path: Path, record: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"turns": ["a"]}\n' + record + "\n", encoding="utf-8")
    assert main(["pii-score", str(path)]) == 2
    printed = capsys.readouterr().err
    assert f"{path}:2" in printed and problem in printed
