"""Plans of decoding on paper, worked out by hand, and where a drafter begins to pay."""

from __future__ import annotations

import pytest

from pipeline.cli import main
from pipeline.planning.decode import (
    MachineRates,
    PlannedDecoding,
    crossings,
    parse_acceptance,
    plan_on_paper,
)
from pipeline.planning.targets import Experts, TargetShape

#: A byte a second and no limit to arithmetic, or the other way round.
SLOW_MEMORY, SLOW_ARITHMETIC = MachineRates(1.0, 1e30), MachineRates(1e30, 1.0)
#: One layer: q and o 8 x 8, k and v 8 x 4, MLP 3 · 8 x 16, norms 2 x 8; a tied vocabulary of 10.
SHAPE = TargetShape(8, 16, 1, 2, 1, 4, 10, tied=True)
PARAMETERS = 2 * 8 * (8 + 4) + 3 * 8 * 16 + 2 * 8 + 10 * 8 + 8
#: Bytes of a token's keys and values.
ENTRY = 2 * 1 * 1 * 4 * 2


def _cells(
    rates: MachineRates, alpha: dict[str, float], shape: TargetShape = SHAPE, context: int = 100
) -> dict[str, PlannedDecoding]:
    plan = plan_on_paper(
        shape, rates, "x", acceptance=alpha, batches=[3], contexts=[context], budget=10
    )
    return {cell.drafter: cell for cell in plan.cells}


def test_reading_is_weights_once_and_the_cache_of_every_row() -> None:
    cell = _cells(SLOW_MEMORY, {"ngram": 0.5})["ngram"]
    plain = 2 * PARAMETERS + 3 * 101 * ENTRY
    assert cell.milliseconds["t_ar"] == pytest.approx(1e3 * plain)
    # Every node costs three entries more, and is accepted half as often as the one before.
    speedups = {}
    for steps in range(1, 9):
        tau = sum(0.5**position for position in range(steps + 1))
        speedups[steps] = tau * plain / (2 * PARAMETERS + 3 * (101 + steps) * ENTRY)
    best = max(speedups, key=lambda steps: speedups[steps])
    assert cell.tree == {"top_k": 1, "steps": best, "nodes": best + 1} and 1 < best < 8
    assert cell.speedup == pytest.approx(speedups[best])


def test_arithmetic_grows_with_every_node() -> None:
    cell = _cells(SLOW_ARITHMETIC, {"ngram": 0.5})["ngram"]
    operations = 3 * (2 * PARAMETERS + 4 * 100 * 1 * 2 * 4)
    assert cell.milliseconds["t_ar"] == pytest.approx(1e3 * operations)
    assert cell.tree["steps"] == 1 and cell.speedup == pytest.approx(1.5 / 2)


def test_self_speculation_reads_its_budget_and_pays_for_long_contexts_alone() -> None:
    cell = _cells(SLOW_MEMORY, {"self_spec": 0.9})["self_spec"]
    assert cell.milliseconds["t_draft"] == pytest.approx(1e3 * (2 * PARAMETERS + 3 * 11 * ENTRY))
    short, long = (
        _cells(SLOW_MEMORY, {"self_spec": 0.9}, context=context)["self_spec"].speedup
        for context in (10, 10_000)
    )
    assert short < 1 < 2 < long


def test_a_markov_bias_is_read_at_every_position() -> None:
    """Of rank 256, over a vocabulary of 10."""
    cells = _cells(SLOW_MEMORY, {"dflash": 0.9, "dspark": 0.9})
    block, biased = (cells[name].milliseconds for name in ("dflash", "dspark"))
    assert block["t_draft"] == 0 and biased["t_draft"] == pytest.approx(1e3 * 2 * 256 * 10)
    once = 1e3 * 2 * 2 * (2 * 8 * 12 + 3 * 8 * 16)  # two layers, read by block and extension each
    assert block["t_extend"] == pytest.approx(2 * once + 1e3 * 2 * 10 * 8)
    assert biased["t_extend"] == pytest.approx(block["t_extend"] + biased["t_draft"])


def test_more_tokens_reach_more_experts() -> None:
    experts = Experts(held=8, active=2, shared=0, width=16)
    shape = TargetShape(8, 16, 1, 2, 1, 4, 10, tied=True, experts=experts)
    cell = _cells(SLOW_MEMORY, {"ngram": 0.5}, shape)["ngram"]
    dense = PARAMETERS - 3 * 8 * 16 + 8 * 8  # without the MLP, with the router
    one = 3 * 8 * 16

    def reached(tokens: int) -> float:
        return dense + one * 8 * (1 - (6 / 8) ** tokens)

    # `active_parameters` is a rounded share of all.
    plain = 2 * reached(3) + 3 * 101 * ENTRY
    assert cell.milliseconds["t_ar"] == pytest.approx(1e3 * plain, rel=2e-3)


def test_where_a_drafter_begins_to_pay_and_where_it_ceases_to() -> None:
    def cell(context: int, speedup: float, batch: int = 1) -> PlannedDecoding:
        return PlannedDecoding(
            drafter="eagle3",
            batch=batch,
            context=context,
            tree={},
            acceptance_length=2.0,
            speedup=speedup,
            milliseconds={},
        )

    begins = crossings([cell(4096, 1.5), cell(512, 0.8), cell(1024, 0.9), cell(700, 3.0, batch=2)])
    assert [(each.batch, each.pays_above) for each in begins] == [(1, True)]
    assert begins[0].context == pytest.approx(1024 + 3072 / 6)
    (ceases,) = crossings([cell(512, 1.2), cell(1024, 0.8)])
    assert ceases.context == pytest.approx(768) and not ceases.pays_above
    assert crossings([cell(512, 1.2), cell(1024, 1.1)]) == ()


def test_acceptance_is_given_by_name() -> None:
    assert parse_acceptance("a=0.5,b=0", ["a", "b"]) == {"a": 0.5, "b": 0.0}
    for text, problem in (
        ("c=0.5", "unknown drafter 'c'"),
        ("a=1", r"not in \[0, 1\)"),
        ("a", "could not convert"),
    ):
        with pytest.raises(ValueError, match=problem):
            parse_acceptance(text, ["a", "b"])


def test_the_command_says_that_nothing_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan-decode", "-c", "configs/llama-3.3-70b.yaml", "--bandwidth", "3350"]
    grid = ["--tflops", "990", "--batches", "1", "--contexts", "1024"]
    assert main([*arguments, *grid, "--alpha", "eagle3=0.7"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "on paper" in printed and "nothing was measured" in printed and "1,024" in printed
    assert main(arguments) == 2
    assert "--tflops" in capsys.readouterr().err
