"""A head that exists makes the next data cheaper, and the decoder picks its own tree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.store.samples import read_samples
from pipeline.store.stage_run import read_manifest, stage_location

Write = Callable[..., Path]


def _replies(run: Path) -> dict[str, tuple[int, ...]]:
    shards = read_manifest(str(run), "synth").shards
    return {
        sample.sample_id: sample.token_ids
        for shard in shards
        for sample in read_samples(stage_location(str(run), "synth"), shard)
    }


def test_synth_drafts_with_an_earlier_head_and_eval_picks_its_tree(
    write_config: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-c", str(write_config(eval={"tree": "auto"}))]) == 0
    shown = capsys.readouterr().out
    assert "tree: auto, trying the head on 6 prompts" in shown
    settings = json.loads((tmp_path / "run/eval/report.json").read_text())["settings"]
    assert settings["tree"]["auto"] is False
    assert settings["tree_auto"]["predicted_acceptance_length"] >= 1

    synth = {
        "head": str(tmp_path / "run/train/head"),
        "tree": {"top_k": 2, "steps": 3, "nodes": 6},
    }
    assert main(["synth", "-c", str(write_config("again", synth=synth))]) == 0
    drafted, plain = tmp_path / "again", tmp_path / "run"
    assert _replies(drafted) == _replies(plain), "drafting must not change what the target says"
    tokens = [read_manifest(str(run), "synth").tokens for run in (drafted, plain)]
    assert tokens[0] == tokens[1]


def test_synth_refuses_a_tree_that_depends_on_timings(
    write_config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["synth", "-c", str(write_config(synth={"tree": "auto"}))]) == 2
    assert "synth.tree cannot be auto" in capsys.readouterr().err
