"""`eagle3 eval --server` and `check-serving` on our own server, against the decoder's report."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.flips import flip_files
from pipeline import __version__
from pipeline.cli import main
from pipeline.config import RunConfig, ServeSection, load
from pipeline.records import sealed_page
from pipeline.reports import EvalReport, ServerResult
from pipeline.serve_eval import pages
from pipeline.serve_eval.pages import load_rows, read_results, write_html
from pipeline.serve_eval.servers.check import check_run
from pipeline.serve_eval.servers.evaluate import evaluate_server
from pipeline.server.start import _listen
from tests.serve_eval.conftest import Serving


def _report(config: RunConfig) -> EvalReport:
    path = Path(config.run.uri) / "eval/report.json"
    return EvalReport.parse(path.read_bytes(), where="report", fix="")


def _on(file: Path, url: str, *more: str) -> RunConfig:
    return load(file, [f"eval.server.url={url}", "eval.server.concurrency=[1, 4]", *more])


def _names(result: ServerResult) -> dict[str, str]:
    return {each.name: each.text for each in result.findings}


def test_our_own_server_does_what_the_report_says(finished: Path, serving: Serving) -> None:
    config = _on(finished, serving(load(finished)))
    before, report = sorted(Path(config.run.uri).rglob("*")), _report(config)
    result = evaluate_server(config)
    assert report.acceptance_length > 1.2, "the comparison would say nothing"
    assert result.kind == "eagle3" and result.model == "tiny" and result.passed
    assert _names(result) == {}
    one, four = result.curve.points
    assert (one.concurrency, one.requests, four.requests) == (1, 8, 8)
    for point in (one, four):  # the backend's promise: the batch changes no token and no round
        assert point.acceptance is not None and point.failed == 0
        assert point.acceptance.acceptance_length.value == pytest.approx(report.acceptance_length)
        assert 0 < point.ttft_seconds.p50 < point.seconds
        assert 0 < point.tpot_seconds.p50 < point.ttft_seconds.p50 + point.seconds
        assert point.throughput == pytest.approx(point.tokens / point.seconds)
    ours = {each.id: each.counters for each in report.prompts}
    for each in result.prompts:
        known, told = ours[each.id], each.counters
        assert known is not None and told is not None
        assert (told.rounds, told.tokens) == (known.rounds, known.tokens)
        assert (told.drafted, told.accepted_lengths) == (known.drafted, known.accepted_lengths)
    assert result.expected is not None and result.expected.prompts == 8
    golden, said = report.golden, result.server_settings
    assert golden is not None and said["speculative_num_draft_tokens"] == 6
    assert said["golden"]["acceptance_length"] == golden.acceptance_length.model_dump()
    assert said["golden"]["prompts_digest"] == golden.prompts_digest
    # A second run has a name of its own, and nothing else of the run has changed.
    evaluate_server(config)
    added = set(Path(config.run.uri).rglob("*")) - set(before)
    assert {each.name for each in added} == {"servers", "eagle3-1.json", "eagle3-2.json"}
    assert read_results(config.run.uri)[0] == result
    flips = flip_files(Path(config.run.uri), flips=120, seed=0)
    assert {each.result for each in flips} == {"found"}
    assert sum(each.kind == "results of servers" for each in flips) > 2
    shutil.rmtree(Path(config.run.uri) / "eval/servers")


def test_a_page_shows_the_server_whose_result_came_while_it_was_made(
    finished: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _on(finished, serving(load(finished)))

    def meanwhile(report: EvalReport) -> str:
        monkeypatch.setattr(pages, "write_html", write_html)
        evaluate_server(config)
        return write_html(report)

    monkeypatch.setattr(pages, "write_html", meanwhile)
    evaluate_server(config)
    results = read_results(config.run.uri)
    shown = _report(config).model_copy(update={"servers": results})
    page = (Path(config.run.uri) / "eval/report.html").read_bytes()
    assert len(results) == 2 and page == sealed_page(write_html(shown))
    shutil.rmtree(Path(config.run.uri) / "eval/servers")


def test_only_tokenizer_and_template_are_needed(
    finished: Path, serving: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A target of a kind that the decoder does not run, without its weights or a run."""
    config = load(finished)
    source = tmp_path / "unknown"
    shutil.copytree(config.target.source, source, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((source / "config.json").read_text())
    settings |= {"model_type": "nobody_knows", "architectures": ["NobodyKnows"]}
    (source / "config.json").write_text(json.dumps(settings))
    url = serving(config)
    elsewhere = [f"target.source={source}", f"run.uri={tmp_path}/run"]
    argv = ["eval", "-c", str(finished), "--server", url + "/v1", *elsewhere]
    assert main([*argv, "eval.server.concurrency=[2]"]) == 0
    assert "no report of the decoder" in capsys.readouterr().out
    (result,) = read_results(str(tmp_path / "run"))
    assert [each.name for each in result.findings] == ["no_report"]
    assert result.curve.points[0].acceptance is not None
    assert not (tmp_path / "run/eval/report.json").exists()


def test_another_system_prompt_and_another_tree_are_told(finished: Path, serving: Serving) -> None:
    """The server renders another system prompt, and drafts chains."""
    chain = ["eval.tree={top_k: 1, steps: 2, nodes: 3}", "eval.system_prompt=Be brief."]
    result = evaluate_server(_on(finished, serving(load(finished, chain))))
    names = _names(result)
    assert "prompt tokens" in names["template_differs"] and not result.passed
    assert names["tree_differs"].startswith(
        "it drafts 2/1/3 (steps/top-k/tokens) where the report's"
    )
    assert "replies_differ" not in names, "ids were sent, so the replies are the same"
    assert (
        result.server_settings["speculative_num_steps"] == 2
        and "golden" not in result.server_settings
    )


def _scrambled(config: RunConfig, folder: Path) -> Path:
    """The run's head with the rows of every matrix in another order."""
    shutil.copytree(Path(config.run.uri) / "train/head", folder)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            tensors[name] = tensor[torch.randperm(len(tensor))].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("tells", [True, False])
def test_trees_by_batch_size_explain_a_fall_under_load(
    finished: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch, tells: bool
) -> None:
    tree = load(finished).eval.tree
    monkeypatch.setattr("pipeline.server.start._trees", lambda _: ({1: tree, 2: None}, {}))
    if not tells:
        monkeypatch.setattr("pipeline.server.start.tree_labels", lambda _: None)
    result = evaluate_server(_on(finished, serving(load(finished))))
    (found,) = (each for each in result.findings if each.name == "changes_under_load")
    assert found.severity == ("note" if tells else "warning")
    assert found.text.endswith("as it drafts 3/2/6 from batch 1, plain from batch 2") == tells
    assert result.version == __version__
    shutil.rmtree(Path(load(finished).run.uri) / "eval/servers")


def test_golden_check_knows_the_right_head_from_a_scrambled_one(
    finished: Path, serving: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(finished)
    report, golden = Path(config.run.uri) / "eval/report.json", _report(config).golden
    assert golden is not None and len(golden.prompts) == 8
    right = serving(config)
    assert main(["check-serving", "--server", right, "-c", str(finished)]) == 0
    assert main(["check-serving", "--server", right, "--report", str(report)]) == 0
    assert "passed" in capsys.readouterr().out
    head = _scrambled(config, tmp_path / "scrambled")
    wrong = serving(load(finished, [f"eval.head={head}"]))
    for source in (["-c", str(finished)], ["--report", str(report)]):
        assert main(["check-serving", "--server", wrong, *source]) == 1
    assert "error: the server's τ is" in (said := capsys.readouterr().out) and "FAILED" in said
    assert (
        main(["eval", "-c", str(finished), "--server", wrong, "eval.server.concurrency=[1]"]) == 1
    )
    assert "error:" in capsys.readouterr().out
    result = read_results(config.run.uri)[-1]
    assert "golden" not in result.server_settings, "that τ is of another head"
    shutil.rmtree(Path(config.run.uri) / "eval/servers")


def test_a_server_is_held_against_itself_without_its_drafter(
    finished: Path, serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    plainly = ["eval.server.plain=true", "eval.server.concurrency=[1, 2]"]
    drafting = _on(finished, serving(load(finished)), "eval.server.concurrency=[1, 2]")
    url = serving(load(finished, ["serve.plain=true"]))
    plain = evaluate_server(_on(finished, url, *plainly))
    assert plain.passed and _names(plain) == {} and plain.curve.settings["plain"] is True
    assert all(each.acceptance is None for each in plain.curve.points)
    with_drafter = evaluate_server(drafting)
    assert [each.tokens for each in plain.curve.points] == [
        each.tokens for each in with_drafter.curve.points
    ]
    report = _report(drafting).model_copy(update={"servers": (with_drafter, plain)})
    rows = {(row.name, row.at.concurrency): row for row in load_rows(report)}
    for at, (before, after) in enumerate(
        zip(plain.curve.points, with_drafter.curve.points, strict=True), start=1
    ):
        gain = rows["speculative, eagle3 server", at].gain
        assert gain == pytest.approx(after.throughput / before.throughput)
        assert rows["plain, eagle3 server", at].gain is None
    # A server that drafts is no baseline.
    mistaken = evaluate_server(_on(finished, str(drafting.eval.server.url), *plainly))
    assert list(_names(mistaken)) == ["not_plain"] and not mistaken.passed
    shutil.rmtree(Path(drafting.run.uri) / "eval/servers")
    capsys.readouterr()


def test_misuse_is_an_error_by_name(finished: Path, tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:9"
    assert main(["eval", "-c", str(finished), "--server", nobody]) == 75
    assert main(["eval", "-c", str(finished), "--server", "ftp://x"]) == 2
    assert main(["eval", "-c", str(finished), "--server", nobody, "--force"]) == 2
    assert main(["check-serving", "--server", nobody, "--report", str(tmp_path / "no.json")]) == 2
    assert main(["check-serving", "--server", nobody, "-c", str(finished)]) == 75
    elsewhere = f"run.uri={tmp_path}/none"
    assert main(["check-serving", "--server", nobody, "-c", str(finished), elsewhere]) == 2
    assert not (tmp_path / "none").exists()


def test_first_tokens_of_a_stream_are_not_held_back() -> None:
    """Without TCP_NODELAY a small packet waits for the acknowledgement of the one before: 40 ms."""
    with _listen(ServeSection(port=0)) as listening:
        assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_shape_that_the_report_does_not_know_is_replayed_on_the_spot(
    finished: Path, serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    url = serving(load(finished, ["eval.tree={top_k: 2, steps: 2, nodes: 4}"]))
    assert check_run(load(finished, [f"eval.server.url={url}"]))
    printed = "".join(capsys.readouterr()).replace("\n", " ")
    assert "compared with the decoder's rounds of 2/2/4" in " ".join(printed.split())
