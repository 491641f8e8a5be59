"""A small run over SmolLM2-135M in fp32, whose report engines are held against.

Its stages are kept in `.venvs/line`: the next call goes on from there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.api import run
from pipeline.config import LiveServerSection, load
from pipeline.reports import REPORT, EvalReport, ServerFinding
from pipeline.serve_eval.servers.check import compare_golden
from pipeline.serve_eval.servers.findings import SeenServer
from pipeline.target.open import open_target
from tests.engines.environments import ROOT
from tests.engines.servers import EngineServer

FOLDER = ROOT / ".venvs/line"
OVERRIDES = [
    f"run.uri={FOLDER / 'run'}",
    "target.dtype=float32",
    "synth.max_prompts=120",
    "synth.shard_prompts=120",
    "synth.max_new_tokens=96",
    "train.epochs=3",
    "eval.tree={top_k: 4, steps: 4, nodes: 8}",
    "eval.shapes=[{top_k: 1, steps: 3, nodes: 4}, {top_k: 4, steps: 5, nodes: 8}]",
    "eval.hf_prompts=2",
]


@dataclass(frozen=True)
class Line:
    """What the stages made."""

    target: Path  # a directory that engines open
    head: Path
    report: EvalReport

    def held_against(
        self, server: EngineServer, **section: object
    ) -> tuple[SeenServer, list[ServerFinding]]:
        """What check-serving finds."""
        given = LiveServerSection.model_validate({"url": server.url, **section})
        return compare_golden(self.report, given, where="the report")


@pytest.fixture(scope="session")
def line() -> Line:
    config = load(ROOT / "configs/demo.yaml", OVERRIDES)
    run(config)
    report = (FOLDER / "run/eval" / REPORT).read_bytes()
    return Line(
        open_target(config.target).directory,
        FOLDER / "run/train/head",
        EvalReport.parse(report, where=REPORT, fix=""),
    )


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a directory, to plant a fault in."""

    def copy(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / folder.name))

    return copy
