"""A whole model on the C++ operations: near the reference, the same bits in any batch and tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.random_target import random_head
from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.engine import Engine
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.cpu.ops import CpuOps
from pipeline.decoder.ops.draft import DraftNoise
from pipeline.decoder.request import Request
from pipeline.decoder.round import prefill_prompt
from pipeline.errors import HeadError
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.tuning.verification import draw_gap, greedy_gaps, log_probabilities
from tests.decoder.conftest import (
    FAMILIES,
    VOCABULARY,
    bad_head,
    load_model,
    open_rows,
    poisoned_planes,
    random_tokens,
)
from tests.decoder.ops.backends import KERNELS, load_kernels, name_of

#: One level of each type: for what the kernels of all levels have in common.
HIGHEST = {dtype: (level, dtype) for level, dtype in KERNELS}.values()
BRANCHED, CHAIN, WIDE = (
    TreeSection(top_k=k, steps=steps, nodes=nodes)
    for k, steps, nodes in ((3, 4, 12), (1, 3, 4), (8, 6, 48))
)
every_kernel = pytest.mark.parametrize("ops", KERNELS, ids=name_of, indirect=True)
highest_kernels = pytest.mark.parametrize("ops", HIGHEST, ids=name_of, indirect=True)


@pytest.fixture(scope="module")
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return load_kernels(*request.param)


def _decode(engine: Engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    return {done.request_id: done.token_ids for done in engine.generate(requests)}


@pytest.mark.parametrize("family", FAMILIES)
@highest_kernels
@torch.inference_mode()
def test_log_probabilities_are_as_near_to_float64_as_torchs_are(
    make_target: Callable[[str], Path], ops: CpuOps, family: str
) -> None:
    directory, ids = make_target(family), random_tokens(90, seed=1).tolist()
    exact, ours, theirs = (
        log_probabilities(load_model(directory, ops=each), ids[:1], ids[1:])
        for each in (TorchOps(torch.float64), ops, TorchOps(ops.dtype))
    )
    # Over one text the ratio scatters between 0.8 and 1.15.
    assert (ours - exact).abs().mean() <= 1.3 * (theirs - exact).abs().mean()


def _drafting(
    directory: Path, ops: CpuOps, tree: TreeSection, lengths: tuple[int, ...], norm_output: bool
) -> tuple[Eagle3Drafter, DecodeBatch, Planes]:
    """A random head's drafter, and rows whose prompts it has read."""
    model = load_model(directory, ops=ops)
    chosen = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[:60]
    drawn = random_head(model.config, chosen.sort().values, intermediate_size=64, scale=12)
    head = Eagle3Head(drawn.shape.model_copy(update={"norm_output": norm_output}))
    head.load_state_dict(drawn.state_dict())
    head.set_vocabulary(drawn.target_ids())
    drafter = Eagle3Drafter(head, model, tree)
    batch = open_rows(model, len(lengths), pages=3, drafter=drafter)
    planes = poisoned_planes(model, 3 * len(lengths) + 1, drafter)
    for row, length in enumerate(lengths):
        prompt = random_tokens(length, seed=row)
        prefill_prompt(model, planes, drafter, batch.rows(row, row + 1), prompt)
    return drafter, batch, planes


@pytest.mark.parametrize(
    ("steps", "k", "norm_output"),
    [(1, 4, True), (2, 1, False), (5, 4, False), (5, 4, True), (7, 8, True), (4, 20, False)],
)
@pytest.mark.parametrize("weights", [None, (0.7, 0.0, 1.3)], ids=["greedy", "noise"])
@highest_kernels
@torch.inference_mode()
def test_a_draft_in_one_call_is_the_draft_step_by_step(
    make_target: Callable[[str], Path],
    ops: CpuOps,
    steps: int,
    k: int,
    norm_output: bool,
    weights: tuple[float, ...] | None,
) -> None:
    """Every bit of it: candidates, logits, and the keys and values that it leaves behind."""
    tree = TreeSection(top_k=k, steps=steps, nodes=2)
    lengths = 5, 61, 90  # the second's beams reach over a page's end
    drafter, batch, planes = _drafting(make_target("llama"), ops, tree, lengths, norm_output)
    state = batch.drafter_state, batch.block_table, batch.seq_lens, batch.seq_lens + 7
    seeds, noise = torch.tensor([3, 1 << 40, 5]), None
    if weights is not None:
        noise = DraftNoise(torch.tensor(weights), seeds, batch.seq_lens + 1)
    drafts: list[list[Tensor]] = []
    for draft_beams in (ops.draft_beams, partial(TorchOps.draft_beams, ops)):
        plane, trace = planes.drafter[0].clone(), list[Tensor]()
        drafted = draft_beams(drafter._head, *state, plane, steps, k, trace, noise)
        drafts.append([*drafted, *trace, plane.nan_to_num()])
    assert all(torch.equal(each, other) for each, other in zip(*drafts, strict=True))
    plane = planes.drafter[0].clone()
    untraced = ops.draft_beams(drafter._head, *state, plane, steps, k, noise=noise)
    assert all(
        torch.equal(each, other) for each, other in zip(untraced, drafts[1][:4], strict=True)
    )


@pytest.mark.parametrize("token", [VOCABULARY, 1 << 40, -1, -(1 << 40)])
@highest_kernels
@torch.inference_mode()
def test_a_draft_outside_the_vocabulary_reads_no_embedding(
    make_target: Callable[[str], Path], ops: CpuOps, token: int
) -> None:
    """The kernel by itself: it read whatever lay there, and died where nothing did."""
    drafter, batch, planes = _drafting(make_target("llama"), ops, BRANCHED, (9,), False)
    state = batch.drafter_state, batch.block_table, batch.seq_lens, batch.seq_lens
    ops.draft_beams(drafter._head, *state, planes.drafter[0].clone(), 3, 4)
    wrong = replace(drafter._head, target_ids=torch.full((60,), token))
    for steps in (1, 3):
        with pytest.raises(IndexError, match=f"token {token} is outside the embedding of"):
            ops.draft_beams(wrong, *state, planes.drafter[0].clone(), steps, 4)


@pytest.mark.parametrize("offset", [VOCABULARY, -1])
def test_a_drafter_takes_no_head_that_leads_outside_the_vocabulary(
    model: DecoderModel, head: Eagle3Head, offset: int
) -> None:
    head.d2t.zero_().add_(offset)
    with pytest.raises(HeadError, match="d2t leads outside the target's vocabulary"):
        Eagle3Drafter(head, model, BRANCHED)


@pytest.mark.parametrize(
    "case",
    [
        *(("llama", BRANCHED, 1, 0.9), ("llama", BRANCHED, 7, 0.0), ("llama", CHAIN, 3, 0.9)),
        *(("llama", WIDE, 3, 0.0), ("llama", WIDE, 7, 0.9)),
        *(("gemma3", BRANCHED, 3, 0.9), ("mistral-sliding", WIDE, 3, 0.0)),
    ],
)
@every_kernel
def test_speculation_and_batches_change_no_bit(
    make_target: Callable[[str], Path],
    ops: CpuOps,
    case: tuple[str, TreeSection, int, float],
) -> None:
    """Behind windows, too, where each token of a tree begins with an entry of its own."""
    family, tree, slots, temperature = case
    model = load_model(make_target(family), ops=ops)
    head = bad_head(model)
    requests = [
        Request(
            str(index), tuple(prompt.tolist()), 4 + 5 * index, (), temperature, 0.95, seed=index
        )
        for index in range(7)
        for prompt in [random_tokens(3 + 17 * index, seed=index)]
    ]
    plain = _decode(Engine(model), requests)
    drafter = Eagle3Drafter(head, model, tree)
    engine = Engine(model, drafter=drafter, slots=slots, prefill_tokens=11)
    assert _decode(engine, requests) == plain
    for request in requests:
        reply = plain[request.request_id]
        if temperature:
            assert draw_gap(model, request, reply) < 1e-6
        else:  # one forward over the text gives the same bits too
            assert greedy_gaps(model, request.prompt_ids, reply).near_ties == 0
