"""Targets that are not Llama's, from prompts to a report, by the bundled decoder alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.reports import EvalReport
from tests.target.families import save_family

Write = Callable[..., Path]


@pytest.mark.parametrize("family", ["gemma3", "smollm3", "phi3"])
def test_it_answers_trains_and_is_decoded_as_by_transformers(
    write_config: Write, tiny_target: Path, tmp_path: Path, family: str
) -> None:
    """Prompts and replies are longer than the window of 64 positions; Gemma 3 reads images, too."""
    sizes = {"vocab_size": 320, "max_position_embeddings": 512, "sliding_window": 64}
    target = save_family(family, tmp_path / family, tiny_target, **sizes)
    config = str(write_config(target={"source": str(target)}, train={"epochs": 2}))
    for stage in ("synth", "features", "train", "eval"):
        assert main([stage, "-c", config, "eval.max_new_tokens=64"]) == 0, stage
    report = EvalReport.model_validate_json((tmp_path / "run/eval/report.json").read_bytes())
    assert report.is_lossless and report.acceptance_length > 1
