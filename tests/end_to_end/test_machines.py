"""One run whose stages run on machines of different kinds: no conflict, and a sound whole."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import isa
from pipeline.records import STAGES
from pipeline.reports import EvalReport
from pipeline.store.manifest import read_manifest

Write = Callable[..., Path]

#: A level for each stage, and what `auto` is there.
LEVELS = {"synth": "avx2", "features": "amx", "train": "avx512", "eval": "avx512_bf16"}


def _eagle3(*words: str, level: str) -> str:
    """Output of a command in a process of its own, where a processor of `level` is all there is."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pipeline.cli", *words],
        env={**os.environ, isa.VARIABLE: level},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def test_each_stage_on_a_machine_of_another_kind(write_config: Write, tmp_path: Path) -> None:
    here = isa.machine_levels()
    if not here:
        pytest.skip("no levels on this machine")
    levels = {stage: level if level in here else "none" for stage, level in LEVELS.items()}
    config = str(write_config(target={"dtype": "auto"}, train={"dtype": "auto"}))
    run = tmp_path / "run"
    dtypes = {}
    for stage, level in levels.items():
        shown = _eagle3(stage, "-c", config, level=level)
        dtypes[stage] = "bfloat16" if level in ("avx512_bf16", "amx") else "float32"
        assert f"{stage} arithmetic: {dtypes[stage]}, kernels " in shown, shown
    for level in {*levels.values(), "none"}:
        again = _eagle3("run", "-c", config, level=level)
        assert again.count("complete") == 4 and "arithmetic" not in again
    checked = _eagle3("verify", str(run), level="none")
    assert checked.startswith("sound: synth, features, train, eval"), checked

    manifests = {stage: read_manifest(str(run), stage) for stage in STAGES}
    assert all(one.contract == manifests["synth"].contract for one in manifests.values())
    for stage, manifest in manifests.items():
        (arithmetic,) = manifest.arithmetic
        assert arithmetic.dtype == dtypes[stage] and arithmetic.threads == 1
    report = EvalReport.model_validate_json((run / "eval/report.json").read_bytes())
    assert report.settings.dtype == dtypes["eval"]
    assert report.lossless.greedy_fp32 is True and report.acceptance_length >= 1
