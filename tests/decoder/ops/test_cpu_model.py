"""A whole model on the C++ operations: near the reference, the same bits in any batch and tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.random_target import random_head
from pipeline.config import TreeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.cpu.ops import CpuOps
from pipeline.decoder.request import Request
from pipeline.decoder.round import prefill_prompt
from pipeline.errors import HeadError
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.tuning.verification import draw_gap, greedy_gaps, log_probabilities
from tests.decoder.conftest import (
    CAPTURE,
    FAMILIES,
    VOCABULARY,
    open_rows,
    poisoned_planes,
    random_tokens,
)
from tests.decoder.ops.kernels import KERNELS, load_kernels, name_of

CPU = torch.device("cpu")
TREES = [
    TreeSection(top_k=3, steps=4, nodes=12),
    TreeSection(top_k=1, steps=3, nodes=4),
    TreeSection(top_k=8, steps=6, nodes=48),
]


@pytest.fixture(scope="module", params=KERNELS, ids=name_of)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return load_kernels(*request.param)


def _model(directory: Path, ops: TorchOps) -> DecoderModel:
    return DecoderModel.load(
        directory, CAPTURE, device=CPU, dtype=ops.dtype, max_length=160, ops=ops
    )


def _requests() -> list[Request]:
    generator = torch.Generator().manual_seed(7)
    prompts = [
        tuple(torch.randint(0, VOCABULARY, (3 + 17 * index,), generator=generator).tolist())
        for index in range(7)
    ]
    return [Request(str(index), prompt, 4 + 5 * index, ()) for index, prompt in enumerate(prompts)]


def _decode(engine: Engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    return {done.request_id: done.token_ids for done in engine.generate(requests)}


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_log_probabilities_are_as_near_to_float64_as_torchs_are(
    make_target: Callable[[str], Path], ops: CpuOps, family: str
) -> None:
    directory = make_target(family)
    ids = torch.randint(0, VOCABULARY, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    exact = log_probabilities(
        _model(directory, TorchOps(torch.float64)),
        ids[:1],
        ids[1:],
    )
    ours, theirs = (
        log_probabilities(_model(directory, each), ids[:1], ids[1:])
        for each in (ops, TorchOps(ops.dtype))
    )
    # Over one text the ratio scatters between 0.8 and 1.15.
    assert (ours - exact).abs().mean() <= 1.3 * (theirs - exact).abs().mean()


@pytest.mark.parametrize(
    ("steps", "k"), [(1, 4), (2, 1), (5, 4), (7, 8), (4, 20)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("norm_output", [False, True])
@torch.inference_mode()
def test_a_draft_in_one_call_is_the_draft_step_by_step(
    make_target: Callable[[str], Path], ops: CpuOps, steps: int, k: int, norm_output: bool
) -> None:
    """Every bit of it: candidates, logits, and the keys and values that it leaves behind."""
    model = _model(make_target("llama"), ops)
    chosen = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[:60]
    drawn = random_head(model.config, chosen.sort().values, intermediate_size=64, scale=12)
    head = Eagle3Head(drawn.shape.model_copy(update={"norm_output": norm_output}))
    head.load_state_dict(drawn.state_dict())
    head.set_vocabulary(drawn.target_ids())
    drafter = Eagle3Drafter(head, model, TreeSection(top_k=k, steps=steps, nodes=2))
    batch = open_rows(model, 3, pages=3, drafter=drafter)
    planes = poisoned_planes(model, 10, drafter)
    for row, length in enumerate((5, 61, 90)):  # the second's beams reach over a page's end
        prefill_prompt(
            model, planes, drafter, batch.rows(row, row + 1), random_tokens(length, seed=k)
        )
    state = batch.drafter_state, batch.block_table, batch.seq_lens, batch.seq_lens + 7
    traces: tuple[list[Tensor], list[Tensor]] = [], []
    copies = planes.drafter[0].clone(), planes.drafter[0].clone()
    ours = ops.draft_beams(drafter._head, *state, copies[0], steps, k, traces[0])
    wanted = TorchOps.draft_beams(ops, drafter._head, *state, copies[1], steps, k, traces[1])
    assert all(torch.equal(each, other) for each, other in zip(ours, wanted, strict=True))
    assert all(torch.equal(each, other) for each, other in zip(*traces, strict=True))
    assert torch.equal(copies[0].nan_to_num(), copies[1].nan_to_num())
    untraced = ops.draft_beams(drafter._head, *state, copies[0], steps, k)
    assert all(torch.equal(each, other) for each, other in zip(untraced, wanted, strict=True))


@pytest.mark.parametrize("token", [VOCABULARY, 1 << 40, -1, -(1 << 40)])
@torch.inference_mode()
def test_a_draft_outside_the_vocabulary_reads_no_embedding(
    make_target: Callable[[str], Path], ops: CpuOps, token: int
) -> None:
    """The kernel by itself: it read whatever lay there, and died where nothing did."""
    model = _model(make_target("llama"), ops)
    head = random_head(model.config, torch.arange(60), intermediate_size=64, scale=12)
    drafter = Eagle3Drafter(head, model, TreeSection(top_k=4, steps=3, nodes=2))
    batch = open_rows(model, 1, pages=3, drafter=drafter)
    planes = poisoned_planes(model, 4, drafter)
    prefill_prompt(model, planes, drafter, batch.rows(0, 1), random_tokens(9, seed=4))
    state = batch.drafter_state, batch.block_table, batch.seq_lens, batch.seq_lens
    ops.draft_beams(drafter._head, *state, planes.drafter[0].clone(), 3, 4)
    wrong = replace(drafter._head, target_ids=torch.full((60,), token))
    for steps in (1, 3):
        with pytest.raises(IndexError, match=f"token {token} is outside the embedding of"):
            ops.draft_beams(wrong, *state, planes.drafter[0].clone(), steps, 4)


def test_a_drafter_takes_no_head_that_leads_outside_the_vocabulary(
    make_target: Callable[[str], Path], ops: CpuOps
) -> None:
    model = _model(make_target("llama"), ops)
    head = random_head(model.config, torch.arange(60), intermediate_size=64, scale=12)
    for offset in (VOCABULARY, -1):
        head.d2t.zero_().sub_(-offset)
        with pytest.raises(HeadError, match="d2t leads outside the target's vocabulary"):
            Eagle3Drafter(head, model, TreeSection(top_k=4, steps=3, nodes=2))


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("slots", [1, 3, 7])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_speculation_and_batches_change_no_bit(
    make_target: Callable[[str], Path],
    ops: CpuOps,
    head: Eagle3Head,
    tree: TreeSection,
    slots: int,
    temperature: float,
) -> None:
    model = _model(make_target("llama"), ops)
    requests = [
        replace(request, temperature=temperature, top_p=0.95, seed=int(request.request_id))
        for request in _requests()
    ]
    plain = _decode(Engine(model), requests)
    assert (
        _decode(
            Engine(model, drafter=Eagle3Drafter(head, model, tree), slots=slots, prefill_tokens=11),
            requests,
        )
        == plain
    )
    for request in requests:
        if temperature:
            assert draw_gap(model, request, plain[request.request_id]) < 1e-6
        else:
            assert (
                greedy_gaps(model, request.prompt_ids, plain[request.request_id]).near_ties == 0
            ), "one forward over the text gives the same bits too"
