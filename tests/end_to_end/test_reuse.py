"""A head that exists makes the next data cheaper, and the decoder picks its own tree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.store.manifest import read_manifest, stage_location
from pipeline.store.samples import read_samples
from pipeline.tuning.cost import Costs

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
    assert "tree: auto, trying the drafter on 6 prompts" in shown
    report = json.loads((tmp_path / "run/eval/report.json").read_text())
    chosen, settings = report["settings"]["tree_auto"], report["settings"]
    assert chosen["predicted_acceptance_length"] >= 1 and not chosen["tried_on_other_prompts"]
    if chosen["predicted_speedup"] > 1:
        assert report["decoding"] == "speculative" and settings["tree"] == chosen["fastest_tree"]
    else:
        assert report["decoding"] == "plain" and "one node, plain decoding" in shown
        assert report["acceptance_length"] == 1 <= report["unused_tree"]["acceptance_length"]

    synth = {
        "head": str(tmp_path / "run/train/head"),
        "tree": {"top_k": 2, "steps": 3, "nodes": 6},
    }
    assert main(["synth", "-c", str(write_config("again", synth=synth))]) == 0
    drafted, plain = tmp_path / "again", tmp_path / "run"
    assert _replies(drafted) == _replies(plain), "drafting must not change what the target says"
    tokens = [read_manifest(str(run), "synth").tokens for run in (drafted, plain)]
    assert tokens[0] == tokens[1]


def test_auto_tries_the_head_on_prompts_that_are_not_measured(
    write_config: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And where drafting is predicted to cost more than it gives, eval decodes plainly."""
    slow = {count: 1e9 for count in (2, 64)}
    costs = Costs(verify={1: 1.0} | slow, draft={1: 1.0}, extend={1: 1.0}, other={2: 0.0})
    monkeypatch.setattr("pipeline.tuning.tune.measure_costs", lambda *_, **__: costs)
    config = str(write_config(eval={"tree": "auto", "max_prompts": 4, "hf_prompts": 0}))
    assert main(["run", "-c", config]) == 0
    shown = capsys.readouterr().out
    assert "tree: auto, trying the drafter on 2 prompts" in shown
    assert "tree: one node, plain decoding" in shown
    report = json.loads((tmp_path / "run/eval/report.json").read_text())
    assert report["decoding"] == "plain" and report["settings"]["tree"] is None
    assert report["settings"]["tree_auto"]["tried_on_other_prompts"] is True
    assert report["acceptance_length"] == report["speedup"]["plain"] == 1
    unused = report["unused_tree"]
    assert unused["acceptance_length"] >= 1 and unused["tree"]["nodes"] == 16
    assert report["lossless"]["greedy_fp32"] is True and report["lossless"]["prompts_checked"] == 4


def test_synth_refuses_a_tree_that_depends_on_timings(
    write_config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["synth", "-c", str(write_config(synth={"tree": "auto"}))]) == 2
    assert "synth.tree: auto is only supported by eval.tree" in capsys.readouterr().err
