"""Requests that wait, stream, fail or are dropped: nobody else notices."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch

from pipeline.config import TreeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Completion, Request, pool_acceptance
from pipeline.errors import HeadError
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from tests.decoder.conftest import VOCABULARY

TREE = TreeSection(top_k=3, steps=3, nodes=8)
GOOD = [
    Request(str(index), tuple((index * 7 + step * 5) % 20 for step in range(4 + 9 * index)), 8, ())
    for index in range(6)
]


def _run(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    return {done.request_id: done for done in engine.generate(requests)}


@pytest.fixture
def expected(model: DecoderModel) -> dict[str, tuple[int, ...]]:
    """What each good request gets when it is alone."""
    return {done.request_id: done.token_ids for done in Engine(model).generate(GOOD)}


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (Request("bad", (), 4, ()), "prompt_ids is empty"),
        (Request("bad", (1,), 0, ()), "max_new_tokens is 0"),
        (Request("bad", (1,) * 150, 20, ()), "170 tokens, the engine holds 160"),
        (
            Request("bad", (1, VOCABULARY), 4, ()),
            f"token {VOCABULARY}, the vocabulary has {VOCABULARY}",
        ),
        (Request("bad", (1, -1), 4, ()), "token -1"),
        (Request("bad", (1,), 4, (), temperature=-1.0), "temperature"),
        (Request("bad", (1,), 4, (), top_p=0.0), "top_p"),
        (Request("bad", (1,), 4, (), temperature=float("nan")), "temperature is nan"),
        (Request("bad", (1,), 4, (), temperature=float("inf")), "temperature is inf"),
        (Request("bad", (1,), 4, (), top_p=float("nan")), "top_p is nan"),
        (Request("bad", (1,), 4, (), seed=2**63), f"seed is {2**63}"),
        (Request("bad", (1,), 4, (), seed=10**5000), "seed is an integer of more than 64 bits"),
        (Request("bad", (1,), 4, (), top_k=2**70), "top_k is an integer of more than 64 bits"),
        (Request("bad", (1,), 3.5, ()), "max_new_tokens is 3.5"),  # type: ignore[arg-type]
        (Request("bad", (1, 2.0), 4, ()), "token 2.0"),  # type: ignore[arg-type]
        (Request("bad", (1, "2"), 4, ()), "token '2'"),  # type: ignore[arg-type]
    ],
)
def test_a_request_that_cannot_run_is_named_and_the_others_finish(
    model: DecoderModel, expected: dict[str, tuple[int, ...]], bad: Request, problem: str
) -> None:
    done = _run(Engine(model, slots=2), [*GOOD[:3], bad, *GOOD[3:]])
    failed = done.pop("bad")
    assert failed.finish_reason == "error"
    assert problem in str(failed.error)
    assert "(fix: " in str(failed.error)
    assert {name: each.token_ids for name, each in done.items()} == expected


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_nan_logits_end_one_request_only(
    model: DecoderModel,
    head: Eagle3Head,
    expected: dict[str, tuple[int, ...]],
    drafting: bool,
    overlap: bool,
) -> None:
    # A poisoned embedding row reaches whoever reads that token: in its prompt, or as its own
    # output.
    used = {token for request in GOOD for token in request.prompt_ids}.union(*expected.values())
    poisoned = min(set(range(VOCABULARY)) - used)
    drafter = Eagle3Drafter(head, model, TREE) if drafting else None
    model.embedding = model.embedding.clone()
    model.embedding[poisoned] = float("nan")
    if drafter:
        drafter._head = replace(drafter._head, embedding=model.embedding)
    engine = Engine(model, drafter=drafter, slots=3, overlap=overlap)
    bad = Request("bad", (5, poisoned, 6), 8, ())
    for _ in range(2):  # the second time on pages that hold NaN from the first
        done = _run(engine, [*GOOD[:2], bad, *GOOD[2:]])
        failed = done.pop("bad")
        assert failed.finish_reason == "error"
        assert "NaN after 0 generated tokens" in str(failed.error)
        assert {name: each.token_ids for name, each in done.items()} == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_wait_for_pages_and_none_is_lost(
    model: DecoderModel, head: Eagle3Head, expected: dict[str, tuple[int, ...]], overlap: bool
) -> None:
    drafter = Eagle3Drafter(head, model, TREE)
    engine = Engine(model, drafter=drafter, slots=6, pages=4, overlap=overlap)  # page 0 is not free
    for _ in range(3):
        done = _run(engine, GOOD)
        assert {name: each.token_ids for name, each in done.items()} == expected
        assert engine.pools.shared.free_pages == engine.pools.shared.capacity == 3
        assert max(each.statistics.queued_seconds for each in done.values()) > 0


def test_a_request_that_the_pool_can_never_hold_is_named(model: DecoderModel) -> None:
    done = _run(Engine(model, pages=2), [Request("big", (1,) * 70, 5, ()), GOOD[0]])
    assert "needs 2 pages of key/value memory, the pool has 1" in str(done["big"].error)
    assert done["0"].finish_reason == "length"


def test_streaming_gives_the_same_tokens_piece_by_piece(
    model: DecoderModel, head: Eagle3Head, expected: dict[str, tuple[int, ...]]
) -> None:
    pieces: dict[str, list[tuple[int, ...]]] = {}
    open_requests = most = 0
    engine = Engine(model, drafter=Eagle3Drafter(head, model, TREE), slots=3)
    for emission in engine.stream(GOOD):
        open_requests += emission.request_id not in pieces
        most = max(most, open_requests)
        pieces.setdefault(emission.request_id, []).append(emission.token_ids)
        if emission.completion:
            open_requests -= 1
            assert emission.completion.token_ids == expected[emission.request_id]
    assert {name: tuple(chain(*parts)) for name, parts in pieces.items()} == expected
    assert min(len(parts) for parts in pieces.values()) > 3
    assert most == 3


def test_requests_are_taken_only_as_slots_become_free(model: DecoderModel) -> None:
    taken: list[str] = []

    def source() -> object:
        for request in GOOD:
            taken.append(request.request_id)
            yield request

    completions = Engine(model, slots=2).generate(source())  # type: ignore[arg-type]
    next(completions)
    assert len(taken) <= 4
    assert len(list(completions)) == 5


def test_a_caller_that_stops_listening_leaves_a_clean_engine(
    model: DecoderModel, head: Eagle3Head, expected: dict[str, tuple[int, ...]]
) -> None:
    engine = Engine(model, drafter=Eagle3Drafter(head, model, TREE), slots=3, prefill_tokens=5)
    for stop_after in (1, 3, 9):
        stream = engine.stream(GOOD)
        for _ in range(stop_after):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert engine.pools.shared.free_pages == engine.pools.shared.capacity
    assert {done.request_id: done.token_ids for done in engine.generate(GOOD)} == expected


def test_a_head_of_another_target_is_refused(model: DecoderModel, head: Eagle3Head) -> None:
    foreign = Eagle3Head(head.shape.model_copy(update={"hidden_size": 96}))
    with pytest.raises(HeadError, match=r"hidden_size is 96, the target's is 48.*fix"):
        Eagle3Drafter(foreign, model, TREE)
    wider = Eagle3Head(head.shape.model_copy(update={"vocab_size": 200}))
    with pytest.raises(HeadError, match="vocab_size is 200"):
        Eagle3Drafter(wider, model, TREE)


def test_statistics_tell_rounds_acceptance_and_times(model: DecoderModel, head: Eagle3Head) -> None:
    done = _run(Engine(model, drafter=Eagle3Drafter(head, model, TREE), slots=3), GOOD)
    for completion in done.values():
        statistics = completion.statistics
        assert statistics.round_tokens == len(completion.token_ids) - 1
        assert statistics.reached[0] == statistics.rounds
        assert statistics.reached == sorted(statistics.reached, reverse=True)
        assert all(0 <= rate <= 1 for rate in pool_acceptance([statistics]).alpha)
        assert statistics.seconds_per_token > 0
        assert statistics.first_token_seconds > 0
    assert torch.is_grad_enabled(), "the engine's inference mode must not leak"


def _step_through(engine: Engine) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    while engine.busy:
        ended = [emission.completion for emission in engine.step()]
        done |= {each.request_id: each for each in ended if each}
    return done


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_join_while_others_run(
    model: DecoderModel, head: Eagle3Head, expected: dict[str, tuple[int, ...]], overlap: bool
) -> None:
    engine = Engine(model, drafter=Eagle3Drafter(head, model, TREE), slots=4, overlap=overlap)
    done: dict[str, tuple[int, ...]] = {}
    for request in GOOD:
        engine.add(request)
        for emission in engine.step():
            if emission.completion:
                done[emission.request_id] = emission.completion.token_ids
    done |= {name: each.token_ids for name, each in _step_through(engine).items()}
    assert done == expected
    assert not engine.busy and engine.running == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_aborted_requests_leave_their_pages_and_nobody_notices(
    model: DecoderModel,
    head: Eagle3Head,
    expected: dict[str, tuple[int, ...]],
    overlap: bool,
    steps: int,
) -> None:
    drafter = Eagle3Drafter(head, model, TREE)
    engine = Engine(model, drafter=drafter, slots=3, prefill_tokens=5, overlap=overlap)
    for request in GOOD:
        engine.add(request)
    done = [emission.completion for _ in range(steps) for emission in engine.step()]
    early = {each.request_id: each.token_ids for each in done if each}
    for name in ("1", "2", "4"):  # running, being read or waiting, as the steps have it
        free = engine.pools.shared.free_pages
        held = engine.running
        ended = engine.abort(name)
        assert (ended is None) == (name in early)
        if ended is not None:
            assert ended.finish_reason == "abort"
            assert ended.token_ids == expected[name][: len(ended.token_ids)]
            assert engine.pools.shared.free_pages - free == held - engine.running
        assert engine.abort(name) is None
    rest = {name: each.token_ids for name, each in _step_through(engine).items()}
    aborted = {"1", "2", "4"} - set(early)
    assert early | rest == {name: ids for name, ids in expected.items() if name not in aborted}
    assert engine.pools.shared.free_pages == engine.pools.shared.capacity
    assert engine.pools.drafter_pages.free_pages == engine.pools.drafter_pages.capacity
