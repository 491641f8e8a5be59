"""Requests that come, go and are cancelled in any order: no page is lost, none is shared, and
those that stay get the tokens of plain decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pipeline.config import TreeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.kv import PageAllocator
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Request
from tests.decoder.conftest import random_tokens
from tests.decoder.random_drafters import every_drafter

TREE = TreeSection(top_k=3, steps=3, nodes=8)
#: Prompts of 1 to 61 tokens, in several chunks each, and limits of 1 to 40.
REQUESTS = [
    Request(str(index), tuple(random_tokens(1 + 12 * index % 61, index).tolist()), limit, (5,))
    for index, limit in enumerate((1, 40, 7, 23, 12, 2, 31, 17))
]
ORDERS = settings(max_examples=30, stateful_step_count=40, deadline=None, derandomize=True)


class Churn(RuleBasedStateMachine):
    """Requests by `engine`, which serves one order after another; `plain` has their tokens."""

    def __init__(self, engine: Engine, plain: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.engine, self.plain = engine, plain
        self.open: dict[str, tuple[str, list[int]]] = {}  # id → which request, its tokens
        self.sent = 0

    @initialize(which=st.integers(0, len(REQUESTS) - 1))
    def begin(self, which: int) -> None:
        self.submit(which)

    @rule(which=st.integers(0, len(REQUESTS) - 1))
    def submit(self, which: int) -> None:
        self.sent += 1
        name = f"request {self.sent}"
        self.engine.add(replace(REQUESTS[which], request_id=name))
        self.open[name] = REQUESTS[which].request_id, []

    @rule()
    def step(self) -> None:
        for emission in self.engine.step() if self.engine.busy else ():
            which, tokens = self.open[emission.request_id]  # never one that was cancelled
            tokens += emission.token_ids
            assert tuple(tokens) == self.plain[which][: len(tokens)]
            if emission.completion is not None:
                assert emission.completion.token_ids == self.plain[which]
                del self.open[emission.request_id]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        ended = self.engine.abort(name)
        assert ended is not None and ended.finish_reason == "abort"
        del self.open[name]
        assert self.engine.abort(name) is None

    @rule()
    def abandon(self) -> None:
        self.engine.abandon()
        self.open.clear()

    @invariant()
    def every_page_is_free_or_one_rows(self) -> None:
        engine, pools = self.engine, self.engine.pools
        held = [*engine._running, *engine._prefill.requests]
        private = [page for each in held for page in each.drafter_pages]
        pages = [page for each in held for page in each.pages]
        for allocator, taken in ((pools.shared, pages), (pools.drafter_pages, private)):
            assert sorted([*taken, *allocator._free]) == list(range(1, allocator.pages))
        for row, table in enumerate(engine._batch.block_table.tolist()):
            of_row = engine._running[row].pages if row < len(engine._running) else []
            assert table == [*of_row, *[0] * (len(table) - len(of_row))]
        assert engine._batch.active.tolist() == [
            int(row < len(engine._running)) for row in range(engine.slots)
        ]

    def teardown(self) -> None:
        while self.engine.busy:
            self.step()
            self.every_page_is_free_or_one_rows()
        assert not self.open, "every request that was not cancelled has ended"
        self.engine.abandon()
        self.every_page_is_free_or_one_rows()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafter", ["plain", "eagle3", "snapkv"])
def test_any_order_of_arrivals_and_cancellations(
    model: DecoderModel, drafter: str, overlap: bool
) -> None:
    drafting = every_drafter(model)[drafter](TREE) if drafter != "plain" else None
    with torch.inference_mode():
        plain = {done.request_id: done.token_ids for done in Engine(model).generate(REQUESTS)}
    engine = Engine(model, drafter=drafting, slots=3, pages=7, prefill_tokens=9, overlap=overlap)
    machine: Any = lambda: Churn(engine, plain)  # noqa: E731
    run_state_machine_as_test(machine, settings=ORDERS)


def test_a_page_that_is_not_freed_is_seen(
    model: DecoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PageAllocator, "free", lambda self, pages: None)
    churn = Churn(Engine(model, slots=2, pages=7), {})
    churn.submit(1)
    churn.engine.step()
    churn.every_page_is_free_or_one_rows()
    churn.engine.abandon()
    with pytest.raises(AssertionError):
        churn.every_page_is_free_or_one_rows()
