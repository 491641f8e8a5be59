"""Through the command line: what answers is the target, and what decodes is its model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.target.rotary import RotaryTable
from tests.conftest import save_tiny_llama
from tests.synth.server import ServedTarget, TargetServer

Write = Callable[..., Path]


@pytest.fixture
def other_target(tiny_target: Path, tmp_path: Path) -> Path:
    """The same tokenizer and sizes, weights of another seed."""
    from transformers import AutoTokenizer

    directory = tmp_path / "other"
    directory.mkdir()
    save_tiny_llama(directory, AutoTokenizer.from_pretrained(tiny_target), seed=5)
    return directory


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("serves", ["the target", "other weights"])
def test_a_server_is_held_against_the_teacher(
    kind: str,
    serves: str,
    write_config: Write,
    tiny_target: Path,
    other_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    served = ServedTarget(tiny_target if serves == "the target" else other_target)
    with TargetServer(served, kind=kind) as server:
        config = str(
            write_config(synth={"generator": {"backend": kind, "endpoints": [server.url]}})
        )
        assert main(["synth", "-c", config]) == 0
    capsys.readouterr()
    code, features = main(["features", "-c", config]), tmp_path / "run/features"
    error = " ".join(capsys.readouterr().err.split())
    if serves == "the target":
        assert code == 0, error
        figures = json.loads((features / "manifest.json").read_text())["details"]["replies"]
        audit = json.loads((features / "audit.json").read_text())
        assert figures["within_gap_share"] >= 0.995 and figures["greedy_tokens"] >= 200
        assert figures["rendered_samples"] > 0 and audit["replies"] == figures
        return
    assert code == 2 and error.startswith("error: ")
    assert "lie below the teacher's best" in error and "sample " in error and "LoRA" in error
    assert not (features / "manifest.json").exists()
    assert not list(features.glob("shards/*.entry.json")), "no shard of another model is committed"


def test_ids_of_turns_tokenised_one_by_one_are_refused(
    write_config: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Planted: what leads to the second reply is tokenised by itself, with a space in front."""
    from pipeline.target.template import ChatTemplate

    prompts = tmp_path / "turns.jsonl"
    rows = [
        {"id": str(n), "license": "MIT", "turns": [f"What is {n} plus 3?", "Why?"]}
        for n in range(8)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {"sources": [{"source": str(prompts)}], "max_turns": 2, "temperature": 1.0}
    config = str(write_config(synth={**section, "max_new_tokens": 200, "max_prompt_tokens": 300}))
    follow = ChatTemplate.follow

    def fragment(self: ChatTemplate, *arguments: Any, **options: Any) -> list[int] | str:
        ids = follow(self, *arguments, **options)
        return ids if isinstance(ids, str) else [*self.encode(" "), *ids]

    with monkeypatch.context() as planted:
        planted.setattr(ChatTemplate, "follow", fragment)
        assert main(["synth", "-c", config]) == 0
    capsys.readouterr()
    assert main(["features", "-c", config]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "the ids between its replies 1 and 2 are not those of the whole conversation" in error


def test_a_decoder_of_another_model_is_not_called_lossless(
    write_config: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Planted: the decoder's rotary base is wrong, for plain and speculative decoding alike."""
    config = str(write_config())
    assert main(["run", "-c", config]) == 0
    report = json.loads((tmp_path / "run/eval/report.json").read_text())
    leg = report["lossless"]["transformers"]
    assert leg["same"] is True and leg["replies"] == 4 and leg["wrong_tokens"] == 0
    assert report["provenance"]["replies"]["within_gap_share"] == 1.0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "✓ lossless" in shown and "plain decoding is transformers' own on 4 replies" in shown

    class OtherBase(RotaryTable):
        def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
            changed = type(config).from_dict(
                config.to_dict() | {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}}
            )
            super().__init__(changed, *arguments, **options)

    monkeypatch.setattr("pipeline.decoder.model.RotaryTable", OtherBase)
    shutil.rmtree(tmp_path / "run/eval")
    assert main(["eval", "-c", config]) == 1
    output = capsys.readouterr()
    assert "plain decoding is not the target's: in fp32" in " ".join(output.err.split())
    assert "✓" not in output.out
    report = json.loads((tmp_path / "run/eval/not-lossless.json").read_text())
    assert report["lossless"]["greedy_fp32"] is True, "the first leg cannot see it"
    assert report["lossless"]["transformers"]["same"] is False
    assert not (tmp_path / "run/eval/manifest.json").exists()
