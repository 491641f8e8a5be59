"""The GPU check on the CPU's operations: passes with a sound decoder, fails with a broken one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.report import ROOT
from pipeline.decoder.model import pick_ops
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.tree import Tree, VerifyOutput
from tests.decoder.random_drafters import DRAFTERS
from tests.gpu import cases, check

CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    **cases.shape_of(4, 2, 64, intermediate_size=96, num_hidden_layers=8, vocab_size=512),
    "max_position_embeddings": 2048,
    "sliding_window": 128,  # of Gemma alone
    "tie_word_embeddings": True,
}
NAMES = [
    "hugging face, tiny llama",
    "hugging face, tiny qwen3",
    "hugging face, tiny gemma3_text",
    "hugging face, tiny llama in float8",
    "logits, llama",
    "near ties in bf16, llama",
    "greedy, llama, tree",
    *(f"drafter, {name}" for name in DRAFTERS),
    "sampling",
    "sampling, top-p and top-k",
    "length limit, 256",
    "length limit, 232",
    "ragged batch",
    "positions for 128k",
    "a pool above 2^31 elements",
    "collectives in rounds",
    "joins and aborts",
    "vocabulary of 128k",
    "captured states",
    "an optimiser step",
    "training losses",
    "training attention",
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = cases.shape_of(4, 2, 128)
    tiny = {
        f"tiny {kind}": {"model_type": kind, "head_dim": 16, **TINY}
        for kind in ("llama", "qwen3", "gemma3_text")
    }
    monkeypatch.setattr(cases, "LLAMA", shape)
    monkeypatch.setattr(cases, "SHAPES", {"llama": shape})
    monkeypatch.setattr(cases, "TREES", {"tree": cases.TREES["tree"]})
    monkeypatch.setattr(cases, "ARCHITECTURES", tiny)
    monkeypatch.setattr(cases, "WIDE", (64, 2048))
    monkeypatch.setattr(cases, "RAGGED", (300, 3, 40, 1))
    monkeypatch.setattr(cases, "BATCHES", (3,))
    monkeypatch.setattr(cases, "LENGTH", 256)
    monkeypatch.setattr(cases, "LONGEST", 4096)
    monkeypatch.setattr(cases, "PROMPTS", (300, 5))
    monkeypatch.setattr(cases, "POOL_ELEMENTS", 2**20)


def perform(*names: str) -> dict[str, dict[str, Any]]:
    return {name: check.perform(name, CPU) for name in names}


def test_a_sound_decoder_passes() -> None:
    assert list(cases.checks(CPU)) == NAMES
    results = perform(*NAMES)
    assert [name for name, result in results.items() if not result["passed"]] == []
    assert results["greedy, llama, tree"]["tokens"] > 200


def test_a_lossy_verification_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = type(pick_ops(CPU, torch.float32))
    honest = backend.verify

    def generous(self: TorchOps, tree: Tree, predicted: torch.Tensor, depth: int) -> VerifyOutput:
        wrong = predicted.clone()
        if depth:
            wrong[:, 0] = torch.where(predicted[:, 0] % 7 == 0, tree.tokens[:, 1], predicted[:, 0])
        return honest(self, tree, wrong, depth)

    monkeypatch.setattr(backend, "verify", generous)
    results = perform("greedy, llama, tree", "sampling", "logits, llama")
    assert not results["greedy, llama, tree"]["passed"]
    assert not results["sampling"]["passed"]
    assert results["logits, llama"]["passed"]


def test_a_check_in_a_process_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    command = [sys.executable, "-m", "tests.gpu.check", "--device", "cpu", "--only", "logits, d 80"]
    done = subprocess.run([*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record == json.loads(done.stdout.splitlines()[-1])
    assert record["passed"] and record["versions"]["torch"] == torch.__version__
    assert list(record["results"]) == ["logits, d 80"]
    assert 0 < record["results"]["logits, d 80"]["seconds"] < 300


def test_a_check_that_takes_too_long_fails() -> None:
    result = check.perform_apart("logits, d 80", CPU, limit=0.5)
    assert not result["passed"]
    assert result["error"].startswith("took longer")


def test_a_check_whose_process_crashes_at_its_end_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    crashing = tmp_path / "python"
    crashing.write_text(f'#!/bin/sh\n{sys.executable} "$@"\nkill -SEGV $$\n')
    crashing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crashing))
    result = check.perform_apart("logits, d 80", CPU, limit=100)
    assert not result["passed"]
    assert result["error"] == "the process ended with status -11"
    assert result["largest_difference"] < cases.DIFFERENCE


def test_parts_are_saved_together(tmp_path: Path) -> None:
    one = check.record_of(CPU, {"a": {"passed": True, "seconds": 1.0}})
    two = check.record_of(CPU, {"b": {"passed": False, "seconds": 2.0}})
    assert check.save(one, tmp_path) == check.save(two, tmp_path)
    (file,) = tmp_path.iterdir()
    saved = json.loads(file.read_text())
    assert list(saved["results"]) == ["a", "b"]
    assert not saved["passed"]
