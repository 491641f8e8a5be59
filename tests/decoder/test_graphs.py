"""How rounds are launched: batch sizes, and on which stream CUDA graphs are captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.decoder import graphs
from pipeline.decoder.engine import Engine
from pipeline.decoder.graphs import CaptureStream, RoundLauncher, default_buckets
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Request
from tests.decoder.conftest import open_rows


def _requests(count: int) -> list[Request]:
    return [Request(str(index), tuple(range(3, 8 + 7 * index)), 12, ()) for index in range(count)]


@pytest.mark.parametrize("buckets", [(1, 2, 4), (), (1, 16)])
def test_buckets_that_do_not_end_at_the_slots_are_refused(
    model: DecoderModel, buckets: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="must be the batch's 8 rows"):
        Engine(model, slots=8, buckets=buckets)


def test_buckets_in_any_order(model: DecoderModel) -> None:
    engine = Engine(model, slots=5, buckets=(5, 1, 3))
    plain = {done.request_id: done.token_ids for done in Engine(model).generate(_requests(6))}
    assert {done.request_id: done.token_ids for done in engine.generate(_requests(6))} == plain


def test_buckets_never_waste_more_than_seven_rows() -> None:
    assert default_buckets(1) == (1,)
    assert default_buckets(8) == (1, 2, 4, 8)
    assert default_buckets(20) == (1, 2, 4, 8, 16, 20)


class _Stream:
    """A CUDA stream's interface; there are 32, handed out in turn.

    No weak reference can be made to one: torch's own leave them dangling.
    """

    __slots__ = ("cuda_stream",)
    made = 0

    def __init__(self, device: torch.device | None = None) -> None:
        self.cuda_stream = _Stream.made % 32
        _Stream.made += 1

    def wait_stream(self, other: object) -> None:
        pass


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """Stands in for CUDA; the list says what happened on which stream."""
    happened: list[tuple[str, object]] = []

    @contextmanager
    def entered(name: str, stream: object) -> Iterator[None]:
        happened.append((name, stream))
        yield

    def graph(graph: object, *, pool: object, stream: object, capture_error_mode: str) -> Any:
        assert capture_error_mode == "thread_local", "another thread may pin memory"
        return entered("capture", stream)

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: entered("warm-up", stream))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    return happened


def test_a_graph_is_captured_on_the_stream_that_it_was_warmed_up_on(
    without_a_gpu: list[tuple[str, object]],
) -> None:
    held, launched = CaptureStream(torch.device("cuda")), list[int]()
    held.capture(lambda: launched.append(1))
    assert without_a_gpu == [("warm-up", held.stream), ("capture", held.stream)]
    assert len(launched) == 3, "twice to warm up, once into the graph"


def test_a_stream_that_is_held_is_not_handed_out_again(
    without_a_gpu: list[tuple[str, object]],
) -> None:
    cuda = torch.device("cuda")
    held = [CaptureStream(cuda) for _ in range(20)]
    handles = {each.stream.cuda_stream for each in held}
    later = {CaptureStream(cuda).stream.cuda_stream for _ in range(100)}  # held for a moment each
    assert len(handles) == 20
    assert not handles & later


def test_a_launcher_captures_on_one_stream_and_another_on_another(
    model: DecoderModel,
    without_a_gpu: list[tuple[str, object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graphs, "decode_round", lambda *arguments, **named: None)
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    launchers, streams = [], []
    for _ in range(3):
        batch = open_rows(model, 4, pages=1)
        launchers.append(RoundLauncher(on_gpu, Planes(torch.zeros(0)), None, batch, buckets=(1, 4)))
        assert len(without_a_gpu) == 8, "two sizes, greedy and sampling"
        streams.append({stream.cuda_stream for _, stream in without_a_gpu})  # type: ignore[attr-defined]
        without_a_gpu.clear()
    assert [len(each) for each in streams] == [1, 1, 1]
    assert len(set.union(*streams)) == 3
