"""A small run over SmolLM2-135M, and a report in fp32 that engines are held against.

Stages are kept in `.venvs/line`: the next call goes on from there. EAGLE3_HEAD=DIR takes a trained
head for the same target instead.
"""

from __future__ import annotations

import hashlib
import os
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
TRAINING = ["synth.max_prompts=120", "synth.shard_prompts=120", "synth.max_new_tokens=96"]
EVALUATION = [
    "run.threads=1",
    "eval.tree={top_k: 4, steps: 4, nodes: 8}",
    "eval.shapes=[{top_k: 1, steps: 7, nodes: 8}, {top_k: 4, steps: 5, nodes: 8}]",
    "eval.hf_prompts=2",
]


@dataclass(frozen=True)
class Line:
    """What the stages made."""

    target: Path  # a directory that engines open
    head: Path
    reports: dict[str, EvalReport]  # by the decoder's dtype

    @property
    def report(self) -> EvalReport:
        """In fp32."""
        return self.reports["float32"]

    def held_against(
        self, server: EngineServer, *, dtype: str = "float32", **section: object
    ) -> tuple[SeenServer, list[ServerFinding]]:
        """What check-serving finds, with the report in that type."""
        given = LiveServerSection.model_validate({"url": server.url, **section})
        return compare_golden(self.reports[dtype], given, where="the report")


@pytest.fixture(scope="session")
def line() -> Line:
    return make_line()


def make_line() -> Line:
    """Runs what is not there yet."""
    demo, head = ROOT / "configs/demo.yaml", os.environ.get("EAGLE3_HEAD")
    if head is None:
        run(load(demo, [f"run.uri={FOLDER / 'run'}", *TRAINING]), "synth", "features", "train")
        head = str(FOLDER / "run/train/head")
    target = open_target(load(demo).target).directory
    reports = {dtype: _report(demo, head, dtype) for dtype in ("float32", "bfloat16")}
    return Line(target, Path(head), reports)


def _report(demo: Path, head: str, dtype: str) -> EvalReport:
    # A head has one report of a kind here: other weights or settings, another directory.
    settings = [f"target.dtype={dtype}", *EVALUATION]
    weights = digest_of(Path(head) / "model.safetensors")
    where = FOLDER / f"{dtype}-{hashlib.sha256(repr((weights, settings)).encode()).hexdigest()[:8]}"
    run(load(demo, [f"run.uri={where}", f"eval.head={head}", *settings]), "eval")
    return EvalReport.parse((where / "eval" / REPORT).read_bytes(), where=REPORT, fix="")


def digest_of(file: Path) -> str:
    """SHA-256 of its bytes."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


CopyOf = Callable[[Path], Path]


@pytest.fixture
def copy_of(tmp_path: Path) -> CopyOf:
    """A copy of a directory, to plant a fault in."""

    def copy(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / folder.name))

    return copy
