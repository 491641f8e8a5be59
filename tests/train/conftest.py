"""A tiny random target on disk, its states, and a run directory that training can start from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import RunConfig, parse
from pipeline.heads.eagle3.shape import Eagle3Head, HeadShape
from pipeline.heads.init import random_init
from pipeline.records import Manifest, TargetContract
from pipeline.store.stage_run import open_stage
from pipeline.store.states import StatesSample, encode_states, teacher_positions
from pipeline.target.open import read_contract, resolve

VOCAB, HIDDEN, LAYERS = 96, 32, 8
HEAD = {"draft_vocab_size": 48, "intermediate_size": 32, "max_share_of_target": 2.0}
SETTINGS = {
    "ttt_steps": 3,
    "batch_tokens": 64,
    "epochs": 2,
    "log_every": 1,
    "wandb": "disabled",
    "checkpoint_every": 4,
}


@pytest.fixture(autouse=True)
def few_threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 8 layers, hidden size 32, with a word-level tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    model: Any = LlamaForCausalLM(config)
    model.lm_head.weight.data *= 4  # a target that is sure of what it says
    model.to(torch.bfloat16).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w1", chat_template=template
    ).save_pretrained(directory)  # type: ignore[no-untyped-call]
    return directory


@pytest.fixture(scope="session")
@torch.no_grad()
def states(target_directory: Path) -> list[StatesSample]:
    """Twelve conversations: random prompts, the target's greedy continuations, captured states."""
    from pipeline.config import TargetSection
    from pipeline.target.forward import capture_states, register_packed_attention
    from pipeline.target.open import open_target

    section = TargetSection(source=str(target_directory), device="cpu", dtype="bfloat16")
    target = open_target(section).load(attention=register_packed_attention())
    generator = torch.Generator().manual_seed(1)
    samples = []
    for number in range(12):
        ids = torch.randint(0, VOCAB, (4 + number % 5,), generator=generator).tolist()
        prompt = len(ids)
        for _ in range(14 + number):
            _, final = capture_states(target, [ids])[0]
            ids.append(int((final[-1] @ target.model.lm_head.weight.T).argmax()))
        ((aux, final),) = capture_states(target, [ids])
        samples.append(make_sample(f"sample-{number}", ids, range(prompt, len(ids)), aux, final))
    return samples


def make_sample(
    name: str, ids: list[int], supervised: Any, aux: torch.Tensor, final: torch.Tensor
) -> StatesSample:
    mask = torch.zeros(len(ids), dtype=torch.uint8)
    mask[list(supervised)] = 1
    positions = teacher_positions(mask)
    token_ids, kept = torch.tensor(ids, dtype=torch.int32), final[positions.long()]
    return StatesSample(name, "test", token_ids, mask, aux, kept, positions)


@pytest.fixture
def tiny_config(tmp_path: Path, target_directory: Path) -> Callable[..., RunConfig]:
    """`tiny_config(uri, epochs=…, head={…})` → a run's configuration."""

    def build(
        uri: str = "run", *, head: dict[str, Any] | None = None, seed: int = 0, **train: Any
    ) -> RunConfig:
        uri = uri if "://" in uri else str(tmp_path / uri)
        settings = {**SETTINGS, **train, "head_config": {**HEAD, **(head or {})}}
        tree = {
            "run": {"uri": uri, "threads": 1, "seed": seed},
            "target": {"source": str(target_directory), "device": "cpu"},
            "train": settings,
        }
        return parse(tree)

    return build


@pytest.fixture
def store_states(states: list[StatesSample]) -> Callable[..., Manifest]:
    """`store_states(config, samples=None)` commits a features stage of shards of five samples."""

    def store(config: RunConfig, samples: list[StatesSample] | None = None) -> Manifest:
        stage_run = open_stage(config, "features", None)
        every = states if samples is None else samples
        for start in range(0, len(every), 5):
            part = every[start : start + 5]
            tokens = sum(len(sample.token_ids) for sample in part)
            name = f"{start // 5:05d}.safetensors"
            stage_run.commit(name, encode_states(part), rows=len(part), tokens=tokens)
        licenses, sources = {"MIT": len(every)}, {"test": len(every)}
        return stage_run.finish(contract=contract_of(config), licenses=licenses, sources=sources)

    return store


def contract_of(config: RunConfig) -> TargetContract:
    return read_contract(config.target, resolve(config.target))


#: Sizes of the heads that formulas are held against.
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 24,
    "draft_vocab_size": 14,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "max_position_embeddings": 128,
}
#: Their draft vocabulary.
SMALL_VOCABULARY = torch.arange(24)[torch.arange(24) % 5 != 0][:14]


@pytest.fixture
def small_head() -> Eagle3Head:
    """A random float64 head of these sizes."""
    head = Eagle3Head(HeadShape(**SMALL))
    random_init(head, 3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    head.set_vocabulary(SMALL_VOCABULARY)
    return head.double()
