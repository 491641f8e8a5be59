"""A prompts file and a synth configuration over the shared tiny target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig, parse
from pipeline.synth.generate import remote
from tests.conftest import CHATML, END, QUESTIONS, save_tiny_llama


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that failed is repeated at once."""
    monkeypatch.setattr(remote, "BACKOFF_SECONDS", 0.01)


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    """24 prompts of two turns under MIT."""
    path = tmp_path / "prompts.jsonl"
    shared = {"source": "ours", "license": "MIT", "category": "math"}
    records = [
        {"id": str(index), **shared, "turns": [question, "Say more."]}
        for index, question in enumerate(QUESTIONS)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def make_config(tiny_target: Path, prompts_file: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """A RunConfig over the tiny target and `prompts_file`; keywords are keys of synth."""

    def make(uri: str = "run", **synth: Any) -> RunConfig:
        return parse(tree(tiny_target, prompts_file, tmp_path / uri, **synth))

    return make


def tree(target: Path, prompts: Path, uri: Path, **synth: Any) -> dict[str, Any]:
    """The configuration as YAML would give it. Sampling makes replies end and seeds matter."""
    section = {
        "sources": [{"source": str(prompts)}],
        "pii": {"enabled": False},
        "temperature": 1.0,
        "max_new_tokens": 48,
        "max_prompt_tokens": 300,
        "batch_size": 4,
        "shard_prompts": 8,
    }
    return {
        "run": {"uri": str(uri), "threads": 1, "seed": 4},
        "target": {"source": str(target), "dtype": "float32", "device": "cpu"},
        "synth": {**section, **synth},
    }


@pytest.fixture(scope="session")
def letters_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose tokens are single printable characters: a text has one spelling in ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("letters_target")
    tokens = ["<|im_start|>", END, "\n", *map(chr, range(32, 127))]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<|im_start|>", END])
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, chat_template=CHATML
    )  # type: ignore[no-untyped-call]
    save_tiny_llama(directory, fast, seed=1)
    return directory
