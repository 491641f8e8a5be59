"""How a round is launched, and how its tokens leave.

On a CPU a round runs eagerly on exactly the active rows. On CUDA every batch-size bucket has one
graph that holds a whole round; a batch of 5 replays the graph of 8, whose other rows are inert. The
host never waits inside a round: it launches the next one, and reads the tokens of the last from
pinned memory.

    GPU    round 1 ─────── round 2 ─────── round 3 ───────
    copy             └ 1 ┘           └ 2 ┘
    host   launch 2 … read 1, join and leave, launch 3 … read 2

A short prompt that is read alone is a graph as well: its kernels may take a GPU less time than the
host takes to launch them one by one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pipeline.decoder.batch import DecodeBatch, TokenRows
from pipeline.decoder.drafter import Drafter
from pipeline.decoder.kv import Planes, on_gpu
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.round import Verify, decode_round, prefill


def default_buckets(slots: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then every 8th size: padding never wastes more than seven rows."""
    smaller = {size for size in (1, 2, 4, *range(8, slots, 8)) if size < slots}
    return tuple(sorted(smaller | {slots}))


#: Device memory that libraries take for themselves: workspaces of cuBLAS on two streams (32 MiB on
#: an H100, docs.pytorch.org, "CUDA semantics"), and an allowance for every graph: its kernels'
#: arguments.
_WORKSPACES, _GRAPH = 2 * 32 * 2**20, 8 * 2**20


def planned_bytes(
    model: DecoderModel, rows: int, nodes: int, *, graphs: int, prefill_tokens: int
) -> int:
    """What an engine takes on a GPU beside weights, keys and values: rounds of `rows` trees of
    `nodes` nodes and short prompts, whose graphs share one pool, and other prompts, which do not
    share it.

    A drafter's forward is no larger than the verification of its tree.
    """
    verified, short = rows * nodes, PROMPT_LENGTHS[-1]
    round_bytes = max(
        model.working_bytes(rows, nodes, tokens=verified, drawn=verified),
        model.working_bytes(1, short, tokens=short, drawn=1),
    )
    prompts = min(rows, prefill_tokens)
    prompt_bytes = model.working_bytes(
        prompts, prefill_tokens, tokens=prefill_tokens, drawn=prompts
    )
    return round_bytes + prompt_bytes + _WORKSPACES + graphs * _GRAPH


#: Tokens of prompts that graphs read. On paper, for an 8B target on an H100: up to 128 a forward
#: takes what reading its weights takes, so padding is free; from 256 on arithmetic takes longer,
#: and the host can launch ahead.
PROMPT_LENGTHS = (16, 32, 64, 96, 128, 192, 256)


class RoundLauncher:
    """Launches rounds on the first rows of a batch."""

    def __init__(
        self,
        model: DecoderModel,
        planes: Planes,
        drafter: Drafter | None,
        batch: DecodeBatch,
        *,
        buckets: Sequence[int] | None,
        verify: Verify | None = None,
        captures: CaptureStream | None = None,
    ) -> None:
        """`buckets` are the batch sizes of rounds; None runs exactly the active rows. `captures`
        says what to capture on, if not a stream of its own.

        On CUDA the graphs are captured here, while every row is still inert. Raises ValueError for
        buckets that the whole batch does not fit into.
        """
        self._model, self._planes, self._drafter, self._batch = model, planes, drafter, batch
        self._buckets, self._verify = None if buckets is None else sorted(buckets), verify
        if self._buckets is not None and max(self._buckets, default=0) != len(batch):
            problem = (
                f"the largest of buckets {self._buckets} must be the batch's {len(batch)} rows"
            )
            raise ValueError(problem)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        if on_gpu(model.device):
            self._captures = captures or CaptureStream(model.device)
            self._capture()

    def launcher(self, rows: int, *, sampling: bool) -> Callable[[], None]:
        """What advances the first `rows` rows by one round: `decode_round`, or a graph of it."""
        size = rows if self._buckets is None else self._buckets[bisect_left(self._buckets, rows)]
        graph = self._graphs.get((size, sampling))
        return self._eager(size, sampling=sampling) if graph is None else graph.replay

    def _eager(self, size: int, *, sampling: bool) -> Callable[[], None]:
        memory = self._planes, self._drafter, self._batch.rows(0, size)
        return partial(decode_round, self._model, *memory, sampling=sampling, verify=self._verify)

    def _capture(self) -> None:
        assert self._buckets is not None
        for size in reversed(self._buckets):  # smaller ones fit into the memory of larger ones
            for sampling in (False, True):
                launch = self._eager(size, sampling=sampling)
                graph = self._captures.capture(launch, self._captures.pool)
                self._graphs[size, sampling] = graph


class PromptGraphs:
    """Graphs that read a prompt's last tokens, its first row of a batch, at one of some lengths.

    tokens     p0  p1  p2  p3  p4 │ x   x   x       5 tokens in the graph of 8: what the others
    entries    L  …           L+4 │ L+5 …           leave is written over before it is seen
    """

    def __init__(
        self,
        model: DecoderModel,
        planes: Planes,
        drafter: Drafter | None,
        row: DecodeBatch,
        captures: CaptureStream,
        *,
        limit: int = PROMPT_LENGTHS[-1],
    ) -> None:
        """Captured while nobody holds the `row`, for prompts of at most `limit` tokens."""
        self._lengths = [each for each in PROMPT_LENGTHS if each <= limit]
        most = max(self._lengths, default=0)
        self._tokens, self._next_tokens = (
            torch.zeros(most, dtype=torch.int64, device=row.roots.device) for _ in range(2)
        )
        self._counts, self._captures = torch.ones_like(row.seq_lens), captures
        self._graphs = {}
        for length in reversed(self._lengths):
            rows = TokenRows.even(1, length, row.roots.device)
            padded = rows, self._tokens[:length], self._next_tokens[:length]
            memory = model, planes, drafter, row
            launch = partial(prefill, *memory, *padded, last=1, counts=self._counts)
            self._graphs[length] = captures.capture(launch, captures.pool)

    def length_for(self, count: int, room: int) -> int | None:
        """Of the graph that reads `count` tokens where `room` entries are left; None without."""
        longer = (each for each in self._lengths if count <= each <= room)
        return next(longer, None)

    def read(self, length: int, tokens: Tensor, next_tokens: Tensor) -> None:
        """Read tokens [n] by the graph of `length`, and draw what follows them."""
        count = len(tokens)
        self._tokens[:count].copy_(tokens)
        self._next_tokens[:count].copy_(next_tokens)
        self._counts.fill_(count)
        self._graphs[length].replay()


class CaptureStream:
    """A stream to capture graphs on that no other living object captures on.

    Graphs keep the address of the cuBLAS workspace of the stream that they were captured on, and
    when one of them goes, torch frees that workspace under the others
    (github.com/pytorch/pytorch/issues/193402). Torch's own capture stream is one for the whole
    process, and new streams are old ones again after 32; so those that are held are remembered, and
    graphs of one stream live and go together.
    """

    #: Streams that torch hands out in turn.
    _STREAMS = 32
    #: By handle. Weak references to these objects, never to a torch stream: its memory is freed
    #: without clearing them, and the interpreter then ends with a segmentation fault.
    _held: ClassVar[WeakValueDictionary[int, CaptureStream]] = WeakValueDictionary()

    def __init__(self, device: torch.device) -> None:
        """With more than 32 holders one is shared."""
        for _ in range(self._STREAMS):
            self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if self.stream.cuda_stream not in self._held:
                break
        self._held[self.stream.cuda_stream] = self
        #: Memory for graphs of which one runs at a time.
        self.pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, launch: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
        """Its kernels as a CUDA graph, with memory from `pool` or of its own.

        The graph reads and writes the tensors that `launch` does: the caller keeps them, and this.
        """
        # Kernels compile, libraries choose their algorithms and make their workspaces outside the
        # capture, on the stream that it will use.
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                launch()
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may pin memory meanwhile, which a capture of the whole process forbids.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode=mode):
            launch()
        return graph


class EmittedRow(NamedTuple):
    """What a launch did for one row."""

    tokens: list[int]
    drafted: int  # nodes that were proposed, not counting the root
    deepest: int  # of them; 0 without


class PendingTokens:
    """Tokens of one launch on their way to the host."""

    def __init__(self, copies: Sequence[Tensor], arrived: torch.cuda.Event | None) -> None:
        """`copies` of a batch's `emitted`, `counts` and `proposed`."""
        self._copies, self._arrived = copies, arrived

    def wait(self) -> list[EmittedRow]:
        """Of each row; waits for the copy, not for later rounds."""
        if self._arrived is not None:
            self._arrived.synchronize()
        rows = zip(*(tensor.tolist() for tensor in self._copies), strict=True)
        return [EmittedRow(tokens[:count], *proposed) for tokens, count, proposed in rows]


def copy_to_host(batch: DecodeBatch) -> PendingTokens:
    """Start copying what the last launch emitted; the batch may be used again at once."""
    leaving = batch.emitted, batch.counts, batch.proposed
    if not on_gpu(batch.roots.device):
        return PendingTokens([each.clone() for each in leaving], None)
    pinned = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in leaving]
    for copy, each in zip(pinned, leaving, strict=True):
        copy.copy_(each, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return PendingTokens(pinned, arrived)
