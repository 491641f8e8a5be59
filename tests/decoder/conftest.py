"""Tiny random targets of every supported family, and a head for one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from bench.random_target import random_head
from pipeline.decoder.batch import DecodeBatch, TokenRows
from pipeline.decoder.drafter import Drafter
from pipeline.decoder.kv import Planes, Pools, pages_for
from pipeline.decoder.model import DecoderModel, Forward
from pipeline.decoder.ops.base import TorchOps
from pipeline.heads.eagle3.shape import Eagle3Head

CAPTURE = (1, 3, 4)
VOCABULARY = 101
#: Rows that the drafter's own pool has pages for.
DRAFTER_ROWS = 8
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,  # large enough that greedy choices are not near-ties
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# A rotary table is longer than the 256 positions, which must change none of them.
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
#: Tokens of the test's vocabulary.
_PHI = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-untied-llama3": {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "rope_parameters": _LLAMA3,
    },
    "llama-yarn": {"model_type": "llama", "rope_parameters": _YARN},
    "llama-linear": {"model_type": "llama", "rope_parameters": _LINEAR},
    "llama-dynamic": {"model_type": "llama", "rope_parameters": _DYNAMIC},
    "llama-wide-heads": {"model_type": "llama", "head_dim": 16},
    "llama-biased": {"model_type": "llama", "attention_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-untied": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    # Windows of 64 and 70 positions, which texts of the tests outgrow.
    "mistral-sliding": {"model_type": "mistral", "sliding_window": 64},
    "qwen2-sliding": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 70,
        "max_window_layers": 3,
    },
    "phi3": {"model_type": "phi3", "sliding_window": 70, **_PHI},
    "phi3-partial": {
        "model_type": "phi3",
        "tie_word_embeddings": False,
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
        },
        **_PHI,
    },
    "smollm3": {"model_type": "smollm3", **_PHI},
    "gemma": {"model_type": "gemma", "head_dim": 16, **_PHI},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 64,
        "layer_types": [
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "full_attention",
        ]
        * 2,
    },
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Threads that wait for each other after every small operation are slower than one."""
    torch.set_num_threads(1)


def poisoned_planes(model: DecoderModel, pages: int, drafter: Drafter | None = None) -> Planes:
    """Key/value memory in which whatever is read before it was written shows."""
    planes = Pools(
        model.plane_shape, drafter, pages=pages, rows=DRAFTER_ROWS, device=model.device
    ).planes
    for plane in (planes.target, *planes.drafter, *planes.drafter_kv):
        plane.fill_(float("nan"))
    return planes


def open_rows(
    model: DecoderModel,
    rows: int,
    *,
    pages: int,
    drafter: Drafter | None = None,
    emitted: int = 8,
    spare: int = 0,
) -> DecodeBatch:
    """A batch of greedy requests with `pages` pages each, none of them in order.

    `spare` inert rows stand behind them.
    """
    private = drafter.drafter_pages if drafter else 0
    assert rows <= DRAFTER_ROWS
    batch = DecodeBatch.empty(
        rows + spare,
        pages=pages,
        emitted=emitted,
        device=model.device,
        drafter=drafter,
    )
    order = 1 + torch.randperm(rows * pages, generator=torch.Generator().manual_seed(9))
    zeros = torch.zeros(rows, dtype=torch.int64)
    private_order = torch.arange(rows * private, 0, -1).view(rows, private)
    batch.rows(0, rows).open(order.view(rows, pages), zeros, zeros, zeros, zeros + 1, private_order)
    return batch


def states_of(model: DecoderModel, tokens: Tensor) -> Forward:
    """Aux and final states of a sequence [T], read in one forward."""
    pages = pages_for(len(tokens))
    batch, planes = open_rows(model, 1, pages=pages), poisoned_planes(model, pages + 1)
    metadata = batch.metadata(model.ops, model.rotary, TokenRows.even(1, len(tokens), model.device))
    return model.forward(tokens, metadata, planes.target)


def random_tokens(length: int, seed: int) -> Tensor:
    """Token ids [length]."""
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def make_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a random target of a family, made once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            settings = {**_BASE, **FAMILIES[family]}
            config = AutoConfig.for_model(settings.pop("model_type"), **settings)
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("bias") or "norm" in name:
                        # Zeros and ones would hide a missing term.
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family])
        return made[family]

    return make


def eight_tokens(directory: Path, max_length: int) -> tuple[DecoderModel, Eagle3Head]:
    """A target that knows eight tokens, so that a random head often guesses one of them right."""
    torch.manual_seed(1)
    config = LlamaConfig(**(_BASE | {"vocab_size": 8}))
    LlamaForCausalLM(config).save_pretrained(directory)
    # Scaled, so that attention and positions weigh something.
    head = random_head(config, torch.arange(8), intermediate_size=64, seed=3, scale=12)
    return load_model(directory, max_length), head


def load_model(directory: Path, max_length: int = 160, ops: TorchOps | None = None) -> DecoderModel:
    """On the CPU; in float32, by the operations that this machine picks, where none are given."""
    return DecoderModel.load(
        directory,
        CAPTURE,
        device=torch.device("cpu"),
        dtype=ops.dtype if ops else torch.float32,
        max_length=max_length,
        ops=ops,
    )


@pytest.fixture
def model(make_target: Callable[[str], Path]) -> DecoderModel:
    return load_model(make_target("llama"))


@pytest.fixture
def torch_model(make_target: Callable[[str], Path]) -> DecoderModel:
    """The same target, computed by the definition of every operation."""
    return load_model(make_target("llama"), ops=TorchOps())


@pytest.fixture
def head(model: DecoderModel) -> Eagle3Head:
    return bad_head(model)


def bad_head(model: DecoderModel) -> Eagle3Head:
    """A random head: its guesses are bad, which losslessness must survive."""
    chosen = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[:60]
    # Scaled, so that attention and positions weigh something.
    return random_head(model.config, chosen.sort().values, intermediate_size=64, seed=3, scale=12)


@pytest.fixture(scope="module")
def looping(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    """A target that says nearly the same behind a token wherever it stands, and so runs into loops;
    it reads long prompts, too."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "o_proj" in name:
            parameter.data.mul_(0.01)
    directory = tmp_path_factory.mktemp("looping")
    model.save_pretrained(directory)
    device = torch.device("cpu")
    return DecoderModel.load(
        directory, (1, 2, 3), device=device, dtype=torch.float32, max_length=2200
    )
