"""Samples as Parquet: exact, deterministic, and readable by the tools that people use."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import CorruptShard
from pipeline.store.samples import decode_samples, encode_samples
from tests.store.conftest import make_sample


def test_samples_come_back_exactly() -> None:
    samples = [make_sample(index, length=5 + index) for index in range(20)]
    data = encode_samples(samples)
    assert decode_samples(data, where="x") == samples
    assert data == encode_samples(samples)
    assert decode_samples(encode_samples([]), where="x") == []


def test_pandas_and_datasets_read_the_file(tmp_path: Path) -> None:
    import datasets  # type: ignore[import-untyped]
    import pandas

    samples = [make_sample(0, length=6), make_sample(1, length=9)]
    path = tmp_path / "samples.parquet"
    path.write_bytes(encode_samples(samples))

    frame = pandas.read_parquet(path)
    assert list(frame["sample_id"]) == ["p0", "p1"]
    assert list(frame["token_ids"][1]) == list(samples[1].token_ids)
    cache = str(tmp_path / "cache")
    rows = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=cache)
    assert rows.column_names == frame.columns.tolist()
    assert rows[1]["supervised"] == [{"start": 3, "end": 9}]
    assert rows[0]["sampling"]["temperature"] == 0.7
    assert rows[0]["messages"][0] == {"role": "user", "content": "Grüße 👋"}
    assert rows[1]["seed"] == 2**40 + 1


def test_unreadable_files_and_rows_are_named() -> None:
    data = encode_samples([make_sample()])
    message = r"synth/shards/0\.parquet: not a readable Parquet file"
    for broken in (b"", data[:-20], b"PAR1" + data[4:50]):
        with pytest.raises(CorruptShard, match=message):
            decode_samples(broken, where="synth/shards/0.parquet")
    bad = make_sample(1).model_copy(update={"finish_reason": "whim"})
    data = encode_samples([make_sample(), bad])
    with pytest.raises(CorruptShard, match=r"0\.parquet: row 1, finish_reason"):
        decode_samples(data, where="0.parquet")
