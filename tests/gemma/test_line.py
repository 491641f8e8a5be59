"""Replies by transformers' own `generate` behind HTTP, then states, a head, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.api import read_samples
from pipeline.cli import main
from pipeline.reports import EvalReport
from tests.gemma.conftest import QUESTIONS
from tests.gemma.server import GenerateServer

Write = Callable[..., str]


def run(config: str, *stages: str) -> None:
    for stage in stages:
        assert main([stage, "-c", config]) == 0, stage


def figures(directory: Path) -> dict[str, Any]:
    """What the referee says of the replies, in the manifest and in the audit."""
    details = json.loads((directory / "features/manifest.json").read_text())["details"]
    audit = json.loads((directory / "features/audit.json").read_text())
    assert details["replies"] == audit["replies"]
    return dict(details["replies"])


def test_a_base_model_says_which_key_gives_it_a_template(
    write_config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["synth", "-c", write_config(), "target.chat_template=null"]) == 2
    assert "set target.chat_template to a template's file" in capsys.readouterr().err


def test_from_replies_to_a_head(
    write_config: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config()
    run(config, "synth", "features", "train")
    samples = list(read_samples(str(tmp_path / "run")))
    assert len(samples) == len(QUESTIONS)
    replies = figures(tmp_path / "run")
    assert replies["greedy_tokens"] >= 150
    assert replies["within_gap_share"] >= 0.995 and replies["best_share"] >= 0.97

    # The head is known by its contract, and every format can be written of it.
    head = str(tmp_path / "run/train/head")
    assert main(["inspect", head]) == 0
    for kind in ("sglang", "speculators"):
        out = str(tmp_path / kind)
        assert main(["export", head, "--format", kind, "--out", out]) == 0
    # The bundled decoder gives what transformers' generate gave, and the head drafts for it.
    capsys.readouterr()
    assert main(["eval", "-c", config, "eval.max_new_tokens=24"]) == 0
    report = EvalReport.model_validate_json((tmp_path / "run/eval/report.json").read_text())
    assert report.is_lossless and len(report.prompts) == len(QUESTIONS)


def test_a_server_that_sends_text_alone(
    write_config: Write, server: GenerateServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "kind", "openai")
    run(write_config(), "synth", "features")
    counts = json.loads((tmp_path / "run/synth/manifest.json").read_text())["rejected"]
    samples = list(read_samples(str(tmp_path / "run")))
    assert len(samples) + sum(counts.values()) == len(QUESTIONS) and len(samples) > 4
    assert all("re-tokenised" in sample.generator for sample in samples)
    assert figures(tmp_path / "run")["within_gap_share"] >= 0.995


def test_drawn_replies(write_config: Write, tmp_path: Path) -> None:
    run(write_config(synth={"temperature": 0.8, "top_p": 0.95}), "synth", "features")
    replies = figures(tmp_path / "run")
    apart = abs(replies["mean_log_probability"] - replies["expected_log_probability"])
    assert replies["drawn_tokens"] >= 150 and apart <= 4 * replies["standard_error"]


def test_another_temperature_is_no_agreement(
    write_config: Write,
    server: GenerateServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(server, "temperature", 1.5)
    config = write_config(synth={"temperature": 0.8})
    run(config, "synth")
    capsys.readouterr()
    assert main(["features", "-c", config]) == 2
    message = capsys.readouterr().err
    assert "hotter" in message or "below what is expected" in message, message
    assert "sampling settings" in message and "Traceback" not in message


def test_other_weights_are_no_agreement(
    write_config: Write, server: GenerateServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last matrices of two layers, exchanged."""
    layers = server.model.model.layers
    one, other = (layers[at].mlp.down_proj.weight for at in (9, 10))

    def exchange() -> None:
        with torch.no_grad():
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)

    config = write_config()
    exchange()
    try:
        run(config, "synth")
    finally:
        exchange()
    capsys.readouterr()
    assert main(["features", "-c", config]) == 2
    message = capsys.readouterr().err
    assert "greedy reply tokens lie below the teacher's best" in message
    assert "its weights" in message and "Traceback" not in message
