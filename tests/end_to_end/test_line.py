"""synth → features → train → eval through the command line, uninterrupted, repeated, and killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.cli import main, make_plans
from pipeline.config import load
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.cpu.ops import CpuOps
from pipeline.decoder.ops.tree import Tree, VerifyOutput
from pipeline.records import STAGES, Manifest
from pipeline.reports import EvalReport
from pipeline.store.manifest import read_manifest
from tests.forked import kill_at

Write = Callable[..., Path]


def _manifests(run: Path) -> dict[str, Manifest]:
    return {stage: read_manifest(str(run), stage) for stage in STAGES}


def _times(run: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}


def test_the_whole_line_and_once_more(
    write_config: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config()
    assert main(["run", "-c", str(config)]) == 0
    assert str(tmp_path / "run/eval/report.html") in capsys.readouterr().out.replace("\n", "")

    report = EvalReport.model_validate_json((tmp_path / "run/eval/report.json").read_bytes())
    assert report.lossless.greedy_fp32 and report.lossless.prompts_checked == 6
    assert report.acceptance_length >= 1 and 0 < len(report.alpha) <= 3
    assert all(0 < value <= 1 for value in report.alpha)
    assert set(report.tokens_per_second) == {"speculative", "plain", "hf"}
    assert min(report.tokens_per_second.values()) > 0
    assert set(report.speedup) == {"plain", "hf"} and set(report.by_category) == {"math", "chat"}
    assert report.provenance["licenses"] == {"MIT": 24}
    assert report.head is not None and report.head.draft_vocab_size == 200
    assert sum("hf" in prompt.tokens_per_second for prompt in report.prompts) == 2
    assert "<html" in (tmp_path / "run/eval/report.html").read_text()

    manifests = _manifests(tmp_path / "run")
    for before, after in pairwise(STAGES):
        assert manifests[after].parent_hash == manifests[before].content_hash
        assert manifests[after].contract == manifests["synth"].contract

    before_again = _times(tmp_path / "run")
    assert main(["run", "-c", str(config)]) == 0
    assert capsys.readouterr().out.count("complete") == 4
    assert _times(tmp_path / "run") == before_again

    for stage in STAGES:
        assert main([stage, "-c", str(config), "--plan"]) == 0
        assert "complete" in capsys.readouterr().out
    # Another process at the same evaluation, or one that was killed before its manifest.
    file, measured = tmp_path / "run/eval/report.json", report.model_dump_json(indent=2)
    (tmp_path / "run/eval/manifest.json").unlink()
    assert main(["eval", "-c", str(config)]) == 0
    assert file.read_text() == measured + "\n"
    assert (
        read_manifest(str(tmp_path / "run"), "eval").content_hash == manifests["eval"].content_hash
    )
    (planned,) = make_plans(load(config), ["eval"])
    assert len(_times(tmp_path / "run/eval")) == planned.objects
    assert main(["features", "-c", str(config), "features.shard_tokens=200"]) == 2
    message = capsys.readouterr().err
    facts = ("features.shard_tokens", "→ 200", "--force", "run.uri")
    assert all(fact in message for fact in facts), message


def test_eval_takes_any_head_and_any_prompts(write_config: Write, tmp_path: Path) -> None:
    config = str(write_config())
    assert main(["run", "-c", config]) == 0
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"turns": ["What is mine?", "And yours?"]}\n')
    head = f"eval.head={tmp_path / 'run/train/head'}"
    other = [f"run.uri={tmp_path / 'other'}", head, f"eval.prompts={mine}", "eval.max_turns=2"]
    assert main(["eval", "-c", config, *other, "target.dtype=float32"]) == 0
    report = json.loads((tmp_path / "other/eval/report.json").read_text())
    first, second = (prompt["id"] for prompt in report["prompts"])
    assert second == f"{first}#2"
    assert report["provenance"]["licenses"] == {"MIT": 24}, "the head carries where it came from"


def test_the_best_head_by_acceptance_is_the_one_that_eval_reads(
    write_config: Write, tmp_path: Path
) -> None:
    evaluation = {
        "evaluate_every": 3,
        "evaluate_prompts": 4,
        "evaluate_tokens": 12,
        "evaluate_tree": {"top_k": 1, "steps": 3, "nodes": 4},
    }
    train = {
        "head_config": {
            "draft_vocab_size": 200,
            "intermediate_size": 32,
            "max_share_of_target": 5.0,
        },
        "batch_tokens": 256,
        "epochs": 4,
    }
    assert main(["run", "-c", str(write_config(train={**train, **evaluation}))]) == 0
    manifests = _manifests(tmp_path / "run")
    details = manifests["train"].details
    assert manifests["train"].rejected["held_out"] == 8
    card = json.loads((tmp_path / "run/train/head/eagle3.json").read_text())["metrics"]
    metrics = (tmp_path / "run/train/metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in metrics]
    assert details["exported_step"] in {line["step"] for line in lines if "tau" in line}
    assert (details["tau"], details["tau_se"]) == (card["tau"], card["tau_se"])
    assert manifests["eval"].parent_hash == manifests["train"].content_hash


#: What must exist before the kill: something of the stage is on disk, but it is not finished.
_MOMENTS = [
    "synth/shards/*.entry.json",
    "features/shards/*.entry.json",
    "train/checkpoints/step-*",
    "eval/begin.json",
]


def test_killed_in_every_stage_the_line_ends_with_the_same_bytes(
    write_config: Write, tmp_path: Path
) -> None:
    assert main(["run", "-c", str(write_config("whole"))]) == 0
    config, run = write_config("cut"), tmp_path / "cut"
    for moment in _MOMENTS:
        printed = kill_at(run, moment, ["run", "-c", str(config)], tmp_path / "printed")
        manifest = run / moment.partition("/")[0] / "manifest.json"
        assert not manifest.exists(), f"killed too late to prove anything: {moment} {printed}"
    assert main(["run", "-c", str(config)]) == 0
    whole, cut = _manifests(tmp_path / "whole"), _manifests(run)
    for stage in ("synth", "features", "train"):
        assert cut[stage].shards == whole[stage].shards, stage
        assert cut[stage].content_hash == whole[stage].content_hash, stage


def test_a_decoder_that_changes_the_output_fails_the_run(
    write_config: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Planted: now and then a drafted token is accepted although the target chose another."""
    config = str(write_config())
    assert main(["run", "-c", config]) == 0

    verify = TorchOps.verify

    def verify_wrongly(self: TorchOps, tree: Tree, predicted: Tensor, depth: int) -> VerifyOutput:
        wrong = predicted.clone()
        if depth:
            wrong[:, 0] = torch.where(predicted[:, 0] % 7 == 0, tree.tokens[:, 1], predicted[:, 0])
        return verify(self, tree, wrong, depth)

    for backend in (TorchOps, CpuOps):
        monkeypatch.setattr(backend, "verify", verify_wrongly)
    shutil.rmtree(tmp_path / "run/eval")
    capsys.readouterr()
    assert main(["eval", "-c", config]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and len(error.splitlines()) == 1
    assert "differs from plain output in fp32" in error
    report = json.loads((tmp_path / "run/eval/not-lossless.json").read_text())
    assert report["lossless"]["greedy_fp32"] is False
    assert not (tmp_path / "run/eval/manifest.json").exists()
    assert not (tmp_path / "run/eval/report.json").exists(), "another attempt measures again"
