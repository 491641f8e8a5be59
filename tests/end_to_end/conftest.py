"""A whole run over the shared tiny target, as a configuration file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.cli import main
from tests.conftest import QUESTIONS


@pytest.fixture
def write_config(tiny_target: Path, tmp_path: Path) -> Callable[..., Path]:
    """`write_config(uri, section={…})` → path of a YAML file for prompts of two categories."""
    return partial(config_file, tiny_target, tmp_path)


def config_file(
    target: Path, folder: Path, /, uri: str = "run", **sections: dict[str, Any]
) -> Path:
    """A YAML file in `folder`, where the run is too."""
    prompts = folder / "prompts.jsonl"
    held_out = folder / "held-out.jsonl"
    if not prompts.exists():
        records = [_record(index, "math", text) for index, text in enumerate(QUESTIONS)]
        prompts.write_text("".join(records))
        # Of the trained ones: what a random target says elsewhere teaches nobody.
        records = [
            _record(index, category, QUESTIONS[3 * (category == "chat") + index])
            for index in range(3)
            for category in ("math", "chat")
        ]
        held_out.write_text("".join(records))
    head = {"draft_vocab_size": 200, "intermediate_size": 32, "max_share_of_target": 5.0}
    tree: dict[str, dict[str, Any]] = {
        "run": {"uri": str(folder / uri), "threads": 1},
        "target": {"source": str(target), "dtype": "float32", "device": "cpu"},
        "synth": {
            "sources": [{"source": str(prompts)}],
            "pii": {"enabled": False},
            "max_new_tokens": 24,
            "batch_size": 8,
            "shard_prompts": 4,
            "max_turns": 1,
            "max_prompt_tokens": 200,
        },
        "features": {"batch_tokens": 256, "shard_tokens": 300},
        "train": {
            "head_config": head,
            "ttt_steps": 3,
            "epochs": 12,
            "learning_rate": 3e-3,
            "batch_tokens": 128,
            "checkpoint_every": 10,
            "log_every": 5,
            "dtype": "float32",
            "wandb": "disabled",
        },
        "eval": {
            "sources": [{"source": str(held_out)}],
            "max_new_tokens": 16,
            "hf_prompts": 2,
            "tree": {"top_k": 2, "steps": 3, "nodes": 6},
        },
    }
    for name, keys in sections.items():
        tree[name] = {**tree.get(name, {}), **keys}
    file = folder / f"{uri}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.fixture(scope="session")
def trained(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with run.yaml, a run that is trained, and `other`, another head for its target."""
    folder = tmp_path_factory.mktemp("trained")
    config = config_file(tiny_target, folder)
    short = ["train.epochs=1", "eval.hf_prompts=0"]
    for stage in ("synth", "features", "train"):
        assert main([stage, "-c", str(config), *short]) == 0
    uri, other = folder / "run", folder / "other"
    shutil.copytree(uri, other)
    shutil.rmtree(other / "train")
    more = ["train.epochs=2", "train.learning_rate=0.01"]
    assert main(["train", "-c", str(config), *more, f"run.uri={other}"]) == 0
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    text = (copy / "run.yaml").read_text().replace(f"{trained}/run", f"{copy}/run")
    (copy / "run.yaml").write_text(text)
    return copy


def _record(index: int, category: str, question: str) -> str:
    record = {
        "id": f"{category}{index}",
        "source": "ours",
        "license": "MIT",
        "category": category,
        "turns": [question],
    }
    return json.dumps(record) + "\n"
