"""A GPU that is not there: tensors without data on the meta device; memory that runs out; streams,
events and graphs that check how they are used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bench.round import AllocationTrace, NotCapturable, RoundTrace, TracedOps, _address
from pipeline.decoder import kv


class FakeGpu(AllocationTrace):  # type: ignore[no-untyped-call]
    """Device memory of `size` bytes, and the graphs that were captured in it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.ops = TracedOps(torch.bfloat16)
        self.graphs: list[FakeGraph] = []

    @property
    def pool_bytes(self) -> int:
        """Of the graphs, which share it."""
        return max((graph.trace.peak_bytes for graph in self.graphs), default=0)

    def allocate(self, made: Tensor) -> bool:
        """A graph's own memory comes from its pool. Raises OutOfMemoryError."""
        if self.ops.trace is not None or not super().allocate(made):
            return False
        if self._held_bytes + self.pool_bytes > self.size:
            self._held_bytes = self.held_bytes()
            if self._held_bytes + self.pool_bytes > self.size:
                raise torch.OutOfMemoryError(f"{self._held_bytes:,} + {self.pool_bytes:,} bytes")
        return True

    def free_bytes(self) -> int:
        return self.size - self.held_bytes() - self.pool_bytes

    @contextmanager
    def capture(
        self, graph: FakeGraph, *, pool: object, stream: object, capture_error_mode: str
    ) -> Iterator[None]:
        """In place of torch.cuda.graph."""
        assert capture_error_mode == "thread_local", "another thread may pin memory"
        with self.ops.recorded() as trace:
            yield
        trace.close()
        graph.trace = trace
        self.graphs.append(graph)
        if self.free_bytes() < 0:
            raise torch.OutOfMemoryError(f"{self.pool_bytes:,} bytes of graphs")


class FakeGraph:
    """In place of torch.cuda.CUDAGraph."""

    trace: RoundTrace

    def replay(self) -> None:
        """Raises NotCapturable where the graph would read memory that was freed."""
        if freed := self.trace.freed_inputs:
            raise NotCapturable(f"{freed} tensors that the graph reads have been freed")


class FakeStream:
    """In place of torch.cuda.Stream."""

    made = 0

    def __init__(self, *device: object) -> None:
        FakeStream.made += 1
        self.cuda_stream = FakeStream.made

    def wait_stream(self, other: object) -> None:
        pass


class PinnedCopies(TorchFunctionMode):
    """Raises NotCapturable where pinned memory is read, or written again, before an event says that
    the copy from it or to it has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[Tensor] = []  # kept: their addresses are nobody else's
        self.copying: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            self.pinned.append(func(*args, **kwargs))
            return self.pinned[-1]
        if func is Tensor.copy_ and args[0].device != args[1].device:
            self.copying |= {_address(each) for each in self._pinned_of(args)}
            return args[0]
        used = args[:1] if func in (Tensor.copy_, Tensor.__setitem__, Tensor.tolist) else ()
        if any(_address(each) in self.copying for each in self._pinned_of(used)):
            raise NotCapturable("pinned memory is used before its copy has ended")
        return func(*args, **kwargs)

    def _pinned_of(self, operands: Sequence[Tensor]) -> list[Tensor]:
        held = {_address(each) for each in self.pinned}
        return [each for each in operands if _address(each) in held]

    def event(self) -> FakeEvent:
        """In place of torch.cuda.Event."""
        return FakeEvent(self)


class FakeEvent:
    """Ends the copies that began before it was recorded, once it is waited for."""

    def __init__(self, copies: PinnedCopies) -> None:
        self._copies = copies
        self._ends: set[int] = set()

    def record(self) -> None:
        self._ends = set(self._copies.copying)

    def synchronize(self) -> None:
        self._copies.copying -= self._ends


@contextmanager
def fake_gpu(size: int = 80 * 10**9) -> Iterator[FakeGpu]:
    """Inside, the meta device is such a GPU."""
    gpu = FakeGpu(size)
    stand_ins: dict[str, Any] = {
        "Stream": FakeStream,
        "CUDAGraph": FakeGraph,
        "graph": gpu.capture,
        "graph_pool_handle": object,
        "stream": lambda stream: ExitStack(),
        "current_stream": FakeStream,
        "mem_get_info": lambda device: (gpu.free_bytes(), size),
        "memory_reserved": lambda device: 0,
        "memory_allocated": lambda device: 0,
    }
    with ExitStack() as entered:
        for name, stand_in in stand_ins.items():
            entered.enter_context(patch.object(torch.cuda, name, stand_in))
        entered.enter_context(patch.object(kv, "GPU_TYPES", {"meta"}))
        entered.enter_context(gpu)
        yield gpu
