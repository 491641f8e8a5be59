"""One run whose stages run on machines of different kinds: no conflict, and a sound whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import isa
from pipeline.records import STAGES
from pipeline.reports import EvalReport
from pipeline.store.manifest import read_manifest
from tests.forked import Command

Write = Callable[..., Path]

#: A level for each stage, and what `auto` is there.
LEVELS = {"synth": "avx2", "features": "amx", "train": "avx512", "eval": "avx512_bf16"}


def _eagle3(*words: str, level: str, folder: Path) -> str:
    """Output of a command in a process of its own, where a processor of `level` is all there is."""
    printed = folder / "printed"
    printed.unlink(missing_ok=True)
    code = Command(words, printed, environment={isa.VARIABLE: level}).wait(timeout=300)
    assert code == 0, printed.read_text()
    return " ".join(printed.read_text().split())


def test_each_stage_on_a_machine_of_another_kind(write_config: Write, tmp_path: Path) -> None:
    here = isa.machine_levels()
    if not here:
        pytest.skip("no levels on this machine")
    levels = {stage: level if level in here else "none" for stage, level in LEVELS.items()}
    config = str(write_config(target={"dtype": "auto"}, train={"dtype": "auto"}))
    run = tmp_path / "run"
    dtypes = {}
    for stage, level in levels.items():
        shown = _eagle3(stage, "-c", config, level=level, folder=tmp_path)
        dtypes[stage] = "bfloat16" if level in ("avx512_bf16", "amx") else "float32"
        assert f"{stage} arithmetic: {dtypes[stage]}, kernels " in shown, shown
    for level in {*levels.values(), "none"}:
        again = _eagle3("run", "-c", config, level=level, folder=tmp_path)
        assert again.count("complete") == 4 and "arithmetic" not in again
    checked = _eagle3("verify", str(run), level="none", folder=tmp_path)
    assert checked.startswith("sound: synth, features, train, eval"), checked

    manifests = {stage: read_manifest(str(run), stage) for stage in STAGES}
    assert all(one.contract == manifests["synth"].contract for one in manifests.values())
    for stage, manifest in manifests.items():
        (arithmetic,) = manifest.arithmetic
        assert arithmetic.dtype == dtypes[stage] and arithmetic.threads == 1
    report = EvalReport.model_validate_json((run / "eval/report.json").read_bytes())
    assert report.settings.dtype == dtypes["eval"]
    assert report.lossless.greedy_fp32 is True and report.acceptance_length >= 1
