"""The cost model: its formulas by hand, and figures of a small model that make sense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from bench.random_target import random_head, random_model
from pipeline.config import TreeSection
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.parallel import TensorGroup
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.tuning.cost import (
    CostMeter,
    Costs,
    Roofline,
    draft_floor_seconds,
    extend_floor_seconds,
    floor_seconds,
    measure_costs,
    s_max,
    trimmed_mean,
)

SHAPE = TreeSection(top_k=3, steps=4, nodes=12)


@pytest.fixture(scope="module")
def drafting() -> tuple[DecoderModel, Eagle3Drafter]:
    """A target of four layers, large enough that more nodes take longer."""
    return drafting_from((0, 1, 2))


def drafting_from(captured: tuple[int, ...]) -> tuple[DecoderModel, Eagle3Drafter]:
    config: Any = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = random_model(
        config,
        captured,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_length=256,
        ops=TorchOps(),
    )
    layers = len(captured)
    head = random_head(config, torch.arange(500), intermediate_size=384, heads=4, aux_layers=layers)
    return model, Eagle3Drafter(head, model, SHAPE)


def test_a_round_is_the_sum_of_its_pieces() -> None:
    costs = Costs(
        verify={1: 10.0, 8: 12.0, 16: 16.0},
        draft={1: 1.0, 5: 3.0},
        extend={2: 1.5, 6: 3.5},
        other={4: 0.25, 20: 1.25},
    )
    # 12 nodes lie half-way from 8 to 16, 3 beams half-way from 1 to 5, 4 steps half-way from 2 to
    # 6, 12 nodes from 4 to 20.
    assert costs.round_seconds(SHAPE) == 14.0 + 3 * 2.0 + 2.5 + 0.75
    assert costs.plain_seconds == 10.0
    assert costs.speedup(SHAPE, tau=4.65) == pytest.approx(4.65 * 10.0 / 23.25)


def test_curves_are_continued_beyond_their_ends() -> None:
    costs = Costs(
        verify={1: 10.0, 8: 12.0, 16: 16.0}, draft={4: 2.0}, extend={2: 1.5, 6: 3.5}, other={4: 1.0}
    )
    assert [costs.verify_seconds(nodes) for nodes in (1, 8, 16, 32)] == [10.0, 12.0, 16.0, 24.0]
    assert [costs.draft_seconds(beams) for beams in (1, 8)] == [2.0, 2.0]
    assert [costs.extend_seconds(steps) for steps in (1, 8)] == [1.0, 4.5]


def test_yardstick() -> None:
    assert s_max(tau=4.0, t_ar=10.0, t_verify=11.0, t_draft=1.0, t_extend=2.0, steps=4) == 2.5
    assert s_max(tau=4.0, t_ar=10.0, t_verify=18.0, t_draft=99.0, t_extend=2.0, steps=1) == 2.0


def test_floors(drafting: tuple[DecoderModel, Eagle3Drafter]) -> None:
    model, _ = drafting
    slow_memory = Roofline(1e6, 1e30, rows=3, context=100)
    slow_arithmetic = Roofline(1e30, 1e6, rows=3, context=100)
    # q and o are 256 x 256, k and v 256 x 64, three MLP matrices 256 x 512, four layers; lm_head is
    # 1000 x 256.
    parameters = 4 * (2 * 256 * 256 + 2 * 256 * 64 + 3 * 256 * 512) + 1000 * 256
    # Of 3 rows with 100 entries each the keys and values of 2 heads of 32 numbers are read, those
    # of 5 tokens written.
    numbers = parameters + 3 * (100 + 5) * 4 * 2 * 64
    assert floor_seconds(model, 5, slow_memory) == pytest.approx(4 * numbers / 1e6)
    # Scores and sums over 100 entries take two multiply-adds for each of 256 numbers of a query.
    operations = 15 * (2 * parameters + 4 * 4 * 100 * 256)
    assert floor_seconds(model, 5, slow_arithmetic) == pytest.approx(operations / 1e6)


def test_what_a_window_hides_is_neither_read_nor_met(
    drafting: tuple[DecoderModel, Eagle3Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers see 40 of 100 entries, two see all: 70, as if the context were so long."""
    model, drafter = drafting
    rooflines = [Roofline(*rates, rows=3, context=100) for rates in ((1e6, 1e30), (1e30, 1e6))]
    shorter = [floor_seconds(model, 5, replace(each, context=70)) for each in rooflines]
    monkeypatch.setattr(model, "windows", [40, 0, 200, 40])
    assert [floor_seconds(model, 5, each) for each in rooflines] == pytest.approx(shorter)
    work = drafter.work(SHAPE)
    for seconds in (draft_floor_seconds, extend_floor_seconds):
        for roofline in rooflines:
            seen = seconds(work._replace(window=30), roofline)
            assert seen == pytest.approx(seconds(work, replace(roofline, context=30)))
            assert seen < seconds(work._replace(window=300), roofline) == seconds(work, roofline)


@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (2, 2), (3, 1)])
def test_floors_of_the_head(
    drafting: tuple[DecoderModel, Eagle3Drafter],
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    parts: int,
) -> None:
    """Of what a rank has: half of the layer and of lm_head, or all where heads do not divide."""
    model, _ = drafting
    monkeypatch.setattr(model, "group", TensorGroup(0, ranks) if ranks > 1 else None)
    head = random_head(model.config, torch.arange(500), intermediate_size=384, heads=4)
    drafter = Eagle3Drafter(head, model, SHAPE)
    step = drafter.work(TreeSection(top_k=4, steps=1))
    extension = drafter.work(TreeSection(top_k=1, steps=3))
    slow_memory = Roofline(1e6, 1e30, rows=2, context=100)
    slow_arithmetic = Roofline(1e30, 1e6, rows=2, context=100)
    # q, k and v have four heads of 32 and read 512 numbers; lm_head is 500 x 256, fc 256 x 768.
    layer, lm_head, fc = 3 * 512 * 128 + 128 * 256 + 3 * 256 * 384, 500 * 256, 256 * 768
    layer, lm_head, queries = layer // parts, lm_head // parts, 128 // parts
    entries = 2 * (100 + 4) * 2 * queries
    numbers = layer + lm_head + entries
    assert draft_floor_seconds(step, slow_memory) == pytest.approx(4 * numbers / 1e6)
    operations = 2 * (4 * 2 * (layer + lm_head) + 4 * 4 * 100 * queries)
    assert draft_floor_seconds(step, slow_arithmetic) == pytest.approx(operations / 1e6)
    # Three steps: four tokens are read, one proposes.
    assert extend_floor_seconds(extension, slow_memory) == pytest.approx(4 * (numbers + fc) / 1e6)
    operations = 2 * (4 * 2 * (layer + fc) + 2 * lm_head + 4 * 4 * 100 * queries)
    assert extend_floor_seconds(extension, slow_arithmetic) == pytest.approx(operations / 1e6)


def test_every_part_of_a_round_is_measured(drafting: tuple[DecoderModel, Eagle3Drafter]) -> None:
    model, drafter = drafting
    costs = measure_costs(
        model, drafter, 2, 100, (16, 64), beam_counts=(1, 4), step_counts=(1, 4), repeats=9
    )
    curves = costs.verify, costs.draft, costs.extend, costs.other
    assert [list(curve) for curve in curves] == [[1, 16, 64], [1, 4], [1, 4], [16, 64]]
    seconds = [value for curve in curves for value in curve.values()]
    assert all(
        0 < value < 10 for value in seconds
    )  # which is the slower one, a busy machine decides
    assert costs.speedup(SHAPE, tau=2.0) == pytest.approx(2 * costs.speedup(SHAPE, tau=1.0))


@pytest.mark.parametrize("captured", [(2,), (0, 1, 2, 3)])
def test_a_head_of_any_number_of_aux_layers_is_measured(captured: tuple[int, ...]) -> None:
    model, drafter = drafting_from(captured)
    costs = measure_costs(
        model, drafter, 1, 100, (1, 16), beam_counts=(1, 4), step_counts=(1, 4), repeats=2
    )
    assert all(each > 0 for each in costs.extend.values())


def test_a_context_without_room_for_a_round(drafting: tuple[DecoderModel, Eagle3Drafter]) -> None:
    with pytest.raises(ValueError, match="max_length 256"):
        measure_costs(*drafting, 1, 250)


def test_the_mean_is_trimmed_by_a_tenth_at_both_ends() -> None:
    assert trimmed_mean([9.0]) == 9.0
    assert trimmed_mean([1.0, 3.0]) == 2.0
    assert trimmed_mean([2.0, 0.0, 100.0]) == 2.0
    assert trimmed_mean([*range(1, 20), 1000.0]) == sum(range(3, 19)) / 16


def test_a_meter_adds_up_its_turns(drafting: tuple[DecoderModel, Eagle3Drafter]) -> None:
    meter = CostMeter(*drafting, 1, 20, (4,), (1,), (2,))
    clock = iter(range(1, 1000))
    meter._seconds = lambda _: float(next(clock))  # 1, 2, 3 …
    meter.turn()
    meter.turn()
    # In their order: verify 1, verify 4, other 4, extend 2, propose 1, draft 1; twice. The drafter
    # goes three steps beyond its first.
    assert meter.costs() == Costs({1: 4.0, 4: 5.0}, {1: 1 / 3}, {2: 7.0}, {4: 6.0})
