"""Configurations of runs on clusters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.config import RunConfig, parse

Configure = Callable[..., RunConfig]


@pytest.fixture
def configure() -> Configure:
    """`configure(section={…})` → a run in a bucket, with an image and every stage."""

    def configure(**sections: Any) -> RunConfig:
        tree: dict[str, Any] = {
            "run": {"uri": "gs://bucket/heads/x"},
            "target": {"source": "org/model"},
            "synth": {"sources": [{"source": "hub:org/prompts"}]},
            "eval": {"sources": [{"source": "hub:org/questions"}]},
            "jobs": {"image": "registry.example/eagle3:1"},
        }
        for name, keys in sections.items():
            tree[name] = keys if keys is None else {**tree.get(name, {}), **keys}
        return parse(tree)

    return configure
