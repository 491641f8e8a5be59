"""Prompts packed into one forward: what shares it changes nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch, TokenRows
from pipeline.decoder.engine import OFFLINE_PREFILL_TOKENS, PREFILL_TOKENS, Engine, Staging
from pipeline.decoder.graphs import PromptGraphs
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.layer import PAGE
from pipeline.decoder.request import Request
from pipeline.decoder.round import decode_round, prefill, prefill_prompt
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from tests.decoder.conftest import open_rows, poisoned_planes, random_tokens
from tests.decoder.random_drafters import DRAFTERS, every_drafter

TREE = TreeSection(top_k=3, steps=4, nodes=10)
PROMPTS = [random_tokens(length, seed=length) for length in (37, 1, 70, 5)]


def _equal(ours: DecodeBatch, theirs: DecodeBatch) -> None:
    for name in ("roots", "seq_lens", "emitted", "counts"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    torch.testing.assert_close(ours.drafter_state, theirs.drafter_state, atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_packed_prompts_leave_what_single_ones_leave(model: DecoderModel, head: Eagle3Head) -> None:
    """First tokens, drafter's states, and keys and values of the target and the drafter."""
    drafter = Eagle3Drafter(head, model, TREE)
    alone = open_rows(model, 4, pages=2, drafter=drafter)
    packed = open_rows(model, 4, pages=2, drafter=drafter)
    planes = [poisoned_planes(model, 9, drafter) for _ in range(2)]
    for batch in (alone, packed):
        batch.temperature[1:3], batch.seeds[1:3] = 0.9, 7
    for row, prompt in enumerate(PROMPTS):
        prefill_prompt(model, planes[0], drafter, alone.rows(row, row + 1), prompt)
    starts = torch.tensor([0, *(len(prompt) for prompt in PROMPTS)]).cumsum(0)
    rows = TokenRows.ragged(starts, int(starts[-1]), max_query_len=70)
    tokens = torch.cat(PROMPTS)
    behind = torch.cat([prompt.roll(-1) for prompt in PROMPTS])
    prefill(model, planes[1], drafter, packed, rows, tokens, behind, last=4)
    _equal(packed, alone)
    for ours, theirs in (
        (planes[1].target, planes[0].target),
        (planes[1].drafter[0], planes[0].drafter[0]),
    ):
        assert torch.equal(ours.isnan(), theirs.isnan())
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3, equal_nan=True)


def test_one_forward_reads_several_prompts(
    model: DecoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six requests of 5 + 7 tokens each arrive at once, the budget is 4 · 12."""
    sizes: list[int] = []
    original = DecoderModel.forward

    def counting(self: DecoderModel, tokens: Tensor, *rest: object) -> object:
        sizes.append(len(tokens))
        return original(self, tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(DecoderModel, "forward", counting)
    requests = [Request(str(index), tuple(range(5 + 7 * index)), 4, ()) for index in range(6)]
    packed = {done.request_id: done for done in Engine(model, slots=6).generate(requests)}
    assert sizes[0] == sum(len(request.prompt_ids) for request in requests)
    assert sizes[1:] == [6, 6, 6]
    sizes.clear()
    engine = Engine(model, slots=6, prefill_tokens=12)
    done = {each.request_id: each for each in engine.generate(requests)}
    # 5 + 12 + 19 + 12 of the 26; then 12 a round beside the rounds of those that are running.
    assert sizes[:2] == [48, 3] and sizes[2] == 12
    monkeypatch.undo()
    for request in requests:
        (alone,) = Engine(model).generate([request])
        name = request.request_id
        assert packed[name].token_ids == done[name].token_ids == alone.token_ids


@pytest.mark.parametrize("prefill_tokens", [3, 16, 512])
@pytest.mark.parametrize("overlap", [False, True])
def test_sampled_replies_do_not_depend_on_the_packing(
    model: DecoderModel, head: Eagle3Head, prefill_tokens: int, overlap: bool
) -> None:
    requests = [
        Request(str(index), tuple(prompt.tolist()), 3 + 4 * index, (), temperature=0.9, seed=index)
        for index, prompt in enumerate(PROMPTS)
    ]
    requests.append(replace(requests[0], request_id="greedy", temperature=0.0))
    alone = {each.request_id: next(Engine(model).generate([each])).token_ids for each in requests}
    drafter = Eagle3Drafter(head, model, TREE)
    engine = Engine(model, drafter=drafter, slots=3, prefill_tokens=prefill_tokens, overlap=overlap)
    for _ in range(2):
        assert {done.request_id: done.token_ids for done in engine.generate(requests)} == alone


def test_drafts_do_not_depend_on_the_chunks(model: DecoderModel, head: Eagle3Head) -> None:
    """A drafter that read a wrong token at a chunk's end would propose other things."""

    def logits(prefill_tokens: int) -> list[Tensor]:
        drafter = Eagle3Drafter(head, model, TREE)
        engine = Engine(model, drafter=drafter, slots=2, prefill_tokens=prefill_tokens)
        drafter.trace = []
        requests = [Request(name, tuple(PROMPTS[2].tolist()), 6, ()) for name in "ab"]
        list(engine.generate(requests))
        return drafter.trace

    whole = logits(512)
    for prefill_tokens in (8, 35):  # 32 and 38 tokens; 70 and 70
        chunks = logits(prefill_tokens)
        # Of the two requests one may start rounds before the other.
        for drafted in (whole, chunks):
            assert len(drafted) % TREE.steps == 0
        first = chunks[: TREE.steps]
        for ours, theirs in zip(first, whole, strict=False):
            torch.testing.assert_close(ours[0], theirs[0], atol=1e-3, rtol=1e-3)


def test_a_pass_reads_no_more_than_the_budget(
    model: DecoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While others decode, 8 tokens a pass; before that four times as many."""
    sizes: list[list[int]] = []
    original = TokenRows.ragged

    def counting(starts: Tensor, tokens: int, max_query_len: int) -> TokenRows:
        sizes.append(starts.diff().tolist())
        assert max_query_len == max(sizes[-1])
        return original(starts, tokens, max_query_len)

    monkeypatch.setattr(TokenRows, "ragged", counting)
    requests = [Request(str(index), (1,) * 30, 20, ()) for index in range(3)]
    list(Engine(model, slots=3, prefill_tokens=8).generate(requests))
    assert sizes == [[30, 2], [8], [8], [8], [4, 4], [8], [8], [8], [2]]


@pytest.mark.parametrize(
    ("prefill_tokens", "first"),
    [(PREFILL_TOKENS, 2048), (2000, 4096), (OFFLINE_PREFILL_TOKENS, 4096)],
)
def test_while_nobody_decodes_a_pass_reads_more_but_no_more_than_offline(
    model: DecoderModel, monkeypatch: pytest.MonkeyPatch, prefill_tokens: int, first: int
) -> None:
    sizes: list[int] = []
    original = TokenRows.ragged

    def counting(starts: Tensor, tokens: int, max_query_len: int) -> TokenRows:
        sizes.append(tokens)
        return original(starts, tokens, max_query_len)

    monkeypatch.setattr(TokenRows, "ragged", counting)
    requests = [Request(str(index), (1,) * 50, 8, ()) for index in range(180)]
    list(Engine(model, slots=180, prefill_tokens=prefill_tokens).generate(requests))
    assert sizes[:2] == [first, prefill_tokens]


@pytest.mark.parametrize("name", ["plain", *DRAFTERS])
@pytest.mark.parametrize(("length", "cut"), [(1, 0), (37, 0), (70, 50)])
@torch.inference_mode()
def test_a_padded_prompt_leaves_what_an_exact_one_leaves(
    model: DecoderModel, name: str, length: int, cut: int
) -> None:
    """Drafts, and the rounds that follow; read in one piece, and its end behind `cut` tokens."""
    drafter = None if name == "plain" else every_drafter(model)[name](TREE)
    prompt = random_tokens(length, seed=length)
    following = prompt.roll(-1)
    drafts, emitted = [], []
    for padding in (0, 9):
        planes = poisoned_planes(model, 5, drafter)
        batch = open_rows(model, 1, pages=4, drafter=drafter)
        if cut:
            chunk = TokenRows.even(1, cut, prompt.device), prompt[:cut], following[:cut]
            prefill(model, planes, drafter, batch, *chunk, last=0)
        garbage = random_tokens(padding, seed=1)
        tokens, behind = (torch.cat((each[cut:], garbage)) for each in (prompt, following))
        padded = TokenRows.even(1, len(tokens), prompt.device), tokens, behind
        counts = torch.tensor([length - cut])
        prefill(model, planes, drafter, batch, *padded, last=1, counts=counts)
        if drafter is not None:
            drafts.append(drafter.candidates(batch, planes, TREE))
        emitted.append([batch.emitted[0, :1].tolist()])
        for _ in range(4):
            decode_round(model, planes, drafter, batch, sampling=False)
            emitted[-1].append(batch.emitted[0, : int(batch.counts[0])].tolist())
    assert emitted[0] == emitted[1]
    if drafter is not None:
        exact, padded_drafts = drafts
        assert torch.equal(exact.tokens, padded_drafts.tokens)
        torch.testing.assert_close(exact.scores, padded_drafts.scores, atol=1e-3, rtol=1e-3)


class _Launched:
    """In place of a capture stream: a graph is what would have been captured."""

    pool: Any = None

    def __init__(self) -> None:
        self.lengths: list[int] = []  # of prompts that were read by one

    def capture(self, launch: Any, pool: Any) -> Any:
        def replay() -> None:
            self.lengths.append(len(launch.args[5]))
            launch()

        launch()
        return SimpleNamespace(replay=replay)


@pytest.mark.parametrize("prefill_tokens", [16, 512])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_graphs_of_prompts_change_no_token(
    model: DecoderModel, head: Eagle3Head, prefill_tokens: int, temperature: float
) -> None:
    """Prompts of every length that fits, one after the other; those that come together are read
    without a graph."""
    graphs, most = _Launched(), model.max_length - 2
    drafter = Eagle3Drafter(head, model, TREE)
    engine = Engine(model, drafter=drafter, slots=3, prefill_tokens=prefill_tokens)
    with torch.inference_mode():
        engine._prefill.capture(graphs)  # type: ignore[arg-type]
    plain = Engine(model)
    for length in (*range(1, 20), 31, 32, 33, 64, 65, 96, 97, 100, most - 1, most):
        prompt = tuple(random_tokens(length, seed=length).tolist())
        request = Request("a", prompt, min(6, most + 2 - length), (), temperature, seed=length)
        (ours,), (theirs,) = engine.generate([request]), plain.generate([request])
        assert ours.token_ids == theirs.token_ids, length
    assert set(graphs.lengths) >= ({16, 32, 64, 96} if prefill_tokens > 100 else {16, 32, 64})
    # Both are read whole; or the second, behind the first, to its 24th token.
    for length in (3, 40):
        prompts = [tuple(random_tokens(length, seed).tolist()) for seed in (1, 2)]
        together = [Request(str(prompt), prompt, 2, ()) for prompt in prompts]
        wanted = {done.request_id: done.token_ids for done in plain.generate(together)}
        alone = len(graphs.lengths)
        given = {done.request_id: done.token_ids for done in engine.generate(together)}
        assert given == wanted
        assert len(graphs.lengths) - alone == (length == 40 and prefill_tokens == 16)


def test_a_drafter_reads_by_a_graph_what_it_reads_without(
    model: DecoderModel, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in chunks, the last of which a graph reads behind those before it."""
    rooms, traces = list[int](), []
    length_for = PromptGraphs.length_for

    def noting(self: PromptGraphs, count: int, room: int) -> int | None:
        rooms.append(room)
        return length_for(self, count, room)

    monkeypatch.setattr(PromptGraphs, "length_for", noting)
    for graphs in (None, _Launched()):
        drafter = Eagle3Drafter(head, model, TREE)
        drafter.trace = []
        engine = Engine(model, drafter=drafter, slots=1, prefill_tokens=8)
        if graphs is not None:
            with torch.inference_mode():
                engine._prefill.capture(graphs)  # type: ignore[arg-type]
        list(engine.generate([Request("a", tuple(PROMPTS[2].tolist()), 6, ())]))
        traces.append(drafter.trace)
    assert graphs is not None and graphs.lengths == [16]
    assert rooms == [engine._batch.block_table.shape[1] * PAGE - 64]
    torch.testing.assert_close(*traces, atol=1e-3, rtol=1e-3)


def test_a_graph_reads_no_further_than_a_row_has_entries(model: DecoderModel) -> None:
    row, graphs = open_rows(model, 1, pages=4), _Launched()
    planes = poisoned_planes(model, 5)
    with torch.inference_mode():
        prompts = PromptGraphs(model, planes, None, row, graphs, limit=64)  # type: ignore[arg-type]
    assert [prompts.length_for(count, 500) for count in (1, 16, 17, 64, 65)] == [
        16,
        16,
        32,
        64,
        None,
    ]
    assert [prompts.length_for(17, room) for room in (17, 31, 32)] == [None, None, 32]


def test_staged_values_may_be_sent_again_before_they_are_used() -> None:
    staging = Staging(torch.int64, torch.device("cpu"))
    sent = [staging.send(values) for values in ([1, 2, 3], [4], [], range(100), [2**62])]
    assert [each.tolist() for each in sent] == [[1, 2, 3], [4], [], list(range(100)), [2**62]]
    numbers = Staging(torch.float32, torch.device("cpu"))
    assert numbers.send([0.5, 1]).dtype is torch.float32


def test_staging_waits_for_a_copy_that_is_under_way() -> None:
    waited: list[str] = []
    staging = Staging(torch.int64, torch.device("cpu"))
    staging._copied = SimpleNamespace(synchronize=lambda: waited.append("waited"))  # type: ignore[assignment]
    staging.send([1])
    assert waited == ["waited"]


@torch.inference_mode()
def test_warming_reads_a_short_and_a_long_prompt_and_leaves_nothing(
    model: DecoderModel, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, drafter=Eagle3Drafter(head, model, TREE), slots=2)
    request = Request("1", tuple(PROMPTS[0].tolist()), 12, ())
    (before,) = engine.generate([request])
    lengths = []
    forward = model.forward

    def counting(tokens: Tensor, *rest: object) -> object:
        lengths.append(len(tokens))
        return forward(tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "forward", counting)
    engine._prefill.warm()
    assert lengths == [1, model.max_length]  # shorter here than what is long
    monkeypatch.undo()
    row = engine._prefill.batch.rows(0, 1)
    assert not row.active.any() and not row.seq_lens.any() and not row.block_table.any()
    (after,) = engine.generate([request])
    assert after.token_ids == before.token_ids
