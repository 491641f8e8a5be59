"""Random bit flips over the files of a run, and how many of them `eagle3 verify` finds.

    python -m bench.flips RUN [--flips 300] [--seed 0]

RUN is copied; each flip changes one random bit of one random file of the copy, and is undone before
the next. Prints a table by kind of file: flips, found, missed, and those that ended in an exception
instead of a line. Exit code 1 where any was not found. Files that verify does not cover by design
are counted, not flipped: what Weights & Biases writes, and claims.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from pipeline.console import console
from pipeline.errors import Eagle3Error
from pipeline.store.verify import UNCOVERED, verify_run
from pipeline.train.checkpoints import stored_checkpoints

#: Kind of file ← what its path below the run matches, the first of these.
KINDS = {
    "entries": "*/shards/*.entry.json",
    "shards of samples": "synth/shards/*",
    "shards of states": "features/shards/*",
    "shards of the head": "train/shards/*",
    "checkpoints": "train/checkpoints/**/*",
    "head": "train/head/*",
    "metrics": "train/metrics.jsonl",
    "begin.json": "*/begin.json",
    "manifests": "*/manifest.json",
    "selection": "synth/selection.json",
    "audits and datasheet": "*/audit.json */datasheet.md",
    "report and pages": "eval/report.*",
    "results of servers": "eval/servers/*",
}


class Outcome(NamedTuple):
    """Of one flip."""

    path: str  # below the run
    kind: str
    result: str  # found, missed, or the exception that was no error of ours


def flip_files(run: Path, *, flips: int, seed: int) -> list[Outcome]:
    """Flip bits of the run at `run`, one at a time; it is as before at the end."""
    kinds = files_by_kind(run)
    draw = random.Random(seed)
    outcomes = []
    for _ in range(flips):
        path = draw.choice(sorted(kinds))
        whole = (run / path).read_bytes()
        at, changed = draw.randrange(len(whole)), bytearray(whole)
        changed[at] ^= 1 << draw.randrange(8)
        (run / path).write_bytes(changed)
        try:
            outcomes.append(Outcome(path, kinds[path], _verify(run)))
        finally:
            (run / path).write_bytes(whole)
    return outcomes


def files_by_kind(run: Path) -> dict[str, str]:
    """Path below `run` → kind, of all files with bytes that are covered."""
    kinds: dict[str, str] = {}
    for kind, patterns in reversed(KINDS.items()):
        for pattern in patterns.split():
            kinds |= {str(path.relative_to(run)): kind for path in run.glob(pattern)}
    others = {str(path.relative_to(run)): "others" for path in run.rglob("*")}
    return {
        path: kind
        for path, kind in (others | kinds).items()
        if (run / path).is_file() and (run / path).stat().st_size and not _is_uncovered(path)
    }


def _is_uncovered(path: str) -> bool:
    return bool(UNCOVERED.keys() & {*path.split("/")[1:-1]})


def _verify(run: Path) -> str:
    try:
        check = verify_run(str(run), {"train": stored_checkpoints})
    except Eagle3Error:
        return "found"
    except Exception as error:
        return type(error).__name__
    return "found" if check.problems else "missed"


def print_outcomes(outcomes: list[Outcome]) -> bool:
    """The table; whether all were found."""
    counts = Counter((each.kind, each.result) for each in outcomes)
    print(f"{'kind of file':24}{'flips':>8}{'found':>8}{'missed':>8}{'raised':>8}")
    for kind in sorted({each.kind for each in outcomes}):
        _print_row(kind, Counter({result: n for (of, result), n in counts.items() if of == kind}))
    _print_row("all", Counter(each.result for each in outcomes))
    for each in outcomes:
        if each.result != "found":
            print(f"{each.result}: {each.path}")
    return all(each.result == "found" for each in outcomes)


def _print_row(kind: str, results: Counter[str]) -> None:
    flips, hits, missed = results.total(), results["found"], results["missed"]
    print(f"{kind:24}{flips:8}{hits:8}{missed:8}{flips - hits - missed:8}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", metavar="RUN", help="directory of a finished run")
    parser.add_argument("--flips", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console.quiet = True
    with tempfile.TemporaryDirectory(prefix="eagle3-flips-") as scratch:
        copy = Path(scratch) / "run"
        shutil.copytree(options.run, copy, symlinks=True)
        paths = [str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()]
        print(f"{sum(map(_is_uncovered, paths))} files that verify does not cover are left alone")
        if _verify(copy) != "missed":
            sys.exit(f"{options.run}: not sound before any flip; see `eagle3 verify`")
        outcomes = flip_files(copy, flips=options.flips, seed=options.seed)
    sys.exit(0 if print_outcomes(outcomes) else 1)


if __name__ == "__main__":
    main()
