"""A template that writes today's date: one date a run, whoever works on it and when."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig
from pipeline.errors import StageIncomplete
from pipeline.records import Sample
from pipeline.store.manifest import find_manifest, read_begin, stage_location
from pipeline.store.samples import read_samples
from pipeline.synth import stage
from pipeline.synth.stage import run
from tests.conftest import CHATML

Configure = Callable[..., RunConfig]
DATED = "<|im_start|>system\n{{ strftime_now('%d %b %Y %H:%M') }}<|im_end|>\n" + CHATML
FIRST = datetime(2026, 3, 1, 23, 30, tzinfo=UTC)


def at(monkeypatch: pytest.MonkeyPatch, moment: datetime, zone: str) -> None:
    """This machine's clock, for us and for transformers, and its time zone."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return moment.astimezone(tz) if tz else moment.astimezone().replace(tzinfo=None)

    monkeypatch.setenv("TZ", zone)
    time.tzset()
    monkeypatch.setattr(stage, "datetime", Clock)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)


@pytest.fixture
def dated(
    make_config: Configure, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """`make_config` over a target whose template writes date and time."""
    target = shutil.copytree(tiny_target, tmp_path / "dated")
    (target / "chat_template.jinja").write_text(DATED)

    def make(uri: str = "run", shard: str | None = None, **synth: Any) -> RunConfig:
        config = make_config(uri, **synth)
        source = config.target.model_copy(update={"source": str(target)})
        part = config.run.model_copy(update={"shard": shard})
        return config.model_copy(update={"target": source, "run": part})

    yield make
    monkeypatch.undo()
    time.tzset()


def samples_of(config: RunConfig) -> list[Sample]:
    manifest = find_manifest(config.run.uri, "synth")
    assert manifest is not None
    location = stage_location(config.run.uri, "synth")
    return [sample for shard in manifest.shards for sample in read_samples(location, shard)]


def test_every_worker_and_attempt_writes_the_date_of_the_beginning(
    dated: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    at(monkeypatch, FIRST, "Pacific/Kiritimati")
    with pytest.raises(StageIncomplete):
        run(dated(shard="0/3"))
    at(monkeypatch, datetime(2026, 3, 9, tzinfo=UTC), "Etc/GMT+12")
    with pytest.raises(StageIncomplete):
        run(dated(shard="1/3"))
    at(monkeypatch, datetime(2027, 3, 9, tzinfo=UTC), "Asia/Tokyo")
    manifest = run(dated())
    samples = samples_of(dated())
    assert len(samples) == 24 and {len(sample.supervised) for sample in samples} == {1, 2}
    at(monkeypatch, FIRST, "UTC")
    tokenizer: Any = AutoTokenizer.from_pretrained(dated().target.source)
    for sample in samples:
        messages = [{"role": "user", "content": sample.messages[0].content}]
        first = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert list(sample.token_ids[: sample.supervised[0].start]) == first
    begun = read_begin(stage_location(dated().run.uri, "synth"))
    assert begun is not None and begun.clock == FIRST
    assert manifest.details["template"]["clock"] == "2026-03-01T23:30:00+00:00"


def test_the_recorded_moment_repeats_a_run(
    dated: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(monkeypatch, FIRST, "UTC")
    whole = run(dated())
    at(monkeypatch, datetime(2027, 3, 9, tzinfo=UTC), "Asia/Tokyo")
    assert run(dated("today")).shards != whole.shards
    (tmp_path / "again/synth").mkdir(parents=True)
    shutil.copy(tmp_path / "run/synth/begin.json", tmp_path / "again/synth")
    assert run(dated("again")).shards == whole.shards


def test_nothing_is_recorded_for_a_template_without_dates(make_config: Configure) -> None:
    config = make_config(max_prompts=4)
    manifest = run(config)
    fields = json.loads((Path(config.run.uri) / "synth/begin.json").read_text())
    assert "clock" not in fields and "clock" not in manifest.details["template"]
