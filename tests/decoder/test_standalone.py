"""A smaller model that drafts: nothing changes but the rounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.config import TreeSection
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.round import prefill_prompt
from pipeline.drafters.standalone import StandaloneDrafter, check_tokens
from pipeline.errors import ConfigError
from pipeline.tuning.cost import measure_costs
from pipeline.tuning.trace import replay, trace
from tests.decoder.conftest import CAPTURE, open_rows, poisoned_planes, random_tokens
from tests.decoder.drafting import decode, no_values, requests_of, tokens_of

CHAIN = TreeSection(top_k=1, steps=4, nodes=5)
TREE = TreeSection(top_k=3, steps=3, nodes=9)
MakeTarget = Callable[[str], Path]


def _load(directory: Path, capture: tuple[int, ...] = CAPTURE) -> DecoderModel:
    return DecoderModel.load(
        directory, capture, device=torch.device("cpu"), dtype=torch.float32, max_length=200
    )


@pytest.fixture
def target(make_target: MakeTarget) -> DecoderModel:
    return _load(make_target("llama"))


@pytest.fixture
def small(make_target: MakeTarget) -> DecoderModel:
    """Another random model: it proposes nothing that helps."""
    return _load(make_target("qwen3"), ())


@pytest.fixture
def same(make_target: MakeTarget) -> DecoderModel:
    """The target itself: it is always right."""
    return _load(make_target("llama"), ())


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("tree", [CHAIN, TREE])
def test_the_text_is_plain_decodings(
    target: DecoderModel, small: DecoderModel, same: DecoderModel, slots: int, tree: TreeSection
) -> None:
    requests = requests_of()
    plain = tokens_of(decode(target, None, requests, slots))
    for draft in (small, same):
        drafter = StandaloneDrafter(draft, target, tree)
        assert tokens_of(decode(target, drafter, requests, slots)) == plain


def test_samples_are_plain_decodings(target: DecoderModel, same: DecoderModel) -> None:
    requests = requests_of(temperature=0.8)
    drafter = StandaloneDrafter(same, target, TREE)
    sampled = tokens_of(decode(target, drafter, requests, 3))
    assert sampled == tokens_of(decode(target, None, requests, 3))


@pytest.mark.parametrize("slots", [1, 4])
def test_a_draft_model_that_is_the_target_is_always_right(
    target: DecoderModel, same: DecoderModel, slots: int
) -> None:
    """Across page borders, chunks of prompts, and rows that join and leave."""
    requests = requests_of(new_tokens=31)
    done = decode(target, StandaloneDrafter(same, target, CHAIN), requests, slots)
    for each in done.values():
        rounds, tokens = each.statistics.rounds, len(each.token_ids) - 1
        assert rounds == -(-tokens // (CHAIN.steps + 1))


def test_plain_rounds_leave_it_ready(target: DecoderModel, same: DecoderModel) -> None:
    drafter = StandaloneDrafter(same, target, {1: CHAIN, 3: None})
    requests = requests_of(new_tokens=20)
    plain = tokens_of(decode(target, None, requests, 4))
    done = decode(target, drafter, requests, 4)
    assert tokens_of(done) == plain
    assert max(each.statistics.acceptance_length for each in done.values()) > 1


@torch.inference_mode()
def test_a_round_looks_at_no_value(make_target: MakeTarget) -> None:
    """In torch's own operations but for attention, which is a kernel on CUDA."""
    ops = TorchOps()
    target, draft = (
        DecoderModel.load(
            make_target("llama"),
            capture,
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_length=200,
            ops=ops,
        )
        for capture in (CAPTURE, ())
    )
    ops.tree_attention = lambda query, *rest: query  # type: ignore[method-assign]
    drafter = StandaloneDrafter(draft, target, TREE)
    batch = open_rows(target, 2, pages=3, drafter=drafter)
    planes = poisoned_planes(target, 7, drafter)
    for row in range(2):
        prefill_prompt(
            target, planes, drafter, batch.rows(row, row + 1), random_tokens(9, seed=row)
        )
    with no_values():
        drafter.candidates(batch, planes, TREE)


def test_traces_and_costs(target: DecoderModel, same: DecoderModel, small: DecoderModel) -> None:
    prompts = [random_tokens(9 + 5 * row, seed=row).tolist() for row in range(3)]
    for draft, least in ((same, CHAIN.steps + 1), (small, 1)):
        drafter = StandaloneDrafter(draft, target, CHAIN)
        traces = trace(target, drafter, prompts, 21, CHAIN, widths=(1,))
        assert replay(traces, CHAIN) == [20 // least if least > 1 else pytest.approx(20, abs=4)] * 3
    costs = measure_costs(target, drafter, 2, 60, (4,), beam_counts=(1,), step_counts=(2,))
    assert costs.draft_seconds(1) > 0 and costs.extend_seconds(2) > 0


def test_what_cannot_draft_is_refused(make_target: MakeTarget, tiny_target: Path) -> None:
    wide = _load(make_target("llama"))
    wide.embedding = torch.cat((wide.embedding, wide.embedding[:1]))
    with pytest.raises(ConfigError, match="the draft model has 102 tokens, the target 101"):
        StandaloneDrafter(wide, _load(make_target("llama")), CHAIN)
    check_tokens(tiny_target, tiny_target, "x")


def test_another_tokenizer_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(tiny_target)
    other.add_tokens(["<extra>"])
    other.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"1 entries differ, first '<extra>'"):
        check_tokens(tmp_path, tiny_target, "small")
