"""The GPU benchmark's rivals on a CPU: real servers without weights, of a tiny shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench import decode_gpu
from bench.random_target import LLAMA_8B
from bench.rival_servers import TAU
from tests.engines.environments import ROOT, SGLANG, VLLM
from tests.engines.servers import VLLM_VARIABLES

SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"PROMPT": 20, "NEW_TOKENS": 91, "DRAFT_VOCABULARY": 256, "RIVAL_ROWS": (1, 3)}
    for name, size in {**sizes, "CONFIG": {**LLAMA_8B, **SMALL}}.items():
        monkeypatch.setattr(decode_gpu, name, size)


def measure(
    monkeypatch: pytest.MonkeyPatch, package: str, python: Path, variables: dict[str, str]
) -> dict[str, Any]:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    interpreters, device = {package: str(python)}, torch.device("cpu")
    *_, last = decode_gpu.measure(
        f"rivals {package}", runs=1, interpreters=interpreters, device=device
    )
    (figures,) = last.values()
    assert figures["version"]
    return dict(figures)


def with_options(folder: Path, python: Path, options: str) -> Path:
    """The interpreter, as one that a server is started with further options by."""
    wrapper = folder / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {python} "$@" {options}\n')
    wrapper.chmod(0o755)
    return wrapper


def test_sglang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It and we emit as many tokens a round as is imposed."""
    backends = "--prefill-attention-backend intel_amx --decode-attention-backend intel_amx"
    python = with_options(tmp_path, SGLANG.make(), f"{backends} --skip-server-warmup")
    variables = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": str(ROOT / "tests/engines/sglang_cpu"),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    figures = measure(monkeypatch, "sglang", python, variables)
    plain, drafting = figures["plain"], figures["drafting_simulated"]
    assert drafting.pop("its_tau") == TAU
    assert list(plain) == list(drafting) == ["batch_1", "batch_3"]
    for each in drafting.values():
        assert each["our_tau"] == TAU
    assert all(each["its_tokens_per_second"] > 0 for each in (*plain.values(), *drafting.values()))


def test_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Plain. Drafting, its server starts and drafts; its sampler for CPUs imposes no acceptance."""
    python = with_options(tmp_path, VLLM.make(), "--enforce-eager")
    figures = measure(monkeypatch, "vllm", python, VLLM_VARIABLES)
    assert list(figures["plain"]) == ["batch_1", "batch_3"]
    assert all(each["its_tokens_per_second"] > 0 for each in figures["plain"].values())
    reason = figures["drafting_simulated"]["left_out"]
    assert "Synthetic acceptance not supported with CPU sampling" in reason
