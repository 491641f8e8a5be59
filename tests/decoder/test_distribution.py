"""Samples of the whole engine follow the target's distribution, whoever drafts.

Thousands of requests for one prompt differ in their seeds only. How often each sequence of their
first tokens occurs is tested against the probabilities that Hugging Face's model gives in float64,
which shares no code with the decoder. The same test, with as many requests, must reject a
verification that accepts a draft at one node in ten regardless.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from bench.random_target import random_head
from pipeline.config import NgramSection, TreeSection
from pipeline.decoder.drafter import Drafter
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.layer import PAGE
from pipeline.decoder.ops.tree import SamplingTensors, Tree
from pipeline.decoder.request import Request
from pipeline.drafters.lookup import LookupDrafter
from pipeline.drafters.ngram import NgramDrafter
from pipeline.drafters.self_spec import SnapKvDrafter, StreamingDrafter
from pipeline.drafters.standalone import StandaloneDrafter
from pipeline.heads.dflash.drafter import DflashDrafter
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from tests.decoder.conftest import _BASE
from tests.decoder.ops import markov
from tests.decoder.ops.biased import towards_drafts
from tests.decoder.test_dflash import block_head

SLOTS, TEMPERATURE = 128, 1.5
SIGNIFICANCE, BIAS = 1e-4, 0.1
#: So few tokens that every sequence of LENGTH is seen often; the first is drawn behind the prompt.
VOCABULARY, LENGTH = 10, 3
TREE = TreeSection(top_k=3, steps=3, nodes=10)

Make = Callable[[DecoderModel, DecoderModel], Drafter]


class Case(NamedTuple):
    """A drafter, made from the target and another random model; the prompt's length."""

    make: Make
    prompt: int = 12
    requests: int = 4096


def _eagle3(model: DecoderModel, other: DecoderModel) -> Drafter:
    head = random_head(model.config, _proposed(), intermediate_size=64, seed=3, scale=12)
    return Eagle3Drafter(head, model, TREE)


def _dflash(model: DecoderModel, other: DecoderModel) -> Drafter:
    return DflashDrafter(block_head(model, proposed=_proposed()), model, TREE)


def _dspark(model: DecoderModel, other: DecoderModel) -> Drafter:
    head = block_head(model, proposed=_proposed(), markov_rank=4, confidence=True)
    return DflashDrafter(head, model, TREE)


def _proposed() -> Tensor:
    """All tokens but two."""
    return torch.arange(VOCABULARY - 2)


def _snapkv(model: DecoderModel, other: DecoderModel) -> Drafter:
    return SnapKvDrafter(model, TREE, budget=12, recent=4, window=2, pool=3)


#: Prompts of the drafters over a part of the cache are longer than that part.
CASES = {
    "eagle3": Case(_eagle3),
    "dflash": Case(_dflash),
    "dspark": Case(_dspark),
    "eagle3 and lookup": Case(
        lambda model, other: LookupDrafter(
            _eagle3(model, other), NgramDrafter(model, TREE, NgramSection())
        )
    ),
    "ngram": Case(lambda model, other: NgramDrafter(model, TREE, NgramSection())),
    "standalone": Case(lambda model, other: StandaloneDrafter(other, model, TREE)),
    "self_spec-streaming": Case(
        lambda model, other: StreamingDrafter(model, TREE, budget=PAGE), 2 * PAGE + 1, requests=3072
    ),
    "self_spec-snapkv": Case(_snapkv, 20),
}


def _save(directory: Path, seed: int) -> Path:
    settings: dict[str, Any] = {**_BASE, "vocab_size": VOCABULARY, "num_hidden_layers": 3}
    torch.manual_seed(seed)
    config = AutoConfig.for_model("llama", **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)  # type: ignore[no-untyped-call]
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the target."""
    return _save(tmp_path_factory.mktemp("target"), 0)


@pytest.fixture(scope="module")
def other_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save(tmp_path_factory.mktemp("other"), 1)


def _load(directory: Path) -> DecoderModel:
    return DecoderModel.load(
        directory, (0, 1, 2), device=torch.device("cpu"), dtype=torch.float32, max_length=160
    )


def _prompt(case: Case) -> tuple[int, ...]:
    """It repeats itself, so that something can be looked up."""
    generator = torch.Generator().manual_seed(case.prompt)
    tokens = torch.randint(0, VOCABULARY, (case.prompt,), generator=generator).tolist()
    return tuple((tokens[:5] + tokens)[: case.prompt])


@torch.inference_mode()
def _exact(directory: Path, prompt: tuple[int, ...]) -> Tensor:
    """[V^L] float64: the probability of every sequence, the first token being the highest digit."""
    target = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    sequences, mass = torch.tensor([prompt]), torch.ones(1, dtype=torch.float64)
    for _ in range(LENGTH):
        logits = target(sequences).logits[:, -1]
        assert logits.dtype == torch.float64
        mass = (mass[:, None] * (logits / TEMPERATURE).softmax(-1)).flatten()
        tokens = torch.arange(VOCABULARY).repeat(len(sequences))
        sequences = torch.cat((sequences.repeat_interleave(VOCABULARY, 0), tokens[:, None]), 1)
    return mass


def _sampled(
    model: DecoderModel, drafter: Drafter, prompt: tuple[int, ...], count: int
) -> tuple[Tensor, list[int]]:
    """Tokens [requests, L] of the engine, and the rounds that each request took."""
    engine = Engine(model, drafter=drafter, slots=SLOTS, prefill_tokens=4096)
    requests = [
        Request(str(seed), prompt, LENGTH, (), temperature=TEMPERATURE, seed=seed)
        for seed in range(count)
    ]
    done = list(engine.generate(requests))
    assert all(each.error is None for each in done) and len(done) == count
    rounds = [each.statistics.rounds for each in done]
    return torch.tensor([each.token_ids for each in done]), rounds


def _p_value(tokens: Tensor, exact: Tensor) -> float:
    codes = (tokens * VOCABULARY ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    return markov.p_value_exact(codes.bincount(minlength=VOCABULARY**LENGTH), exact)


def _planted(ops: TorchOps) -> Callable[..., Tensor]:
    """`ops.sample`, but at one node in ten the child with the largest id is accepted."""
    honest = ops.sample

    def sample(
        logits: Tensor, tree: Tree, sampling: SamplingTensors, positions: Tensor, depth: int
    ) -> Tensor:
        favoured = towards_drafts(logits, tree, sampling, positions, BIAS, order=tree.tokens)
        return honest(favoured, tree, sampling, positions, depth)

    return sample


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_samples_follow_the_targets_distribution_and_a_planted_bias_does_not(
    case: Case, directory: Path, other_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = _load(directory), _load(other_directory)
    drafter, prompt = case.make(model, other), _prompt(case)
    exact = _exact(directory, prompt)
    tokens, rounds = _sampled(model, drafter, prompt, case.requests)
    assert min(rounds) < LENGTH - 1 == max(rounds), "some drafts are accepted, and some are not"
    assert fmean(rounds) < 0.99 * (LENGTH - 1)
    assert _p_value(tokens, exact) > SIGNIFICANCE
    monkeypatch.setattr(model.ops, "sample", _planted(model.ops))
    biased, _ = _sampled(model, case.make(model, other), prompt, case.requests)
    assert _p_value(biased, exact) < SIGNIFICANCE
