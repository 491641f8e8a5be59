"""Records that cannot be used, through the whole of synth: counted, shown by place, left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import RunConfig
from pipeline.errors import DataError
from pipeline.store.location import Location
from pipeline.synth.select import PromptStream, prompt_counts, select
from pipeline.synth.stage import run

Configure = Callable[..., RunConfig]
SECRET = "anna@example.com"


@pytest.fixture
def with_bad_records(prompts_file: Path) -> Path:
    """Two among 24 + 20 good ones; what they hold is nobody's business."""
    lines = prompts_file.read_text().splitlines()
    good = [
        json.dumps({"turns": [f"{text} again?"], "license": "MIT"}) for text in map(str, range(20))
    ]
    lines[5:5] = [json.dumps({"id": SECRET, "turns": [SECRET, " "]}), f'{{"{SECRET}": cut']
    prompts_file.write_text("\n".join([*lines, *good]) + "\n", encoding="utf-8")
    return prompts_file


def test_they_are_counted_in_every_receipt(
    make_config: Configure, with_bad_records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(max_new_tokens=8, max_turns=1, shard_prompts=50, max_prompts=30)
    assert prompt_counts(config)[:2] == (46, 30), "the plan reads them in the same way"
    manifest = run(config)
    expected = {"record:blank": 1, "record:not_json": 1, "max_prompts": 14}
    assert manifest.rejected == expected and manifest.rows == 30
    folder = Path(config.run.uri) / "synth"
    audit = json.loads((folder / "audit.json").read_text())
    assert audit["prompts"]["loaded"] == 46 and audit["rejected"] == expected
    sheet = (folder / "datasheet.md").read_text()
    assert "| record:blank | record that cannot be read | 1 |" in sheet
    told = capsys.readouterr().out
    assert "records left out: 2 (record:blank 1, record:not_json 1)" in told
    assert (
        f"{with_bad_records}:6: user turn 2 is blank" in told and f"{with_bad_records}:7: " in told
    )
    assert SECRET not in told + sheet + json.dumps(audit)


def test_too_many_stop_the_run_with_the_first(
    make_config: Configure, with_bad_records: Path
) -> None:
    with with_bad_records.open("a") as file:
        file.write("[]\n")
    config = make_config()
    with pytest.raises(DataError, match=r"prompts\.jsonl:6: user turn 2 is blank; 3 of 47 records"):
        select(config, Location(f"{config.run.uri}/synth"))
    assert not (Path(config.run.uri) / "synth/selection.json").exists()


def test_of_an_evaluation_set_every_record_counts(
    make_config: Configure, with_bad_records: Path
) -> None:
    config = make_config(exclude=[{"source": str(with_bad_records)}])
    assert config.synth
    with pytest.raises(DataError, match=r"prompts\.jsonl:6: user turn 2 is blank \(fix"):
        list(PromptStream(config.synth, 0))
