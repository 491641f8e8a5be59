"""Drafts with the noise of the target's draws propose what the target is about to draw.

A target and drafters whose logits are all the same draw by their noise alone, so every token that
a drafter can propose must be accepted: if it took the noise of another position, seed or token,
hardly one would be.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from bench.random_target import random_head
from pipeline.config import TreeSection
from pipeline.decoder.drafter import Drafter
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel, pick_ops
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.layer import PAGE
from pipeline.decoder.request import Request
from pipeline.drafters.self_spec import SnapKvDrafter, StreamingDrafter
from pipeline.drafters.standalone import StandaloneDrafter
from pipeline.heads.dflash.drafter import DflashDrafter
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.mtp.drafter import ChainedDrafter
from tests.decoder.conftest import _BASE, VOCABULARY, load_model, random_tokens
from tests.decoder.test_chained import chained_head
from tests.decoder.test_dflash import block_head

CHAIN, EVERY = TreeSection.chain(3), torch.arange(VOCABULARY)
#: What heads propose: their rows are not the target's.
PROPOSED = torch.arange(60) * 5 // 3 + 1


def _eagle3(model: DecoderModel) -> Drafter:
    return Eagle3Drafter(_level(random_head(model.config, PROPOSED)), model, CHAIN)


def _dflash(model: DecoderModel) -> Drafter:
    return DflashDrafter(_level(block_head(model, proposed=PROPOSED)), model, CHAIN)


def _chained(model: DecoderModel) -> Drafter:
    head = chained_head(model)
    head.set_vocabulary(PROPOSED)
    return ChainedDrafter(_level(head), model, CHAIN)


def _level(head: Any) -> Any:
    nn.init.zeros_(head.lm_head.weight)
    return head


#: Drafters whose logits are level, and the tokens that they propose.
DRAFTERS: dict[str, tuple[Callable[[DecoderModel], Drafter], Tensor]] = {
    "eagle3": (_eagle3, PROPOSED),
    "mtp": (_chained, PROPOSED),
    "dflash": (_dflash, PROPOSED),
    "standalone": (lambda model: StandaloneDrafter(model, model, CHAIN), EVERY),
    "streaming": (lambda model: StreamingDrafter(model, CHAIN, budget=2 * PAGE), EVERY),
    "snapkv": (
        lambda model: SnapKvDrafter(model, CHAIN, budget=12, recent=4, window=2, pool=3),
        EVERY,
    ),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that finds all tokens equally likely."""
    directory = tmp_path_factory.mktemp("level")
    config = AutoConfig.for_model("llama", **_BASE | {"tie_word_embeddings": False})
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("reference", [False, True], ids=["machine", "torch"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_draft_that_knows_the_logits_is_what_the_target_draws(
    directory: Path, name: str, reference: bool
) -> None:
    ops = TorchOps() if reference else pick_ops(torch.device("cpu"), torch.float32)
    model, (make, proposed) = load_model(directory, ops=ops), DRAFTERS[name]
    engine = Engine(model, drafter=make(model), slots=3)
    prompts = [tuple(random_tokens(5 + seed, seed=seed).tolist()) for seed in range(6)]
    requests = [
        Request(str(seed), prompt, 13, (), temperature=1.3 * (seed != 2), seed=seed)
        for seed, prompt in enumerate(prompts)
    ]
    done = {each.request_id: each for each in engine.generate(requests)}
    assert set(done.pop("2").token_ids) == {0}, "a greedy one beside them"
    for each in done.values():
        assert each.statistics.rounds == _rounds(each.token_ids, set(proposed.tolist()))


def _rounds(tokens: tuple[int, ...], proposed: set[int]) -> int:
    """That draw the tokens after the first if whatever can be proposed is accepted."""
    rounds, at = 0, 1
    while at < len(tokens):
        accepted = takewhile(proposed.__contains__, tokens[at : at + CHAIN.steps])
        rounds, at = rounds + 1, at + len(list(accepted)) + 1
    return rounds
