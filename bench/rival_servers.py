"""vLLM and SGLang without weights: servers of random ones, with acceptance that is imposed.

Both read the config.json of a target and of a head, and no tensors (`--load-format dummy`). Prompts
are token ids. They draft chains, of which every round accepts as many tokens as is imposed: vLLM by
its rejection sampler's method `synthetic`, SGLang by SGLANG_SIMULATE_ACC_LEN. Prefixes are not
cached: a turn may not profit from the one before.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx

from pipeline.heads.eagle3.sglang import sglang_config
from pipeline.heads.eagle3.shape import HeadShape
from tests.engines.servers import EngineServer, NoAnswer, answering, free_port, running

#: Tokens of a chain.
DRAFTS = 5
#: Tokens that every round emits. A whole number, which all engines meet in each round.
TAU = 3.0
#: Seconds until a server must answer: it compiles, and captures its graphs.
_START_SECONDS = 200.0
#: The same until it has replied: twice both, plain and drafting, leave a part within ten minutes.
_REPLY_SECONDS = 90.0


@dataclass(frozen=True)
class DummyModel:
    """What a server reads and has to hold."""

    target: Path
    head: Path | None
    rows: int
    entries: int  # of a row: its prompt and its reply
    memory_share: float  # of the whole GPU


class DummyServer(ABC):
    """A server that answers."""

    package: ClassVar[str]

    def __init__(self, url: str) -> None:
        self.url = url

    @classmethod
    @abstractmethod
    def command(cls, model: DummyModel, port: int) -> tuple[list[str], dict[str, str]]:
        """The arguments of an interpreter, and variables."""

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        """Greedy replies of just so many tokens, of all prompts at a time."""

    @property
    @abstractmethod
    def tau(self) -> float:
        """Tokens a round emitted, as the server counts them."""

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = httpx.post(f"{self.url}{path}", json=body, timeout=_REPLY_SECONDS)
        return response.raise_for_status().json()

    def _check(self, tokens: int, expected: int) -> None:
        if tokens != expected:
            raise NoAnswer(f"{self.package} replied with {tokens} tokens instead of {expected}")


class DummyVllm(DummyServer):
    """`vllm serve`."""

    package = "vllm"

    @classmethod
    def command(cls, model: DummyModel, port: int) -> tuple[list[str], dict[str, str]]:
        command = ["-m", "vllm.entrypoints.cli.main", "serve", str(model.target)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
        command += ["--load-format", "dummy", "--skip-tokenizer-init", "--no-enable-prefix-caching"]
        command += ["--max-model-len", str(model.entries), "--max-num-seqs", str(model.rows)]
        command += ["--gpu-memory-utilization", f"{model.memory_share:.2f}"]
        if model.head:
            settings = {
                **{"method": "eagle3", "model": str(model.head), "num_speculative_tokens": DRAFTS},
                **{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": TAU},
            }
            command += ["--speculative-config", json.dumps(settings)]
        return command, {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        body = {"prompt": list(prompts), "max_tokens": new_tokens, "temperature": 0}
        reply = self._post("/v1/completions", {**body, "ignore_eos": True})
        self._check(reply["usage"]["completion_tokens"], len(prompts) * new_tokens)

    @property
    def tau(self) -> float:
        counted = EngineServer(self.url, Path()).counters()
        return 1 + counted["num_accepted_tokens"] / max(1, counted["num_drafts"])


class DummySglang(DummyServer):
    """`sglang.launch_server`."""

    package = "sglang"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._rounds = self._accepted = 0

    @classmethod
    def command(cls, model: DummyModel, port: int) -> tuple[list[str], dict[str, str]]:
        command = ["-m", "sglang.launch_server", "--model-path", str(model.target)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
        command += ["--load-format", "dummy", "--skip-tokenizer-init", "--disable-radix-cache"]
        # It reserves room for drafts of the next rounds beside a row's own.
        entries = 2 * model.entries
        command += ["--context-length", str(entries), "--max-running-requests", str(model.rows)]
        command += ["--max-total-tokens", str(model.rows * entries)]
        variables = {"HF_HUB_OFFLINE": "1"}
        if model.head:
            command += ["--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk", "1"]
            command += ["--speculative-draft-model-path", str(model.head)]
            command += ["--speculative-num-steps", str(DRAFTS)]
            command += ["--speculative-num-draft-tokens", str(DRAFTS + 1)]
            variables["SGLANG_SIMULATE_ACC_LEN"] = str(TAU)
        return command, variables

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": list(prompts), "sampling_params": sampling}
        replies = [each["meta_info"] for each in self._post("/generate", body)]
        self._check(sum(each["completion_tokens"] for each in replies), len(prompts) * new_tokens)
        self._rounds += sum(each.get("spec_verify_ct", 0) for each in replies)
        self._accepted += sum(each.get("spec_num_correct_drafts", 0) for each in replies)

    @property
    def tau(self) -> float:
        return 1 + self._accepted / max(1, self._rounds)


def installed(package: str, python: str) -> str | None:
    """The version that an interpreter has of a package; None where it has none."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def write_configs(
    folder: Path, config: Any, shape: HeadShape, capture_layers: tuple[int, ...]
) -> tuple[Path, Path]:
    """Directories of a target and of a head, a config.json in each."""
    target, head = folder / "target", folder / "head"
    bodies = {
        target: {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"},
        head: sglang_config(shape, capture_layers),
    }
    for directory, body in bodies.items():
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(body))
    return target, head


@contextmanager
def serving(
    kind: type[DummyServer], python: str, model: DummyModel, log: Path
) -> Iterator[DummyServer]:
    """One at a time. Raises NoAnswer, with the errors of its log, where it does not start or ends
    before it has replied."""
    port = free_port()
    arguments, variables = kind.command(model, port)
    server = EngineServer(f"http://127.0.0.1:{port}", log)
    with running([python, *arguments], {**os.environ, **variables}, log) as process:
        try:
            answering(lambda: process.poll() is None, server, within=_START_SECONDS)
            yield kind(server.url)
        except (NoAnswer, httpx.HTTPError) as error:
            lines = re.findall(r"\w+Error: .+", log.read_text(errors="replace"))
            problems = [str(error).split("\n", 1)[0], *dict.fromkeys(lines)]
            raise NoAnswer("; ".join(problems[:4])) from error
