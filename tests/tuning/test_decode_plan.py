"""Plans of decoding: where a drafter begins to pay, and rounds that are run to check a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.random_target import random_head
from pipeline.config import TreeSection
from pipeline.decoder.drafter import DrafterFactory
from pipeline.decoder.model import DecoderModel
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.planning.decode import Crossing, DecodePlan, PlannedDecoding
from pipeline.serve_eval.pages import write_plan
from pipeline.tuning.cost import Costs
from pipeline.tuning.trace import acceptance, replay
from pipeline.tuning.tune import (
    Measurement,
    PlannedCell,
    plan_cell,
    run_rounds,
    shapes_for,
    trace_drafter,
    widest_for,
)

SHAPE = TreeSection(top_k=3, steps=3, nodes=8)
PROMPTS = [[(3 * row + step * step) % 8 for step in range(9 + 3 * row)] for row in range(3)]
NEW_TOKENS = 24

Pair = tuple[DecoderModel, DrafterFactory]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(directory)
    model = DecoderModel.load(
        directory, (1, 3, 4), device=torch.device("cpu"), dtype=torch.float32, max_length=256
    )
    head = random_head(config, torch.arange(8), intermediate_size=64, seed=3, scale=12)
    return model, DrafterFactory(lambda trees: Eagle3Drafter(head, model, trees), depths=(1, 2, 4))


def _cell(context: int, speedup: float) -> PlannedCell:
    costs = Costs({1: 1.0}, {1: 0.1}, {1: 0.1}, {2: 0.0})
    factory = DrafterFactory(lambda trees: pytest.fail("nothing is drafted"))
    return PlannedCell("eagle3", 1, context, SHAPE, 2.0, speedup, costs, factory)


def test_the_error_is_a_share_of_what_was_measured() -> None:
    cell = _cell(512, 1.5)
    assert cell.error is None
    ran = Measurement(plain_seconds=2.0, round_seconds=3.0, acceptance_length=1.8, rounds=5)
    assert ran.speedup == pytest.approx(1.2)
    assert cell.checked(ran).error == pytest.approx(1.5 / 1.2 - 1)


def test_no_deeper_than_the_drafter_goes(pair: Pair) -> None:
    _, factory = pair
    assert widest_for(factory).steps == 4
    assert {shape.steps for shape in shapes_for(factory)} == {1, 2, 4}
    deep = DrafterFactory(factory.make, depths=(1, 12))
    assert (widest_for(deep).steps, widest_for(deep).top_k) == (12, 4), "11 · 4 of 64 entries"
    assert max(shape.top_k for shape in shapes_for(deep) if shape.steps == 12) == 4


@pytest.mark.parametrize("rows", [1, 3])
def test_rounds_that_are_run_are_those_that_are_replayed(pair: Pair, rows: int) -> None:
    model, factory = pair
    traces = trace_drafter(model, factory, PROMPTS, NEW_TOKENS + 1, SHAPE)
    ran = run_rounds(model, factory(SHAPE), PROMPTS, rows, NEW_TOKENS)
    replayed = replay(traces, SHAPE)
    # Side by side, the slowest row says how many rounds there are.
    assert ran.rounds == (sum(replayed) if rows == 1 else max(replayed))
    assert ran.plain_seconds > 0 and ran.round_seconds > 0
    assert ran.acceptance_length == pytest.approx(acceptance(traces, SHAPE), rel=0.15)
    assert ran.acceptance_length > 1.1


def test_a_cell_is_the_best_shape_at_its_costs(pair: Pair) -> None:
    model, factory = pair
    traces = trace_drafter(model, factory, PROMPTS, NEW_TOKENS)
    cell = plan_cell(model, "eagle3", [(factory, traces)], 2, 64)
    assert cell.acceptance_length == acceptance(traces, cell.tree)
    assert cell.speedup == cell.costs.speedup(cell.tree, cell.acceptance_length)
    others = (shape for shape in shapes_for(factory) if shape.nodes <= 32 and traces.covers(shape))
    assert cell.speedup == max(
        cell.costs.speedup(shape, acceptance(traces, shape)) for shape in others
    )


def test_the_page_holds_every_cell_and_escapes_what_it_shows(tmp_path: Path) -> None:
    def planned(name: str, context: int, speedup: float) -> PlannedDecoding:
        return PlannedDecoding(
            drafter=name,
            batch=4,
            context=context,
            tree={"top_k": 2, "steps": 3, "nodes": 6},
            settings={"budget": 1024},
            acceptance_length=1.75,
            speedup=speedup,
            milliseconds={"t_ar": 1.0},
            measured_speedup=speedup / 1.1,
            error=0.1,
        )

    cells = (planned("eagle3", 512, 1.31), planned("<ngram>", 2048, 0.93))
    plan = DecodePlan(
        basis="measured",
        machine="<b>cpu</b>",
        target="a & b",
        prompts=2,
        new_tokens=8,
        cells=cells,
        crossings=(Crossing(drafter="eagle3", batch=4, context=700.0, pays_above=False),),
    )
    page = write_plan(plan)
    assert "budget 1,024" in page
    assert "1.31×" in page and "0.93×" in page and "3/2/6" in page and "–" in page
    assert "off by 10.0% on average, 10.0% at most" in page
    assert "a &amp; b" in page and "<b>cpu" not in page and "<ngram>" not in page
    assert "&lt;ngram&gt;" in page and "<svg" in page
