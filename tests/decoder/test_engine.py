"""The engine: speculative output equals plain output, whatever the drafter proposes."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.drafter import ReadTokens, TreeDrafter
from pipeline.decoder.engine import Engine
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.draft import Candidates
from pipeline.decoder.ops.tree import Tree, VerifyOutput
from pipeline.decoder.request import Completion, Request
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.tuning.verification import draw_gap
from tests.decoder.conftest import VOCABULARY


def _requests(count: int, stop_ids: tuple[int, ...] = ()) -> list[Request]:
    """Prompts of 3 to 40 tokens, limits of 1 to 36."""
    generator = torch.Generator().manual_seed(7)
    lengths = [3 + (11 * index) % 38 for index in range(count)]
    drawn = [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]
    prompts = [tuple(prompt.tolist()) for prompt in drawn]
    return [
        Request(str(index), prompt, 1 + (17 * index) % 36, stop_ids)
        for index, prompt in enumerate(prompts)
    ]


def _run(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    return {done.request_id: done for done in engine.generate(requests)}


def _replies(engine: Engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    return {name: done.token_ids for name, done in _run(engine, requests).items()}


class OracleDrafter(TreeDrafter):
    """Knows the replies: proposes the true tokens, down to depth `right`, among distractors."""

    def __init__(self, replies: dict[tuple[int, ...], tuple[int, ...]], right: int) -> None:
        super().__init__(TreeSection(top_k=3, steps=4, nodes=13), VOCABULARY)
        self._whole = [(*prompt, *reply)[1:] for prompt, reply in replies.items()]
        self._right = right
        self._seen: dict[int, list[int]] = {}  # by the request's first page: rows may move

    def prefill(self, batch: DecodeBatch, planes: Planes, read: ReadTokens, ended: int) -> None:
        self.extend(batch, planes, read)

    def extend(self, batch: DecodeBatch, planes: Planes, read: ReadTokens) -> None:
        firsts = read.rows.cu_seqlens_q[:-1].tolist()
        for row, (first, count) in enumerate(zip(firsts, read.counts.tolist(), strict=True)):
            seen = self._seen.setdefault(int(batch.block_table[row, 0]), [])
            del seen[int(batch.seq_lens[row]) :]  # whoever held the page before
            seen += read.next_tokens[first : first + count].tolist()

    def candidates(self, batch: DecodeBatch, planes: Planes, shape: TreeSection) -> Candidates:
        tokens = []
        for row, root in enumerate(batch.roots.tolist()):
            seen = self._seen[int(batch.block_table[row, 0])]
            assert seen[-1] == root
            future = enumerate(self._future(seen))
            guesses = [token + (depth >= self._right) for depth, token in future]
            siblings = [token + other for token in guesses for other in (2, 0, 3)]
            tokens.append([token % VOCABULARY for token in siblings])
        depths = torch.arange(4).repeat_interleave(3)  # three candidates each
        parents = (3 * depths - 2).clamp(min=-1).expand(len(batch), -1)
        scores = -(depths + 1.0).expand(len(batch), -1)
        return Candidates(torch.tensor(tokens), parents, scores, depths + 1)

    def _future(self, seen: list[int]) -> list[int]:
        (whole,) = [whole for whole in self._whole if whole[: len(seen)] == tuple(seen)]
        return [*whole[len(seen) :], 0, 0, 0, 0][:4]


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize(
    "tree",
    [
        TreeSection(top_k=3, steps=4, nodes=12),
        TreeSection(top_k=1, steps=3, nodes=4),
        TreeSection(top_k=8, steps=1, nodes=9),
    ],
)
def test_speculation_with_a_bad_head_changes_nothing(
    model: DecoderModel, head: Eagle3Head, slots: int, tree: TreeSection
) -> None:
    requests = _requests(11)
    engine = Engine(model, drafter=Eagle3Drafter(head, model, tree), slots=slots)
    assert _replies(engine, requests) == _replies(Engine(model), requests)


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("right", [0, 1, 3, 4])
def test_speculation_with_a_good_drafter_changes_nothing_but_the_rounds(
    model: DecoderModel, slots: int, right: int
) -> None:
    requests = _requests(11)
    plain = _replies(Engine(model), requests)
    replies = {request.prompt_ids: plain[request.request_id] for request in requests}
    speculative = _run(Engine(model, drafter=OracleDrafter(replies, right), slots=slots), requests)
    assert {name: done.token_ids for name, done in speculative.items()} == plain
    for name, done in speculative.items():
        after_prefill = len(plain[name]) - 1
        # The oracle proposes zeros behind the end of the reply: only the last round may fall short.
        assert done.statistics.rounds == -(-after_prefill // (right + 1))
        assert done.statistics.round_tokens == after_prefill


def test_plain_decoding_equals_hugging_face(
    make_target: Callable[[str], Path], model: DecoderModel
) -> None:
    reference: Any = AutoModelForCausalLM.from_pretrained(make_target("llama"))
    done = _run(Engine(model, slots=3), _requests(6))
    for request in _requests(6):
        ids = torch.tensor([request.prompt_ids])
        expected = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        assert done[request.request_id].token_ids == tuple(expected[0, ids.shape[1] :].tolist())


def test_requests_stop_at_stop_tokens_and_limits(model: DecoderModel) -> None:
    free = _run(Engine(model), _requests(8))
    stop = free["5"].token_ids[3]
    stopped = _run(Engine(model, slots=4), _requests(8, stop_ids=(stop,)))
    for name, done in stopped.items():
        whole = free[name].token_ids
        cut = whole[: whole.index(stop) + 1] if stop in whole else whole
        assert done.token_ids == cut
        assert done.finish_reason == ("stop" if stop in whole else "length")
    assert stopped["5"].finish_reason == "stop"


def test_statistics_count_rounds_without_prefill(model: DecoderModel) -> None:
    request = Request("a", (1, 2, 3), 9, ())
    statistics = _run(Engine(model), [request])["a"].statistics
    assert (statistics.rounds, statistics.round_tokens, statistics.reached) == (8, 8, [8])
    assert statistics.acceptance_length == 1.0
    assert statistics.first_token_seconds > 0
    assert statistics.decode_seconds > 0


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(
    "settings", [{"top_p": 1.0}, {"top_p": 0.7}, {"top_k": 5}, {"top_p": 0.9, "top_k": 20}]
)
def test_a_seed_draws_the_same_tokens_with_and_without_a_drafter(
    model: DecoderModel, head: Eagle3Head, slots: int, settings: dict[str, Any]
) -> None:
    requests = [
        replace(request, temperature=0.8, seed=index, **settings)
        for index, request in enumerate(_requests(7))
    ]
    drafter = Eagle3Drafter(head, model, TreeSection(top_k=3, steps=4, nodes=12))
    greedy = replace(requests[2], request_id="greedy", temperature=0.0)
    speculative = _replies(Engine(model, drafter=drafter, slots=slots), [*requests, greedy])
    for request in requests:
        # Not compared token by token: a number at the very edge between two tokens may be rounded
        # to either side.
        reply, other = speculative[request.request_id], replace(request, seed=50)
        assert draw_gap(model, request, reply) < 1e-4
        assert draw_gap(model, other, reply) > 1e-2, "other numbers draw other tokens"
    assert speculative["greedy"] == _replies(Engine(model), _requests(7))["2"]


def test_prompts_read_in_chunks_change_nothing(model: DecoderModel, head: Eagle3Head) -> None:
    requests = _requests(11)
    whole = _replies(Engine(model), requests)
    for prefill_tokens in (1, 7):
        drafter = Eagle3Drafter(head, model, TreeSection(top_k=2, steps=3, nodes=6))
        engine = Engine(model, drafter=drafter, slots=3, prefill_tokens=prefill_tokens)
        assert _replies(engine, requests) == whole


def test_a_tree_shape_for_each_batch_size(model: DecoderModel, head: Eagle3Head) -> None:
    shapes = {
        1: TreeSection(top_k=4, steps=4, nodes=16),
        3: TreeSection(top_k=2, steps=2, nodes=4),
        5: TreeSection(top_k=1, steps=1, nodes=2),
    }
    drafter = Eagle3Drafter(head, model, shapes)
    drafted = [drafter.shape_for(rows) for rows in (1, 2, 3, 4, 5, 8)]
    assert drafted == [shapes[rows] for rows in (1, 1, 3, 3, 5, 5)]
    requests = _requests(11)
    engine = Engine(model, drafter=drafter, slots=6)
    assert _replies(engine, requests) == _replies(Engine(model), requests)


def test_three_frames_lead_to_the_round(model: DecoderModel) -> None:
    frames: list[str] = []

    def verify(tree: Tree, predicted: Tensor, depth: int) -> VerifyOutput:
        frames[:] = [frame.name for frame in traceback.extract_stack()]
        return model.ops.verify(tree, predicted, depth)

    list(Engine(model, verify=verify).generate(_requests(2)))
    here = frames.index("test_three_frames_lead_to_the_round")
    assert frames[here + 1 : frames.index("decode_round") + 1] == ["stream", "step", "decode_round"]
