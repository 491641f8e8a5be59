"""What a captured round must not do, how much memory it takes, and what its graph needs to live on;
without a GPU, see fake_gpu.py. Faults are planted to show that each would be seen."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig

from bench.random_target import LLAMA_8B, random_model
from bench.report import ROOT
from bench.round import (
    CONTEXT,
    META,
    NotCapturable,
    RoundCounts,
    TracedOps,
    count_round,
    eagle3_for,
    llama_8b,
    lookup_beside,
    main,
    without_data,
)
from bench.round import TREE as ROUND_TREE
from pipeline.config import TreeSection
from pipeline.decoder import engine as scheduler
from pipeline.decoder.batch import DecodeBatch, TokenRows
from pipeline.decoder.engine import Engine, Staging
from pipeline.decoder.graphs import PROMPT_LENGTHS, copy_to_host, planned_bytes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.tree import Tree, VerifyOutput
from pipeline.decoder.round import prefill
from pipeline.tuning.cost import CostMeter, model_bytes
from tests.decoder.fake_gpu import FakeGpu, PinnedCopies, fake_gpu
from tests.decoder.random_drafters import DRAFTERS, every_drafter

TREE = TreeSection(top_k=3, steps=3, nodes=10)
GIB = 2**30


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_gpu() as gpu:
        yield gpu


# The counts of a round --------------------------------------------------------------------------

#: (rows, round) → launches, allocations, bytes held, read and written.
COUNTS = {
    (1, "plain"): (180, 433, 642_048, 15_581_226_032, 33_414_040),
    (1, "greedy"): (269, 588, 10_231_296, 19_978_815_768, 492_535_628),
    (1, "fp8"): (269, 594, 10_231_296, 18_063_430_936, 497_674_060),
    (1, "sampled"): (283, 605, 10_231_296, 19_989_396_740, 493_628_088),
    (1, "lookup"): (274, 596, 10_231_296, 19_978_973_088, 492_540_772),
    (1, "plain, target in fp8"): (180, 433, 642_048, 8_607_409_200, 33_414_040),
    (1, "greedy, target in fp8"): (269, 588, 10_231_296, 13_004_998_936, 492_535_628),
    (8, "plain"): (180, 433, 5_115_904, 19_577_133_696, 267_312_320),
    (8, "greedy"): (397, 588, 78_650_880, 25_349_666_728, 1_518_075_488),
    (8, "fp8"): (397, 594, 78_650_880, 23_467_105_192, 1_556_037_216),
    (8, "sampled"): (411, 605, 78_650_880, 25_425_354_504, 1_526_815_168),
    (8, "lookup"): (402, 596, 78_650_880, 25_350_798_448, 1_518_110_592),
    (8, "plain, target in fp8"): (180, 433, 5_115_904, 12_603_316_864, 267_312_320),
    (8, "greedy, target in fp8"): (525, 844, 78_650_880, 27_080_341_416, 2_885_418_592),
    (32, "plain"): (180, 433, 20_457_472, 33_109_616_384, 901_477_120),
    (32, "greedy"): (412, 583, 314_601_984, 44_484_729_384, 5_737_888_128),
    (32, "fp8"): (442, 639, 314_601_984, 45_152_554_536, 6_139_165_056),
    (32, "sampled"): (426, 600, 314_601_984, 44_783_640_488, 5_772_846_848),
    (32, "lookup"): (417, 591, 314_601_984, 44_489_201_904, 5_738_025_952),
    (32, "plain, target in fp8"): (180, 433, 20_457_472, 26_135_799_552, 901_477_120),
    (32, "greedy, target in fp8"): (796, 839, 320_893_440, 65_430_952_488, 33_657_928_064),
}


@pytest.fixture(scope="module")
def counted() -> dict[tuple[int, str], RoundCounts]:
    model = llama_8b(8192)
    drafter, in_float8 = eagle3_for(model), eagle3_for(model, float8=True)
    drafters = {
        **{"plain": None, "greedy": drafter, "fp8": in_float8, "sampled": drafter},
        "lookup": lookup_beside(drafter, model),
    }
    smaller = llama_8b(8192, float8=True)
    cases = [(model, name, drafting) for name, drafting in drafters.items()]
    cases += [
        (smaller, "plain, target in fp8", None),
        (smaller, "greedy, target in fp8", eagle3_for(smaller)),
    ]
    return {
        (rows, name): count_round(target, drafting, rows, CONTEXT, sampling=name == "sampled")
        for rows in (1, 8, 32)
        for target, name, drafting in cases
    }


def test_counts_are_pinned(counted: dict[tuple[int, str], RoundCounts]) -> None:
    """More launches, allocations or bytes than before are seen here; docs/decoder.md shows them."""
    assert {
        key: (each.launches, each.allocations, each.peak_bytes, each.read, each.written)
        for key, each in counted.items()
    } == COUNTS


def test_a_rank_reads_its_share_and_launches_more() -> None:
    """Of a round that eight share."""
    model = llama_8b(8192, ranks=8)
    drafters = {"plain": None, "greedy tree": eagle3_for(model)}
    page = (ROOT / "docs/decoder.md").read_text(encoding="utf-8")
    for rows in (1, 8):
        for name, drafter in drafters.items():
            counts = count_round(model, drafter, rows, CONTEXT, sampling=False)
            sizes = f"{counts.read / 1e6:,.0f} | {counts.written / 1e6:,.0f}"
            assert f"| {name} | {rows} | {counts.launches} | {sizes} |" in page
            whole = COUNTS[rows, name.split()[0]]
            assert counts.read < whole[3] / 7 and counts.launches < whole[0] + 160


def test_rounds_behind_a_window_are_captured() -> None:
    """What a window hides is counted once a forward, not once a layer."""
    fields = {"num_hidden_layers": 8, "sliding_window": 4096}
    config, ops = MistralConfig(**{**LLAMA_8B, **fields}), TracedOps(torch.bfloat16)
    kind: dict[str, Any] = {"device": META, "dtype": torch.bfloat16, "max_length": 8192}
    with without_data():
        sliding = random_model(config, (1, 3, 4), ops=ops, **kind)
    launches = [
        count_round(model, eagle3_for(model), 8, CONTEXT, sampling=False).launches
        for model in (llama_8b(8192, layers=8), sliding)
    ]
    assert 0 < launches[1] - launches[0] <= 3


def test_the_page_shows_them() -> None:
    page = (ROOT / "docs/decoder.md").read_text(encoding="utf-8")
    names = {
        **{"plain": "plain", "greedy": "greedy tree", "fp8": "greedy, fp8 head"},
        **{"sampled": "sampled tree", "lookup": "greedy, lookup"},
        **{"plain, target in fp8": "plain, fp8", "greedy, target in fp8": "greedy tree, fp8"},
    }
    for (rows, name), (launches, allocations, *sizes) in COUNTS.items():
        megabytes = " | ".join(f"{size / 1e6:,.0f}" for size in sizes)
        assert f"| {names[name]} | {rows} | {launches} | {allocations} | {megabytes} |" in page


def test_bytes_are_those_of_the_roofline_and_little_more(
    counted: dict[tuple[int, str], RoundCounts],
) -> None:
    """Of plain rounds: weights once, and the keys and values of every row."""
    model = llama_8b(8192)
    weights, entry = model_bytes(model), model.plane_shape.page_bytes / 64
    for rows in (1, 8, 32):
        floor = weights + rows * (CONTEXT + 1) * entry
        counts = counted[rows, "plain"]
        assert floor < counts.read + counts.written < 1.06 * floor


def test_a_drafting_round_reads_the_target_once(
    counted: dict[tuple[int, str], RoundCounts],
) -> None:
    for rows in (1, 8, 32):
        assert counted[rows, "greedy"].read < 1.5 * counted[rows, "plain"].read


def test_a_head_in_float8_saves_what_the_cost_model_counts(
    counted: dict[tuple[int, str], RoundCounts],
) -> None:
    """A byte of every parameter, as often as a round of one row reads it."""
    model = llama_8b(256, layers=8)
    stored, work = (eagle3_for(model, float8=each).work(ROUND_TREE) for each in (False, True))
    assert (stored.weight_bytes, work.weight_bytes) == (2, 1)
    steps = ROUND_TREE.steps - 1
    parameters = steps * sum(size for size, _ in work.step) + sum(
        size for size, _ in work.extension
    )
    saved = counted[1, "greedy"].read - counted[1, "fp8"].read
    assert saved == pytest.approx(parameters, rel=0.01)


def test_a_target_in_float8_reads_a_byte_of_every_parameter_less(
    counted: dict[tuple[int, str], RoundCounts],
) -> None:
    """Of its layers', and takes half the memory."""
    model, smaller = llama_8b(256, layers=8), llama_8b(256, layers=8, float8=True)
    saved = model_bytes(model) - model_bytes(smaller)
    assert saved == 8 * (4096 * (4096 + 1024) * 2 + 3 * 4096 * 14336)
    read = counted[1, "plain"].read - counted[1, "plain, target in fp8"].read
    assert read == pytest.approx(saved * 32 / 8, rel=0.001)


def test_the_copy_of_a_matrix_in_float8_is_planned() -> None:
    """Of the largest, which long prompts make."""
    ops, sizes = TracedOps(torch.bfloat16), list[int]()
    for shape in ((2, 4), (256, 64), (128, 64)):
        ops.pack_float8(torch.empty(shape, device=META))
        sizes.append(ops.scratch_bytes(1, 1, 1, 1, 1))
    assert [each - sizes[0] for each in sizes] == [
        0,
        2 * (256 * 64 - 2 * 4),
        2 * (256 * 64 - 2 * 4),
    ]


# Planted faults ---------------------------------------------------------------------------------

stashed: list[Tensor] = []
turns = count()

#: What is done beside verification → how the trace says that no graph can hold it.
FAULTS: dict[str, tuple[Callable[[TracedOps, Tensor], object], str]] = {
    "item": (lambda ops, chosen: chosen[0, 0].item(), "looks at a value"),
    "branch": (lambda ops, chosen: bool((chosen > 0).all()), "looks at a value"),
    "size by value": (lambda ops, chosen: chosen.nonzero(), "looks at a value"),
    "host tensor": (lambda ops, chosen: torch.zeros(3), "on the host"),
    "from the host": (lambda ops, chosen: torch.tensor([3], device=META) + chosen, "on the host"),
    "to the host": (lambda ops, chosen: chosen.cpu(), "on the host"),
    "pinned memory": (lambda ops, chosen: torch.empty(3, pin_memory=True), "on the host"),
    "kept memory": (lambda ops, chosen: stashed.append(chosen + 1), "still held"),
    "python length": (lambda ops, chosen: chosen + next(turns), "does not repeat"),
    "another launch": (
        lambda ops, chosen: [chosen + 1 for _ in range(next(turns))],
        "does not repeat|does more",
    ),
    "stride-0 view": (
        lambda ops, chosen: ops.add_rms_norm(
            torch.empty(2, 8, device=META), None, torch.empty(1, device=META).expand(8), 1e-5
        ),
        "reads a view",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, message = FAULTS[fault]
    honest = TracedOps.verify

    def verify(ops: TracedOps, tree: Tree, predicted: Tensor, depth: int) -> VerifyOutput:
        if ops.trace is not None:
            plant(ops, predicted)
        return honest(ops, tree, predicted, depth)

    model = llama_8b(256, layers=8)
    drafter = eagle3_for(model)
    count_round(model, drafter, 2, 100, sampling=False)
    monkeypatch.setattr(TracedOps, "verify", verify)
    with pytest.raises(AssertionError, match=message):
        count_round(model, drafter, 2, 100, sampling=False)
    stashed.clear()


def test_a_round_that_reads_more_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that are copied, as a product's result in float32 would be."""
    honest = DecoderModel.logits
    model = llama_8b(256, layers=8)
    before = count_round(model, None, 8, 100, sampling=False)
    monkeypatch.setattr(DecoderModel, "logits", lambda *args: honest(*args).clone())
    after = count_round(model, None, 8, 100, sampling=False)
    logits = 8 * model.vocabulary * 2
    assert (after.launches, after.allocations) == (before.launches + 1, before.allocations + 1)
    assert (after.read - before.read, after.written - before.written) == (logits, logits)


# Engines and their graphs -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", *DRAFTERS])
def test_engines_keep_what_their_graphs_read_and_plan_for_their_memory(
    gpu: FakeGpu, name: str
) -> None:
    """Of every drafter: rounds can be captured, greedy and sampling, and take what was planned."""
    model = llama_8b(2048, gpu.ops, layers=8)
    with without_data():
        drafter = None if name == "plain" else every_drafter(model)[name](TREE)
    engine = Engine(model, drafter=drafter, slots=4, buckets=(1, 4))
    gc.collect()
    rounds, prompts = gpu.graphs[:4], gpu.graphs[4:]
    assert len(rounds) == 4, "of 1 and of 4 rows, greedy and sampling"
    assert len(prompts) == len(PROMPT_LENGTHS)
    for graph in gpu.graphs:
        graph.replay()
    nodes = max(drafter.nodes, drafter.lookahead) if drafter else 1
    planned = planned_bytes(model, 4, nodes, graphs=0, prefill_tokens=0)
    assert gpu.pool_bytes < planned
    del engine


def test_a_freed_input_is_seen(gpu: FakeGpu) -> None:
    engine = Engine(llama_8b(256, gpu.ops, layers=8), slots=2)
    (graph, *_) = gpu.graphs
    graph.replay()
    engine._batch = engine._rounds._batch = DecodeBatch.empty(2, pages=1, emitted=1, device=META)
    gc.collect()
    with pytest.raises(NotCapturable, match="have been freed"):
        graph.replay()


@pytest.mark.parametrize("float8", [False, True])
def test_the_clock_keeps_the_trees_that_its_graphs_verify(gpu: FakeGpu, float8: bool) -> None:
    model = llama_8b(256, gpu.ops, layers=8)
    meter = CostMeter(model, eagle3_for(model, float8=float8), 2, 100, (1, 8), (1, 4), (1, 3))
    gc.collect()
    for graph in gpu.graphs:
        graph.replay()
    del meter._held
    gc.collect()
    with pytest.raises(NotCapturable, match="have been freed"):
        for graph in gpu.graphs:
            graph.replay()


# Memory -----------------------------------------------------------------------------------------


def largest_prefill(engine: Engine, tokens: int) -> None:
    """As many prompts as there are slots, in one forward, one of them long."""
    batch, model = engine._prefill.batch, engine.model
    starts = torch.zeros(len(batch) + 1, dtype=torch.int64, device=META)
    rows = TokenRows.ragged(starts, tokens, tokens + 1 - len(batch))
    ids = torch.zeros(tokens, dtype=torch.int64, device=META)
    with torch.inference_mode():
        prefill(model, engine.pools.planes, engine.drafter, batch, rows, ids, ids, last=len(batch))


@pytest.mark.parametrize(
    ("slots", "float8"),
    [(1, ""), (8, ""), (64, ""), (1, "head"), (64, "head"), (64, "target"), (64, "both")],
)
def test_an_8b_target_on_24_gb(slots: int, float8: str) -> None:
    """Weights, rounds and prompts fit beside the pages, which take most of what is left."""
    with fake_gpu(24 * GIB) as gpu:
        model = llama_8b(8192, gpu.ops, float8=float8 in ("target", "both"))
        drafter = eagle3_for(model, float8=float8 in ("head", "both"))
        engine = Engine(model, drafter=drafter, slots=slots, buckets=(slots,))
        before = gpu.peak_bytes = gpu.held_bytes()
        largest_prefill(engine, 2048)
        prompts = gpu.peak_bytes - before
        full = len(engine._batch) * engine._batch.block_table.shape[1] + 1
        assert slots == 1 or engine.pools.shared.pages < full
        planned = planned_bytes(model, slots, 16, graphs=0, prefill_tokens=2048)
        assert prompts + gpu.pool_bytes < planned < 2 * (prompts + gpu.pool_bytes) + 2**27
        assert slots == 1 or 0 < gpu.free_bytes() - prompts < 0.25 * (24 * GIB - model_bytes(model))


def test_pages_that_are_taken_first_leave_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: four fifths of what is free, and rounds and prompts from the rest."""
    monkeypatch.setattr(scheduler, "planned_bytes", lambda *args, **named: 0)
    with fake_gpu(24 * GIB) as gpu, pytest.raises(torch.OutOfMemoryError):
        model = llama_8b(8192, gpu.ops)
        engine = Engine(model, drafter=eagle3_for(model), slots=64, buckets=(64,))
        largest_prefill(engine, 2048)


# Pinned memory ----------------------------------------------------------------------------------


@pytest.fixture
def copies(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[PinnedCopies]:
    copies = PinnedCopies()
    monkeypatch.setattr(torch.cuda, "Event", copies.event)
    with copies:
        yield copies


def test_prompts_are_not_written_over_a_copy_under_way(copies: PinnedCopies) -> None:
    staging = Staging(torch.int64, META)
    for number in range(3):
        staging.send([number, number])
    assert len(copies.pinned) == 1
    staging._copied = None
    with pytest.raises(NotCapturable, match="before its copy has ended"):
        staging.send([1, 2])


def test_tokens_are_not_read_before_their_copy_has_ended(copies: PinnedCopies) -> None:
    batch = DecodeBatch.empty(2, pages=1, emitted=3, device=META)
    copy_to_host(batch).wait()
    pending: Any = copy_to_host(batch)
    pending._arrived = None
    with pytest.raises(NotCapturable, match="before its copy has ended"):
        pending.wait()


def test_the_command_prints_a_roofline(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the bytes and of the gaps between launches, from what the user says of a machine."""
    assert main(["--rows", "1", "--bandwidth", "2000", "--gap", "1"]) == 0
    heading, plain, *drafting = capsys.readouterr().out.splitlines()
    assert heading.split()[-2:] == ["round", "ms"] and len(drafting) == 6
    launches, _, _, read, written = COUNTS[1, "plain"]
    memory, gaps = (read + written) / 2e9, launches / 1e3  # milliseconds
    figures = [float(each) for each in plain.split()[-3:]]
    assert figures == pytest.approx([memory, gaps, memory + gaps], abs=1e-3)
