"""Every operation against the reference: one check each, which every backend goes through.

A check takes a backend and a case. Named corners come first, then what Hypothesis draws: always
the same cases, so that what is nearly a tie stays what it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.config import NgramSection
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.draft import Candidates, DraftNoise
from pipeline.decoder.ops.draws import by_node, perturb
from pipeline.decoder.ops.layer import PAGE, Float8Rows, LayerStack, LayerWeights
from pipeline.decoder.ops.tree import WINDOW, SamplingTensors, Tree
from pipeline.decoder.ops.triton.launch import INTERPRETED
from pipeline.decoder.ops.triton.ops import MOST_SPLIT
from tests.decoder.ngrams import (
    both_of,
    chains_of,
    drafted_candidates,
    looked_up_candidates,
    nodes_of,
    random_histories,
    row_of_tokens,
    tree_of,
)
from tests.decoder.ops import attention
from tests.decoder.ops.backends import BF16, FP32, REFERENCE, Backend
from tests.decoder.ops.conftest import attention_metadata

Check = Callable[..., None]
NAN, INF = float("nan"), float("inf")
#: By name: check(backend).
OPERATIONS: dict[str, Check] = {}
#: Temperature, top-p, top-k.
SAMPLING = [
    (0.0, 1.0, 0), (0.0, 0.5, 3), (1.0, 1.0, 0), (0.7, 0.9137, 0), (1.3, 1.0, 5), (0.9, 0.5, 40),
    (1.0, 1e-6, 0), (1.0, 0.0, 0), (2.0, 0.99, 1), (1.5, 0.999, 70000), (0.05, 0.31, 7),
    (1e-3, 0.9, 0), (1e-8, 1.0, 0),
]  # fmt: skip


def operation(*ranges: int | list[Any] | Any, corners: list[Any]) -> Callable[[Check], Check]:
    """Register the check of the operation it is named after, on `corners` and drawn cases.

    For each part of a case: n draws 1 … n, a list one of its items, a strategy what it gives.
    """

    def strategy(drawn: Any) -> Any:
        if isinstance(drawn, list):
            return st.sampled_from(drawn)
        return st.integers(1, drawn) if isinstance(drawn, int) else drawn

    def register(check: Check) -> Check:
        def seeded(backend: Backend, case: tuple[Any, ...]) -> None:
            torch.manual_seed(0)
            check(backend, *case)

        test = given(case=st.tuples(*map(strategy, ranges)))(seeded)
        for corner in reversed(corners):
            test = example(case=corner)(test)
        few = settings(max_examples=5, deadline=None, database=None, derandomize=True)
        OPERATIONS[check.__name__] = few(test)
        return check

    return register


def both(backend: Backend, name: str, *arguments: Any) -> tuple[Any, Any]:
    """What an operation and its reference give."""
    return getattr(backend.ops, name)(*arguments), getattr(REFERENCE, name)(*arguments)


def assert_same(pair: tuple[Any, Any], *names: str) -> None:
    for name in names:
        assert torch.equal(*(getattr(each, name) for each in pair)), name


def wide(*tensors: Tensor) -> Any:
    return [tensor.double() for tensor in tensors]


# Rows --------------------------------------------------------------------------------------------


# Half a panel, halves of one; the most rows of a pass in AVX2, and in AVX-512; two passes; a tile
# and a rest; rows in chunks; even 40 rows in several chunks.
@operation(90, 400, 140, [BF16, torch.half, FP32], corners=[
    (1, 1, 1, FP32), (1, 33, 17, BF16), (1, 64, 64, FP32), (2, 2, 31, BF16), (7, 127, 65, FP32),
    (12, 64, 96, BF16), (13, 576, 96, FP32), (40, 33, 48, BF16), (16, 48, 80, torch.half),
    (300, 1536, 48, BF16), (77, 20_000, 70, FP32),
])  # fmt: skip
def linear(backend: Backend, rows: int, inputs: int, outputs: int, stored: torch.dtype) -> None:
    """Of views; a row's bits depend on no other row, thread or type that holds the weight."""
    ops = backend.ops
    x, weight = backend.numbers(rows, 2, inputs)[:, 1], torch.randn(inputs, outputs).to(stored).t()
    bias, packed = backend.numbers(outputs) if (rows + outputs) % 2 else None, ops.pack(weight)
    y = ops.linear(x, packed, bias)
    wanted = x.double() @ weight.to(ops.dtype).double().t() + (0 if bias is None else bias.double())
    # Errors of a sum average out, but where one accumulator walks thousands of terms.
    backend.near(y, wanted, absolute=backend.rounded[1] * max(math.sqrt(inputs), inputs / 50))
    assert y.is_contiguous()
    assert torch.equal(ops.linear(x, ops.pack(weight.float()), bias), y)
    if not backend.bits_alone:
        return
    wider = F.pad(weight.float(), (0, 0, 0, 1), value=1 / 3)  # which only float32 holds
    longer = None if bias is None else F.pad(bias, (0, 1))
    assert torch.equal(ops.linear(x, ops.pack(wider), longer)[:, :outputs], y)
    for size in {1, 2, 5, 16, 31} & set(range(rows)):
        pieces = [ops.linear(part, packed, bias) for part in torch.split(x, size)]
        assert torch.equal(torch.cat(pieces), y), size
    torch.set_num_threads(3)
    assert torch.equal(ops.linear(x, packed, bias), y)
    torch.set_num_threads(1)
    x[-1, -1] = NAN
    spoiled = ops.linear(x, packed, bias)
    assert spoiled[-1].isnan().all() and torch.equal(spoiled[:-1], y[:-1])


@operation(70, [64, 130, 1000], [33, 576], [False, True], corners=[
    (1, 4096, 130, True), (64, 64, 130, False), (65, 64, 130, True), (3, 63, 576, True),
    (321, 64, 33, True),
])  # fmt: skip
def float8_linear(backend: Backend, rows: int, outputs: int, inputs: int, biased: bool) -> None:
    """A row of zeros, one of small numbers, and numbers below float8's smallest normal one."""
    weight = torch.randn(outputs, inputs, device=backend.device)
    weight[0], weight[1] = 0, weight[1] * 1e-6
    weight[2:, ::3] /= 2000
    x, bias = backend.numbers(rows, inputs), backend.numbers(outputs) if biased else None
    y = backend.ops.linear(x, backend.ops.pack_float8(weight), bias)
    rows_of = Float8Rows.of(weight)
    held = rows_of.widened().double()
    numbers = rows_of.values.view(torch.float8_e4m3fn).double()
    assert torch.equal(held, numbers * rows_of.scales.double()[:, None]), "bfloat16 holds all"
    wanted = x.double() @ held.t()
    wanted = wanted if bias is None else wanted + bias.double()
    backend.near(y, wanted, absolute=backend.rounded[1] * math.sqrt(inputs))
    apart = (held - weight.double()).abs()
    assert (apart <= weight.abs() / 16 + weight.abs().amax(1, keepdim=True) / 2**17).all()


@operation(40, 700, [False, True], [False, True], corners=[
    (1, 7, True, True), (3, 100, False, True), (16, 2048, True, False), (200, 576, True, True),
    (2, 4096, False, False),
])  # fmt: skip
def add_rms_norm(backend: Backend, rows: int, size: int, updated: bool, normed_first: bool) -> None:
    """Every second row, and columns in the middle; the first row is so small that eps counts."""
    parts = backend.numbers(2, 2 * rows, size + 9, scale=3)
    parts[:, 0] /= 1000
    x, update = parts[..., 4 : 4 + size][:, ::2]
    added, weight = update if updated else None, backend.gains(size)
    update_norm, before = backend.gains(size) if normed_first else None, update.clone()
    normed, total = backend.ops.add_rms_norm(x, added, weight, 1e-5, update_norm)
    assert torch.equal(update, before), "an input is not written over"
    if updated and update_norm is not None:
        update = backend.ops.add_rms_norm(update, None, update_norm, 1e-5)[0]
    if backend.is_triton and INTERPRETED and updated:
        backend.near(total, x + update)  # cut off, not rounded
    else:
        assert torch.equal(total, x + update if updated else x)
    backend.near(normed, REFERENCE.add_rms_norm(total.double(), None, weight.double(), 1e-5)[0])
    if backend.bits_alone:
        one = x[-1:], None if added is None else added[-1:]
        alone = backend.ops.add_rms_norm(*one, weight, 1e-5, update_norm)
        assert torch.equal(alone[0], normed[-1:])


@operation(40, 500, [False, True], corners=[
    (1, 1536, False), (3, 17, True), (64, 1536, True), (5, 100, False), (1, 1, True),
])  # fmt: skip
def gate_mul(backend: Backend, rows: int, size: int, gelu: bool) -> None:
    """Of a view; values at which exp overflows."""
    gate_up = backend.numbers(2 * rows, 2 * size + 3, scale=6)[::2, 1:-2]
    most = 1e12 if gelu else 3e38  # which GELU takes to the third power
    special = torch.tensor([0.0, 200.0, -200.0, most, -most])[:size]
    gate_up[0, : len(special)] = special.to(gate_up)
    gate_up[0, size:] /= 60  # no product overflows
    mixed = backend.ops.gate_mul(gate_up, gelu=gelu)
    # A GPU's exp is as inexact as its argument is large. Far below zero GELU's 1 + tanh is a
    # difference of nearly equal numbers, in torch; ours is a sigmoid.
    absolute = 1e-6 if backend.is_triton else 1e-9 if gelu else 1e-30
    if gelu and not (backend.is_triton or backend.is_cpp):
        absolute = 1e-5
    backend.near(mixed, REFERENCE.gate_mul(gate_up.double(), gelu=gelu), absolute=absolute)
    if backend.bits_alone:
        assert torch.equal(backend.ops.gate_mul(gate_up[-1:], gelu=gelu), mixed[-1:])


@operation(9, 600, corners=[(3, 576), (3, 33), (1, 64), (5, 100)])
def embed_concat(backend: Backend, count: int, size: int) -> None:
    embedding, hidden = backend.numbers(30, size), backend.numbers(count, 2 * size)[:, :size]
    tokens, norms = backend.integers(0, 30, count), backend.gains(2, size)
    tokens[0], tokens[-1] = 0, 29
    hidden[0] /= 1000  # so that eps counts
    got = backend.ops.embed_concat(tokens, embedding, hidden, norms[0], norms[1], 1e-5)
    assert got.dtype is backend.ops.dtype and got.is_contiguous()
    embedding, hidden, norms = wide(embedding, hidden, norms)
    wanted = REFERENCE.embed_concat(tokens, embedding, hidden, norms[0], norms[1], 1e-5)
    backend.near(got, wanted)


# Cache -------------------------------------------------------------------------------------------


@operation([(9, 3, 64), (4, 4, 80), (4, 2, 6), (15, 3, 34)], 12, [False, True], corners=[
    ((4, 4, 80), 1, False), ((8, 2, 96), 21, True), ((8, 1, 128), 33, True),
    ((3, 1, 6), 21, False), ((3, 3, 64), 9, True), ((4, 2, 8), 9, False),
])  # fmt: skip
def rope_write(backend: Backend, shape: tuple[int, int, int], tokens: int, normed: bool) -> None:
    """Into a slice of a larger pool; what is not written stays as it is."""
    heads, groups, size = shape
    qkv = backend.numbers(tokens, (heads + 2 * groups) * size)
    qkv[0] /= 1000  # so that eps counts
    rotary, norms = backend.numbers(2, 400, size), backend.gains(2, size)
    slots = torch.randperm(4 * PAGE)[:tokens].to(backend.device)
    pool = torch.full((2, 2, 4, groups, PAGE, size), NAN, device=backend.device).to(qkv)
    wanted_pool = pool.double()

    none = torch.zeros(1, 1, dtype=torch.int64, device=backend.device)
    where = attention_metadata(none, none[0], [tokens], None)
    alone = replace(where, positions=backend.integers(0, 400, tokens), slot_mapping=slots)

    def rotated(ops: TorchOps, pool: Tensor, qkv: Tensor, rotary: Tensor, norms: Tensor) -> Tensor:
        where = replace(alone, rotary=(rotary[0], rotary[1]))
        gains = (norms[0], norms[1]) if normed else None
        return ops.rope_write(qkv, gains, 1e-6, where, pool[1, 0], pool[1, 1])

    query = rotated(backend.ops, pool, qkv, rotary, norms)
    wanted = rotated(REFERENCE, wanted_pool, *wide(qkv, rotary, norms))
    # In bfloat16 all but C++ round once more before the rotation, whose terms may cancel.
    twice = normed and not backend.is_cpp and pool.dtype is BF16
    coarse = {"relative": 2.0**-6, "absolute": 6e-2} if twice else {}
    backend.near(query, wanted, **coarse)
    backend.near(pool, wanted_pool, **coarse)
    values = pool[1, 1].double().nan_to_num(), wanted_pool[1, 1].nan_to_num()
    assert torch.equal(*values), "values are copied as they are"


BORDERS = [0, 1, 15, 62, 63, 64, 65, 127, 128]
ROWS = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 9)), min_size=1, max_size=3)
SHAPES = [(9, 3, 64), (4, 4, 80), (8, 2, 96), (8, 1, 128), (3, 1, 6), (15, 3, 34)]


@operation(ROWS, SHAPES, [None, 9, WINDOW], [0, 3], [False, True], corners=[
    ([(0, 1)], (9, 3, 64), 1, 0, False),
    ([(0, 1)], (4, 4, 80), None, 3, False),
    ([(prefix, 1) for prefix in BORDERS], (2, 1, 64), 1, 0, True),
    ([(prefix, 1) for prefix in BORDERS], (2, 1, 64), None, 0, False),
    ([(prefix, 64) for prefix in BORDERS], (1, 1, 34), WINDOW, 0, False),  # the sign bit
    ([(prefix, 64) for prefix in BORDERS], (1, 1, 6), None, 0, True),
    ([(0, 3), (63, 3), (100, 3)], (4, 2, 80), WINDOW, 0, False),  # sees beyond the tree
    ([(0, 3), (63, 3), (100, 3)], (8, 1, 64), WINDOW, 3, True),
    ([(300, 16), (17, 16)], (8, 2, 96), 16, 1, True),
    ([(130, 9), (1, 9)], (8, 1, 128), 9, 3, False),
    ([(61, 37), (0, 90), (700, 1)], (3, 1, 64), None, 3, True),
    ([(0, 200)], (3, 1, 64), None, 0, False),
    # Cut into chunks, beside a row that is not, and one that ends where a chunk does.
    ([(3000, 8), (70, 8), (500, 8)], (2, 1, 64), 8, 3, False),
    ([(1500, 8), (70, 8), (500, 8)], (2, 1, 128), None, 3, False),
    ([(600, 3), (64, 3)], (2, 1, 64), 3, 900, False),  # chunks of 29 pages
    # A prompt of more than a tile after an earlier chunk, one that is cut, a row of no token.
    ([(70, MOST_SPLIT + 3), (500, 1), (5, 0), (300, MOST_SPLIT)], (2, 1, 64), None, 3, False),
    ([(70, 3), (60, 0), (190, 5)], (8, 2, 34), 8, 3, False),
    ([(0, 3), (5, 1)], (4, 2, 64), 3, 0, False, 2),  # beside rows that see nothing
    ([(90, 4)], (4, 1, 34), 4, 40, False, 2),
])  # fmt: skip
def tree_attention(backend: Backend, *case: Any) -> None:
    attention.check(backend, attention.pose(backend, *case))


@operation(ROWS, SHAPES, [None, 9], 150, corners=[
    ([(prefix, 1) for prefix in BORDERS], (2, 1, 64), 1, 63),
    ([(prefix, 1) for prefix in BORDERS], (9, 3, 64), None, 65),
    ([(700, 3), (64, 3), (130, 90)], (2, 1, 64), None, 128),
    ([(3000, 8), (70, 8), (500, 8)], (2, 1, 64), 8, 2000),  # whole chunks are hidden
])  # fmt: skip
def sliding_attention(backend: Backend, *case: Any) -> None:
    """With the first entries hidden from each token, as many as it has or fewer."""
    *shape, hidden = case
    posed = attention.pose(backend, *shape)
    attention.check(backend, attention.hide(posed, hidden))


@operation(5, 30, corners=[(1, 1)])
def compute_slot_mapping(backend: Backend, rows: int, tokens: int) -> None:
    table = torch.randperm(rows * 8).view(rows, 8).to(backend.device)[:, ::2]
    seq_lens, row = backend.integers(0, 170, rows), backend.integers(0, rows, tokens)
    where = table, seq_lens, row, backend.integers(0, WINDOW, tokens)
    got, wanted = both(backend, "compute_slot_mapping", *where)
    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))


@operation(3, [(3, 64), (2, 80), (1, 128), (2, 6)], 17, corners=[
    (9, (3, 64), 5), (1, (2, 80), 17), (2, (1, 128), 1),
])  # fmt: skip
def compact(backend: Backend, layers: int, shape: tuple[int, int], moved: int) -> None:
    """Within a page, across its end, at its end, and nothing to move; never another row's page."""
    groups, size = shape
    seq_lens = torch.tensor([0, PAGE - 4, 2 * PAGE - 1, 17], device=backend.device)
    planes = backend.numbers(layers, 2, 18, groups, PAGE, size)
    table = torch.randperm(18)[:16].view(4, 4).to(backend.device)
    path, real = torch.arange(moved).repeat(4, 1), [moved, 1 + moved // 2, 1, moved]
    for row, count in enumerate(real[:-1]):
        path[row, 1:count] = 1 + torch.randperm(39)[: count - 1].sort().values
        path[row, count:] = path[row, count - 1]
    before, wanted = planes.clone(), planes.clone()
    for ops, each in ((REFERENCE, wanted), (backend.ops, planes)):
        ops.compact(each, table, seq_lens, path.to(backend.device))
        for row, count in enumerate(real):  # what only fills up the path leaves anything
            after = torch.arange(count, moved, device=backend.device) + seq_lens[row]
            each[:, :, table[row, after // PAGE], :, after % PAGE] = 0
    assert torch.equal(planes, wanted)
    assert torch.equal(planes[:, :, table[-1]], before[:, :, table[-1]])


# Layers ------------------------------------------------------------------------------------------


def layer_of(
    backend: Backend, sizes: tuple[int, ...], formed: bool, float8: bool, odd: bool
) -> tuple[LayerWeights, LayerWeights]:
    """A layer of a backend and the same in float64; `formed`: with biases and norms of heads, and
    with what other families have where `odd`."""
    hidden, inner, heads, groups, size = sizes

    def weight(rows: int, columns: int) -> Tensor:
        return backend.numbers(rows, columns, scale=columns**-0.5)

    def vector(length: int) -> Tensor:
        return 1 + backend.numbers(length, scale=0.3)

    qkv, output = weight((heads + 2 * groups) * size, hidden), weight(hidden, heads * size)
    gate_up, down = weight(2 * inner, hidden), weight(hidden, inner)
    matrices = {"qkv": qkv, "output": output, "gate_up": gate_up, "down": down}
    vectors = {"post_norm": backend.gains(hidden)}
    bias = {"qkv_bias": vector(len(qkv)), "output_bias": vector(hidden)} if formed else {}
    norms = tuple(backend.gains(2, size)) if formed else None
    updates = tuple(backend.gains(2, hidden)) if odd else None
    pack = backend.ops.pack_float8 if float8 else backend.ops.pack
    packed = {name: pack(each) for name, each in matrices.items()}
    if float8:
        matrices = {name: Float8Rows.of(each).widened() for name, each in matrices.items()}
    none: dict[str, Any] = {"qkv_bias": None, "output_bias": None, "head_norms": norms}
    none |= {"update_norms": updates, "gelu": odd, "local": odd}
    ours = LayerWeights(**none | packed | vectors | bias)
    wider = {name: each.double() for name, each in (matrices | vectors | bias).items()}
    none["head_norms"] = norms and tuple(wide(*norms))
    none["update_norms"] = updates and tuple(wide(*updates))
    return ours, LayerWeights(**none | wider)


LAYERS = [(96, 80, 4, 2, 32), (512, 130, 2, 1, 64), (64, 200, 3, 1, 48), (34, 66, 2, 2, 64)]


# Of one token, whose products are split, in float8 of 1,024 inputs and more; as many as are fused,
# and one more; heads of an odd size.
@operation(20, LAYERS, [False, True], [False, True], [False, True], corners=[
    (1, LAYERS[1], False, False, False), (2, (256, 544, 1, 1, 128), True, False, False),
    (7, LAYERS[1], True, False, False), (64, LAYERS[0], True, False, False),
    (65, LAYERS[0], False, False, False), (5, LAYERS[2], True, False, False),
    (16, LAYERS[3], True, False, False), (3, (1024, 130, 2, 1, 64), True, True, False),
    (64, LAYERS[0], False, True, False), (65, LAYERS[0], True, True, False),
    (3, LAYERS[1], True, False, True), (70, LAYERS[1], False, False, True),
    (5, (64, 96, 2, 1, 256), True, False, True),
])  # fmt: skip
def layers(
    backend: Backend,
    tokens: int,
    sizes: tuple[int, ...],
    formed: bool,
    float8: bool,
    odd: bool = False,
) -> None:
    """Two of them, of few tokens twice: what a call leaves behind must not be in the next one's
    way. The first is one that turns by other angles, has a window and is of an `odd` family, or
    neither."""
    hidden, _, _, groups, size = sizes
    made = [layer_of(backend, sizes, formed, float8, each) for each in (odd, False)]
    norms = tuple(backend.gains(hidden) for _ in made)
    ours, exact = zip(*made, strict=True)
    plane = backend.numbers(2, 2, 4, groups, PAGE, size)
    rotary, prefix = backend.numbers(4, 200, size), 70
    table = torch.tensor([[2, 0, 3]], device=backend.device)
    where = attention_metadata(table, torch.tensor([prefix], device=backend.device), [tokens], None)
    entries = prefix + torch.arange(tokens, device=backend.device)
    slots = table[0, entries // PAGE] * PAGE + entries % PAGE
    placed = replace(where, positions=entries, slot_mapping=slots)
    x = backend.numbers(2, tokens, hidden)

    def through(
        ops: TorchOps, weights: Any, norms: Any, rotary: Tensor, x: Tensor, plane: Tensor
    ) -> tuple[Tensor, ...]:
        stack = LayerStack(weights, tuple(norms), 1e-5, (0,))
        first_seen = (placed.positions - 66).clamp(min=0)
        other = replace(placed, rotary=(rotary[2], rotary[3]), first_seen=first_seen)
        metadata = replace(placed, rotary=(rotary[0], rotary[1]), local=other)
        return *ops.layers(stack, metadata, x[0], x[1], plane), plane

    wanted = through(REFERENCE, exact, wide(*norms), *wide(rotary, x, plane))
    for _ in range(2 if tokens <= 16 else 1):
        got = through(backend.ops, ours, norms, rotary, x, plane.clone())
        for each, right in zip(got, wanted, strict=True):
            assert each.shape == right.shape and each.dtype is backend.ops.dtype
            backend.near(each, right, **LAYER_ERRORS[backend.ops.dtype])
    if odd:
        stack = LayerStack(ours, norms, 1e-5, (0,))
        with pytest.raises(AssertionError, match="other angles or a window"):
            bare = replace(placed, rotary=(rotary[0], rotary[1]))
            backend.ops.layers(stack, bare, x[0], x[1], plane)


#: Of numbers of size one, through two layers.
LAYER_ERRORS = {
    FP32: {"relative": 1e-4, "absolute": 1e-4},
    BF16: {"relative": 0.03, "absolute": 0.15},
}


# Choices -----------------------------------------------------------------------------------------


@operation(2000, corners=[(1,), (2,), (15,), (16,), (5000,), (49_152,), (128_256,)])
def argmax(backend: Backend, size: int) -> None:
    """Of a hundred different values, so that equals are common; NaN, infinities, zeros."""
    logits = backend.integers(-50, 50, 2, 6, size).to(backend.ops.dtype)
    logits[0, 0] = logits[0, 4, : size - 1] = -INF
    logits[0, 1, size // 2], logits[0, 5, -1] = NAN, -NAN
    logits[0, 2] = -0.0
    logits[0, 2, -1] = 0.0  # equal to -0
    logits[0, 3] = INF
    index = backend.ops.argmax(logits)
    assert index[0].tolist() == [0, -1, 0, 0, size - 1, -1]
    largest = logits[1] == logits[1].amax(-1, keepdim=True)
    assert torch.equal(index[1], largest.int().argmax(-1))


@operation(9, st.integers(70, 700), 64, corners=[
    (1, 4, 4), (9, 17, 3), (3, 100, 10), (9, 300, 64), (9, 300, 65), (4, 8192, 10),
    (1, 32_000, 8), (2, 49_152, 10),
])  # fmt: skip
def propose(backend: Backend, rows: int, size: int, k: int) -> None:
    """Every second row is full of equals, the first holds -inf, one more holds NaN."""
    logits = backend.numbers(rows + 1, size, scale=4)
    logits[::2] = (logits[::2] * 4).round() / 4
    logits[0, size // 2 :] = -INF if k < size // 2 else 0.0
    logits[-1, size // 2] = NAN
    scores, index = backend.ops.propose(logits, k)
    names = torch.randperm(size).to(backend.device) + 7
    named = backend.ops.propose(logits, k, names)
    assert torch.equal(named[0].nan_to_num(1), scores.nan_to_num(1))
    assert torch.equal(named[1], names[index])
    wanted = logits.double().log_softmax(-1).gather(1, index)
    torch.testing.assert_close(scores.double(), wanted, rtol=0, atol=2e-5, equal_nan=True)
    assert scores[-1].isnan().all() and index.min() >= 0 and index.max() < size
    best = logits[:-1].sort(descending=True, stable=True)
    assert torch.equal(logits[:-1].gather(1, index[:-1]), best.values[:, :k])
    # The reference's topk is free to order equals as it likes, and C++ leaves it more than 64.
    if k <= 64 and (backend.is_cpp or backend.is_triton):
        assert torch.equal(index[:-1], best.indices[:, :k])
        if backend.bits_alone:
            assert torch.equal(backend.ops.propose(logits[:1], k)[0], scores[:1])


@operation(4, 8, 100, corners=[(1, 1, 64), (1, 4, 24), (3, 4, 100), (2, 10, 576), (5, 8, 24)])
def select_beams(backend: Backend, rows: int, k: int, size: int) -> None:
    """Scores in steps of a quarter: nearly all are tied. Views of larger tensors, as drafted."""
    score = -backend.integers(0, 9, rows, k).float() / 4
    gained = -backend.integers(0, 9, rows, k, 2 * k).float()[..., :k] / 4
    gained[0, 0, 0] = -INF
    proposed, beam_mask = (backend.integers(0, 1 << 40, rows, *ks) for ks in ((k, k), (k,)))
    bits = (1 << torch.arange(k, device=backend.device)).expand(rows, k)
    rest = proposed, beam_mask, backend.numbers(rows * k, size), bits
    beams = both(backend, "select_beams", score, gained, *rest)
    assert_same(beams, "total", "best", "score", "token", "beam_mask", "hidden")
    gained[0] = NAN
    best = backend.ops.select_beams(score, gained, *rest).best
    assert len(set(best[0].tolist())) == k


# Trees -------------------------------------------------------------------------------------------


def candidates(backend: Backend, rows: int, count: int, chain: bool) -> Any:
    """Tokens, parents, cumulative scores [rows, count] as drafted: many equals, few words; views.

    The parents of a chain are the candidates before.
    """
    parents, scores = torch.zeros(rows, count, dtype=torch.int64), torch.zeros(rows, count)
    for index in range(count):
        parents[:, index] = torch.randint(index - 1 if chain else -1, index, (rows,))
        above = scores.gather(1, parents[:, index : index + 1].clamp(min=0))[:, 0]
        above = torch.where(parents[:, index] < 0, 0.0, above)
        scores[:, index] = above - torch.randint(1 if chain else 0, 4, (rows,)) / 2
    parts = torch.randint(6, (rows, count)), parents, scores
    return [torch.cat((part, part), 1).to(backend.device)[:, :count] for part in parts]


# With 64 nodes a chain is the deepest tree there is, and a mask has its sign bit.
@operation(4, 100, 64, [False], corners=[
    (3, 1, 2, False), (3, 5, 1, False), (4, 6, 20, False), (3, 63, 64, True), (2, 300, 64, False),
])  # fmt: skip
def grow_tree(backend: Backend, rows: int, count: int, nodes: int, chain: bool) -> None:
    roots = backend.integers(0, 6, 2 * rows)[::2]
    drafted = candidates(backend, rows, count, chain)
    trees = both(backend, "grow_tree", roots, *drafted, nodes)
    assert_same(trees, "tokens", "parents", "tree_mask", "depth")
    drafted[2][0, 3:] = NAN
    assert_same(both(backend, "grow_tree", roots, *drafted, nodes), "tokens", "parents")


def random_tree(backend: Backend, rows: int, nodes: int, chain: bool = False) -> Tree:
    count = nodes if chain else 2 * nodes
    tokens, parents, scores = candidates(backend, rows, count, chain)
    return REFERENCE.grow_tree(backend.integers(0, 6, rows), tokens, parents, scores, nodes)


# The last is deeper than the walk.
@operation(4, 64, 12, [False], corners=[
    (4, 1, 1, False), (4, 2, 5, False), (4, 17, 5, False), (4, 64, 12, False), (2, 64, 63, True),
    (2, 9, 3, True),
])  # fmt: skip
def verify(backend: Backend, rows: int, nodes: int, depth: int, chain: bool) -> None:
    """Most nodes agree with one of their children, all of a chain's; predictions are a slice."""
    tree = random_tree(backend, rows, nodes, chain)
    predicted = backend.integers(-1, 6, rows, nodes + 5)[:, :nodes]
    for child in range(1, nodes):
        if chain or child % 5:
            one = slice(child, child + 1)
            predicted.scatter_(1, tree.parents[:, one], tree.tokens[:, one])
    walks = both(backend, "verify", tree, predicted, depth)
    assert_same(walks, "path", "counts", "tokens")
    assert not chain or (walks[0].counts == depth + 1).all()
    if not backend.is_cpp:
        with pytest.raises(AssertionError):
            backend.ops.verify(tree, predicted.repeat(1, 2), depth)


# Lookups -----------------------------------------------------------------------------------------


# Several blocks of history; more matches than there are; all that may be compared.
@operation(6, 12, 9, 12, [1, 2, 3, 8], corners=[
    (1, 1, 1, 1, 1), (3, 64, 5, 8, 2), (2, 16, 4, 64, 40), (7, 8, 5, 8, 1), (5, 3, 6, 5, 2),
])  # fmt: skip
def look_up(backend: Backend, rows: int, max_match: int, steps: int, most: int, kinds: int) -> None:
    """By plain search; what stands behind a row is garbage that would match."""
    section = NgramSection(min_match=min(2, max_match), max_match=max_match, matches=most)
    histories = random_histories(rows, seed=most)
    if kinds > 8:
        histories[0] = backend.integers(0, kinds, 2500).tolist()
    state, seq_lens = row_of_tokens(histories, 70 if kinds <= 8 else 2600)
    text = state.to(backend.device), seq_lens.to(backend.device)
    lengths, chains = backend.ops.look_up(
        *text, max_match=max_match, least=section.min_match, most=most, steps=steps
    )
    assert lengths.shape == (rows, most) and chains.shape == (rows, most, steps)
    for row, history in enumerate(histories):
        expected = chains_of(history, section, steps)
        count = len(expected)
        assert lengths[row].tolist() == [each[0] for each in expected] + [0] * (most - count)
        assert chains[row, :count].tolist() == [each[1] for each in expected]


@operation(5, 12, 6, 5, corners=[(1, 1, 1, 1), (4, 64, 5, 3), (8, 8, 5, 2), (7, 3, 3, 1)])
def tree_of_chains(backend: Backend, rows: int, count: int, steps: int, top_k: int) -> None:
    """By plain search: few tokens, so that many chains begin alike, and few weights, so that many
    are equal; the first row has the heaviest, and some have no chains."""
    chains = backend.integers(0, 4, rows, count, steps)
    lengths = backend.integers(0, 4, rows, count)
    lengths[0] *= 6
    lengths = lengths.sort(dim=1, descending=True).values
    lengths[:, count // 2 :] *= backend.integers(0, 2, rows, 1)
    lengths[1::3] = 0
    candidates = backend.ops.tree_of_chains(chains, lengths, top_k)
    for row in range(rows):
        pairs = zip(lengths[row].tolist(), chains[row].tolist(), strict=True)
        expected = tree_of([each for each in pairs if each[0]], top_k)
        nodes = nodes_of(candidates, row)
        assert nodes.keys() == expected.keys()
        assert nodes == pytest.approx(expected, abs=1e-5)
        if not expected:
            assert not candidates.tokens[row].any()


@operation(5, 5, 4, 12, corners=[(1, 1, 1, 1), (3, 4, 6, 40), (2, 7, 5, 8), (7, 4, 3, 5)])
def merge_candidates(backend: Backend, rows: int, steps: int, beams: int, count: int) -> None:
    """By dictionaries of branches; neither part is written to."""
    drafted, looked_up = (
        Candidates(*(part.to(backend.device) for part in each))
        for each in (
            drafted_candidates(rows, steps, beams, count),
            looked_up_candidates(rows, steps, count, beams),
        )
    )
    before = [each.clone() for each in (*drafted, *looked_up)]
    merged = backend.ops.merge_candidates(drafted, looked_up, steps)
    for row in range(rows):
        assert nodes_of(merged, row) == pytest.approx(both_of(drafted, looked_up, row))
    assert all(map(torch.equal, before, (*drafted, *looked_up)))


# A prompt's chunk of several blocks; rows that end within one; a full history.
@operation(5, 6, 40, corners=[(1, 1, 2), (3, 70, 90), (2, 6, 5), (4, 33, 32)])
def write_history(backend: Backend, rows: int, most: int, size: int) -> None:
    lengths = [max(1, most - row) for row in range(rows)]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(backend.device)
    tokens, after = backend.integers(0, 9, 2, sum(lengths))
    after[::3] = -1
    counts = torch.stack([backend.integers(1, 1 + each, 1)[0] for each in lengths])
    seq_lens, history = backend.integers(0, size, rows), backend.integers(10, 19, rows, size)
    expected = history.tolist()
    for row, start in enumerate(starts[:-1].tolist()):
        count = int(counts[row])
        read = tokens[start : start + count].tolist()
        read.append(max(0, int(after[start + count - 1])))
        for place, token in enumerate(read, int(seq_lens[row])):
            if place < size:
                expected[row][place] = token
    backend.ops.write_history(history, seq_lens, starts, most, tokens, after, counts)
    assert history.tolist() == expected


# Draws -------------------------------------------------------------------------------------------


def sampling_of(
    backend: Backend, rows: list[tuple[float, float, int]], repeats: int
) -> SamplingTensors:
    """Rows of (temperature, top-p, top-k), each `repeats` times, with seeds of over 32 bits."""
    columns = zip(*(row for row in rows for _ in range(repeats)), strict=True)
    temperature, top_p, top_k = (torch.tensor(column, device=backend.device) for column in columns)
    seeds = backend.integers(0, 1 << 62, len(temperature))
    return SamplingTensors(temperature, top_p, top_k, seeds)


@operation(200, [0.3, 3.0], corners=[
    (1, 1.0), (3, 0.3), (50, 2.0), (500, 4.0), (5003, 0.01), (49_152, 3.0),
])  # fmt: skip
def draw(backend: Backend, size: int, spread: float) -> None:
    """The reference's, or nearly tied with it; NaN and infinities are its row's only."""
    assume(size < 40_000 or not INTERPRETED)
    ops, repeats = backend.ops, 1 if INTERPRETED or size > 40_000 else 12
    sampling = sampling_of(backend, SAMPLING, repeats)
    rows = len(sampling.seeds)
    logits = backend.numbers(rows, size, scale=spread)
    positions = torch.arange(rows, device=backend.device) * 2**33
    drawn, wanted = both(backend, "draw", logits, sampling, positions)
    noisy = perturb(logits, sampling, positions)
    best, chosen = noisy.max(-1).values, noisy.gather(1, drawn[:, None])[:, 0]
    # Sums of logits and noise that are this close may be rounded to either order.
    tie = 1e-4 if backend.is_triton else 2.0**-20 * best.abs().clamp(min=1)
    assert (best - chosen <= tie).all()
    assert (drawn == wanted).sum() >= rows - 1 - rows // 100
    if size == 1:
        return
    size = min(size, 50)
    special = logits[:5, :size].clone()
    special[0] = -INF
    special[1, size // 2 :] = INF
    special[2, : size // 2] = special[2, size // 2 + 1 :] = -INF
    special[3, -1], special[4, size // 3] = NAN, -NAN
    few = SAMPLING[1:6:2]
    sampling, positions = sampling_of(backend, few, 5), positions[:1].expand(5 * len(few))
    got = ops.draw(special.repeat(len(few), 1), sampling, positions).view(-1, 5)
    assert got.tolist() == [[0, size // 2, size // 2, -1, -1]] * len(few)


@operation(5, 700, corners=[(1, 1), (4, 3), (1, 2500), (12, 40)])
def perturb_drafts(backend: Backend, drafts: int, size: int) -> None:
    """What `perturb` gives the same tokens without top-k and top-p, times the temperature; drafts
    of a row share noise."""
    sampling = sampling_of(backend, [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.3, 1.0, 0)], 1)
    rows, device = len(sampling.seeds), backend.device
    positions = 2**33 + torch.arange(rows, device=device)
    noise = DraftNoise(sampling.temperature, sampling.seeds, positions)
    times = sampling.temperature.repeat_interleave(drafts)[:, None]
    times = torch.where(times == 0, 1, times)
    logits = backend.numbers(rows * drafts, size, scale=3)
    logits[0, 0], logits[-1, -1] = NAN, -INF
    ids = torch.randperm(5 * size)[:size].sort().values.to(device)
    for target_ids in (None, ids):
        noisy = backend.ops.perturb_drafts(logits, noise, target_ids)
        whole = logits.new_zeros(rows * drafts, 5 * size)
        named = torch.arange(size, device=device) if target_ids is None else target_ids
        whole[:, named] = logits
        by_draft = by_node(sampling, drafts)
        wanted = perturb(whole, by_draft, positions.repeat_interleave(drafts))[:, named]
        backend.near(noisy, wanted * times, absolute=1e-4)
        assert torch.equal(noisy[1:drafts], logits[1:drafts]), "a greedy row stays"
        assert noisy[0, 0].isnan() and noisy[-1, -1] == -INF


@operation(3, 6, corners=[(300, 12), (13, 3)])
def sample(backend: Backend, rows: int, nodes: int) -> None:
    """The walk goes where the reference's draws go, and a NaN ends it."""
    assume(rows < 300 or not INTERPRETED)
    tree = random_tree(backend, rows, nodes)
    sampling = sampling_of(backend, [SAMPLING[row % len(SAMPLING)] for row in range(rows)], 1)
    logits = backend.numbers(rows, nodes, 6)
    logits[::7, nodes // 3 :, 5] = NAN
    positions = torch.cat((tree.depth + 5, tree.depth), 1)[:, :nodes]
    ours, theirs = (
        REFERENCE.verify(tree, predicted, 5)
        for predicted in both(backend, "sample", logits, tree, sampling, positions, 5)
    )
    alike = (ours.tokens == theirs.tokens).all(1) & (ours.counts == theirs.counts)
    assert alike.sum() >= rows - 1 - rows // 100
    assert rows < 300 or (theirs.counts.max() >= 3 and (theirs.tokens == -1).any())
