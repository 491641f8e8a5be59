"""A prompts file that is another one than a run has read is told."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import RunConfig, SourceSpec
from pipeline.prompts.changes import fingerprints, notice_changes
from pipeline.store.location import Location
from pipeline.store.samples import SELECTION
from pipeline.synth.select import find_selection, select
from pipeline.synth.stage import run

Configure = Callable[..., RunConfig]
Output = pytest.CaptureFixture[str]


def test_every_byte_of_a_file_counts(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "p.jsonl"
    text = bytes(range(256)) * 12_000  # three blocks, the last one cut
    path.write_bytes(text)
    specs = [SourceSpec(source=name) for name in (str(path), f"file://{path}", "hub:org/name")]
    before = fingerprints(specs)
    assert before[0] == before[1] and before[0] and before[2] is None
    notice_changes("synth", specs, before)
    notice_changes("synth", specs, ())
    assert capsys.readouterr().out == ""
    for at in (0, len(text) // 2, len(text) - 1):
        path.write_bytes(text[:at] + b"x" + text[at + 1 :])
        notice_changes("synth", specs, before)
        assert f"{path} has changed since then (other bytes)" in capsys.readouterr().out, at
    path.write_bytes(text + b"\n")
    notice_changes("synth", specs, before)
    assert "(3,072,001 bytes, not 3,072,000)" in capsys.readouterr().out
    path.unlink()
    notice_changes("synth", specs, before)
    assert capsys.readouterr().out == "", "moved away, as it may be"


def test_a_small_file_s_fingerprint_is_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    for text in (b"", b"a", b"x" * (1 << 20)):
        path.write_bytes(text)
        [told] = fingerprints([SourceSpec(source=str(path))])
        assert told == f"{len(text)}:{hashlib.sha256(text).hexdigest()}"


def test_a_run_tells_and_keeps_its_prompts(
    make_config: Configure, prompts_file: Path, capsys: Output
) -> None:
    config = make_config(max_new_tokens=4, max_turns=1)
    location = Location(f"{config.run.uri}/synth")
    selection = select(config, location)
    prompts_file.write_text(prompts_file.read_text().replace("5 minus", "7 minus"))
    capsys.readouterr()
    told = f"{prompts_file} has changed since then (other bytes); this run keeps the prompts"
    assert select(config, location) == selection and told in capsys.readouterr().out
    first = run(config)
    assert told in capsys.readouterr().out and first.rows == 24
    assert run(config) == first
    assert told in capsys.readouterr().out, "of a finished run, too"


def test_a_selection_of_an_earlier_version_tells_nothing(
    make_config: Configure, prompts_file: Path, capsys: Output
) -> None:
    config = make_config()
    location = Location(f"{config.run.uri}/synth")
    made = select(config, location)
    location.write(SELECTION, made.model_dump_json(exclude={"files"}).encode())
    prompts_file.write_text("")
    assert select(config, location) == find_selection(location) != made
    assert "changed" not in capsys.readouterr().out
