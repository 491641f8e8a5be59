"""Evaluations and plans with drafters that nobody trained, through the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.cli import main
from pipeline.config import NgramSection, load
from pipeline.decoder.model import DecoderModel
from pipeline.errors import ConfigError
from pipeline.planning.decode import DecodePlan
from pipeline.reports import EvalReport
from pipeline.serve_eval.pages import load_rows
from pipeline.server.start import make_app
from pipeline.tuning.cost import Costs

Write = Callable[..., Path]


@pytest.mark.parametrize("name", ["ngram", "standalone", "self_spec"])
def test_a_report_of_what_nobody_trained(
    write_config: Write,
    tiny_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """Without synth, features and train; a draft model that is the target is always right."""
    config = write_config()
    command = ["eval", "-c", str(config), f"eval.drafter.name={name}", "eval.hf_prompts=0"]
    command += [f"eval.drafter.source={tiny_target}"] if name == "standalone" else []
    for state in ("not started", "complete"):
        assert main([*command, "--plan"]) == 0 and state in capsys.readouterr().out
        assert main(command) == 0
    report = EvalReport.model_validate_json((tmp_path / "run/eval/report.json").read_bytes())
    assert report.lossless.greedy_fp32 and report.drafter.name == name
    assert report.head is None
    page = (tmp_path / "run/eval/report.html").read_text()
    assert f"drafter {name}" in page and "Size of the head" not in page
    if name != "ngram":
        assert report.acceptance_length > 2, "everything is visible: full rounds but the last"


def test_golden_rounds_are_without_the_lookup(
    write_config: Write, tiny_target: Path, tmp_path: Path
) -> None:
    """A server that drafts with the same model is held against what it can do."""
    other = tmp_path / "other"
    shutil.copytree(tiny_target, other)
    weights = load_file(other / "model.safetensors")
    torch.manual_seed(0)
    noisy = {name: each + 0.02 * torch.randn_like(each) for name, each in weights.items()}
    save_file(noisy, other / "model.safetensors", {"format": "pt"})
    command = ["eval", "-c", str(write_config()), "eval.hf_prompts=0", "eval.max_new_tokens=40"]
    command += ["eval.drafter.name=standalone", f"eval.drafter.source={other}"]
    command += ["eval.tree={steps: 4, top_k: 2, nodes: 6}", "eval.shape_prompts=4"]
    reports = []
    for name, lookup in (("alone", []), ("both", ["eval.drafter.lookup={}"])):
        assert main([*command, f"run.uri={tmp_path / name}", *lookup]) == 0
        document = (tmp_path / name / "eval/report.json").read_bytes()
        reports.append(EvalReport.model_validate_json(document))
    alone, both = reports
    assert alone.golden and both.golden and both.lossless.greedy_fp32
    assert (alone.drafter.lookup, both.drafter.lookup) == (None, NgramSection().model_dump())
    assert both.acceptance_length > alone.acceptance_length
    counters = {each.id: each.counters for each in alone.golden.prompts}
    assert (len(counters), len(both.golden.prompts)) == (6, 4), "those that were replayed alone"
    assert all(each.counters == counters[each.id] for each in both.golden.prompts)
    for ours, theirs in zip(alone.shapes, both.shapes, strict=True):
        assert (ours.acceptance, ours.own) == (theirs.acceptance, theirs.own)
    assert both.of_drafter_alone and both.of_drafter_alone.rounds > 0
    page = (tmp_path / "both/eval/report.html").read_text()
    assert "drafter standalone and lookup" in page and "without the lookup" in page
    assert "tokens, without the lookup" in (tmp_path / "both/eval/report.md").read_text()


def test_a_budget_is_picked_with_the_tree_and_named(
    write_config: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "-c", str(write_config()), "eval.drafter.name=self_spec"]
    command += ["eval.hf_prompts=0", "eval.drafter.budget=auto"]
    assert main(command) == 2
    assert "set tree to auto, or budget to a number" in capsys.readouterr().err
    assert main([*command, "eval.tree=auto"]) == 0
    shown = capsys.readouterr()
    assert "; budget 128" in shown.out + shown.err
    assert "self_spec, budget 128" in shown.out
    report = EvalReport.model_validate_json((tmp_path / "run/eval/report.json").read_bytes())
    assert report.drafter.model_dump()["budget"] == 128
    assert report.settings.tree_auto and report.settings.tree_auto.settings == {"budget": 128}
    assert report.lossless.greedy_fp32


def test_rivals_take_turns_on_the_same_prompts(
    write_config: Write, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A draft model that is the target is always right: better than n-grams, equal to itself."""
    prompts = tmp_path / "questions.jsonl"
    asked = [{"turns": [f"What is {n} plus {n * n}?"], "category": "sums"} for n in range(9)]
    prompts.write_text("\n".join(json.dumps(each) for each in asked))
    exact = {"name": "standalone", "source": str(tiny_target)}
    rivals = [
        {"name": "n-grams", "drafter": {"name": "ngram"}, "tree": {"steps": 3, "top_k": 1}},
        {"name": "itself", "drafter": exact, "tree": {"steps": 3, "top_k": 1, "nodes": 4}},
    ]
    command = ["eval", "-c", str(write_config()), "eval.hf_prompts=0", "eval.shapes=[]"]
    command += [f"eval.drafter={json.dumps(exact)}", f"eval.prompts={prompts}"]
    command += ["eval.tree={steps: 3, top_k: 1, nodes: 4}", "eval.max_new_tokens=24"]
    refused = [{**rivals[0], "name": "plain"}]
    assert main([*command, f"eval.compare={json.dumps(refused)}"]) == 2
    assert "compare has a name twice" in capsys.readouterr().err
    few = [*command, f"eval.compare={json.dumps(rivals)}", "eval.max_prompts=7"]
    few.append(f"run.uri={tmp_path}/few")
    assert main(few) == 2 and "a verdict needs 8" in capsys.readouterr().err
    assert main([*command, f"eval.compare={json.dumps(rivals)}"]) == 0
    report = EvalReport.model_validate_json((tmp_path / "run/eval/report.json").read_bytes())
    other, same = report.comparisons
    assert (other.rival, other.verdict, other.prompts) == ("n-grams", "better", 9)
    assert other.difference.value == pytest.approx(
        report.acceptance_length - other.acceptance_length.value
    )
    assert same.verdict == "no difference seen" and same.difference.value == 0
    assert same.speed_ratio is not None and same.settings["tree"]["nodes"] == 4
    capsys.readouterr()


def test_load_is_measured_with_and_without_the_drafter(
    write_config: Write, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In fp32 both ways write the same tokens, at every concurrency, drawn or not."""
    exact = {"name": "standalone", "source": str(tiny_target)}
    load = {"concurrency": [3, 1], "temperatures": [0, 0.8], "requests": 7}
    command = ["eval", "-c", str(write_config()), "eval.hf_prompts=0", "eval.shapes=[]"]
    command += [f"eval.drafter={json.dumps(exact)}", f"eval.load={json.dumps(load)}"]
    command += ["eval.tree={steps: 3, top_k: 1, nodes: 4}", "eval.max_new_tokens=16"]
    assert main(command) == 0
    report = EvalReport.model_validate_json((tmp_path / "run/eval/report.json").read_bytes())
    curves = {(each.name, each.settings["temperature"]): each.points for each in report.load}
    assert set(curves) == {(way, t) for way in ("plain", "speculative") for t in (0.0, 0.8)}
    for temperature in (0.0, 0.8):
        pairs = zip(curves["plain", temperature], curves["speculative", temperature], strict=True)
        for count, (plain, drafted) in zip((1, 3), pairs, strict=True):
            assert plain.concurrency == drafted.concurrency == count
            assert plain.requests == drafted.requests == 7 and plain.failed == drafted.failed == 0
            assert plain.tokens == drafted.tokens > 7
            assert plain.acceptance is None and drafted.acceptance is not None
            assert drafted.acceptance.rounds < plain.tokens - 7
            assert drafted.throughput == pytest.approx(drafted.tokens / drafted.seconds)
            for point in (plain, drafted):
                assert 0 < point.tpot_seconds.p50 <= point.tpot_seconds.p99 < point.seconds
                assert 0 < point.ttft_seconds.p50 <= point.ttft_seconds.p99 < point.seconds
                decoding = point.tpot_seconds.mean * (point.tokens - point.requests)
                open_seconds = decoding + point.ttft_seconds.mean * point.requests
                assert (open_seconds > 1.4 * point.seconds) == (count == 3), "they overlap"
            parts = drafted.round_seconds
            assert set(parts) == {"plain", "verify", "draft", "extend", "other"}
            assert min(parts.values()) > 0 and drafted.efficiency is None
    greedy = curves["speculative", 0.0][0].acceptance
    assert greedy is not None and greedy.acceptance_length.value > 2, "the draft is always right"
    assert report.lossless.sampled_fp32 == {"0.8": True}
    capsys.readouterr()


def test_auto_picks_a_tree_for_every_batch_size(
    write_config: Write,
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where verification costs more in larger batches, they draft less, and in the end nothing."""

    def costs(model: DecoderModel, drafter: Any, rows: int, *_: Any, **__: Any) -> Costs:
        two, three = {1: (1.0, 1.0), 2: (1.1, 50.0), 4: (50.0, 50.0)}[rows]  # nodes
        return Costs({1: 1.0, 2: two, 3: three, 64: three}, {1: 0.01}, {1: 0.0}, {2: 0.0})

    monkeypatch.setattr("pipeline.tuning.tune.measure_costs", costs)
    exact = {"name": "standalone", "source": str(tiny_target)}
    load_at = {"concurrency": [1, 2, 4], "requests": 4}
    settings = ["eval.hf_prompts=0", "eval.shapes=[]", "eval.max_new_tokens=16", "eval.tree=auto"]
    settings += [f"eval.drafter={json.dumps(exact)}", f"eval.load={json.dumps(load_at)}"]
    path = write_config()
    assert main(["eval", "-c", str(path), *settings]) == 0
    report = EvalReport.model_validate_json((tmp_path / "run/eval/report.json").read_bytes())
    assert report.settings.tree_auto is not None
    one, two, four = (report.settings.tree_auto.by_batch[rows] for rows in ("1", "2", "4"))
    assert one and two and one.nodes > two.nodes > 1 and four is None
    plain, drafted = report.load
    names = {"1": one.label, "2": two.label, "4": "plain"}
    assert plain.settings["trees"] == drafted.settings["trees"] == names
    assert [row.tree for row in load_rows(report)] == ["", "", "", *names.values()]
    at_one, at_two, at_four = drafted.points
    assert at_one.acceptance and at_two.acceptance and at_four.acceptance is None
    assert at_one.acceptance.acceptance_length.value > at_two.acceptance.acceptance_length.value
    assert at_one.round_seconds and at_two.round_seconds and at_four.round_seconds == {}
    assert [point.tokens for point in drafted.points] == [point.tokens for point in plain.points]
    drafter = make_app(load(path, settings), None).engine.drafter
    assert drafter is not None
    shapes = [drafter.shape_for(rows) for rows in (1, 2, 3, 4, 8)]
    drafts = [shape and shape.nodes for shape in shapes]
    assert drafts == [one.nodes, two.nodes, two.nodes, None, None]
    capsys.readouterr()


def test_the_server_drafts_what_eval_has_picked(
    write_config: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = ["eval.drafter.name=self_spec", "eval.drafter.budget=auto"]
    settings += ["eval.tree=auto", "eval.hf_prompts=0", "eval.shapes=[]"]
    path = write_config()
    config = load(path, settings)
    with pytest.raises(ConfigError, match="has not finished in this run"):
        make_app(config, None)
    assert main(["eval", "-c", str(path), *settings]) == 0
    told = json.loads((tmp_path / "run/eval/report.json").read_text())

    def reported(_: str) -> EvalReport:
        return EvalReport.parse(json.dumps(told).encode(), where="report.json", fix="")

    monkeypatch.setattr("pipeline.server.start.read_report", reported)
    # What pays differs from machine to machine: once a tree, once plain decoding.
    told |= {"decoding": "speculative"}
    told["settings"]["tree"] = {"top_k": 2, "steps": 3, "nodes": 5}
    drafter = make_app(config, None).engine.drafter
    assert drafter is not None and (drafter.depth, drafter.nodes) == (3, 5)
    told |= {"decoding": "plain"}
    told["settings"]["tree"] = None
    assert make_app(config, None).engine.drafter is None
    with pytest.raises(ConfigError, match="is of drafter self_spec"):
        make_app(load(path, ["eval.drafter.name=ngram", "eval.tree=auto"]), None)
    capsys.readouterr()


def test_a_head_for_a_drafter_that_has_none_is_refused(
    write_config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "-c", str(write_config())]
    assert main([*command, "eval.drafter.name=ngram", "eval.head=somewhere"]) == 2
    assert "drafter ngram has no head (fix: leave head out)" in capsys.readouterr().err
    assert main([*command, "eval.drafter.name=none"]) == 2
    assert "drafter none is what every drafter is compared with" in capsys.readouterr().err
    assert main([*command, "eval.drafter.name=medusa"]) == 2
    assert "eval.drafter.name" in capsys.readouterr().err
    assert main([*command, "eval.drafter.name=standalone"]) == 2
    assert "eval.drafter.source: required" in capsys.readouterr().err


def test_replies_are_the_same_whatever_drafts(
    write_config: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = []
    for uri, drafter in (("plain", None), ("drafted", {"name": "ngram"})):
        config = write_config(uri)
        extra = [f"synth.drafter={json.dumps(drafter)}"] if drafter else []
        assert main(["synth", "-c", str(config), *extra]) == 0
        files = sorted((tmp_path / uri / "synth/shards").glob("*.parquet"))
        digests.append([file.read_bytes() for file in files])
    assert digests[0] == digests[1] and digests[0]
    capsys.readouterr()


def test_a_plan_is_measured_checked_and_drawn(
    write_config: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan-decode", "-c", str(write_config()), "--drafters", "ngram,self_spec"]
    command += ["eval.tree=auto", "eval.drafter.name=self_spec", "eval.drafter.budget=auto"]
    command += ["--batches", "1,2", "--contexts", "24,40", "--prompts", "2", "--new-tokens", "8"]
    files = ["--json", str(tmp_path / "plan.json"), "--page", str(tmp_path / "plan.html")]
    assert main([*command, "--most-tokens", "48", "--check", *files]) == 0
    plan = DecodePlan.model_validate_json((tmp_path / "plan.json").read_bytes())
    cells = {(cell.drafter, cell.batch, cell.context) for cell in plan.cells}
    wanted = {(1, 24), (1, 40), (2, 24)}  # 2 · 40 is more than 48
    assert cells == {(name, *each) for name in ("ngram", "self_spec") for each in wanted}
    assert all(cell.measured_speedup and cell.speedup > 0 for cell in plan.cells)
    picked = {cell.drafter: cell.settings for cell in plan.cells}
    assert picked == {"ngram": {}, "self_spec": {"budget": 128}}
    assert plan.basis == "measured" and "measured" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "plan.html").read_text()
    with pytest.raises(SystemExit, match="2"):
        main([*command[:4], "medusa"])
    assert main([*command, "--contexts", "100000"]) == 2
    assert "positions of the target" in capsys.readouterr().err
