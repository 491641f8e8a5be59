"""What the cells say together: τ, how sure it is, and differences of the same prompts.

τ           Σ tokens / Σ rounds, over prompts and seeds
interval    95 % of 4,000 draws of prompts, and of seeds, with replacement
difference  of two rows within each draw: both decode the same prompts
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.leaderboard.experiment import Experiment
from bench.leaderboard.runs import CellResult

_DRAWS, _SEED = 4_000, 0
#: The part of docs/leaderboard.md that is written anew.
BEGIN, END = "<!-- rows: begin -->", "<!-- rows: end -->"


class Row(NamedTuple):
    """One experiment at one budget."""

    experiment: Experiment
    budget: int
    cells: tuple[CellResult, ...]  # of each seed, the same prompts in the same order

    def sums(self) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """Rounds and tokens [seeds, prompts, 2]."""
        return np.array(
            [[(each.rounds, each.tokens) for each in cell.prompts] for cell in self.cells], float
        )

    def tau(self) -> float:
        rounds, tokens = self.sums().sum((0, 1))
        return float(tokens / rounds)


def draws_of(row: Row) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """τ of each draw. Rows with as many prompts and seeds get the same draws."""
    random, sums = np.random.default_rng(_SEED), row.sums()
    seeds, prompts, _ = sums.shape
    drawn = np.empty(_DRAWS)
    for index in range(_DRAWS):
        chosen_prompts = random.integers(prompts, size=prompts)
        chosen_seeds = random.integers(seeds, size=seeds)
        rounds, tokens = sums[chosen_seeds][:, chosen_prompts].sum((0, 1))
        drawn[index] = tokens / rounds
    return drawn


def table(rows: Sequence[Row]) -> str:
    """Markdown, by budget, the best row first."""
    lines = [
        "| training data | row | τ | against | seeds | passes | CPU-hours | commit |",
        "|---:|---|---:|---:|---:|---:|---:|---|",
    ]
    for budget in sorted({row.budget for row in rows}):
        of_budget = sorted((row for row in rows if row.budget == budget), key=Row.tau)
        named = {row.experiment.name: row for row in of_budget}
        lines += [_line(row, named.get(row.experiment.against)) for row in reversed(of_budget)]
    about = [f"* `{name}`: {text}" for name, text in _abouts(rows).items()]
    return "\n".join([*lines, "", *about])


def _line(row: Row, rival: Row | None) -> str:
    drawn, against = draws_of(row), ""
    if rival and rival is not row and rival.sums().shape == row.sums().shape:
        differences = drawn - draws_of(rival)
        against = f"`{rival.experiment.name}` {row.tau() - rival.tau():+.3f}"
        against = f"{against} {_interval(differences, sign='+')}"
    first = row.cells[0]
    passes = sum(cell.trained_tokens / cell.data_tokens for cell in row.cells) / len(row.cells)
    hours = sum(cell.cpu_hours for cell in row.cells) / len(row.cells)
    tau = f"{row.tau():.3f} {_interval(drawn)}"
    cells = f"{row.budget:,}", f"`{row.experiment.name}`", tau, against, f"{len(row.cells)}"
    return f"| {' | '.join(cells)} | {passes:.1f} | {hours:.2f} | {first.commit} |"


def _interval(drawn: np.ndarray[tuple[int, ...], np.dtype[np.float64]], sign: str = "") -> str:
    low, high = np.quantile(drawn, (0.025, 0.975))
    return f"({low:{sign}.2f} … {high:{sign}.2f})"


def _abouts(rows: Sequence[Row]) -> dict[str, str]:
    return {row.experiment.name: row.experiment.about for row in rows}


def replace_rows(document: str, rows: str) -> str:
    """The document with the part between the two marks written anew."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{rows}\n{END}{after}"
