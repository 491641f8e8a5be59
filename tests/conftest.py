"""What several rooms' tests share: a tiny instruct target, and a real object store."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.config import RunSection, run
from pipeline.prompts.demo_sets import prompt_set

if TYPE_CHECKING:
    from tests.hub_server import HubServer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = "<|im_end|>"

QUESTIONS = [
    f"What is {a} {word} {a + 3}, and why would that be so?"
    for a in range(8)
    for word in ("plus", "minus", "times")
]


#: Real models, servers, compilers, kills and second processes. `make test-quick` leaves them out,
#: `make test` begins with them, so that its two workers end together.
SLOW = (
    "decoder/ops/test_aot.py",
    "train/test_distributed.py",
    "decoder/ops/test_triton.py",
    "end_to_end/",
    "target/test_smollm2.py",
    "target/test_parallel.py",
    "features/test_tensor_parallel.py",
    "train/test_stage.py",
    "train/test_resume.py",
    "train/test_follow.py",
    "train/test_acceptance.py",
    "decoder/test_engine.py",
    "decoder/ops/test_lossless.py",
    "decoder/ops/test_cpu_library.py",
    "synth/test_stage.py",
    "synth/test_remote.py",
    "synth/test_busy.py",
    "synth/test_rejections.py",
    "synth/test_screening.py",
    "synth/test_kill.py",
    "store/test_faults.py",
    "store/test_kill.py",
    "store/test_hub.py",
    "store/test_writers.py",
    "store/test_claims.py",
    "gpu/",
    "features/test_stage.py",
    "tuning/",
    "prompts/test_sets.py",
    "synth/test_audit.py",
    "synth/test_dlp.py",
    "synth/test_pii.py",
    "synth/test_pii_time.py",
    "synth/test_provocations.py",
    "synth/test_metadata.py",
    "synth/test_score.py",
    "synth/test_screen.py",
    "synth/test_secrets.py",
    "server/test_api.py",
    "server/test_robust.py",
    "jobs/test_slurm.py",
    "jobs/test_launch.py",
    "test_api.py",
    "gemma/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow, and put it first."""
    root = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        name = item.path.relative_to(root).as_posix()
        return next((at for at, start in enumerate(SLOW) if name.startswith(start)), len(SLOW))

    for item in items:
        if rank(item) < len(SLOW):
            item.add_marker(pytest.mark.slow)
        for room in ("gemma", "engines"):
            if item.path.is_relative_to(root / room):
                item.add_marker(room)
    items.sort(key=rank)


@pytest.fixture(autouse=True)
def reset_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the cache directory or the limits of the run of another one."""
    monkeypatch.setattr(run, "_run", RunSection())


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with config, tokenizer and safetensors."""
    return build_tiny_target(tmp_path_factory.mktemp("tiny_target"))


def build_tiny_target(directory: Path) -> Path:
    """A random Llama with a tokenizer of QUESTIONS and ChatML, saved to `directory`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant system", *QUESTIONS], trainer)
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, chat_template=CHATML
    )  # type: ignore[no-untyped-call]
    save_tiny_llama(directory, fast, seed=0)
    return directory


def save_tiny_llama(directory: Path, tokenizer: Any, *, seed: int) -> None:
    """A random Llama of 8 layers and hidden size 32 for `tokenizer`, both saved to `directory`."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer.save_pretrained(directory)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight *= (
            0.1  # near-uniform next tokens: sampled replies end within some hundred tokens
        )
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """gs:// URI of an empty bucket on a real fake-gcs-server process."""
    from tests.gcs_server import gcs_bucket

    with gcs_bucket("eagle3") as uri:
        yield uri


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A stand-in for the Hub that huggingface_hub and datasets talk to, with a writer's token."""
    import datasets.config  # type: ignore[import-untyped]
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    from pipeline.store import hub as reading
    from tests.hub_server import WRITER, hub_server

    with hub_server() as server:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.url)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")
        monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda _: None, time=time.time))
        monkeypatch.setenv("HF_TOKEN", WRITER)
        monkeypatch.setenv("EAGLE3_STORE_RETRY_SECONDS", "0")
        yield server
        reading.resolved.cache_clear()
        reading._fetched.cache_clear()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a tiny real filesystem: permission bits do not stop root, quotas are rarely on."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        point = tmp_path / f"mount{len(mounted)}"
        point.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(point)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            pytest.skip(f"mounting needs root: {done.stderr.strip()}")
        mounted.append(point)
        return point

    yield mount
    for point in mounted:
        # Lazily: on a loaded machine a process that was ended a moment ago may still hold it.
        subprocess.run(["umount", "--lazy", str(point)], check=True)


def demo_prompts(name: str) -> str:
    """The file of one of the demo's prompt sets; skips where set-up has not written it."""
    file = prompt_set(name)
    if not Path(file).exists():
        pytest.skip(f"needs configs/prompts/{name}.jsonl: make setup")
    return file
