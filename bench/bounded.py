"""Disk over time of a run that must not hold all of its states: watched from beside it, and drawn.

    python -m bench.bounded RUN --out FILE.svg    # start it, then `eagle3 run`; it ends with that

Looks at the files of RUN, a local directory, all the time until training has its manifest.
Prints the most shards that lay there at one time, those being written included, and their bytes,
beside features.keep_shards and what a run without it holds. Exit code 1 where there were more.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure

from pipeline.console import console
from pipeline.store.disk import is_temporary
from pipeline.store.manifest import find_manifest, read_begin, read_manifest, stage_location
from pipeline.store.shards import ENTRY, SHARDS

#: Seconds between two looks.
_PAUSE = 0.02


class Look(NamedTuple):
    """What lay in the run at one moment."""

    seconds: float
    shards: int  # of states, those being written included
    states: int  # bytes of the committed ones
    unfinished: int  # bytes of those being written


def look(run: Path, seconds: float) -> Look:
    """One listing. A file that goes meanwhile counts as gone."""
    states, unfinished = dict[str, int](), dict[str, int]()
    with suppress(FileNotFoundError):
        for entry in os.scandir(run / "features" / SHARDS):
            with suppress(FileNotFoundError):
                if ENTRY in entry.name:
                    continue
                if is_temporary(entry.name):  # .NAME.<pid>-<hex>.tmp, which is renamed at its end
                    unfinished[entry.name[1:].rsplit(".", 2)[0]] = entry.stat().st_size
                else:
                    states[entry.name] = entry.stat().st_size
    shards = len(states | unfinished)
    return Look(seconds, shards, sum(states.values()), sum(unfinished.values()))


def watch(run: Path) -> Iterator[Look]:
    """Looks that differ from the one before, until training is finished, and one after it."""
    start, is_over = time.monotonic(), False
    last: Look | None = None
    while not is_over:
        is_over = find_manifest(str(run), "train") is not None
        now = look(run, time.monotonic() - start)
        if last is None or now[1:] != last[1:] or is_over:
            yield now
        last = now
        time.sleep(_PAUSE)


def draw(looks: Sequence[Look], out: Path, *, most: int, all_states: int) -> None:
    """States over minutes, and lines at the most that may lie there and at all of them."""
    minutes = [each.seconds / 60 for each in looks]
    parts = {
        "committed": [each.states / 1e6 for each in looks],
        "being written": [each.unfinished / 1e6 for each in looks],
    }
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": out.name}):
        figure = Figure(figsize=(7, 3), layout="constrained")
        axes = figure.add_subplot()
        colours = "#2a6f97", "#e07a1f"
        axes.stackplot(minutes, *parts.values(), labels=list(parts), colors=colours, step="post")
        axes.axhline(most / 1e6, color="#2a6f97", linestyle="--", label="the largest keep_shards")
        axes.axhline(all_states / 1e6, color="#444", linestyle=":", label="all states")
        axes.set(xlabel="minutes", ylabel="MB of states", xlim=(0, minutes[-1]), ylim=(0, None))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        figure.savefig(out, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--out", type=Path, required=True, help="the drawing, an SVG")
    options = parser.parse_args()
    looks = list(watch(options.run))
    begun = read_begin(stage_location(str(options.run), "features"))
    assert begun is not None and begun.shaping is not None, "training has followed it"
    keep = int(begun.shaping["features"]["keep_shards"])
    sizes = sorted(shard.bytes for shard in read_manifest(str(options.run), "features").shards)
    peak = max(looks, key=lambda each: each.states + each.unfinished)
    shards = max(each.shards for each in looks)
    draw(looks, options.out, most=sum(sizes[-keep:]), all_states=sum(sizes))
    console.print(
        f"keep_shards {keep} of {len(sizes)}: at most {shards} shards, "
        f"{(peak.states + peak.unfinished) / 1e6:.1f} MB of states at one time "
        f"({peak.unfinished / 1e6:.1f} MB being written); the {keep} largest have "
        f"{sum(sizes[-keep:]) / 1e6:.1f} MB, all {sum(sizes) / 1e6:.1f} MB; "
        f"{len(looks):,} looks that differ, at the end {looks[-1].states / 1e6:.1f} MB of states"
    )
    return int(shards > keep)


if __name__ == "__main__":
    sys.exit(main())
