"""Train the rows of `experiments/` and compare what their heads accept: `make leaderboard`.

Each row says in a few lines what differs from --config. All are trained on the same draws of the
same data, at each budget of distinct data tokens, once a seed, and decode the same evaluation
prompts. A row that is finished is not made again; a killed one continues. With --write the results
go into experiments/results.jsonl, in the place of earlier ones of the same cells on such a machine,
and the tables of all that stand there into docs/leaderboard.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.leaderboard.experiment import read_experiments
from bench.leaderboard.results import CellResult, keep_results
from bench.leaderboard.runs import Bench
from bench.leaderboard.table import page, replace_rows, rows_of
from bench.report import ROOT
from pipeline.errors import Eagle3Error

_DOCUMENT = ROOT / "docs" / "leaderboard.md"
_EXPERIMENTS = ROOT / "experiments"
_RESULTS = _EXPERIMENTS / "results.jsonl"


def main() -> int:
    """Run the rows; a user's error ends with 2, as everywhere."""
    options = _options()
    try:
        cells = _cells(options)
        print(_tables(cells))
        if options.write:
            document = _DOCUMENT.read_text(encoding="utf-8")
            tables = _tables(keep_results(_RESULTS, cells))
            _DOCUMENT.write_text(replace_rows(document, tables), encoding="utf-8")
    except Eagle3Error as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _tables(cells: Sequence[CellResult]) -> str:
    known = {each.name: each for each in read_experiments(_EXPERIMENTS, [])}
    return page(rows_of(cells, known))


def _cells(options: argparse.Namespace) -> list[CellResult]:
    source = json.dumps([{"source": str(options.prompts)}])
    common = [f"synth.sources={source}", f"synth.max_prompts={options.max_prompts}"]
    common += ["train.wandb=disabled", f"run.threads={options.threads}", *options.set]
    bench = Bench(
        options.config,
        options.out,
        options.evaluation,
        common=common,
        prompts_per_set=options.prompts_per_set,
        new_tokens=options.new_tokens,
        peer_python=options.peer_python,
    )
    return [
        bench.result(experiment, budget, seed)
        for budget in options.budgets
        for experiment in read_experiments(_EXPERIMENTS, options.rows)
        for seed in range(options.seeds)
    ]


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="leaderboard", description=__doc__, formatter_class=raw)
    option = parser.add_argument
    option("--prompts", type=Path, required=True, help="file of training prompts")
    option("--max-prompts", type=int, default=6500, help="of them answered; enough for all budgets")
    option("--evaluation", type=Path, nargs="+", required=True, help="files of evaluation prompts")
    option("--prompts-per-set", type=int, default=18, help="prompts of each that are decoded")
    option("--new-tokens", type=int, default=96, help="longest reply of the evaluation")
    option("--config", type=Path, default=ROOT / "configs/smollm2-135m.yaml", help="the base")
    option("--rows", type=_names, default=[], help="names, by commas; default: all")
    option("--budgets", type=_counts, default=[100_000], help="data tokens, as 100k,300k,1m")
    option("--seeds", type=int, default=3, help="0 to this number minus 1")
    option("--peer-python", type=Path, help="interpreter of rows with `peer`, see bench/peers")
    option("--set", nargs="*", default=[], help="more overrides of every row, KEY=VALUE")
    option("--threads", type=int, default=0, help="CPU threads; 0: every core")
    option("--out", type=Path, default=Path("runs/leaderboard"), help="folder of runs and results")
    option("--write", action="store_true", help="keep results, write docs/leaderboard.md")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _counts(text: str) -> list[int]:
    units = {"k": 1_000, "m": 1_000_000}
    return [
        int(float(part[:-1]) * units[part[-1].lower()]) if part[-1].lower() in units else int(part)
        for part in text.split(",")
    ]


if __name__ == "__main__":
    raise SystemExit(main())
