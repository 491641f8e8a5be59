"""Servers that lose too many prompts stop the run; what is committed stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig, SourceSpec, SynthSection
from pipeline.errors import EndpointError
from pipeline.records import Manifest
from pipeline.store.manifest import find_manifest
from pipeline.synth.stage import RejectionLimit, run
from tests.synth.server import ServedTarget, TargetServer
from tests.synth.test_remote import QUICK, pick, served

__all__ = ["served"]  # a fixture

Start = Callable[..., Manifest]


def losing(ids: tuple[int, ...], before: int) -> str | None:
    """About every fourth prompt, always."""
    return "500" if pick(ids) >= 0 and pick(ids) % 4 == 0 else None


@pytest.fixture
def start(make_config: Callable[..., RunConfig], prompts_file: Path, served: ServedTarget) -> Start:
    """A run of 160 prompts in shards of 8 with a server of its own."""
    records = [
        {"id": str(number), "turns": [f"What is the square of {number}, and why is it so?"]}
        for number in range(160)
    ]
    text = "".join(json.dumps({**record, "license": "MIT"}) + "\n" for record in records)
    prompts_file.write_text(text, encoding="utf-8")

    def start(uri: str, *, fault: Any = losing, **synth: Any) -> Manifest:
        with TargetServer(served, fault=fault) as server:
            generator = {"backend": "vllm", "endpoints": [server.url], **QUICK, "retries": 0}
            return run(make_config(uri, generator=generator, max_new_tokens=4, **synth))

    return start


def committed(folder: Path) -> int:
    return len(list(folder.rglob("*.entry.json")))


def test_too_many_rejections_stop_the_run_and_a_higher_limit_continues_it(
    start: Start, tmp_path: Path
) -> None:
    whole = start("whole", max_rejected=0.5)
    lost = whole.rejected["remote:error_500"]
    assert 20 < lost < 80 and whole.rows == 160 - lost
    problem = r"the servers cost \d+ of \d+ prompts \(\d.*%\), at most 5\.0% .*: remote:error_500 2"
    for _ in range(2):
        with pytest.raises(EndpointError, match=problem) as stopped:
            start("cut")
        assert stopped.value.exit_code == 2 and stopped.value.where == "synth.max_rejected"
    assert 0 < committed(tmp_path / "cut") < 20
    assert find_manifest(str(tmp_path / "cut"), "synth") is None
    continued = start("cut", max_rejected=0.5)
    assert continued.content_hash == whole.content_hash and continued.shards == whole.shards


def test_mended_servers_get_the_prompts_of_the_last_shard_again(
    start: Start, tmp_path: Path
) -> None:
    with pytest.raises(EndpointError):
        start("run")
    assert committed(tmp_path / "run") > 0
    manifest = start("run", fault=None)
    assert manifest.rejected["remote:error_500"] < 20 and manifest.rows > 140


def test_the_whole_stage_is_judged_once_more(start: Start, tmp_path: Path) -> None:
    """Of several processes none may have seen enough."""
    whole = start("run", max_rejected=1)
    (tmp_path / "run" / "synth" / "manifest.json").unlink()
    with pytest.raises(EndpointError, match="at most 5"):
        start("run")
    assert find_manifest(str(tmp_path / "run"), "synth") is None
    assert start("run", max_rejected=1).content_hash == whole.content_hash


def test_few_rejections_and_other_reasons_are_nobodys_fault() -> None:
    section = SynthSection(sources=(SourceSpec(source="x"),), max_rejected=0.1)
    limit = RejectionLimit(section)
    limit.add({"remote:timeout": 10, "pii:EMAIL_ADDRESS": 500}, prompts=510)
    limit.add({"remote:timeout": 9}, prompts=9)
    limit.add({"remote:error_500": 36}, prompts=31)
    with pytest.raises(
        EndpointError, match=r"56 of 551 .*: remote:error_500 37, remote:timeout 19"
    ):
        limit.add({"remote:error_500": 1}, prompts=1)
