"""The GPU benchmark's parts on a CPU, with a small target: they run, and their figures agree."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaConfig

from bench import decode_gpu
from bench.random_target import LLAMA_8B, random_hf, random_model
from bench.rival_servers import TAU
from bench.rivals import decoding_rate
from pipeline.decoder.ops.triton import ops as operations
from pipeline.tuning.verification import log_probabilities

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
    return measure_part("small")


def measure_part(part: str, **interpreters: str) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    device = torch.device("cpu")
    for group in decode_gpu.measure(part, runs=1, interpreters=interpreters, device=device):
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
    assert min(context["round_ms"], context["plain_round_ms"]) > 0
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


def test_generate_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_gpu, "RIVAL_ROWS", (1, 3))
    rival = measure_part("rivals generate")["rival_generate"]
    assert rival["version"] and list(rival["plain"]) == ["batch_1", "batch_3"]
    for each in rival["plain"].values():
        ratio = each["ours_tokens_per_second"] / each["its_tokens_per_second"]
        assert each["ours_over_it"] == pytest.approx(ratio)  # of one turn


def test_generate_has_the_same_weights() -> None:
    config = LlamaConfig(**{**LLAMA_8B, **SMALL})
    settings: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "scale": 0.2}
    hf, own = (
        random_hf(config, **settings),
        random_model(config, (1, 3, 4), max_length=64, **settings),
    )
    prompt, reply = (3, 1, 4, 1, 5), (9, 2, 6)
    with torch.inference_mode():
        logits = hf(torch.tensor([[*prompt, *reply[:-1]]])).logits[0, len(prompt) - 1 :]
    theirs = logits.log_softmax(-1)
    assert (log_probabilities(own, prompt, reply) - theirs).abs().max() < 1e-3 < theirs.std()


def test_rates_leave_prefill_out() -> None:
    clock = [0.0]

    def generate(prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        clock[0] += 5 + 0.25 * (new_tokens - 1)

    with patch("time.perf_counter", lambda: clock[0]):
        assert decoding_rate(generate, [(1,), (2,)], 9) == 2 / 0.25


@pytest.mark.parametrize("accepted", [2, 1])
def test_a_server_is_measured_where_it_accepts_what_is_imposed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, accepted: int
) -> None:
    monkeypatch.setattr(decode_gpu, "RIVAL_ROWS", (1, 3))
    script = Path(__file__).with_name("stub_sglang.py")
    python = interpreter(tmp_path, f"exec {sys.executable} {script} {accepted} $*")
    figures = measure_part("rivals sglang", sglang=python)["rival_sglang"]
    plain, drafting = figures["plain"], figures["drafting_simulated"]
    assert list(plain) == ["batch_1", "batch_3"]
    # At 10 ms a token 300; what the machine does meanwhile makes it more or less.
    assert 30 < plain["batch_3"]["its_tokens_per_second"] < 1000
    if accepted == TAU - 1:
        assert drafting["its_tau"] == drafting["batch_3"]["our_tau"] == TAU
    else:
        assert "emitted 2.00 tokens a round instead of 3.0" in drafting["left_out"]


def interpreter(folder: Path, line: str) -> str:
    """What says that it has any package in version 1.0, and runs a line where one is started."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo 1.0 && exit\n{line}\n')
    python.chmod(0o755)
    return str(python)


def test_a_rival_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not installed, or installed and ends at once."""
    python = interpreter(tmp_path, 'echo "ValueError: no card"; exit 1')
    interpreters = {"vllm": sys.executable, "sglang": python}
    vllm = measure_part("rivals vllm", **interpreters)["rival_vllm"]
    assert vllm == {"left_out": f"vllm is not installed for {sys.executable}"}
    sglang = measure_part("rivals sglang", **interpreters)["rival_sglang"]
    assert sglang["version"] == "1.0" and sglang["tau_imposed"] == TAU
    for name in ("plain", "drafting_simulated"):
        assert "no card" in sglang[name]["left_out"]


def test_parts_by_name_and_number() -> None:
    parts = list(decode_gpu.PARTS)
    assert decode_gpu.chosen(None) == parts
    rivals = [f"rivals {name}" for name in ("generate", "vllm", "sglang")]
    assert decode_gpu.chosen("rivals") == rivals and decode_gpu.chosen(rivals[1]) == rivals[1:2]
    assert decode_gpu.chosen("ragged") == ["ragged"]
    assert decode_gpu.chosen("2/4") == parts[1::4]
    with pytest.raises(SystemExit, match="is one of"):
        decode_gpu.chosen("5/4")
