"""How many prompts a plan is told, without a selection and with one."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from pipeline.config import RunConfig, SourceSpec
from pipeline.errors import DataError
from pipeline.prompts.demo_sets import prompt_set
from pipeline.prompts.sources import estimate_records, record_bytes
from pipeline.store.location import Location
from pipeline.synth.select import prompt_counts, select

Configs = Callable[..., RunConfig]


def lines(count: int, last_turn: str = "And then?!", **fields: Any) -> str:
    """Records of two turns, 100 characters together; every fourth is not licensed."""
    records = (
        {
            "turns": [f"{index:90d}", last_turn],
            "license": "MIT" if index % 4 else "GPL-3.0-only",
            **fields,
        }
        for index in range(count)
    )
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file counts as a large one, and a sample is small."""
    monkeypatch.setattr("pipeline.synth.select.SMALL_BYTES", 1000)
    monkeypatch.setattr("pipeline.synth.select._SAMPLE", 200)


def test_small_sources_are_counted(make_config: Configs, prompts_file: Path) -> None:
    prompts_file.write_text(lines(1000))
    counts = prompt_counts(make_config(max_prompts=400))
    assert counts[:4] == (1000, 400, 800, 40_000)
    assert counts.basis == "all prompts of the sources, filtered"
    assert prompt_counts(make_config(max_turns=1))[:4] == (1000, 750, 750, 67_500)
    assert not Path(make_config().run.uri).exists()


def test_a_selection_is_believed(make_config: Configs, prompts_file: Path) -> None:
    config = make_config(max_prompts=10)
    select(config, Location(f"{config.run.uri}/synth"))
    prompts_file.unlink()
    counts = prompt_counts(config)
    assert (counts.loaded, counts.prompts, counts.total_turns) == (24, 10, 20)
    assert counts.basis == "the prompts that this run has selected"


@pytest.mark.usefixtures("large")
def test_large_sources_are_estimated(make_config: Configs, prompts_file: Path) -> None:
    text, other, third = (
        lines(6000, last_turn) for last_turn in ("And then?!", "Why so???", "Where?")
    )
    prompts_file.write_text(text)
    packed = prompts_file.with_name("packed.jsonl.gz")
    parts = (other[at : at + 9000].encode() for at in range(0, len(other), 9000))
    packed.write_bytes(b"".join(map(gzip.compress, parts)))
    table = prompts_file.with_name("table.parquet")
    pq.write_table(pa.Table.from_pylist([json.loads(line) for line in third.splitlines()]), table)
    sources = [{"source": str(path)} for path in (prompts_file, packed, table)]
    sources += [{"source": prompt_set("instructions")}]
    counts = prompt_counts(make_config(sources=sources))
    assert counts.loaded == pytest.approx(3 * 6000 + 770, rel=0.05)
    assert counts.prompts == pytest.approx(3 * 4500 + 770, rel=0.05)
    assert counts.basis.startswith("estimated from 204 records and the sizes of the sources")
    assert estimate_records(SourceSpec(source=str(table))) == 6000
    limited = make_config(sources=sources[:1], max_prompts=1000)
    assert prompt_counts(limited)[1:4] == (1000, 2000, 100_000)
    read_less = [{"source": str(prompts_file), "read_at_most": 3000, "limit": 1000}]
    assert prompt_counts(make_config(sources=read_less))[:2] == pytest.approx((1000, 750), rel=0.05)


@pytest.mark.usefixtures("large")
def test_a_short_source_beside_large_ones_is_counted(
    make_config: Configs, prompts_file: Path
) -> None:
    prompts_file.write_text(lines(20))
    long = prompts_file.with_name("long.jsonl")
    long.write_text(lines(5000))
    sources = [
        {"source": str(prompts_file), "license": "MIT"},
        {"source": str(long), "license": "X"},
    ]
    assert prompt_counts(make_config(sources=sources)).prompts == 20


@pytest.mark.usefixtures("large")
def test_what_a_hub_data_set_does_not_tell_is_said(
    make_config: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "train.jsonl").write_text(lines(300, license="MIT"))
    counts = prompt_counts(make_config(sources=[{"source": "hub:org/name"}]))
    assert counts.loaded == 201 and "1 do not tell theirs and may hold more" in counts.basis
    read_less = [{"source": "hub:org/name", "read_at_most": 100}]
    exact = prompt_counts(make_config(sources=read_less))
    assert exact.loaded == 100 and "do not tell" not in exact.basis


def test_a_file_of_gigabytes_is_planned_in_a_moment(
    make_config: Configs, prompts_file: Path
) -> None:
    """Its end is a hole, which nobody reads."""
    with prompts_file.open("w") as file:
        file.write(lines(60_000))
        size = file.tell()
        file.truncate(2000 * size)
    started = time.monotonic()
    counts = prompt_counts(make_config())
    assert counts.loaded == pytest.approx(120_000_000, rel=0.05)
    assert counts.prompts == pytest.approx(90_000_000, rel=0.05)
    assert time.monotonic() - started < 10


def test_what_cannot_be_opened_is_refused(make_config: Configs, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file"):
        prompt_counts(make_config(sources=[{"source": str(tmp_path / "gone.jsonl")}]))


def test_sizes_without_reading(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(bytes(500))
    (tmp_path / "a.jsonl.gz").write_bytes(bytes(500))
    names = [str(tmp_path / "a.jsonl"), str(tmp_path / "a.jsonl.gz"), "hub:a/b"]
    assert [record_bytes(SourceSpec(source=name)) for name in names] == [500, 2000, None]
