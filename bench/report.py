"""What every benchmark shares: interleaved runs, medians, and one JSON line at the end."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch  # what needs it imports it: the steps of bench.scale are timed with their imports

ROOT = Path(__file__).resolve().parents[1]
#: A rival that is this much slower than another one has lost.
CLEARLY = 1.5


def interleaved(
    cases: Mapping[str, Callable[[], float]], *, runs: int, warm_up: int = 1
) -> dict[str, float]:
    """Median of what each case returns, over `runs` turns in which every case runs once.

    Whatever else the machine does then hits all of them."""
    return medians(turns(cases, runs=runs, warm_up=warm_up))


def contested(
    rivals: Mapping[str, Callable[[], float]],
    cases: Mapping[str, Callable[[], float]],
    *,
    runs: int,
) -> dict[str, float]:
    """Rates of `cases` and of `rivals`, of which the fastest counts.

    A first run of each rival warms up; one that another beats clearly in it keeps that figure and
    is not run again, so that an emulated type does not take up the time of all the rest.
    """
    first = {name: rate() for name, rate in rivals.items()}
    best = max(first.values())
    close = {name: rivals[name] for name, rate in first.items() if CLEARLY * rate >= best}
    return first | interleaved({**close, **cases}, runs=runs)


def turns(
    cases: Mapping[str, Callable[[], float]], *, runs: int, warm_up: int = 1
) -> list[dict[str, float]]:
    """What each case returned in each turn, those of the warm-up left out."""
    return [{name: case() for name, case in cases.items()} for _ in range(warm_up + runs)][warm_up:]


def medians(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each case over all turns."""
    return {name: statistics.median(turn[name] for turn in measured) for name in measured[0]}


def median_ratio(measured: Sequence[Mapping[str, float]], case: str, rival: str) -> float:
    """Median of the turns' own ratios: a slow minute is one for both, and cancels out."""
    return statistics.median(turn[case] / turn[rival] for turn in measured)


def share_of(names: Sequence[str], part: str) -> list[str]:
    """Of `names` the part that is called for example "2/3": the second, the fifth, the eighth …

    Raises ValueError when `part` is no such thing."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError("a part is written as 1/3")
    return list(names[int(match[1]) - 1 :: int(match[2])])


def peak_gigabytes() -> float:
    """Peak memory of this process so far. Not ru_maxrss: a child starts with its parent's there."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024 / 1e9


def machine(device: torch.device) -> str:
    """One line that tells what a figure was measured on."""
    import torch

    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def processor() -> str:
    """The CPU's model, and what it has for bf16."""
    lines = _cpuinfo()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    bf16 = " ".join(name for name in ("avx512_bf16", "amx_bf16") if name in flags)
    return f"{next(names, platform.processor())}, {bf16 or 'no bf16 instructions'}"


def publish(
    name: str,
    figures: Mapping[str, Any],
    *,
    device: torch.device,
    folder: Path | None = None,
    merge: bool = False,
) -> None:
    """Write runs/bench/NAME.json and print the same as the last line.

    With `merge`, figures of an earlier call stay where this one measured nothing, if they are of
    the same commit and machine: what takes long is measured in parts.
    """
    record = {"bench": name, "commit": commit(), "machine": machine(device)}
    path = (folder or ROOT / "runs/bench") / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier = json.loads(path.read_text(encoding="utf-8")) if merge and path.exists() else {}
    same = all(earlier.get(key) == value for key, value in record.items())
    whole = {**record, "figures": {**(earlier["figures"] if same else {}), **figures}}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(whole))


def rounded(figures: Mapping[str, Any], digits: int = 4) -> dict[str, Any]:
    """Figures to so many significant digits, in groups as well; what is no number stays."""

    def short(value: Any) -> Any:
        if isinstance(value, Mapping):
            return rounded(value, digits)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(f"{value:.{digits}g}") if number else value

    return {name: short(value) for name, value in figures.items()}


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def commit() -> str:
    """What was measured: EAGLE3_COMMIT if set, as for a copy on another machine, else the
    checked-out commit, and whether files differ from it."""
    if named := os.environ.get("EAGLE3_COMMIT"):
        return named
    head, changes = _git("rev-parse", "--short", "HEAD"), _git("status", "--porcelain")
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
