"""`make gpu-check`: the decoder on this GPU, in minutes, with torch, triton and transformers only.

    python -m tests.gpu.check [--list] [--part 1/3] [--only NAME …] [--jobs 8] [--save]
                              [--sanitizer]

Every check of cases.py runs in a process of its own, so that one that takes the device down fails
alone, and all share a Triton cache that is kept: what one has compiled the next one has, in the
next call as well. Most of the time is compilation: with cores to spare, --jobs runs several at a
time. The last line is JSON; the exit status is 1 if a check fails. `--save` adds the results to
tests/gpu_results/<gpu>-<date>.json. `--sanitizer` runs the checks under compute-sanitizer's
memcheck, which is many times slower: name some with --only. `--device cpu` runs them with the
CPU's operations, which tests this file.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.report import ROOT, commit, machine, share_of
from tests.gpu.cases import checks

RESULTS = ROOT / "tests/gpu_results"
#: Seconds that a check may take, and how much longer under the sanitizer.
LIMIT, SANITIZER_FACTOR = 300, 10
#: Exit status by which compute-sanitizer says that it has seen an error.
_SANITIZER_ERRORS = 86


def perform(name: str, device: torch.device) -> dict[str, Any]:
    """One check in this process; whatever breaks on a new GPU is a result, too."""
    started = time.perf_counter()
    try:
        result = {"passed": True, **checks(device)[name]()}
    except Exception as error:
        traceback.print_exc()
        result = {"passed": False, "error": f"{type(error).__name__}: {error}"[:500]}
    return {**result, "seconds": round(time.perf_counter() - started, 2)}


def perform_apart(
    name: str, device: torch.device, *, limit: float, sanitizer: Sequence[str] = ()
) -> dict[str, Any]:
    """One check in a process of its own, at most `limit` seconds, under the command `sanitizer`."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [*sanitizer, sys.executable, "-m", "tests.gpu.check"]
        command += ["--device", device.type, "--here", str(file), "--only", name]
        try:
            done = subprocess.run(command, cwd=ROOT, env=_environment(), timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            result = {"passed": False, "error": f"took longer than {limit:.0f} s"}
        else:
            result = json.loads(file.read_text()) if file.exists() else {}
            if sanitizer and done.returncode == _SANITIZER_ERRORS:
                result |= {"passed": False, "error": "memcheck has seen errors, above"}
            elif done.returncode or not file.exists():
                ended = f"the process ended with status {done.returncode}"
                result |= {"passed": False, "error": result.get("error", ended)}
    return {**result, "seconds": round(time.perf_counter() - started, 2)}


def _environment() -> dict[str, str]:
    """Compiled kernels are kept in TRITON_CACHE_DIR, below runs/ where nothing else is set."""
    return {"TRITON_CACHE_DIR": str(ROOT / "runs/triton"), **os.environ}


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    option = parser.add_argument
    option("--device", default="cuda", choices=("cuda", "cpu"))
    option("--list", action="store_true", help="print the names of the checks and end")
    option("--part", help="one part of the checks, as 1/3")
    option("--only", nargs="+", metavar="NAME", help="checks by name, or by how it begins")
    option("--jobs", type=int, default=1, help="checks at a time, default 1")
    option("--limit", type=float, default=LIMIT, help=f"seconds a check, default {LIMIT}")
    option("--sanitizer", action="store_true", help="under compute-sanitizer --tool memcheck")
    option("--save", action="store_true", help=f"add the results to {RESULTS.relative_to(ROOT)}/")
    option("--out", type=Path, help="where the JSON goes, besides the last line")
    option("--here", type=Path, help=argparse.SUPPRESS)  # the child's side of `perform_apart`
    options = parser.parse_args()
    options.device = torch.device(options.device)
    options.names = _chosen(parser, options)
    if options.list:
        print("\n".join(options.names))
        raise SystemExit
    if options.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu runs the same checks with the CPU's operations")
    options.under = ()
    if options.sanitizer:
        program = shutil.which("compute-sanitizer")
        if program is None:
            parser.error("--sanitizer needs compute-sanitizer, which comes with the CUDA toolkit")
        options.under = program, "--tool", "memcheck", "--error-exitcode", str(_SANITIZER_ERRORS)
        options.limit *= SANITIZER_FACTOR
    return options


def _chosen(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    names = list(checks(options.device))
    if options.only:
        exact = [name for name in names if name in options.only]
        names = exact or [name for name in names if name.startswith(tuple(options.only))]
        if not names:
            parser.error(f"no check is called {', '.join(options.only)}; see --list")
    try:
        return share_of(names, options.part) if options.part else names
    except ValueError as error:
        parser.error(f"--part {options.part}: {error}")


def main() -> None:
    options = _options()
    if options.here:
        (name,) = options.names
        options.here.write_text(json.dumps(perform(name, options.device)), encoding="utf-8")
        return
    results: dict[str, Any] = {}
    one = partial(
        perform_apart, device=options.device, limit=options.limit, sanitizer=options.under
    )
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(one, name): name for name in options.names}
        for done in as_completed(running):
            name, result = running[done], done.result()
            results[name] = result
            print(f"{'pass' if result['passed'] else 'FAIL'}  {name}  {result}", flush=True)
    record = record_of(options.device, results, sanitizer=options.sanitizer)
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.save:
        print(f"results: {save(record, RESULTS)}")
    print(json.dumps(record))
    raise SystemExit(not record["passed"])


def record_of(
    device: torch.device, results: dict[str, Any], *, sanitizer: bool = False
) -> dict[str, Any]:
    """What is kept of a call."""
    packages = {"torch": torch.__version__, "cuda": torch.version.cuda}
    for package in ("triton", "transformers"):
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            packages[package] = None
    return {
        "check": "decoder, compute-sanitizer memcheck" if sanitizer else "decoder",
        "commit": commit(),
        "machine": machine(device),
        "versions": packages,
        "passed": all(result["passed"] for result in results.values()),
        "results": results,
    }


def save(record: dict[str, Any], folder: Path) -> Path:
    """Add a record to the day's file of its machine; results of one commit are joined."""
    name = re.sub(r"[^a-z0-9]+", "-", record["machine"].split(",")[0].lower()).strip("-")
    kind = "-memcheck" if "memcheck" in record["check"] else ""
    path = folder / f"{name}-{date.today().isoformat()}{kind}.json"
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if all(earlier.get(key) == record[key] for key in ("check", "commit", "machine", "versions")):
        results = {**earlier["results"], **record["results"]}
        passed = all(result["passed"] for result in results.values())
        record = {**record, "passed": passed, "results": results}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    main()
