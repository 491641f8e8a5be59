"""The fast operations in torch give what the definitions give, and copy no cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pipeline.decoder.model import pick_ops
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.eager import EagerOps
from pipeline.decoder.ops.layer import PAGE, AttentionMetadata
from pipeline.decoder.ops.tree import SamplingTensors
from tests.decoder.ops.conftest import chain_metadata, slot_metadata, tree_metadata

REFERENCE, OPS = TorchOps(), EagerOps()
NAN = float("nan")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Pool:
    """Keys and values of one layer, whose pages hold NaN wherever nothing was written.

    `scattered` pages are handed out in any order, with pages of others between them.
    """

    def __init__(
        self, entries: Sequence[int], groups: int, size: int, *, scattered: bool = False
    ) -> None:
        rows, width = len(entries), -(-max(entries) // PAGE) or 1
        pages = 3 * rows * width + 1 if scattered else rows * width + 1
        shape = pages, groups, PAGE, size
        self.keys, self.values = torch.full(shape, NAN), torch.full(shape, NAN)
        order = torch.randperm(pages - 1) if scattered else torch.arange(pages - 1)
        self.block_table = order[: rows * width].view(rows, width) + 1
        for row, count in enumerate(entries):
            entry = torch.arange(count)
            page, offset = self.block_table[row, entry // PAGE], entry % PAGE
            self.keys[page, :, offset] = torch.randn(count, groups, size)
            self.values[page, :, offset] = torch.randn(count, groups, size)

    def compare(self, query: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Attend as the definition does, NaN behind the visible entries included."""
        wanted = REFERENCE.tree_attention(query, self.keys, self.values, metadata)
        mixed = OPS.tree_attention(query, self.keys, self.values, metadata)
        torch.testing.assert_close(mixed, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
        return mixed

    def compare_in_place(self, query: Tensor, metadata: AttentionMetadata) -> None:
        """The same with other leftovers in the rows' own pages, and nobody to fall back on."""
        with pytest.MonkeyPatch.context() as patch:
            wanted = REFERENCE.tree_attention(query, self.keys, self.values, metadata)
            own = self.block_table.flatten()
            for plane in (self.keys, self.values):
                plane[own] = plane[own].nan_to_num(1e30)
            patch.setattr(TorchOps, "tree_attention", None)
            mixed = EagerOps().tree_attention(query, self.keys, self.values, metadata)
        torch.testing.assert_close(mixed, wanted, rtol=1e-4, atol=1e-5)


def random_tree(rows: int, nodes: int) -> Tensor:
    """Ancestor bits [rows, nodes]."""
    masks = torch.ones(rows, nodes, dtype=torch.int64)
    for node in range(1, nodes):
        parent = torch.randint(node, (rows, 1))
        masks[:, node] = masks.gather(1, parent)[:, 0] | (1 << node if node < 63 else -(1 << 63))
    return masks


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    ("heads", "groups", "size"), [(9, 3, 64), (4, 4, 80), (8, 1, 128), (3, 1, 6)]
)
@pytest.mark.parametrize(
    ("prefixes", "nodes"),
    [
        ([0], 1),
        ([300], 1),
        ([300], 16),
        ([0, 63, 64, 65, 128, 15], 16),
        ([700, 1, 130], 64),
        ([5, 100, 70, 64], 1),
    ],
)
def test_trees(
    heads: int, groups: int, size: int, prefixes: list[int], nodes: int, scattered: bool
) -> None:
    pool = Pool([prefix + nodes for prefix in prefixes], groups, size, scattered=scattered)
    metadata = tree_metadata(
        pool.block_table, torch.tensor(prefixes), random_tree(len(prefixes), nodes)
    )
    query = torch.randn(len(prefixes) * nodes, heads, size)
    assert pool.compare(query, metadata).isfinite().all(), "what nobody sees never matters"
    pool.compare_in_place(query, metadata)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    ("prefixes", "counts"),
    [
        ([0], [200]),
        ([61], [200]),
        ([61, 0, 700], [37, 90, 1]),
        ([61, 10, 700, 3], [5, 0, 1, 3]),
        ([0, 128], [64, 2]),
    ],
)
def test_ragged_chains(prefixes: list[int], counts: list[int], scattered: bool) -> None:
    entries = [prefix + count for prefix, count in zip(prefixes, counts, strict=True)]
    pool = Pool(entries, 3, 64, scattered=scattered)
    metadata = chain_metadata(pool.block_table, torch.tensor(prefixes), counts)
    query = torch.randn(sum(counts), 9, 64)
    assert pool.compare(query, metadata).isfinite().all()
    pool.compare_in_place(query, metadata)


def test_ragged_trees_and_an_upper_bound_of_longest() -> None:
    pool = Pool([80, 70, 200], 2, 32)
    even = tree_metadata(pool.block_table, torch.tensor([70, 60, 190]), random_tree(3, 8))
    assert even.mask is not None
    kept = torch.tensor([0, 1, 2, 16, 17, 18, 19, 20])  # three tokens, none, and five
    ragged = replace(
        even,
        slot_mapping=even.slot_mapping[kept],
        positions=even.positions[kept],
        mask=even.mask[kept],
        cu_seqlens_q=torch.tensor([0, 3, 3, 8]),
        max_query_len=8,
    )
    query = torch.randn(8, 8, 32)
    pool.compare(query, ragged)
    pool.compare_in_place(query, ragged)


def test_nan_that_is_seen_stays() -> None:
    pool = Pool([100, 90], 3, 64)
    pool.values[pool.block_table[0, 0], :, 3] = NAN
    metadata = tree_metadata(pool.block_table, torch.tensor([90, 80]), random_tree(2, 10))
    mixed = pool.compare(torch.randn(20, 9, 64), metadata)
    assert mixed[:10].isnan().all() and mixed[10:].isfinite().all()


def test_seeing_nothing_gives_zeros_and_inert_rows_may_share_a_page() -> None:
    pool = Pool([10, 10, 90], 1, 32)
    pool.block_table[:2] = 0
    masks = torch.tensor([[1, 3], [0, 0], [1, 3]])
    metadata = tree_metadata(pool.block_table, torch.tensor([0, 0, 80]), masks)
    pool.keys[0], pool.values[0] = torch.randn(2, 1, PAGE, 32)
    mixed = pool.compare(torch.randn(6, 4, 32), metadata)
    assert torch.equal(mixed[2:4], torch.zeros_like(mixed[2:4]))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "groups", "size"), [(9, 3, 64), (4, 2, 6)])
def test_rope_write(heads: int, groups: int, size: int, normed: bool) -> None:
    tokens, length = 7, 40
    angles = torch.randn(length, size // 2).repeat(1, 2)
    slots = torch.randperm(4 * PAGE)[:tokens]
    metadata = slot_metadata((angles.cos(), angles.sin()), torch.randperm(length)[:tokens], slots)
    qkv = torch.randn(tokens, (heads + 2 * groups) * size)
    norms = (torch.randn(size), torch.randn(size)) if normed else None
    ours, wanted = (torch.zeros(2, 4, groups, PAGE, size) for _ in range(2))
    query = OPS.rope_write(qkv, norms, 1e-5, metadata, *ours)
    torch.testing.assert_close(
        query, REFERENCE.rope_write(qkv, norms, 1e-5, metadata, *wanted), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 33])
def test_rows(tokens: int) -> None:
    x, update, weight = torch.randn(tokens, 48), torch.randn(tokens, 48), torch.randn(48)
    for added in (None, update):
        ours = OPS.add_rms_norm(x, added, weight, 1e-5)
        for mine, wanted in zip(ours, REFERENCE.add_rms_norm(x, added, weight, 1e-5), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(OPS.silu_mul(x), REFERENCE.silu_mul(x))


@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 65])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(tokens: int, biased: bool) -> None:
    x, weight, bias = torch.randn(tokens, 48), torch.randn(80, 48), torch.randn(80)
    y = OPS.linear(x, OPS.pack(weight), bias if biased else None)
    assert y.is_contiguous()
    wanted = x @ weight.T + (bias if biased else 0)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)


def test_a_greedy_draw_makes_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, ones = torch.randn(3, 50), torch.ones(3)
    greedy = SamplingTensors(0 * ones, ones, ones.long(), torch.arange(3))
    warm = replace(greedy, temperature=torch.tensor([0.0, 1.0, 0.7]), top_k=0 * ones.long())
    positions = torch.arange(3)
    assert torch.equal(OPS.draw(logits, warm, positions), REFERENCE.draw(logits, warm, positions))
    monkeypatch.setattr("pipeline.decoder.ops.base.perturb", None)
    assert torch.equal(OPS.draw(logits, greedy, positions), logits.argmax(-1))


def test_half_precision() -> None:
    pool, ops = Pool([300, 90], 3, 64), EagerOps(torch.bfloat16)
    metadata = tree_metadata(pool.block_table, torch.tensor([290, 80]), random_tree(2, 10))
    query = torch.randn(20, 9, 64).bfloat16()
    keys, values = pool.keys.bfloat16(), pool.values.bfloat16()
    wanted = REFERENCE.tree_attention(query.float(), keys.float(), values.float(), metadata)
    mixed = ops.tree_attention(query, keys, values, metadata)
    assert mixed.dtype is torch.bfloat16
    torch.testing.assert_close(mixed.float(), wanted, rtol=2.0**-6, atol=2.0**-6)


def test_it_is_what_a_cpu_without_kernels_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_CPU_KERNELS", "0")
    for dtype in (torch.float32, torch.bfloat16):
        assert type(pick_ops(torch.device("cpu"), dtype)) is EagerOps
