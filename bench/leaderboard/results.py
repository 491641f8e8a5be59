"""What a cell of the leaderboard measured, and those that the repository keeps.

    runs/leaderboard/<row>/<budget>-<seed>/result.json ─┐
    experiments/results.jsonl, a line a cell ◄──────────┴── --write; the newest of a cell stays

Run folders get lost, and rows are compared in pairs: so the counts of every prompt are stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bench.leaderboard.experiment import PeerSettings
from pipeline.config import TreeSection
from pipeline.records import Record


class PromptResult(Record):
    """One prompt, decoded greedily."""

    name: str  # evaluation set and id
    rounds: int
    tokens: int  # that rounds emitted, bonus included


class CellResult(Record):
    """One head."""

    row: str
    budget: int  # distinct tokens of training data at most
    seed: int
    data_tokens: int  # of them trained on
    trained_tokens: int  # over all passes
    cpu_hours: float  # of the last attempt at training alone
    peak_gb: float | None = None  # of that process
    peer: PeerSettings | None = None
    parameters: int
    machine: str  # processor that answered, captured and trained
    since: str | None = None  # when its folder was begun: other folders have other replies
    commit: str
    questions: str  # digest of the prompts' names
    tree: TreeSection
    new_tokens: int
    prompts: tuple[PromptResult, ...]

    @property
    def group(self) -> tuple[str, str]:
        """Machine, data, and what was decoded how: only cells of one group can be compared."""
        tree = f"{self.tree.top_k}/{self.tree.steps}/{self.tree.nodes}"
        made = self.since or ""
        return self.machine, f"{made}/{self.questions}/{tree}/{self.new_tokens}"

    @property
    def key(self) -> tuple[str, str, int, str, int]:
        """What another result of the same takes the place of."""
        return *self.group, self.budget, self.row, self.seed


def read_results(path: Path) -> list[CellResult]:
    """The stored cells, in the order of their keys; none without a file."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    fix = f"delete the line, or take {path.name} from the repository"
    return [
        CellResult.parse(line, where=f"{path}:{number}", fix=fix)
        for number, line in enumerate(lines, start=1)
    ]


def keep_results(path: Path, fresh: Iterable[CellResult]) -> list[CellResult]:
    """All that the file holds then: `fresh` ones, and those before that are of other cells."""
    newest = {cell.key: cell for cell in (*read_results(path), *fresh)}
    cells = [newest[key] for key in sorted(newest)]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{cell.model_dump_json()}\n" for cell in cells), encoding="utf-8")
    partial.replace(path)
    return cells
