"""Key/value memory: who owns it, how large it is, how far the rotary tables reach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.config import TreeSection
from pipeline.decoder import kv
from pipeline.decoder.engine import Engine
from pipeline.decoder.kv import PlaneShape, _free_of_container, free_bytes, pages_for
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.layer import PAGE, Packed
from pipeline.decoder.ops.tree import HEADROOM
from pipeline.decoder.request import Request
from pipeline.errors import ConfigError
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.tuning.cost import measure_costs
from pipeline.tuning.verification import ImposedAcceptance

CPU = torch.device("cpu")
TREE = TreeSection(top_k=3, steps=4, nodes=10)
CHAIN = TreeSection(top_k=1, steps=12, nodes=13)


def _requests(count: int) -> list[Request]:
    return [Request(str(index), tuple(range(3, 8 + 7 * index)), 12, ()) for index in range(count)]


def test_rotary_tables_reach_to_the_end_of_a_round_in_flight(
    model: DecoderModel, head: Eagle3Head
) -> None:
    """A request of full length, the deepest trees, every draft accepted, one round too many."""
    drafter = Eagle3Drafter(head, model, CHAIN)
    for table in (*model.rotary, *drafter._head.rotary):
        assert len(table) == model.max_length + HEADROOM
    for new_tokens in range(2, 2 + CHAIN.steps):
        accept_all = ImposedAcceptance((CHAIN.steps,), CPU)
        engine = Engine(model, drafter=drafter, overlap=True, verify=accept_all)
        prompt = (1,) * (model.max_length - new_tokens)
        (done,) = engine.generate([Request("a", prompt, new_tokens, ())])
        assert len(done.token_ids) == new_tokens


def test_the_deepest_tree_that_can_be_configured_has_room(
    model: DecoderModel, head: Eagle3Head
) -> None:
    deepest = TreeSection(top_k=1, steps=65, nodes=64)
    Engine(model, drafter=Eagle3Drafter(head, model, deepest), overlap=True)


def test_engines_and_measurements_share_a_drafter(model: DecoderModel, head: Eagle3Head) -> None:
    """Another engine and the clock, in the middle of a reply, change no draft of it."""

    def logits(disturb: Callable[[Eagle3Drafter], object]) -> list[Tensor]:
        drafter = Eagle3Drafter(head, model, TREE)
        stream = Engine(model, drafter=drafter).stream(_requests(1))
        for _ in range(4):
            next(stream)
        disturb(drafter)
        drafter.trace = []
        for _ in stream:
            pass
        return drafter.trace

    def engine(drafter: Eagle3Drafter) -> None:
        list(Engine(model, drafter=drafter, slots=2).generate(_requests(3)))

    def measure(drafter: Eagle3Drafter) -> None:
        measure_costs(model, drafter, 1, 20, (4,), beam_counts=(1,), step_counts=(1,), repeats=1)

    undisturbed = logits(lambda drafter: None)
    assert len(undisturbed) > 20
    for disturb in (engine, measure):
        for ours, theirs in zip(logits(disturb), undisturbed, strict=True):
            assert torch.equal(ours, theirs)


def _with_free_memory(monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    monkeypatch.setattr(kv, "free_bytes", lambda device: size)


def _page_bytes(model: DecoderModel, drafter: Eagle3Drafter) -> int:
    return model.plane_shape.page_bytes + drafter.planes[0].page_bytes


def test_the_pool_takes_what_slots_need_and_never_more_than_its_share_of_free_memory(
    model: DecoderModel, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Eagle3Drafter(head, model, TREE)
    page = _page_bytes(model, drafter)
    plain = {done.request_id: done.token_ids for done in Engine(model).generate(_requests(6))}
    sizes = {}
    for pages in (100, 20, 9):
        _with_free_memory(monkeypatch, 2 * pages * page + 1)
        engine = Engine(model, drafter=drafter, slots=10)
        sizes[pages] = engine.pools.shared.pages
    # Requests wait for pages where there are not enough for all of them.
    assert {done.request_id: done.token_ids for done in engine.generate(_requests(6))} == plain
    full = pages_for(model.max_length + 5 + 10)
    assert sizes == {100: 10 * full + 1, 20: 20, 9: 9}
    _with_free_memory(monkeypatch, None)  # nobody says what is free
    assert Engine(model, drafter=drafter, slots=10).pools.shared.pages == 10 * full + 1


def test_memory_that_holds_no_request_is_named(
    model: DecoderModel, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Eagle3Drafter(head, model, TREE)
    _with_free_memory(monkeypatch, 2 * 3 * _page_bytes(model, drafter))
    with pytest.raises(ConfigError, match=r"one request of full length take .* GiB.*50% of what"):
        Engine(model, drafter=drafter, slots=10)


def test_free_memory_of_the_host() -> None:
    free = free_bytes(CPU)
    assert free is None or 2**20 < free < 2**50


def test_free_memory_of_a_container(tmp_path: Path) -> None:
    assert _free_of_container(tmp_path) is None
    for name, text in (
        ("memory.max", "max\n"),
        ("memory.current", "3000\n"),
        ("memory.stat", "anon 1\ninactive_file 1000\n"),
    ):
        (tmp_path / name).write_text(text)
    assert _free_of_container(tmp_path) is None, "no limit"
    (tmp_path / "memory.max").write_text("10000\n")
    assert _free_of_container(tmp_path) == 8000


def test_bytes_of_a_page() -> None:
    shape = PlaneShape(32, 8, 128, torch.bfloat16)
    assert shape.page_bytes == 2 * 2 * 32 * 8 * 128 * PAGE  # 128 KiB a token, as of Llama-3.1-8B


def test_weights_are_packed_in_the_type_they_are_stored_in(
    make_target: Callable[[str], Path], head: Eagle3Head
) -> None:
    packed: list[torch.dtype] = []

    class Ops(TorchOps):
        def pack(self, weight: Tensor) -> Packed:
            packed.append(weight.dtype)
            return super().pack(weight)

    model = DecoderModel.load(
        make_target("llama"),
        (1, 3, 4),
        device=CPU,
        dtype=torch.float32,
        max_length=64,
        ops=Ops(torch.float32),
    )
    target = len(packed)
    half = Eagle3Head(head.shape).half()
    Eagle3Drafter(half, model, TREE)
    assert set(packed[:target]) == {torch.float32}
    assert set(packed[target:]) == {torch.float32}, "float16 is widened"
    packed.clear()
    Eagle3Drafter(Eagle3Head(head.shape).bfloat16(), model, TREE)
    assert set(packed) == {torch.bfloat16}
