"""What docs/fleet.md tells schedulers is something that they, and this package, understand."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.cli.parser import parse_arguments
from pipeline.runtime import ROOMS

TEXT = (Path(__file__).resolve().parents[1] / "docs/fleet.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def commands(found: Any) -> list[list[str]]:
    """Every `command:` of a manifest, at any depth."""
    if isinstance(found, list):
        return [command for item in found for command in commands(item)]
    if not isinstance(found, dict):
        return []
    own = [found["command"]] if "command" in found else []
    return own + [command for item in found.values() for command in commands(item)]


def test_manifests_run_stages_that_exist() -> None:
    found = [command for block in blocks("yaml") for command in commands(yaml.safe_load(block))]
    assert [command[0] for command in found] == ["eagle3", "torchrun"]
    for command in found:
        ours = (
            command[1:] if command[0] == "eagle3" else command[command.index("pipeline.cli") + 1 :]
        )
        parsed = parse_arguments(ours)
        assert parsed.command in ROOMS and parsed.overrides == ["run.uri=gs://bucket/heads/x"]


def test_the_job_gives_up_where_another_attempt_would_not_help() -> None:
    job = yaml.safe_load(blocks("yaml")[0])
    assert job["spec"]["podFailurePolicy"]["rules"][0] == {
        "action": "FailJob",
        "onExitCodes": {"operator": "In", "values": [1, 2]},
    }
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never", (
        "the API demands it beside a podFailurePolicy"
    )


@pytest.mark.parametrize("script", blocks("bash"))
def test_scripts_are_shell(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
