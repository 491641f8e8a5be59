"""`make fuzz`: right files, mutated; whatever reads them refuses or accepts, and nothing else.

Each target runs in a process of its own, with MEMORY bytes and SECONDS a case. A traceback, a hang,
memory beyond that, an exit code that is not documented and an error that names no file are
findings. The files that led to one are kept in --out; once mended they become tests. `api` is a
running server, which Schemathesis asks by its own OpenAPI document, from an environment of its own.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.fuzz.api import fuzz_server
from tests.fuzz.mutate import mutate
from tests.fuzz.targets import TARGETS

SECONDS, MEMORY = 30, 6 << 30
_API = "api"
_TREES = (".json", ".jsonl", ".yaml")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30, help="of each target")
    parser.add_argument("--seed", type=int, default=None, help="the default is drawn, and printed")
    names = (*TARGETS, _API)
    parser.add_argument("--target", choices=names, action="append", help="the default is all")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="of findings")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    seed = random.randrange(2**31) if options.seed is None else options.seed
    if options.worker:
        return fuzz(options.target[0], seed, options.seconds, options.out, options.worker)
    print(f"seed {seed}", flush=True)
    failed = 0
    for name in options.target or names:
        if name == _API:
            failed |= fuzz_server(seed, options.seconds)
            continue
        with tempfile.TemporaryDirectory() as root:
            command = [sys.executable, "-m", "tests.fuzz", "--worker", root, "--target", name]
            command += ["--seconds", str(options.seconds), "--seed", str(seed)]
            code = subprocess.run([*command, "--out", options.out], check=False).returncode
            if code < 0:
                kept = options.out / f"{name}-{seed}-ended"
                shutil.copytree(Path(root, "case"), kept, dirs_exist_ok=True)
                print(
                    f"{name}: {signal.Signals(-code).name} ended it\n    kept in {kept}", flush=True
                )
        failed |= code
    return int(bool(failed))


def fuzz(name: str, seed: int, seconds: float, out: Path, root: Path) -> int:
    """Cases of one target until its time is over, in `root`; 1 where there are findings."""
    target, counts, kinds = TARGETS[name], Counter[str](), set[str]()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, _too_slow)
    right, folder = root / "right", root / "case"
    right.mkdir()
    target.write(right)
    assert target.read(right), "the files are right as they are"
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        rng = random.Random(f"{seed} {name} {counts['cases']}")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(right, folder)
        for path in folder.iterdir():
            if path.suffix in _TREES:  # paths inside are those of the case
                path.write_text(path.read_text().replace(str(right), str(folder)))
        path = rng.choice(sorted(each for each in folder.glob(target.files) if each.is_file()))
        path.write_bytes(mutate(path.read_bytes(), rng, tree=path.suffix in _TREES))
        outcome = _outcome(name, folder)
        counts["cases"] += 1
        counts["findings" if outcome not in ("accepted", "refused") else outcome] += 1
        if outcome not in ("accepted", "refused", *kinds):
            kinds.add(outcome)
            kept = out / f"{name}-{seed}-{counts['cases'] - 1}"
            shutil.copytree(folder, kept, dirs_exist_ok=True)
            print(f"{name}: {path.name}: {outcome}\n    kept in {kept}", flush=True)
    figures = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    print(f"{name}: {figures}, {len(kinds)} kinds of findings", flush=True)
    return int(bool(kinds))


def _too_slow(number: int, frame: object) -> None:
    raise TimeoutError(f"takes more than {SECONDS} seconds")


def _outcome(name: str, folder: Path) -> str:
    """accepted, refused, or what went wrong and where."""
    signal.alarm(SECONDS)
    try:
        return "accepted" if TARGETS[name].read(folder) else "refused"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        lines = traceback.extract_tb(error.__traceback__)
        ours = [each for each in lines if "/pipeline/" in each.filename] or lines
        place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        return f"{type(error).__name__} at {place}: {' '.join(str(error).split())[:200]}"
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    sys.exit(main())
