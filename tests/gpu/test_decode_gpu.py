"""The GPU benchmark's parts on a CPU, with a small target: they run, and their figures agree."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bench import decode_gpu
from bench.random_target import LLAMA_8B
from pipeline.decoder.ops.triton import ops as operations

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"PROMPT": 20, "NEW_TOKENS": 12, "LONG": 300, "JOINING": 200, "SHORT": 16}
    for name, size in {**sizes, "RAGGED_ROWS": 3, "ROUNDS": 5, "DRAFT_VOCABULARY": 256}.items():
        monkeypatch.setattr(decode_gpu, name, size)
    monkeypatch.setattr(decode_gpu, "CONFIG", {**LLAMA_8B, **SMALL})


def measure(monkeypatch: pytest.MonkeyPatch, length: int, **workloads: Any) -> dict[str, Any]:
    monkeypatch.setitem(decode_gpu.PARTS, "small", (length, workloads))
    figures: dict[str, Any] = {}
    for group in decode_gpu.measure("small", runs=1, device=torch.device("cpu")):
        figures |= group
    return figures


def test_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    length, workloads = decode_gpu._batches((2,))
    batch = measure(monkeypatch, length, **workloads)["batch_2"]
    rates = [
        batch[f"{name}_tokens_per_second{end}"]
        for name, end in (("speculative", "_simulated"), ("plain", ""))
    ]
    assert batch["speedup_simulated"] == pytest.approx(rates[0] / rates[1])
    assert 2 < batch["tau_simulated"] < 5
    assert math.isfinite(batch["cost_model_error"])
    floor = batch["plain_round_floor_share"] * batch["plain_round_ms"]
    assert 0 < floor < batch["round_floor_share"] * batch["round_ms"]


def test_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    length, workloads = decode_gpu._contexts(100, "100", (1,))
    context = measure(monkeypatch, length, **workloads)["context_100_batch_1"]
    # Five rounds of the pattern accept 14 drafts, where the tree of a random head is deep enough.
    assert 1.8 <= context["tau_simulated"] <= 3.8
    assert context["round_ms"] > context["plain_round_ms"]
    assert context["prefill_tokens_per_second"] > 0


def test_ragged_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    workloads = {"ragged": decode_gpu._ragged, "joining": decode_gpu._joining}
    figures = measure(monkeypatch, 400, **workloads)
    ragged, joining = figures["ragged"], figures["joining"]
    ratio = ragged["ragged_round_ms"] / ragged["even_round_ms"]
    assert ragged["round_ms_ragged_over_even"] == pytest.approx(ratio)
    assert joining["longest_gap_ms_beside_a_long_prompt"] >= joining["gap_ms_beside_a_long_prompt"]


def test_products_with_and_without_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is put back: other parts measure what engines do."""
    most = operations.MOST_FUSED
    products = measure(monkeypatch, 400, products=decode_gpu._products)["products"]
    ratio = products["cublas_plain_round_ms"] / products["fused_plain_round_ms"]
    assert products["plain_round_ms_cublas_over_fused"] == pytest.approx(ratio)
    assert operations.MOST_FUSED == most > 0


def test_parts_by_name_and_number() -> None:
    parts = list(decode_gpu.PARTS)
    assert decode_gpu.chosen(None) == parts
    assert decode_gpu.chosen("ragged") == ["ragged"]
    assert decode_gpu.chosen("2/4") == parts[1::4]
    with pytest.raises(SystemExit, match="is one of"):
        decode_gpu.chosen("5/4")
