"""What docs/fleet.md shows of jobs is what `eagle3 jobs render` writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.cli.parser import parse_arguments
from pipeline.config import RunConfig, parse
from pipeline.jobs import render

TEXT = (Path(__file__).resolve().parents[1] / "docs/fleet.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def config() -> RunConfig:
    """A run with the page's section `jobs`."""
    tree: dict[str, Any] = {
        "run": {"uri": "gs://bucket/heads/x"},
        "target": {"source": "org/model"},
        "synth": {"sources": [{"source": "hub:org/prompts"}]},
        "eval": {"sources": [{"source": "hub:org/questions"}]},
    }
    return parse(tree | yaml.safe_load(blocks("yaml")[0]))


def holds(whole: Any, part: Any) -> bool:
    """Whether mappings have at least the keys of the part's, and all else is equal."""
    if isinstance(part, dict):
        return all(key in whole and holds(whole[key], value) for key, value in part.items())
    return bool(whole == part)


def test_shown_manifest_is_part_of_the_rendered_one(config: RunConfig) -> None:
    shown = yaml.safe_load(blocks("yaml")[1])
    rendered = yaml.safe_load(render(config, "kubernetes")["features.yaml"])
    assert holds(rendered, shown)
    shown["spec"]["completions"] += 1
    assert not holds(rendered, shown)


def test_shown_script_is_part_of_the_rendered_one(config: RunConfig) -> None:
    (shown,) = blocks("bash")
    assert shown in render(config, "slurm")["features.sbatch"]


def test_shown_commands_are_ones_that_eagle3_takes() -> None:
    shown = re.findall(r"^    eagle3 (jobs [^#\n]*)", TEXT, re.MULTILINE)
    assert len(shown) == 2
    schedulers = [parse_arguments(line.split()).scheduler for line in shown]
    assert schedulers == ["kubernetes", "slurm"]
