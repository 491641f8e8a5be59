"""What cells of one group say together: τ, how sure it is, and differences of the same prompts.

τ           Σ tokens / Σ rounds, over prompts and seeds
interval    95 % of 4,000 draws of prompts, and of seeds, with replacement
difference  of two rows within each draw, over the seeds that both have; prompts are the same
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from bench.leaderboard.experiment import Experiment
from bench.leaderboard.results import CellResult

_DRAWS, _SEED = 4_000, 0
#: The part of docs/leaderboard.md that is written anew.
BEGIN, END = "<!-- rows: begin -->", "<!-- rows: end -->"
_GONE = "no longer among the experiments."


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

    def with_seeds_of(self, other: Row) -> Row:
        """The same row without the seeds that the other lacks."""
        seeds = {cell.seed for cell in other.cells}
        return self._replace(cells=tuple(cell for cell in self.cells if cell.seed in seeds))

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


def rows_of(cells: Iterable[CellResult], experiments: Mapping[str, Experiment]) -> list[Row]:
    """Rows of cells, each of one group, budget and experiment."""
    ordered = sorted(cells, key=lambda cell: cell.key)
    return [
        Row(experiments.get(row) or Experiment(name=row, about=_GONE), budget, tuple(of))
        for (*_, budget, row), of in groupby(ordered, key=lambda cell: cell.key[:-1])
    ]


def page(rows: Sequence[Row]) -> str:
    """Markdown: the table of each group, and what the rows are."""
    groups = [list(of) for _, of in groupby(rows, key=lambda row: row.cells[0].group)]
    abouts = [f"* `{name}`: {text}" for name, text in sorted(_abouts(rows).items())]
    tables = [f"{_heading(of[0])}\n\n{table(of)}" for of in groups]
    return "\n\n".join([*tables, "\n".join(abouts)])


def _heading(row: Row) -> str:
    first, tree = row.cells[0], row.cells[0].tree
    decoded = f"{len(first.prompts)} prompts, tree {tree.steps}/{tree.top_k}/{tree.nodes}"
    data = f", data of {first.since}" if first.since else ""
    return f"**{first.machine}**{data}: {decoded}, at most {first.new_tokens} tokens"


def table(rows: Sequence[Row]) -> str:
    """Markdown of one group, by budget, the best row first."""
    lines = [
        "| training data | row | τ | against | seeds | passes | CPU-hours, GB | commit |",
        "|---:|---|---:|---:|---:|---:|---:|---|",
    ]
    for budget in sorted({row.budget for row in rows}):
        of_budget = sorted((row for row in rows if row.budget == budget), key=Row.tau)
        named = {row.experiment.name: row for row in of_budget}
        lines += [_line(row, named.get(row.experiment.against)) for row in reversed(of_budget)]
    return "\n".join(lines)


def _line(row: Row, rival: Row | None) -> str:
    commits = ", ".join(dict.fromkeys(cell.commit for cell in row.cells))
    passes = sum(cell.trained_tokens / cell.data_tokens for cell in row.cells) / len(row.cells)
    hours = sum(cell.cpu_hours for cell in row.cells) / len(row.cells)
    peaks = [cell.peak_gb for cell in row.cells if cell.peak_gb is not None]
    took = f"{hours:.2f}" + (f", {max(peaks):.1f}" if peaks else "")
    tau, against = f"{row.tau():.3f} {_interval(draws_of(row))}", _difference(row, rival)
    cells = f"{row.budget:,}", f"`{row.experiment.name}`", tau, against, f"{len(row.cells)}"
    return f"| {' | '.join(cells)} | {passes:.1f} | {took} | {commits} |"


def _difference(row: Row, rival: Row | None) -> str:
    """Of the row from its rival; empty where it has none."""
    if rival is None or rival is row:
        return ""
    mine, theirs = row.with_seeds_of(rival), rival.with_seeds_of(row)
    if not mine.cells:
        return ""
    interval = _interval(draws_of(mine) - draws_of(theirs), sign="+")
    return f"`{rival.experiment.name}` {mine.tau() - theirs.tau():+.3f} {interval}"


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
