"""Attention of the C++ kernels: like the reference, blind to what is masked, batch-invariant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.cpu.ops import CpuOps
from pipeline.decoder.ops.layer import PAGE, AttentionMetadata, entry_slots
from tests.decoder.ops.conftest import chain_metadata, tree_metadata
from tests.decoder.ops.kernels import KERNELS, load_kernels, name_of, numbers

REFERENCE = TorchOps()
NAN = float("nan")


@pytest.fixture(scope="module", params=KERNELS, ids=name_of)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return load_kernels(*request.param)


class Cache:
    """Pages of one layer for a batch, holding NaN wherever nothing was written."""

    def __init__(self, ops: TorchOps, rows: int, entries: int, groups: int, size: int) -> None:
        pages = -(-entries // PAGE)
        shape = 2, rows * pages + 1, groups, PAGE, size
        self.planes = torch.full(shape, NAN, dtype=ops.dtype)
        self.keys_values = self.planes[0], self.planes[1]
        self.block_table = torch.randperm(rows * pages).view(rows, pages) + 1

    def wide(self) -> tuple[Tensor, Tensor]:
        return self.planes[0].float(), self.planes[1].float()

    def write(self, row: int, entries: Tensor, content: Tensor) -> None:
        """content [2, E, G, d]: keys and values of `entries` [E] of a row."""
        slots = entry_slots(self.block_table[row : row + 1], entries[None])[0]
        self.planes[:, slots // PAGE, :, slots % PAGE] = content.transpose(0, 1)

    def metadata(self, query: Tensor, seq_lens: Tensor, mask: Tensor | None) -> AttentionMetadata:
        """Of queries [B, N, Q, d]; mask [B, N], None for a chain."""
        if mask is not None:
            return tree_metadata(self.block_table, seq_lens, mask)
        return chain_metadata(self.block_table, seq_lens, [query.shape[1]] * len(query))

    def attend(self, ops: CpuOps, query: Tensor, seq_lens: Tensor, mask: Tensor | None) -> Tensor:
        """[B, N, Q, d] → [B, N, Q, d]."""
        metadata = self.metadata(query, seq_lens, mask)
        return ops.tree_attention(query.flatten(0, 1), *self.keys_values, metadata).view_as(query)


def random_tree(rows: int, nodes: int) -> Tensor:
    """Ancestor bits [rows, nodes]."""
    masks = torch.ones(rows, nodes, dtype=torch.int64)
    for node in range(1, nodes):
        parent = torch.randint(node, (rows, 1))
        masks[:, node] = masks.gather(1, parent)[:, 0] | (1 << node if node < 63 else -(1 << 63))
    return masks


def content(ops: CpuOps, entries: int, groups: int, size: int) -> Tensor:
    return numbers(ops, 2, entries, groups, size)


@pytest.mark.parametrize(
    ("heads", "groups", "size"),
    [(9, 3, 64), (4, 4, 80), (8, 2, 96), (8, 1, 128), (3, 1, 6), (15, 3, 34)],
)
@pytest.mark.parametrize(
    ("prefixes", "nodes", "tree"),
    [
        ([0], 1, True),
        ([300], 1, True),
        ([0, 63, 64, 65, 128, 15, 16, 17], 16, True),
        ([2000, 1, 130], 64, True),
        ([0], 1, False),
        ([0], 200, False),
        ([61, 700], 37, False),
    ],
)
def test_tree_attention(
    ops: CpuOps, heads: int, groups: int, size: int, prefixes: list[int], nodes: int, tree: bool
) -> None:
    rows = len(prefixes)
    cache, seq_lens = Cache(ops, rows, max(prefixes) + nodes, groups, size), torch.tensor(prefixes)
    for row, prefix in enumerate(prefixes):
        cache.write(row, torch.arange(prefix + nodes), content(ops, prefix + nodes, groups, size))
    query = torch.randn(rows, nodes, heads, size).to(ops.dtype)
    mask = random_tree(rows, nodes) if tree else None
    mixed = cache.attend(ops, query, seq_lens, mask)
    metadata = cache.metadata(query, seq_lens, mask)
    wanted = REFERENCE.tree_attention(query.float().flatten(0, 1), *cache.wide(), metadata)
    wanted = wanted.view_as(query)
    if ops.dtype is torch.float32:
        torch.testing.assert_close(mixed, wanted, rtol=2e-5, atol=2e-5)
        return
    # Weights are rounded to bf16 before they mix values of size one: errors of 2^-9, averaging out.
    torch.testing.assert_close(mixed.float(), wanted, rtol=2.0**-7, atol=6e-3)
    assert (mixed.float() - wanted).square().mean().sqrt() < 2.0**-8 * wanted.square().mean().sqrt()


def test_each_query_is_blind_to_what_it_does_not_see(ops: CpuOps) -> None:
    """NaN in one branch, or behind a prompt's query, reaches nobody else.

    The reference promises less.
    """
    cache, seq_lens = Cache(ops, 1, 400, 3, 64), torch.tensor([100])
    cache.write(0, torch.arange(400), content(ops, 400, 3, 64))
    query, mask = torch.randn(1, 40, 9, 64).to(ops.dtype), random_tree(1, 40)
    clean_tree = cache.attend(ops, query, seq_lens, mask)
    clean_chain = cache.attend(ops, query, seq_lens, None)
    cache.write(0, torch.tensor([105]), torch.full((2, 1, 3, 64), NAN, dtype=ops.dtype))
    sees = ((mask >> 5) & 1).bool()[0]
    tree = cache.attend(ops, query, seq_lens, mask)
    assert torch.equal(tree[0, ~sees], clean_tree[0, ~sees]) and tree[0, sees].isnan().all()
    chain = cache.attend(ops, query, seq_lens, None)
    assert torch.equal(chain[0, :5], clean_chain[0, :5]) and chain[0, 5:].isnan().all()


def test_seeing_nothing_gives_zeros(ops: CpuOps) -> None:
    cache = Cache(ops, 1, 10, 1, 64)
    query = torch.randn(1, 1, 3, 64).to(ops.dtype)
    mixed = cache.attend(ops, query, torch.tensor([0]), torch.tensor([[0]]))
    assert torch.equal(mixed, torch.zeros_like(mixed))


@pytest.mark.parametrize("prefix", [0, 5, 16, 59, 300])
@pytest.mark.parametrize(("heads", "groups", "size"), [(9, 3, 64), (8, 1, 80)])
def test_a_node_of_a_tree_gets_the_bits_of_plain_decoding(
    ops: CpuOps, prefix: int, heads: int, groups: int, size: int
) -> None:
    nodes = 40
    mask, known = random_tree(1, nodes), content(ops, prefix + nodes, groups, size)
    leaf = max(range(nodes), key=lambda node: int(mask[0, node]).bit_count())
    branch = [node for node in range(leaf + 1) if int(mask[0, leaf]) >> node & 1]
    entries = torch.cat((torch.arange(prefix), prefix + torch.tensor(branch)))
    assert branch != list(range(len(branch)))  # there are gaps
    tree, chain = (
        Cache(ops, 1, prefix + nodes, groups, size),
        Cache(ops, 1, prefix + nodes, groups, size),
    )
    tree.write(0, torch.arange(prefix + nodes), known)
    chain.write(0, torch.arange(len(entries)), known[:, entries])
    query, seq_lens = torch.randn(1, nodes, heads, size).to(ops.dtype), torch.tensor([prefix])

    verified = tree.attend(ops, query, seq_lens, mask)[:, branch]
    assert torch.equal(verified, chain.attend(ops, query[:, branch], seq_lens, None))
    for step, node in enumerate(branch):
        for alone in (None, torch.tensor([[1]])):
            decoded = chain.attend(ops, query[:, node : node + 1], seq_lens + step, alone)
            assert torch.equal(decoded[:, 0], verified[:, step])


def test_a_row_does_not_depend_on_the_batch_or_the_threads(ops: CpuOps) -> None:
    prefixes = [0, 17, 64, 200, 333]
    cache, seq_lens = Cache(ops, 5, 400, 3, 64), torch.tensor(prefixes)
    for row in range(5):
        cache.write(row, torch.arange(400), content(ops, 400, 3, 64))
    query, mask = torch.randn(5, 20, 9, 64).to(ops.dtype), random_tree(5, 20)
    together = cache.attend(ops, query, seq_lens, mask)
    for row in range(5):
        one = slice(row, row + 1)
        metadata = tree_metadata(cache.block_table[one], seq_lens[one], mask[one])
        alone = ops.tree_attention(query[row], *cache.keys_values, metadata)
        assert torch.equal(alone, together[row])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(cache.attend(ops, query, seq_lens, mask), together)
    finally:
        torch.set_num_threads(before)
    # A block table that is a view of a larger one.
    wider = torch.cat((cache.block_table, cache.block_table), dim=1)
    cache.block_table = wider[:, : cache.block_table.shape[1]]
    assert torch.equal(cache.attend(ops, query, seq_lens, mask), together)


def test_ragged_rows_have_the_bits_of_rows_alone(ops: CpuOps) -> None:
    """Chunks of three prompts in one forward, one of them of no token."""
    prefixes, counts = torch.tensor([70, 0, 9, 3]), [5, 40, 0, 17]
    cache = Cache(ops, 4, 128, 3, 64)
    for row in range(4):
        cache.write(row, torch.arange(128), content(ops, 128, 3, 64))
    query = numbers(ops, sum(counts), 9, 64)
    metadata = chain_metadata(cache.block_table, prefixes, counts)
    together = torch.split(ops.tree_attention(query, *cache.keys_values, metadata), counts)
    for row, part in enumerate(torch.split(query, counts)):
        one = slice(row, row + 1)
        alone = chain_metadata(cache.block_table[one], prefixes[one], counts[one])
        mixed = ops.tree_attention(part, *cache.keys_values, alone)
        assert torch.equal(mixed, together[row])


@pytest.mark.skipif(len(KERNELS) < 4, reason="one level only")
def test_float32_has_the_same_bits_on_every_level() -> None:
    both = [load_kernels(level, dtype) for level, dtype in KERNELS if dtype is torch.float32]
    cache, seq_lens, mask = (
        Cache(both[0], 2, 200, 3, 64),
        torch.tensor([130, 21]),
        random_tree(2, 16),
    )
    for row in range(2):
        cache.write(row, torch.arange(200), content(both[0], 200, 3, 64))
    query = torch.randn(2, 16, 9, 64)
    for chosen in (mask, None):
        assert torch.equal(*(cache.attend(ops, query, seq_lens, chosen) for ops in both))
