"""Metrics: what is counted, where it is written, and that it costs nothing while it is off."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline import telemetry
from pipeline.config import RunSection
from pipeline.console import progress_bar, worker_name
from pipeline.errors import DataError, StageIncomplete
from pipeline.store.backend import retry
from pipeline.store.location import Location
from pipeline.store.shards import write_shard
from pipeline.telemetry import count, metrics_of, observe


def read(folder: Path, stage: str = "synth") -> dict[str, float]:
    """Name, or name and the label that is not on every metric, to value."""
    from prometheus_client.parser import text_string_to_metric_families

    text = (folder / f"eagle3-{stage}-{worker_name()}.prom").read_text(encoding="utf-8")
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert (sample.labels["stage"], sample.labels["run"]) == (stage, "x")
            assert sample.labels["worker"] == worker_name()
            own = [value for name, value in sample.labels.items() if name not in telemetry._LABELS]
            values[" ".join([sample.name, *own])] = sample.value
    return values


@pytest.fixture
def settings(tmp_path: Path) -> RunSection:
    return RunSection(uri="gs://bucket/heads/x", metrics_dir=str(tmp_path / "not/yet/there"))


@pytest.fixture
def folder(settings: RunSection) -> Path:
    assert settings.metrics_dir is not None
    return Path(settings.metrics_dir)


def test_counters_and_gauges_of_a_stage(settings: RunSection, folder: Path) -> None:
    with metrics_of(settings, "synth"):
        assert read(folder)["eagle3_running"] == 1, "there from the beginning"
        count("records", 3)
        count("records", 4)
        count("rejected", 2, reason="too_short")
        count("rejected", 1, reason="pii:PERSON")
        observe("endpoints_healthy", 2)
        with progress_bar("synth", unit="prompts", total=8, done=2) as bar:
            bar.advance(3)
    values = read(folder)
    assert values["eagle3_records_total"] == 7 and values["eagle3_records_per_second"] > 0
    assert values["eagle3_rejected_total too_short"] == 2
    assert values["eagle3_rejected_total pii:PERSON"] == 1
    assert values["eagle3_endpoints_healthy"] == 2 and values["eagle3_running"] == 0
    assert values["eagle3_progress_done prompts"] == 5
    assert values["eagle3_progress_total prompts"] == 8
    assert values["eagle3_progress_per_second prompts"] > 0
    assert values["eagle3_progress_seconds_left prompts"] >= 0
    assert [file.suffix for file in folder.iterdir()] == [".prom"], "nothing is left over"


def test_the_file_is_renewed_while_the_stage_is_at_work(
    settings: RunSection, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert telemetry.PERIOD_SECONDS <= 15
    monkeypatch.setattr(telemetry, "PERIOD_SECONDS", 0.02)
    with metrics_of(settings, "synth"):
        count("tokens", 5)
        until = time.monotonic() + 10
        while read(folder).get("eagle3_tokens_total") != 5:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_repeated_requests_are_counted(settings: RunSection, folder: Path) -> None:
    failures = [ConnectionResetError("reset")]

    def call() -> str:
        if failures:
            raise failures.pop()
        return "done"

    with metrics_of(settings, "synth"):
        assert retry(call, "a.bin") == "done"
    assert read(folder)["eagle3_retries_total store"] == 1


def test_a_shard_that_another_process_had_committed_is_counted_apart(
    settings: RunSection, folder: Path, tmp_path: Path
) -> None:
    location = Location(str(tmp_path / "synth"))
    with metrics_of(settings, "synth"):
        for _ in range(2):
            write_shard(location, "a.bin", b"12345", rows=2, tokens=3, rejected={"x": 4}, seconds=0)
    values = read(folder)
    assert (values["eagle3_shards_total"], values["eagle3_shards_lost_total"]) == (1, 1)
    assert (values["eagle3_records_total"], values["eagle3_tokens_total"]) == (2, 3)
    assert (values["eagle3_written_bytes_total"], values["eagle3_rejected_total x"]) == (5, 4)


def test_what_ends_a_stage_is_counted(settings: RunSection, folder: Path) -> None:
    with pytest.raises(DataError), metrics_of(settings, "synth"):
        raise DataError("bad", where="a", fix="b")
    assert read(folder)["eagle3_errors_total DataError"] == 1
    with pytest.raises(StageIncomplete), metrics_of(settings, "features"):
        raise StageIncomplete("others", where="a", fix="b")
    assert not [name for name in read(folder, "features") if "errors" in name]


def test_a_file_that_cannot_be_written_is_said_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(telemetry, "PERIOD_SECONDS", 0.02)
    (tmp_path / "file").write_text("in the way")
    with metrics_of(RunSection(metrics_dir=str(tmp_path / "file/metrics")), "synth"):
        time.sleep(0.2)
    assert capsys.readouterr().out.count("metrics cannot be written, the work goes on") == 1


def test_off_it_counts_nothing_and_loads_nothing(tmp_path: Path) -> None:
    program = """
import sys
from pipeline.config import RunSection
from pipeline.telemetry import count, metrics_of, observe
with metrics_of(RunSection(), "synth"):
    count("records", 3)
    observe("endpoints_healthy", 1)
assert "prometheus_client" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert list(tmp_path.iterdir()) == []
