"""What cells of one group say together: τ, how sure it is, and differences of the same prompts.

τ           Σ tokens / Σ rounds, over prompts and seeds
interval    95 %: of draws of prompts with replacement, and of what another seed is worth
difference  of two rows within each draw, over the seeds that both have; prompts are the same

Two or three seeds of a row tell little of what a seed is worth, and one nothing. So that is one
figure of all rows together: the deviation between seeds of the same row, of each with two or more.

    half of the interval    sqrt(prompts² + (t · deviation / sqrt(seeds))²)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from bench.leaderboard.experiment import Experiment
from bench.leaderboard.results import CellResult
from pipeline.serve_eval.intervals import drawn_sums, estimate, student

_Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

#: The part of docs/leaderboard.md that is written anew.
BEGIN, END = "<!-- rows: begin -->", "<!-- rows: end -->"
_GONE = "no longer among the experiments."


class Row(NamedTuple):
    """One experiment at one budget."""

    experiment: Experiment
    budget: int
    cells: tuple[CellResult, ...]  # of each seed, the same prompts in the same order

    def sums(self) -> _Floats:
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

    def tau_by_seed(self) -> _Floats:
        """[seeds]."""
        rounds, tokens = self.sums().sum(1).T
        return np.asarray(tokens / rounds)

    def draws(self) -> _Floats:
        """τ, and below of each draw of prompts; rows with as many prompts get the same draws."""
        sums = self.sums().sum(0)  # [prompts, 2]
        rounds, tokens = drawn_sums(sums, [f"{number}" for number in range(len(sums))]).T
        return np.asarray(tokens / rounds)


class Spread(NamedTuple):
    """Between seeds, of what several rows have in common."""

    deviation: float
    free: int  # degrees of freedom; 0: nothing is known

    @classmethod
    def of(cls, by_seed: Iterable[_Floats]) -> Spread:
        """From [seeds] of each row."""
        rows = [each for each in by_seed if len(each) > 1]
        free = sum(len(each) - 1 for each in rows)
        squares = sum(float(((each - each.mean()) ** 2).sum()) for each in rows)
        return cls(math.sqrt(squares / max(1, free)), free)

    def half(self, seeds: int) -> float:
        """Of the interval of a mean over so many."""
        return student(self.free) * self.deviation / math.sqrt(seeds) if self.free else 0.0


class Spreads(NamedTuple):
    """Of τ, and of differences of the same seed."""

    tau: Spread
    difference: Spread

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Spreads:
        named = {_name(row): row for row in rows}
        pairs = [(row, named.get(_name(row, row.experiment.against))) for row in rows]
        both = [_of_both(row, rival) for row, rival in pairs if rival and rival is not row]
        differences = [
            mine.tau_by_seed() - theirs.tau_by_seed() for mine, theirs in both if mine.cells
        ]
        return cls(Spread.of(row.tau_by_seed() for row in rows), Spread.of(differences))


def _name(row: Row, experiment: str | None = None) -> tuple[object, ...]:
    return row.cells[0].group, row.budget, experiment or row.experiment.name


def _of_both(row: Row, rival: Row) -> tuple[Row, Row]:
    """With the seeds that both have."""
    return row.with_seeds_of(rival), rival.with_seeds_of(row)


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
    spreads = Spreads.of(rows)
    tables = [f"{_heading(of[0])}\n\n{table(of, spreads)}" for of in groups]
    return "\n\n".join([*tables, "\n".join(abouts)])


def _heading(row: Row) -> str:
    first, tree = row.cells[0], row.cells[0].tree
    decoded = f"{len(first.prompts)} prompts, tree {tree.steps}/{tree.top_k}/{tree.nodes}"
    data = f", data of {first.since}" if first.since else ""
    return f"**{first.machine}**{data}: {decoded}, at most {first.new_tokens} tokens"


def table(rows: Sequence[Row], spreads: Spreads) -> str:
    """Markdown of one group, by budget, the best row first."""
    lines = [
        "| training data | row | τ | against | seeds | passes | CPU-hours, GB | commit |",
        "|---:|---|---:|---:|---:|---:|---:|---|",
    ]
    for budget in sorted({row.budget for row in rows}):
        of_budget = sorted((row for row in rows if row.budget == budget), key=Row.tau)
        named = {row.experiment.name: row for row in of_budget}
        lines += [
            _line(row, named.get(row.experiment.against), spreads) for row in reversed(of_budget)
        ]
    return "\n".join(lines)


def _line(row: Row, rival: Row | None, spreads: Spreads) -> str:
    commits = ", ".join(dict.fromkeys(cell.commit for cell in row.cells))
    passes = sum(cell.trained_tokens / cell.data_tokens for cell in row.cells) / len(row.cells)
    hours = sum(cell.cpu_hours for cell in row.cells) / len(row.cells)
    peaks = [cell.peak_gb for cell in row.cells if cell.peak_gb is not None]
    took = f"{hours:.2f}" + (f", {max(peaks):.1f}" if peaks else "")
    low, high = interval(row.draws(), row, spreads.tau)
    tau = f"{row.tau():.3f} ({low:.2f} … {high:.2f})"
    against = _difference(row, rival, spreads.difference)
    cells = f"{row.budget:,}", f"`{row.experiment.name}`", tau, against, f"{len(row.cells)}"
    return f"| {' | '.join(cells)} | {passes:.1f} | {took} | {commits} |"


def _difference(row: Row, rival: Row | None, spread: Spread) -> str:
    """Of the row from its rival; empty where it has none."""
    if rival is None or rival is row:
        return ""
    mine, theirs = _of_both(row, rival)
    if not mine.cells:
        return ""
    draws = mine.draws() - theirs.draws()
    low, high = interval(draws, mine, spread)
    return f"`{rival.experiment.name}` {draws[0]:+.3f} ({low:+.2f} … {high:+.2f})"


def interval(draws: _Floats, row: Row, spread: Spread) -> tuple[float, float]:
    """Of draws of a row's prompts, the figure itself in front, over as many seeds as it has."""
    prompts, seeds = estimate(draws, row.sums().shape[1]), spread.half(len(row.cells))
    low = prompts.value - math.hypot(prompts.value - prompts.low, seeds)
    high = prompts.value + math.hypot(prompts.high - prompts.value, seeds)
    return low, high


def _abouts(rows: Sequence[Row]) -> dict[str, str]:
    return {row.experiment.name: row.experiment.about for row in rows}


def replace_rows(document: str, rows: str) -> str:
    """The document with the part between the two marks written anew."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{rows}\n{END}{after}"
