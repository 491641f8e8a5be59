"""What is fuzzed: right files, and what reads them."""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipeline.cli import main
from pipeline.config import GeneratorSection, TargetSection, load
from pipeline.decoder.request import Request
from pipeline.errors import Eagle3Error
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.registry import open_head, save_head
from pipeline.server.protocol import ApiError, ChatBody, CompletionBody, parse_body
from pipeline.synth.generate.remote import RemoteBackend
from pipeline.target.gguf import GgufMetadata
from pipeline.target.open import open_target, open_template
from pipeline.target.template import load_template
from tests.lying_server import LyingServer, reply

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


def _write_run(folder: Path) -> None:
    from tests.end_to_end.conftest import config_file

    made = folder.parent / "made"
    if not made.exists():
        made.mkdir()
        _write_target(folder.parent / "other")
        config = str(config_file(folder.parent / "tiny_target", made))
        with redirect_stdout(io.StringIO()):
            assert main(["run", "-c", config, "train.epochs=1", "eval.hf_prompts=0"]) == 0
    shutil.copytree(made / "run", folder / "run")


def _read_run(folder: Path) -> bool:
    """Sound only where every byte is as it was; whatever reads a run says what is wrong with it."""
    before, after = _bytes_below(folder.parent / "right"), _bytes_below(folder)
    head = "FOLDER/run/train/head"
    sound = _command("verify", "FOLDER/run")(folder)
    if sound and before != after:
        raise Finding("sound, although a file is not what it was")
    _command("compare", "FOLDER/run", "FOLDER/run")(folder)
    export = "export", head, "--format", "sglang", "--report", "FOLDER/run", "--out", "FOLDER/out"
    _command(*export)(folder)
    _command("gc", "FOLDER/run", "--dry-run")(folder)
    return sound


def _bytes_below(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _write_overrides(folder: Path) -> None:
    _write_config(folder)
    words = ("synth.max_prompts=200", "eval.tree={top_k: 2, steps: 3, nodes: 6}", "run.seed=7")
    more = ("target.capture_layers=[1, 3, 4]", 'serve.allowed_hosts=["a:1", &x b, *x]')
    (folder / "words").write_text("\0".join((*words, *more, "synth.system_prompt='Be kind.'")))


def _read_overrides(folder: Path) -> bool:
    words = (folder / "words").read_bytes().decode(errors="surrogateescape").split("\0")
    try:
        load(folder / "run.yaml", words)
    except Eagle3Error as error:
        if not re.search(r"override|[a-z_]+\.[a-z_]+|run\.yaml", error.where):
            raise Finding(f"names no key: {error}") from error
        return False
    return True


#: What the fuzzed replies answer.
_ASKED = Request("a", (1, 2, 3), 4, (0,))


def _honest(backend: str, prompt: list[int]) -> bytes:
    choice = {"index": 0, "text": "Hi", "finish_reason": "length", "token_ids": [5, 6, 7, 8]}
    choice |= {"prompt_token_ids": prompt, "stop_reason": None}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": 4}
    finish = {"finish_reason": {"type": "length", "matched": None}}
    generated = {"text": "Hi", "output_ids": [5, 6, 7, 8], "meta_info": finish | usage}
    completion = {"id": "x", "choices": [choice], "usage": usage}
    return json.dumps(completion if backend == "vllm" else generated).encode()


def _write_replies(folder: Path) -> None:
    for backend in ("vllm", "sglang"):
        (folder / f"{backend}.json").write_bytes(_honest(backend, list(_ASKED.prompt_ids)))
    _write_target(folder.parent / "other")


_template = cache(partial(load_template, source="tiny", system_prompt=None))


def _read_replies(folder: Path) -> bool:
    """Both through the client, from a server that is well but for them; a reply that is taken is
    one that was asked for."""
    template = _template(folder.parent / "tiny_target")
    taken = True
    for backend in ("vllm", "sglang"):
        data = (folder / f"{backend}.json").read_bytes()

        def answer(path: str, asked: Any, data: bytes = data, kind: str = backend) -> list[bytes]:
            prompt = asked["prompt" if kind == "vllm" else "input_ids"]
            is_ours = prompt == list(_ASKED.prompt_ids)
            return [reply(data if is_ours else _honest(kind, prompt))]

        with LyingServer(answer) as server:
            fields = {"backend": backend, "endpoints": (f"{server.url}/v1",), "retries": 0}
            section = GeneratorSection.model_validate(fields | {"timeout_seconds": 5.0})
            client = RemoteBackend(section, template, model="m", vocabulary=300)
            left = iter([_ASKED])
            (said,) = client.generate(partial(next, left, None))
        taken &= said.rejected is None
        ids = said.token_ids
        if not (said.rejected or (0 < len(ids) <= 4 and all(0 <= each < 300 for each in ids))):
            raise Finding(f"took {said}")
    return taken


TARGETS = {
    "config": Target(_write_config, _command("show", "-c", "FOLDER/run.yaml"), "run.yaml"),
    "prompts": Target(_write_prompts, _call(_read_prompts), "*"),
    "target": Target(_write_target, _call(_read_target), "*"),
    "gguf": Target(_write_gguf, _call(lambda folder: GgufMetadata(folder / "m.gguf")), "*"),
    "head": Target(_write_head, _call(lambda folder: open_head(str(folder))), "*"),
    "bodies": Target(_write_bodies, _call(_read_bodies), "*"),
    "run": Target(_write_run, _read_run, "run/**/*"),
    "overrides": Target(_write_overrides, _read_overrides, "words"),
    "replies": Target(_write_replies, _read_replies, "*.json"),
}
