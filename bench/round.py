"""What a decoding round launches, allocates and moves, without a GPU: `python -m bench.round`.

A round of Llama-3.1-8B's shape runs on torch's meta device, whose tensors have shapes and no data,
with the operations of a GPU. Every one of them is recorded on its way:

    launches     of Triton kernels, and one for every torch operation that is no view; a sort or a
                 product that cuBLAS splits launches more than it is counted for
    allocations  of device memory, and the most that is held at a time: what a graph's pool takes
    read         bytes of every operand once, of tables and caches only what is looked up
    written      bytes of every result

A captured round replays what it did once, so a round that asks for a value, makes a tensor on the
host, leaves memory behind, or does something else the second time raises NotCapturable.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench import random_target
from bench.random_target import LLAMA_8B, RandomWeights
from pipeline.config import NgramSection, TreeSection
from pipeline.decoder.drafter import Drafter
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.layer import PAGE, Packed
from pipeline.decoder.ops.parallel import TensorGroup
from pipeline.decoder.ops.tree import WINDOW
from pipeline.decoder.ops.triton.ops import TritonOps, chunks_of
from pipeline.decoder.round import decode_round
from pipeline.drafters.lookup import LookupDrafter
from pipeline.drafters.ngram import NgramDrafter
from pipeline.heads.base import DraftingHead
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.tuning.cost import open_batch

META = torch.device("meta")
CONTEXT, DRAFT_VOCABULARY = 4096, 32000
TREE = TreeSection(top_k=4, steps=5, nodes=16)
#: torch's allocator hands out multiples of this many bytes.
_BLOCK = 512


class NotCapturable(AssertionError):
    """An operation that a captured round must not contain."""


class Launch(NamedTuple):
    """What one kernel does."""

    name: str
    arguments: str  # shapes, and every number that a graph would keep
    read: int  # bytes
    written: int


@contextmanager
def without_data() -> Iterator[None]:
    """Inside, random targets and heads have shapes and no numbers, and ids are not read."""
    with (
        torch.device("meta"),
        patch.object(DraftingHead, "check_fits", _not_read),
        patch.object(DraftingHead, "set_vocabulary", _not_read),
        patch.object(random_target, "RandomWeights", ShapedWeights),
    ):
        yield


def _not_read(head: DraftingHead, *arguments: object) -> None:
    """Ids of a draft vocabulary are neither made nor checked."""


class ShapedWeights(RandomWeights):
    """Weights of a configuration without numbers in them."""

    def __init__(
        self, config: Any, *, device: torch.device, dtype: torch.dtype, scale: float
    ) -> None:
        self._config, self._device, self._dtype = config, device, dtype

    def _matrix(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, device=self._device, dtype=self._dtype)


class AllocationTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the device memory that is allocated inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocations = 0
        self.peak_bytes = 0
        #: By address, of what was allocated inside. A weak reference keeps an address from being
        #: used again.
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._held_bytes = 0  # at most

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        before = {_address(each) for each in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        for each in _tensors(result):
            if _address(each) not in before:
                self.allocate(each)
        return result

    def allocate(self, made: Tensor) -> bool:
        """Count a tensor's memory, if it is new and on the device."""
        storage = made.untyped_storage()
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        if made.device.type == "cpu" or size == 0 or _address(made) in self._made:
            return False
        self._made[_address(made)] = _weakly(made), size
        self.allocations += 1
        self._held_bytes += size
        if self._held_bytes > self.peak_bytes:  # unless some of it has been freed since
            self._held_bytes = self.held_bytes()
            self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        return True

    def held_bytes(self) -> int:
        """Bytes that were allocated inside and have not been freed."""
        return sum(size for held, size in self._made.values() if not _is_freed(held))


class RoundTrace(AllocationTrace):  # type: ignore[no-untyped-call]
    """Records what runs inside, and raises NotCapturable for what a graph cannot hold.

    `context` entries of every row are committed; keys and values have no others to be read.
    """

    def __init__(self, context: int = CONTEXT) -> None:
        super().__init__()
        self.context = context
        self.launches: list[Launch] = []
        self._inputs: dict[int, StorageWeakRef] = {}
        self._empty: set[int] = set()  # allocated, and nothing written yet

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        name, operands = str(func), _tensors((args, kwargs))
        _refuse_looking(func, name, operands)
        _refuse_host(name, operands, kwargs)
        key = torch._C.DispatchKey.CompositeImplicitAutograd
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        for each in operands:
            self._take(each)
        before = {_address(each) for each in operands}
        result = func(*args, **kwargs)
        results = _tensors(result)
        _refuse_host(name, results, {})
        made = [each for each in results if _address(each) not in before]
        for each in made:
            self.allocate(each)
        if name.split(".")[1] in _ALLOCATING:
            self._empty |= {_address(each) for each in made}
            return result
        changed = _changed(func, args, kwargs)
        if made or changed:
            written = made + changed
            read = _read_bytes(name.split(".")[1], operands, changed, made)
            self._launch(name, (args, kwargs), read, sum(map(_bytes, written)), written)
        return result

    def start(
        self, kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], constants: Any
    ) -> None:
        """Record the launch of a Triton kernel."""
        name = str(kernel.__name__)
        by_name = dict(zip(kernel.arg_names, arguments, strict=False))
        tensors = {key: each for key, each in by_name.items() if isinstance(each, Tensor)}
        for each in tensors.values():
            self._take(each)
        rule = _TOUCHED.get(name.removesuffix("_kernel"))
        touched = rule(by_name, constants, self.context) if rule else {}
        read = written = 0
        results, seen = list[Tensor](), set[tuple[int, int]]()
        for key, each in tensors.items():
            if _place(each) in seen:  # in place of one that the kernel does not read
                continue
            seen.add(_place(each))
            fresh, whole = _address(each) in self._empty, _bytes(each)
            reads, writes = touched.get(key, (0, whole) if fresh else (whole, 0))
            read, written = read + reads, written + writes
            if fresh:
                results.append(each)
        self._launch(name, (grid, arguments, constants), read, written, results)

    def close(self) -> None:
        """After the last operation: nothing that was allocated inside may be left."""
        if left := self.held_bytes():
            raise NotCapturable(f"{left:,} bytes that the round allocated are still held after it")

    @property
    def freed_inputs(self) -> int:
        """How many tensors from outside were read or written, and have been freed since."""
        return sum(map(_is_freed, self._inputs.values()))

    def _take(self, operand: Tensor) -> None:
        address = _address(operand)
        if address not in self._made and operand.untyped_storage().nbytes():
            self._inputs.setdefault(address, _weakly(operand))

    def exchange(self, name: str, read: Tensor, written: Tensor) -> None:
        """Record what ranks send each other."""
        self._take(read)
        self._launch(name, (read, written), _bytes(read), _bytes(written), [written])

    def _launch(
        self, name: str, arguments: Any, read: int, written: int, results: Iterable[Tensor]
    ) -> None:
        self._empty -= {_address(each) for each in results}
        self.launches.append(Launch(name, _described(arguments), read, written))


class TracedOps(TritonOps):
    """The operations of a GPU; launches go to the trace that is open, if any."""

    trace: RoundTrace | None = None
    #: Whether the target's layers are as `eagle3 float8` rounds them.
    float8 = False

    def pack_layer(self, weight: Tensor) -> Packed:
        return self.pack_float8(weight) if self.float8 else self.pack(weight)

    def _start(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        warps: int,
        stages: int,
        **constants: Any,
    ) -> None:
        if self.trace is not None:
            self.trace.start(kernel, grid, arguments, constants)

    @contextmanager
    def recorded(self, context: int = CONTEXT) -> Iterator[RoundTrace]:
        """Record what runs inside."""
        assert self.trace is None
        self.trace = RoundTrace(context)
        try:
            with self.trace:
                yield self.trace
        finally:
            self.trace = None


@dataclass(frozen=True)
class TracedGroup(TensorGroup):
    """What a rank sends the others, each time a launch; nobody is there."""

    ops: TracedOps

    def sum(self, part: Tensor) -> Tensor:
        self._record("all_reduce", part, part)
        return part

    def gather(self, part: Tensor) -> Tensor:
        whole = part.new_empty(len(part), self.size * part.shape[1])
        self._record("all_gather", part, whole)
        return whole

    def agree(self, decided: Tensor) -> Tensor:
        self._record("broadcast", decided, decided)
        return decided

    def _record(self, name: str, read: Tensor, written: Tensor) -> None:
        if self.ops.trace is not None:
            self.ops.trace.exchange(name, read, written)


#: What is left of torch.tensor, which copies numbers from the host.
_FROM_HOST = {"aten.detach_.default", "aten.lift_fresh.default"}
#: Operations that allocate and write nothing.
_ALLOCATING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
#: Operations whose first operand is a table: as much of it is read as comes out.
_LOOKUPS = {"embedding", "gather", "index", "index_select", "take"}
#: Operations in place that do not read what they overwrite.
_OVERWRITING = {"copy_", "fill_", "zero_", "normal_", "random_", "uniform_"}


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _weakly(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_freed(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def _place(tensor: Tensor) -> tuple[int, int]:
    return _address(tensor), int(tensor.storage_offset())


def _bytes(tensor: Tensor) -> int:
    """What reading a tensor takes; of an expanded one, once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1
    for size, stride in sizes:
        count *= size if stride or not size else 1
    return count * tensor.dtype.itemsize


def _refuse_looking(func: Any, name: str, operands: Sequence[Tensor]) -> None:
    tags = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
    # Indices are looked at where they are a mask.
    masked = any(each.dtype in (torch.bool, torch.uint8) for each in operands[1:])
    if any(tag in func.tags for tag in tags) and (masked or "aten.index." not in name):
        raise NotCapturable(f"{name} looks at a value")


def _refuse_host(name: str, tensors: Sequence[Tensor], kwargs: dict[str, Any]) -> None:
    device = kwargs.get("device")
    to_host = device is not None and torch.device(device).type == "cpu"
    to_host = to_host or bool(kwargs.get("pin_memory")) or name in _FROM_HOST
    if to_host or any(each.device.type == "cpu" for each in tensors):
        raise NotCapturable(f"{name} has a tensor on the host")


def _changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The operands that an operation writes to."""
    values = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    written = [
        values.get(each.name)
        for each in func._schema.arguments
        if each.alias_info is not None and each.alias_info.is_write
    ]
    return _tensors(written)


def _read_bytes(
    operation: str, operands: Sequence[Tensor], changed: Sequence[Tensor], made: Sequence[Tensor]
) -> int:
    overwritten = [*changed] if operation in _OVERWRITING else []
    unlike = {
        _place(each): each for each in operands if not any(each is other for other in overwritten)
    }
    tables = operands[:1] if operation in _LOOKUPS else []
    looked_up = sum(map(_bytes, made)) if tables else 0
    whole = [each for each in unlike.values() if not any(each is table for table in tables)]
    return looked_up + sum(map(_bytes, whole))


def _described(arguments: Any) -> str:
    """Shapes of the tensors, and all numbers."""
    return repr(
        [tuple(each.shape) if isinstance(each, Tensor) else each for each in tree_leaves(arguments)]
    )


#: Parameter → bytes that are read, and written.
_Touched = dict[str, tuple[int, int]]


def _norm(arguments: dict[str, Any], constants: Any, context: int) -> _Touched:
    return {} if constants["HAS_UPDATE"] else {"update": (0, 0), "total": (0, 0)}


def _embed(arguments: dict[str, Any], constants: Any, context: int) -> _Touched:
    return {"embedding": (_bytes(arguments["hidden"]), 0)}


def _rope(arguments: dict[str, Any], constants: Any, context: int) -> _Touched:
    keys, tokens = arguments["keys"], len(arguments["positions"])
    row, item = 2 * constants["HALF"], keys.dtype.itemsize
    entry = 0, tokens * constants["GROUPS"] * row * item
    gain = (4 * row if constants["NORMS"] else 0), 0
    angle = tokens * row * item, 0
    gains = {"query_gain": gain, "key_gain": gain}
    return {"cos": angle, "sin": angle, "keys": entry, "values": entry, **gains}


def _attention(arguments: dict[str, Any], constants: Any, context: int) -> _Touched:
    keys, rows = arguments["keys"], len(arguments["seq_lens"])
    entries = rows * (context + len(arguments["query"]) // rows)
    cached = entries * constants["GROUPS"] * constants["DIM"] * keys.dtype.itemsize
    partial, lse = _parts(arguments, context)
    return {
        "keys": (cached, 0),
        "values": (cached, 0),
        "block_table": (rows * -(-context // PAGE) * 8, 0),
        "partial": (partial, partial),
        "lse_log2": (lse, lse),
        "arrived": (0, 0),
    }


def _parts(arguments: dict[str, Any], context: int) -> tuple[int, int]:
    """Bytes of the chunks' results that are used; none where no row is cut."""
    partial, lse = arguments["partial"], arguments["lse_log2"]
    room = len(partial)
    chunks = chunks_of(-(-(context + WINDOW) // PAGE), partial.shape[2])[0] if room else 1
    if chunks <= 1:
        return 0, 0
    return _bytes(partial) * chunks // room, _bytes(lse) * chunks // room


def _product(arguments: dict[str, Any], constants: Any, context: int) -> _Touched:
    """The sums that splits leave behind are read again; what is not used is not touched."""
    partial, held = _bytes(arguments["partial"]), arguments["x"]
    touched = {"partial": (partial, partial), "arrived": (0, 0), "x": (_bytes(held), 0)}
    return touched if constants["PARTS"] else touched | {"gain": (0, 0), "squares": (0, 0)}


def _project_heads(arguments: dict[str, Any], constants: Any, context: int) -> _Touched:
    named = {"NORMS": constants["HEAD_NORMS"]}
    return _product(arguments, constants, context) | _rope(arguments, constants | named, context)


def _compact(arguments: dict[str, Any], constants: Any, context: int) -> _Touched:
    planes, path = arguments["planes"], arguments["path"]
    layers, sides, _, groups, _, size = planes.shape
    moved = layers * sides * path.numel() * groups * size * planes.dtype.itemsize
    return {"planes": (moved, moved), "block_table": (path.numel() * 8, 0)}


def _threshold(arguments: dict[str, Any], constants: Any, context: int) -> _Touched:
    few = "scratch", "masses", "arrived"  # of tokens near the best one, which stay in a cache
    return dict.fromkeys(few, (0, 0))


def _largest(arguments: dict[str, Any], constants: Any, context: int) -> _Touched:
    return {"arrived": (0, 0)}


_TOUCHED: dict[str, Callable[[dict[str, Any], Any, int], _Touched]] = {
    "add_rms_norm": _norm,
    "embed_concat": _embed,
    "rope_write": _rope,
    "tree_attention": _attention,
    "project_heads": _project_heads,
    "add_product": _product,
    "gated_product": _product,
    "product": _product,
    "compact": _compact,
    "argmax": _largest,
    "threshold": _threshold,
    "draw": _largest,
}


@dataclass(frozen=True)
class RoundCounts:
    """Of one round."""

    launches: int
    allocations: int
    peak_bytes: int  # allocated and held at a time
    read: int  # bytes
    written: int
    by_name: Counter[str]  # launches

    @classmethod
    def of(cls, trace: RoundTrace) -> RoundCounts:
        launches = trace.launches
        return cls(
            launches=len(launches),
            allocations=trace.allocations,
            peak_bytes=trace.peak_bytes,
            read=sum(each.read for each in launches),
            written=sum(each.written for each in launches),
            by_name=Counter(each.name for each in launches),
        )

    def seconds(self, bandwidth: float, gap: float) -> tuple[float, float]:
        """At so many bytes/s and seconds from kernel to kernel: of the memory, and of the gaps."""
        return (self.read + self.written) / bandwidth, self.launches * gap


def count_round(
    model: DecoderModel, drafter: Drafter | None, rows: int, context: int, *, sampling: bool
) -> RoundCounts:
    """Trace a round of `rows` rows with `context` entries each. Raises NotCapturable."""
    ops = model.ops
    assert isinstance(ops, TracedOps)
    emitted = drafter.depth + 1 if drafter else 1
    with torch.inference_mode():
        batch, planes = open_batch(model, drafter, rows, model.max_length + WINDOW, emitted=emitted)
        launch = partial(decode_round, model, planes, drafter, batch, sampling=sampling)
        return trace_twice(ops, launch, context)


def trace_twice(ops: TracedOps, launch: Callable[[], object], context: int) -> RoundCounts:
    """What `launch` does after it has been warmed up. Raises NotCapturable, also where it does
    something else when it is launched again."""
    launch()  # what it keeps for good is made here
    traces = []
    for _ in range(2):
        with ops.recorded(context) as trace:
            launch()
        trace.close()
        traces.append(trace)
    pairs = zip(*(trace.launches for trace in traces), strict=False)
    for first, second in pairs:
        if first != second:
            raise NotCapturable(f"another launch does not repeat {first}, but does {second}")
    counts = [RoundCounts.of(trace) for trace in traces]
    if counts[0] != counts[1]:
        raise NotCapturable("another launch does more, or less")
    return counts[0]


def llama_8b(
    max_length: int,
    ops: TracedOps | None = None,
    *,
    layers: int = LLAMA_8B["num_hidden_layers"],
    float8: bool = False,
    ranks: int = 1,
) -> DecoderModel:
    """The target, or `layers` layers of it, or what one of so many `ranks` has; as `eagle3 float8`
    rounds it, or as it is."""
    from transformers import LlamaConfig

    config, dtype = LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": layers}), torch.bfloat16
    capture, ops = (1, layers // 2 - 1, layers - 4), ops or TracedOps(dtype)
    ops.float8 = float8
    kind: dict[str, Any] = {"device": META, "dtype": dtype, "max_length": max_length, "ops": ops}
    group = None if ranks == 1 else TracedGroup(0, ranks, ops)
    with without_data():
        return random_target.random_model(config, capture, group=group, **kind)


def eagle3_for(
    model: DecoderModel, tree: TreeSection = TREE, *, float8: bool = False
) -> Eagle3Drafter:
    """A head of the usual shape for it."""
    with without_data():
        head = random_target.random_head(model.config, torch.arange(DRAFT_VOCABULARY))
        return Eagle3Drafter(head, model, tree, float8=float8)


def lookup_beside(
    drafter: Eagle3Drafter, model: DecoderModel, tree: TreeSection = TREE
) -> LookupDrafter:
    """With n-grams as they are by default."""
    return LookupDrafter(drafter, NgramDrafter(model, tree, NgramSection()))


_HEADINGS = "round", "rows", "launches", "allocations", "held MB", "read MB", "written MB"
_ROW = "{:16} {:>5} {:>9} {:>12} {:>9} {:>9} {:>11}"
_TIMES = " {:>10} {:>8} {:>9}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the counts, and with them what a machine's bandwidth and gaps make of them."""
    parser = argparse.ArgumentParser(prog="python -m bench.round", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=CONTEXT, help="committed entries of a row")
    parser.add_argument("--length", type=int, default=8192, help="longest prompt + reply")
    parser.add_argument("--ranks", type=int, default=1, help="one of so many that share the target")
    parser.add_argument("--bandwidth", type=float, help="GB/s: print a roofline, with --gap")
    parser.add_argument("--gap", type=float, help="microseconds from one kernel to the next")
    parser.add_argument("--kernels", action="store_true", help="launches of every kernel")
    chosen = parser.parse_args(arguments)
    if (chosen.bandwidth is None) != (chosen.gap is None):
        parser.error("--bandwidth and --gap belong together")
    timed = chosen.bandwidth is not None
    heading = _ROW.format(*_HEADINGS)
    print(heading + (_TIMES.format("memory ms", "gaps ms", "round ms") if timed else ""))
    model = llama_8b(chosen.length, ranks=chosen.ranks)
    drafter, in_float8 = eagle3_for(model), eagle3_for(model, float8=True)
    smaller = llama_8b(chosen.length, float8=True, ranks=chosen.ranks)
    for rows in chosen.rows:
        for name, target, drafting, sampling in (
            ("plain", model, None, False),
            ("greedy tree", model, drafter, False),
            ("greedy, fp8 head", model, in_float8, False),
            ("sampled tree", model, drafter, True),
            ("greedy, lookup", model, lookup_beside(drafter, model), False),
            ("plain, fp8", smaller, None, False),
            ("greedy tree, fp8", smaller, eagle3_for(smaller), False),
        ):
            counts = count_round(target, drafting, rows, chosen.context, sampling=sampling)
            sizes = counts.peak_bytes, counts.read, counts.written
            line = _ROW.format(
                name,
                rows,
                counts.launches,
                counts.allocations,
                *(f"{size / 1e6:,.0f}" for size in sizes),
            )
            if timed:
                memory, gaps = counts.seconds(chosen.bandwidth * 1e9, chosen.gap * 1e-6)
                times = memory, gaps, memory + gaps
                line += _TIMES.format(*(f"{1e3 * each:.3f}" for each in times))
            print(line)
            if chosen.kernels:
                for kernel, count in counts.by_name.most_common():
                    print(f"    {count:5} {kernel}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
