"""The bench of trainers: how they take turns, and what its ratios are of."""

from __future__ import annotations

import sys

import pytest

from bench.peers.__main__ import _floors, _ratios, _Turns


def test_a_trainer_performs_a_step_whenever_it_is_asked() -> None:
    ours = _Turns("ours", "float32", sys.executable, threads=1)
    ours.step()
    ours.step()
    assert all(step["seconds"] > 0 and step["cpu_seconds"] > 0 for step in ours.steps)
    assert len(ours.steps) == 2 and 0.3 < ours.end() < 30


def test_a_trainer_that_cannot_start_is_named() -> None:
    with pytest.raises(SystemExit, match="specforge in float32 ended with 1"):
        _Turns("specforge", "float32", sys.executable, threads=1)


def test_ratios_are_of_each_trainers_better_type() -> None:
    """Here the peers' better types are fp32 and bf16, and each is the best peer once."""
    rows = {
        "ours.bfloat16": (400, 200, 1.0),
        "ours.float32": (900, 100, 9.0),
        "specforge.bfloat16": (1, 1, 1.0),
        "specforge.float32": (50, 80, 4.0),
        "speculators.bfloat16": (100, 40, 5.0),
        "speculators.float32": (1000, 30, 0.1),
    }
    names = "tokens_per_second", "tokens_per_cpu_second", "peak_gb"
    figures = {
        f"{row}.{name}": value
        for row, values in rows.items()
        for name, value in zip(names, values, strict=True)
    }
    figures |= {f"floor.{name}.tokens_per_cpu_second": 500 for name in ("bfloat16", "float32")}
    assert _ratios(figures, ["ours", "specforge", "speculators"]) == {
        "tokens_per_second_vs_peers": 4.0,
        "tokens_per_cpu_second_vs_peers": 2.5,
        "peak_gb_vs_peers": 0.25,
        "floor_share": 0.4,
        "floor_vs_peers": 6.25,
    }
    assert _ratios(figures, ["ours"]) == {}


def test_the_floor_counts_the_products_that_labels_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 512 tokens pass fc, and step 0's keys and values; 368 labels pass the rest, each step."""
    monkeypatch.setattr("bench.peers.__main__.matmul_rate", lambda *_, **__: 1e12)
    fc, keys_values, others = 3 * 576**2, 2 * 1152 * 192, (1152 + 576) * 576 + 3 * 1536 * 576
    every_step = keys_values + others + 8192 * 576
    products = (fc + keys_values) * 512 + (7 * every_step - keys_values) * 368
    expected = pytest.approx(1e12 / 2 / (6 * products / 512), rel=1e-3)  # but for the norms
    assert _floors(threads=2) == {
        "floor.bfloat16.tokens_per_cpu_second": expected,
        "floor.float32.tokens_per_cpu_second": expected,
    }
