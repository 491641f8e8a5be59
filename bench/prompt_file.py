"""A whole file of prompts through everything of synth but generation, in a process of its own.

load ─► licences, duplicates, near duplicates, languages, repetition, decontamination ─► screen
        └──────────────────────────────── filters ────────────────────────────────┘      policy
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.report import ROOT, peak_gigabytes
from pipeline.config import parse
from pipeline.synth.screening import Screen
from pipeline.synth.select import PromptStream, synth_section

#: Prompts that are screened together, as the prompts of a shard are.
SHARD = 500
#: Every step on.
QUALITY = {"near_duplicates": 0.8, "languages": ["en"], "max_prompt_repetition": 0.5}


def prompt_file(file: Path, excluded: Sequence[Path], threads: int) -> dict[str, float]:
    """Prompts before and after, seconds, and the peak memory of the process."""
    paths = [str(path.absolute()) for path in (file, *excluded)]
    command = [sys.executable, "-m", "bench.prompt_file", str(threads), *paths]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    threads, file, *excluded = sys.argv[1:]
    synth = {
        "sources": [{"source": file}],
        "exclude": [{"source": path, "license": "CC0-1.0"} for path in excluded],
        "quality": QUALITY,
    }
    run = {"uri": "runs/none", "threads": int(threads)}
    config = parse({"run": run, "target": {"source": "none"}, "synth": synth})
    started = time.perf_counter()
    stream = PromptStream(synth_section(config), config.run.seed)
    prompts = list(stream)
    selected = time.perf_counter()
    screen = Screen(synth_section(config), seed=config.run.seed)
    cuts = (prompts[start : start + SHARD] for start in range(0, len(prompts), SHARD))
    clean = sum(len(screen.prompts(cut)[0]) for cut in cuts)
    ended = time.perf_counter()
    figures = {
        "file_prompts": stream.loaded,
        "file_prompts_after_filters": len(prompts),
        "file_prompts_after_policy": clean,
        "file_filters_seconds": selected - started,
        "file_policy_seconds": ended - selected,
        "file_peak_gb": peak_gigabytes(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
