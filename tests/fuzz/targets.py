"""What is fuzzed: right files, and what reads them."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import torch

from pipeline.cli import main
from pipeline.config import TargetSection
from pipeline.errors import Eagle3Error
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.registry import open_head, save_head
from pipeline.server.protocol import ApiError, ChatBody, CompletionBody, parse_body
from pipeline.target.gguf import GgufMetadata
from pipeline.target.open import open_target, open_template

CODES = {0, 1, 2, 75}
PROMPT = {"id": "a", "turns": ["What is 2 plus 3?", "Why?"], "license": "MIT", "system": "Be kind."}
CONFIG = {
    "run": {"uri": "run"},
    "target": {"source": "target", "capture_layers": [1, 3, 4]},
    "synth": {"sources": [{"source": "prompts.jsonl"}], "max_prompts": 3},
    "train": {"ttt_steps": 2, "learning_rate": 0.001},
    "eval": {"prompts": "prompts.jsonl", "tree": {"top_k": 2, "steps": 2, "nodes": 4}},
}
BODY = {"prompt": "Hi", "max_tokens": 3, "stop": ["x"], "seed": 1, "stream_options": {}}
CHAT = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "top_p": 0.5}


class Finding(Exception):
    """What no input may lead to."""


class Target(NamedTuple):
    """`write` makes the right files in an empty folder; `read` returns whether they are accepted,
    and raises anything but an error that names one of them as a finding."""

    write: Callable[[Path], None]
    read: Callable[[Path], bool]
    files: str  # a pattern of those that are mutated


def _command(*words: str) -> Callable[[Path], bool]:
    """A command of `eagle3`; FOLDER in a word is the folder."""

    def read(folder: Path) -> bool:
        output, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(output), redirect_stderr(errors):
            code = main([word.replace("FOLDER", str(folder)) for word in words])
        said = errors.getvalue()
        if code not in CODES or "Traceback" in said:
            raise Finding(f"exit code {code}: {said[-500:]}")
        if code and not any(path.name in said + output.getvalue() for path in folder.rglob("*")):
            raise Finding(f"names no file: {said[-500:]}")
        return code == 0

    return read


def _call(call: Callable[[Path], object]) -> Callable[[Path], bool]:
    """A function that raises errors of ours alone."""

    def read(folder: Path) -> bool:
        try:
            call(folder)
        except Eagle3Error as error:
            if str(folder) not in str(error):
                raise Finding(f"names no file: {error}") from error
            return False
        except ApiError as error:
            if not 400 <= error.status < 500:
                raise Finding(f"status {error.status}: {error}") from error
            return False
        return True

    return read


def _write_config(folder: Path) -> None:
    (folder / "prompts.jsonl").write_text(json.dumps(PROMPT) + "\n")
    text = json.dumps(CONFIG).replace('"prompts.jsonl"', f'"{folder}/prompts.jsonl"')
    text = text.replace('"run"}', f'"{folder}/run"}}').replace('"target",', f'"{folder}",')
    (folder / "run.yaml").write_text(text)


def _write_prompts(folder: Path) -> None:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    rows = [{**PROMPT, "id": name} for name in "abc"]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    pq.write_table(pa.Table.from_pylist(rows), folder / "c.parquet")


def _read_prompts(folder: Path) -> None:
    from pipeline.config.synth import SourceSpec
    from pipeline.prompts import load_prompts

    for path in sorted(folder.iterdir()):
        load_prompts([SourceSpec(source=str(path))], seed=0)


def _write_target(folder: Path) -> None:
    from tests.conftest import build_tiny_target

    made = folder.parent / "tiny_target"
    if not made.exists():
        build_tiny_target(made)
    shutil.copytree(made, folder, dirs_exist_ok=True)


def _read_target(folder: Path) -> None:
    section = TargetSection(source=str(folder))
    open_target(section)
    open_template(section).start("What is 2 plus 3?")


def _write_gguf(folder: Path) -> None:
    from transformers import AutoTokenizer

    from tests.target.gguf_files import byte_level, write_model

    made = folder.parent / "tiny_target"
    if not made.exists():
        _write_target(folder.parent / "other")
    write_model(folder / "m.gguf", byte_level(AutoTokenizer.from_pretrained(made), "gpt-2"))


def _write_bodies(folder: Path) -> None:
    (folder / "chat.json").write_text(json.dumps(CHAT))
    (folder / "completion.json").write_text(json.dumps(BODY))


def _read_bodies(folder: Path) -> None:
    parse_body(ChatBody, (folder / "chat.json").read_bytes())
    parse_body(CompletionBody, (folder / "completion.json").read_bytes())


def _write_head(folder: Path) -> None:
    from transformers import AutoConfig

    from bench.random_target import random_head

    made = folder.parent / "tiny_target"
    if not made.exists():
        _write_target(folder.parent / "other")
    target = open_target(TargetSection(source=str(made), capture_layers=(1, 3, 4)))
    config = AutoConfig.from_pretrained(made)
    head = random_head(config, torch.arange(0, 64, 2), intermediate_size=48)
    save_head(folder, head, HeadCard(target.contract))


TARGETS = {
    "config": Target(_write_config, _command("show", "-c", "FOLDER/run.yaml"), "run.yaml"),
    "prompts": Target(_write_prompts, _call(_read_prompts), "*"),
    "target": Target(_write_target, _call(_read_target), "*"),
    "gguf": Target(_write_gguf, _call(lambda folder: GgufMetadata(folder / "m.gguf")), "*"),
    "head": Target(_write_head, _call(lambda folder: open_head(str(folder))), "*"),
    "bodies": Target(_write_bodies, _call(_read_bodies), "*"),
}
