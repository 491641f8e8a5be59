"""The line for a base model: its chat template is the configuration's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.api import read_samples
from pipeline.cli import main
from pipeline.config import load
from pipeline.server.start import make_app
from tests.conftest import CHATML

Write = Callable[..., Path]


@pytest.fixture
def base(tiny_target: Path, tmp_path: Path) -> dict[str, Any]:
    """`target` of a configuration: the tiny one without its template, which is a file."""
    directory, file = tmp_path / "base", tmp_path / "chat.jinja"
    shutil.copytree(tiny_target, directory)
    (directory / "chat_template.jinja").unlink()
    file.write_text(CHATML)
    return {"source": str(directory), "chat_template": str(file)}


def test_every_stage_uses_the_template_that_the_configuration_gives(
    write_config: Write, base: dict[str, Any], tmp_path: Path
) -> None:
    evaluated = {"evaluate_every": 8, "evaluate_prompts": 2, "evaluate_tokens": 8, "epochs": 2}
    mine = write_config("mine", target=base, train=evaluated)
    shipped = write_config("shipped", train=evaluated)
    for config in (mine, shipped):
        assert main(["run", "-c", str(config)]) == 0
    # A target that ships the template is the referee.
    for ours, theirs in zip(
        *(read_samples(str(tmp_path / name)) for name in ("mine", "shipped")), strict=True
    ):
        assert (ours.token_ids, ours.supervised) == (theirs.token_ids, theirs.supervised)
    reports = [
        json.loads((tmp_path / name / "eval/report.json").read_text())
        for name in ("mine", "shipped")
    ]
    prompts = [[(each["id"], each["context_tokens"]) for each in r["prompts"]] for r in reports]
    assert prompts[0] == prompts[1] and prompts[0]

    make_app(load(mine, ["serve.max_length=128", "eval.tree.top_k=1"]), None)
    assert main(["inspect", str(tmp_path / "mine/train/head")]) == 0


def test_another_template_is_refused_by_every_later_stage(
    write_config: Write, base: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config("mine", target=base, train={"epochs": 1}))
    assert main(["run", "-c", config]) == 0
    file = Path(base["chat_template"])
    file.write_text(CHATML.replace("<|im_start|>{{ m.role }}", "{{ m.role }}"))
    for stage in ("synth", "features", "train", "eval"):
        capsys.readouterr()
        assert main([stage, "-c", config]) == 2
        message = capsys.readouterr().err
        assert "target.chat_template" in message and "Traceback" not in message, message
    file.unlink()
    assert main(["synth", "-c", config]) == 2
    assert "target.chat_template: cannot be read: No such file" in capsys.readouterr().err


def test_replies_that_never_end(
    write_config: Write, base: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base model's usual reply is cut off at the limit: kept, or dropped and counted."""
    path = Path(base["source"]) / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 5}))  # which it hardly ever says
    kept = write_config("kept", target=base, synth={"max_new_tokens": 2})
    assert main(["synth", "-c", str(kept)]) == 0 and main(["features", "-c", str(kept)]) == 0
    cut = list(read_samples(str(tmp_path / "kept")))
    assert len(cut) == 24 and {sample.finish_reason for sample in cut} == {"length"}
    synth = {"max_new_tokens": 2, "on_length": "drop"}
    dropped = write_config("dropped", target=base, synth=synth)
    capsys.readouterr()
    assert main(["synth", "-c", str(dropped)]) == 2
    message = capsys.readouterr().err
    assert "none of 24 prompts became a sample (length 24)" in message and "limits" in message
