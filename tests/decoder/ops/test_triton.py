"""Triton kernels against the reference, operation by operation, and what is Triton's alone.

Without a GPU these tests run in Triton's interpreter, see conftest.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton.runtime import interpreter  # type: ignore[import-untyped]
from triton.runtime.errors import InterpreterError  # type: ignore[import-untyped]

import pipeline.decoder.ops.triton.ops as choices
from pipeline.decoder.ops import draws as philox
from pipeline.decoder.ops.draws import keep_top
from pipeline.decoder.ops.layer import PAGE
from pipeline.decoder.ops.tree import SamplingTensors
from pipeline.decoder.ops.triton.attention import tree_attention_kernel
from pipeline.decoder.ops.triton.launch import INTERPRETED, Pointer, Table, jit
from pipeline.decoder.ops.triton.logits import gumbel, threshold_kernel
from pipeline.decoder.ops.triton.ops import TritonOps, chunks_of
from tests.decoder.ops import operations
from tests.decoder.ops.attention import NAN
from tests.decoder.ops.backends import FP32, TYPES, Backend, triton_backend
from tests.decoder.ops.conftest import attention_metadata
from tests.decoder.ops.operations import INF, OPERATIONS, SAMPLING, sampling_of


@pytest.fixture
def backend(device: torch.device) -> Backend:
    torch.manual_seed(0)
    return triton_backend(FP32, device)


# Products are cuBLAS's.
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "linear"])
@pytest.mark.parametrize("dtype", TYPES)
def test_operations(
    device: torch.device, operation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "SPLIT_INPUTS", 16)  # so that smaller products are split
    OPERATIONS[operation](triton_backend(dtype, device))


#: What a launch of products.py is changed to: its arguments by name, its constants.
FLOAT8_FAULTS: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "no scales": lambda given, fixed: given["scales"].fill_(1),
    "another row's scale": lambda given, fixed: given["scales"].copy_(given["scales"].roll(1)),
    "another sign": lambda given, fixed: given["weight"].bitwise_and_(127),
}
PRODUCT_FAULTS: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "a share too short": lambda given, fixed: fixed.update(SHARE=fixed["SHARE"] - 1),
    "counters that are not zero": lambda given, fixed: given["arrived"].fill_(1),
    "no norm": lambda given, fixed: fixed.update(PARTS=0),
    "a block's squares": lambda given, fixed: fixed.update(PARTS=min(fixed["PARTS"], 1)),
    "no bias": lambda given, fixed: fixed.update(BIASED=False),
    "no norm of heads": lambda given, fixed: fixed.update(HEAD_NORMS=False),
    **FLOAT8_FAULTS,
    "another residual": lambda given, fixed: given.get("hidden", given["x"]).neg_(),
}


@pytest.mark.parametrize("fault", [None, *PRODUCT_FAULTS])
def test_faults_of_products_are_seen(
    backend: Backend, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "SPLIT_INPUTS", 8)  # so that a small product is split
    sizes, float8 = (256, 130, 2, 1, 64), fault in FLOAT8_FAULTS

    class Faulty(TritonOps):
        def _start(self, kernel: Any, grid: Any, given: Any, *rest: Any, **fixed: Any) -> None:
            if fault is not None and "arrived" in kernel.arg_names and "SHARE" in fixed:
                named = dict(zip(kernel.arg_names, given, strict=False))
                PRODUCT_FAULTS[fault](named, fixed)
                given = tuple(named.values())
            super()._start(kernel, grid, given, *rest, **fixed)

    posed = partial(operations.layers, replace(backend, ops=Faulty(FP32)), 7, sizes, True, float8)
    if fault is None:
        posed()
    else:
        with pytest.raises((AssertionError, InterpreterError)):  # or NaN, where nothing was written
            posed()


def test_a_kernel_refuses_a_view_whose_strides_it_does_not_know(backend: Backend) -> None:
    with pytest.raises(AssertionError, match=r"add_rms_norm_kernel reads a view of shape \[64\]"):
        backend.ops.add_rms_norm(backend.numbers(1, 64), None, backend.numbers(128)[::2], 1e-5)


@jit
def multiplied_kernel(numbers: Table, out: Pointer, FACTOR: tl.constexpr) -> None:
    tl.store(out, tl.load(numbers) * FACTOR)


@pytest.mark.skipif(not INTERPRETED, reason="compiled integers wrap around")
def test_the_interpreter_refuses_integers_that_overflow(device: torch.device) -> None:
    number, out = torch.tensor([2**30], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    multiplied_kernel[(1,)](number, out, FACTOR=-2)
    assert out.tolist() == [-(2**31)]
    with pytest.raises(InterpreterError, match="int overflow in mul"):
        multiplied_kernel[(1,)](number, out, FACTOR=2)


def test_weights_take_the_type_of_the_activations(device: torch.device) -> None:
    """A weight stored in another type would not multiply: cuBLAS knows one type at a time."""
    for dtype in TYPES:
        ops = TritonOps(dtype)
        packed = ops.pack(torch.randn(4, 8, dtype=torch.bfloat16, device=device))
        assert ops.dtype == packed.dtype == dtype
        assert ops.linear(torch.randn(2, 8, dtype=dtype, device=device), packed).shape == (2, 4)


def test_long_rows_have_few_chunks() -> None:
    """Longer ones: what is left of them and of the merge stays bounded."""
    assert chunks_of(1) == (1, 2) and chunks_of(64) == (32, 2) and chunks_of(65) == (17, 4)
    assert chunks_of(2049) == (17, 128)
    # 16 nodes of four query heads each; 60 of them.
    assert chunks_of(65, 64) == (9, 8) and chunks_of(65, 240) == (3, 32)
    assert all(16 < chunks_of(pages)[0] <= 32 for pages in range(33, 5000))


def working_programs(
    backend: Backend, prefix: int, width: int, monkeypatch: pytest.MonkeyPatch, sliding: int = 0
) -> tuple[int, Tensor]:
    """How many programs attend over a row of `prefix` entries and a tree of four nodes, in a block
    table of `width` pages, behind a window of `sliding` positions; and the result."""
    torch.manual_seed(0)
    groups, size = 2, 16
    needed = -(-(prefix + 64) // PAGE)
    table = torch.zeros(1, width, dtype=torch.int64)
    table[0, :needed] = torch.arange(needed)
    planes = backend.numbers(2, needed, groups, PAGE, size)
    mask = torch.tensor([1, 3, 5, 11])
    table, mask = table.to(backend.device), mask.to(backend.device)
    prefixes = torch.tensor([prefix], device=backend.device)
    metadata = attention_metadata(table, prefixes, [4], mask)
    if sliding:
        positions = prefix + torch.tensor([0, 1, 1, 2], device=backend.device)
        metadata = replace(metadata, first_seen=positions + 1 - sliding)
    working: list[int] = []
    ops = backend.ops
    assert isinstance(ops, TritonOps)
    launch = ops._launch

    def counting(kernel: Any, grid: Any, arguments: Any, *rest: Any, **more: Any) -> None:
        attends = kernel is tree_attention_kernel
        lse = arguments[kernel.arg_names.index("lse_log2")].fill_(NAN) if attends else None
        launch(kernel, grid, arguments, *rest, **more)
        if lse is not None:  # [chunks, B·G, rows]; of a row that is not cut nothing is written
            working.append(int((~lse.isnan()).any(-1).sum()) or groups)

    with monkeypatch.context() as patch:
        patch.setattr(ops, "_launch", counting)
        query = backend.numbers(4, 4 * groups, size)
        mixed = ops.tree_attention(query, planes[0], planes[1], metadata)
    return working[0], mixed


def test_as_many_programs_work_whatever_the_table_has_room_for(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`serve` has tables for 131,072 positions: a row of 4,096 entries is still cut into 17 chunks
    of four pages, which are 136 programs with eight key/value heads, and gets the same bits."""
    widths = 70, 2053
    results = [working_programs(backend, 4096, width, monkeypatch) for width in widths]
    assert [programs for programs, _ in results] == [2 * 17] * 2
    assert torch.equal(results[0][1], results[1][1])
    short = [working_programs(backend, 1000, width, monkeypatch)[0] for width in (20, 2053)]
    assert short == [2 * chunks_of(17)[0]] * 2 == [2 * 9] * 2


def test_what_a_window_hides_is_not_cut_into_chunks(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4,096 entries the last 512 and the tree lie on nine pages: five chunks of two."""
    programs, _ = working_programs(backend, 4096, 2053, monkeypatch, sliding=512)
    assert programs == 2 * chunks_of(9)[0] == 2 * 5


def test_many_queries_have_long_chunks(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen queries a head, of which a page may have one: 65 pages are five chunks of sixteen."""
    monkeypatch.setattr(choices, "QUERIES_A_PAGE", 1)
    assert chunks_of(65, 16) == (5, 16)
    assert working_programs(backend, 4096, 70, monkeypatch)[0] == 2 * 5


def test_chunks_by_the_width_of_the_table_are_seen(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was: with a chunk of one 32nd of the table each head had one program."""
    monkeypatch.setattr(choices, "LEAST_CHUNK", -(-2053 // 32))
    assert working_programs(backend, 4096, 2053, monkeypatch)[0] == 2


# Draws -------------------------------------------------------------------------------------------


@jit
def gumbel_kernel(
    seed: Table, position: Table, out: Pointer, GROUPS: tl.constexpr, FIRST: tl.constexpr
) -> None:
    group = tl.arange(0, GROUPS)
    at = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out + at, gumbel(tl.load(seed), tl.load(position), group + FIRST))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (2**63 - 1, 5), (12345678901234, 2**40)])
def test_noise(device: torch.device, seed: int, position: int) -> None:
    """The words of every token, by their Gumbel numbers."""
    first = 1000
    got = torch.full((4096,), float("nan"), device=device)
    where = torch.tensor([seed], device=device), torch.tensor([position], device=device)
    gumbel_kernel[(1,)](*where, got, GROUPS=1024, FIRST=first)
    wanted = philox.gumbel(*where, 4 * first + 4096)[0, 4 * first :]
    assert float((got - wanted).abs().max()) < 4e-6


class Thresholds(TritonOps):
    """Keeps the thresholds of the last draw."""

    least: Tensor
    programs: tuple[int, ...]

    def _start(self, kernel: Any, grid: Any, given: Any, *rest: Any, **fixed: Any) -> None:
        super()._start(kernel, grid, given, *rest, **fixed)
        if kernel is threshold_kernel:
            self.least = given[kernel.arg_names.index("threshold")]
            self.programs = grid


def thresholds(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    ops, positions = Thresholds(logits.dtype), torch.zeros(len(logits), dtype=torch.int64)
    ops.draw(logits, sampling, positions.to(logits.device))
    assert not ops._counters[0].any(), "as the next launch finds them"
    assert ops.programs == (len(logits), -(-logits.shape[1] // choices.logits_block(0)))
    return ops.least


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 1500 tokens has three of them."""
    monkeypatch.setattr(choices, "logits_block", lambda size: 512)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("near", "capacity"), [(16.0, 4096), (0.5, 4096), (16.0, 64)])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.usefixtures("short_blocks")
def test_kept_set(
    device: torch.device,
    dtype: torch.dtype,
    near: float,
    capacity: int,
    ties: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same tokens survive top-k and top-p, ties included.

    With a small `near` the candidates do not suffice, with a small `capacity` they do not fit.
    """
    monkeypatch.setattr(choices, "NEAR", near)
    monkeypatch.setattr(choices, "CAPACITY", capacity)
    torch.manual_seed(0)
    backend, cases = triton_backend(dtype, device), [case for case in SAMPLING if case[0] > 0.01]
    sampling = sampling_of(backend, cases, 1)
    logits = backend.numbers(len(cases), 3000, scale=3)
    logits[:, 7] = float("-inf")
    logits = (logits * 4).round() / 4 if ties else logits
    least = thresholds(logits, sampling)
    scaled = logits.float() / sampling.temperature.clamp(min=1e-6)[:, None]
    wanted = keep_top(scaled, sampling) > float("-inf")
    for row, case in enumerate(cases):
        kept = scaled[row] >= least[row]
        kept[7] = wanted[row, 7]
        assert torch.equal(kept, wanted[row]), case
    assert (least == float("-inf")).tolist() == [p >= 1 and k in (0, 70000) for _, p, k in cases]


#: Temperature, top-p, top-k.
FILTERS = [
    (1.0, 0.999999, 0), (1.0, 0.5, 40), (0.7, 1e-6, 0), (2.0, 0.95, 0), (1.5, 1.0, 1),
    (1.0, 1.0, 1499), (0.3, 0.99, 1000),
]  # fmt: skip


def check_thresholds(backend: Backend, seed: int, filters: list[tuple[float, float, int]]) -> None:
    """Random rows of every kind, with top-k, with top-p, and with both, against float64."""
    torch.manual_seed(seed)
    logits = backend.numbers(6, 1500, scale=3)
    logits[0] = (logits[0] * 2).round() / 2  # many equals
    logits[1, torch.randperm(1500)[:1490]] = -INF
    logits[2] = torch.where(torch.arange(1500) == 1234, 20.0, -20.0)  # one, and equals far below
    logits[3] = 0.25
    logits[4] *= 10  # nothing but the largest weighs
    cases = [each for each in filters for _ in logits]
    sampling, rows = sampling_of(backend, cases, 1), logits.repeat(len(filters), 1)
    least = thresholds(rows, sampling)
    scaled = (rows.float() / sampling.temperature[:, None]).double()
    for x, bar, (_, top_p, top_k) in zip(scaled, least.double(), cases, strict=True):
        bar_k = x.sort(descending=True).values[top_k - 1 if top_k else -1]
        mass = (x - x.max()).exp() * (x >= bar_k)
        share, kept, above = top_p * mass.sum(), mass[x >= bar].sum(), mass[x > bar].sum()
        assert bar in x or bar == -INF
        if top_p >= 1:
            assert ((x >= bar) == (x >= bar_k)).all()
        else:  # enough, and no more
            assert kept > share * (1 - 1e-6) and above < share * (1 + 1e-6)
            assert bar >= bar_k


@pytest.mark.usefixtures("short_blocks")
def test_thresholds_are_float64s(backend: Backend) -> None:
    check_thresholds(backend, 1, FILTERS)


def test_the_order_of_arrival_and_other_rows_change_no_bit(
    backend: Backend, short_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates are copied as blocks arrive, and the last to do so weighs them."""
    logits = backend.numbers(4, 1500, scale=3)
    cases = [(1.0, 0.93, 0), (1.3, 0.9, 400)]
    sampling = sampling_of(backend, cases, 2)
    forward = thresholds(logits, sampling)
    alone = [
        thresholds(logits[[row]], sampling_of(backend, [case], 1))
        for row, case in ((0, cases[0]), (3, cases[1]))
    ]
    assert torch.equal(torch.cat(alone), forward[[0, 3]])
    if INTERPRETED:  # one program after another
        builder, place = (
            interpreter.interpreter_builder,
            interpreter.interpreter_builder.set_grid_idx,
        )
        order = [1, 2, 0]
        monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: place(x, order[y], z))
    assert torch.equal(thresholds(logits, sampling), forward)


#: What a launch of the threshold kernel is changed to: its arguments by name, its constants.
THRESHOLD_FAULTS: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "a block too few": lambda given, fixed: fixed.update(PARTS_BLOCK=2),
    "the largest of one block": lambda given, fixed: given["keys"].copy_(given["keys"][:, :1]),
    "counters that are not zero": lambda given, fixed: given["arrived"].fill_(1),
    "a unit too small": lambda given, fixed: fixed.update(UNIT=2.0**8),
    "a unit too large": lambda given, fixed: fixed.update(UNIT=2.0**60),
    "few of those near": lambda given, fixed: given["arrived"][len(given["logits"]) :].fill_(9),
}


@pytest.mark.parametrize("fault", THRESHOLD_FAULTS)
@pytest.mark.usefixtures("short_blocks")
def test_faults_of_thresholds_are_seen(
    backend: Backend, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = TritonOps._start

    def start(
        self: TritonOps, kernel: Any, grid: Any, given: Any, *rest: Any, **fixed: Any
    ) -> None:
        if kernel is threshold_kernel:
            named = dict(zip(kernel.arg_names, given, strict=False))
            THRESHOLD_FAULTS[fault](named, fixed)
            given = tuple(named.values())
        honest(self, kernel, grid, given, *rest, **fixed)

    monkeypatch.setattr(TritonOps, "_start", start)
    with pytest.raises((AssertionError, InterpreterError)):
        check_thresholds(backend, 1, FILTERS[:2])


def test_few_candidates_fit(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operation passes its limits on, and draws the same beyond them."""
    sampling = sampling_of(backend, SAMPLING, 1)
    logits = backend.numbers(len(SAMPLING), 900)
    positions = torch.arange(len(SAMPLING), device=backend.device)
    wanted = backend.ops.draw(logits, sampling, positions)
    monkeypatch.setattr(choices, "CAPACITY", 32)
    assert torch.equal(backend.ops.draw(logits, sampling, positions), wanted)
