"""The decoder's operations in plain torch, made for speed: a CPU without a compiler takes these.

Attention reads the cache where it lies. Each page is attended over by the queries of the row that
owns it, for all rows in one call, and a row's pages are merged by the log of their sums:

    pages in memory   3   4   5   6   7        row 0 owns 3 and 5, row 1 owns 4 and 7
    owner             0   1   0   .   1        6 is nobody's: computed, and left out by `table`
    table             row 0 → 0 2              where each row's pages are in that list
                      row 1 → 1 4

What depends on the metadata alone is worked out once a forward, not once a layer.

Shapes as in base.py; n pages in the list, R queries that read a page of one key/value head: N
queries of a row, N = `max_query_len`, times the Q/G query heads that share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from math import isfinite

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.decoder.ops.base import TorchOps, rms_norm
from pipeline.decoder.ops.layer import PAGE, AttentionMetadata, Packed
from pipeline.decoder.ops.tree import WINDOW, SamplingTensors

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

#: Chains up to this long read pages; longer ones, which are prompts, read their row in one piece.
_SHORT = 64
#: Tokens of a forward whose products are mostly faster with the weight in front.
_FEW = range(8, 65)
#: Pages of nobody between two that are read together; reading one costs what another call does.
_GAP = 1


class EagerOps(TorchOps):
    """fp32 is what it is made for; other types and devices are right, and slower."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self._forwards: list[_Forward] = []  # of the last two metadata: a forward may have both

    def linear(self, x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
        if len(x) not in _FEW or x.dtype is not torch.float32:
            return F.linear(x, weight, bias)
        # The same product with the weight in front: for so few rows BLAS is faster that way.
        y = torch.mm(weight, x.t()).t().contiguous()
        return y if bias is None else y.add_(bias)

    def add_rms_norm(
        self,
        x: Tensor,
        update: Tensor | None,
        weight: Tensor,
        eps: float,
        update_norm: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if update is not None and update_norm is not None:
            update = _normed(update, update_norm, eps)
        total = x if update is None else x + update
        return _normed(total, weight, eps), total

    def gate_mul(self, gate_up: Tensor, *, gelu: bool = False) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)).mul_(up)

    def rope_write(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        metadata: AttentionMetadata,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        forward = self._prepared(metadata)
        groups, size = keys.shape[1], keys.shape[3]
        split = qkv.view(len(qkv), -1, size)  # [T, Q + 2G, d]
        heads = split.shape[1] - 2 * groups
        turned = split[:, : heads + groups]
        if norms is not None:
            query = rms_norm(turned[:, :heads], norms[0], eps)
            turned = torch.cat((query, rms_norm(turned[:, heads:], norms[1], eps)), dim=1)
        # (a, b) → (a cos - b sin, b cos + a sin) on the two halves of each head.
        cos, signed_sin = forward.rotation
        halves = turned.reshape(*turned.shape[:2], 2, -1)
        other = halves.flip(2).view(turned.shape)
        turned = (turned * cos).addcmul_(other, signed_sin)
        index = forward.entries(groups)
        keys.view(-1, size).index_copy_(0, index, turned[:, heads:].reshape(-1, size))
        written = split[:, heads + groups :].reshape(-1, size)
        values.view(-1, size).index_copy_(0, index, written)
        return turned[:, :heads]

    def tree_attention(
        self, query: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        if query.device.type != "cpu":
            return super().tree_attention(query, keys, values, metadata)
        forward = self._prepared(metadata)
        if metadata.mask is None and forward.max_query_len > _SHORT:
            return _attend_prompts(query, keys, values, forward)
        pages = forward.pages(query.shape[1] // keys.shape[1], query.dtype)
        mixed = None if pages is None else _attend_pages(query, keys, values, forward, pages)
        # Weights of zero are none where an unseen entry holds NaN or infinity: the definition does
        # not read those at all.
        if mixed is None or not isfinite(mixed.sum().item()):
            return super().tree_attention(query, keys, values, metadata)
        return mixed

    def draw(self, logits: Tensor, sampling: SamplingTensors, positions: Tensor) -> Tensor:
        if not bool(sampling.temperature.any()):  # the first tokens of greedy requests
            return self.argmax(logits)
        return super().draw(logits, sampling, positions)

    def _prepared(self, metadata: AttentionMetadata) -> _Forward:
        for forward in self._forwards:
            if forward.metadata is metadata:
                return forward
        self._forwards = [_Forward(metadata), *self._forwards[:1]]
        return self._forwards[0]


@dataclass(frozen=True)
class _Pages:
    """The pages that a forward's rows read, in the order of memory, with what lies between."""

    runs: tuple[tuple[int, int], ...]  # first and last + 1 of page ids; n in all
    owner: Tensor  # [n] row; any row where nobody owns the page
    bias: Tensor  # [n, 1, R, PAGE] 0 where the owner's query sees the entry, else -inf
    unseen: Tensor | None  # [n, 1, R] where a query sees nothing of the page; None: nowhere
    table: Tensor | None  # [B, most] places among the n; None: one row, which owns all of them
    padding: Tensor | None  # [B, most, 1, 1] true after a row's last page


class _Forward:
    """What the layers of one forward share."""

    def __init__(self, metadata: AttentionMetadata) -> None:
        self.metadata = metadata
        self.counts = metadata.cu_seqlens_q.diff()  # [B]
        self._entries: dict[int, Tensor] = {}
        self._pages: dict[tuple[int, torch.dtype], _Pages | None] = {}

    @cached_property
    def max_query_len(self) -> int:
        """N."""
        return int(self.counts.max())

    @cached_property
    def rotation(self) -> tuple[Tensor, Tensor]:
        """cos [T, 1, d], and sin with the sign that each half takes."""
        cos, sin = (table[self.metadata.positions][:, None] for table in self.metadata.rotary)
        first, second = sin.chunk(2, dim=-1)
        return cos, torch.cat((-first, second), dim=-1)

    def entries(self, groups: int) -> Tensor:
        """[T · G] places of the written entries in a plane seen as [pages · G · PAGE, d]."""
        if groups not in self._entries:
            page, offset = self.metadata.slot_mapping // PAGE, self.metadata.slot_mapping % PAGE
            group = torch.arange(groups, device=page.device)
            self._entries[groups] = (
                (page[:, None] * groups + group) * PAGE + offset[:, None]
            ).flatten()
        return self._entries[groups]

    @cached_property
    def tokens(self) -> Tensor | None:
        """[B, N] tokens of each row, its last one's place taken by any; None: rows are even."""
        if len(self.metadata.positions) == self.metadata.rows * self.max_query_len:
            return None
        within = torch.arange(self.max_query_len, device=self.counts.device)
        tokens = self.metadata.cu_seqlens_q[:-1, None] + within
        return tokens.clamp(max=len(self.metadata.positions) - 1)

    @cached_property
    def padded_index(self) -> Tensor:
        """[T] places of the tokens in [B · N]."""
        within = torch.arange(self.max_query_len, device=self.counts.device)
        return (within < self.counts[:, None]).flatten().nonzero()[:, 0]

    def pages(self, shared: int, dtype: torch.dtype) -> _Pages | None:
        """For `shared` query heads to a key/value head, and scores of type `dtype`.

        None where two rows share a page, or a query sees nothing: the definition's business.
        """
        key = shared, dtype
        if key not in self._pages:
            self._pages[key] = self._make_pages(shared, dtype)
        return self._pages[key]

    def _make_pages(self, shared: int, dtype: torch.dtype) -> _Pages | None:
        metadata = self.metadata
        width = metadata.block_table.shape[1]
        ends = metadata.seq_lens + (self.counts if metadata.mask is None else self._reach())
        most = torch.where(self.counts > 0, (ends + PAGE - 1) // PAGE, 0).clamp(max=width)  # [B]
        ordinal = torch.arange(int(most.max()))
        padding = ordinal >= most[:, None]  # [B, most]
        row, of_row = (~padding).nonzero(as_tuple=True)
        ids = metadata.block_table[row, of_row]
        order = ids.argsort()
        ids, row, of_row = ids[order], row[order], of_row[order]
        gaps = ids.diff()
        if len(ids) == 0 or bool((gaps == 0).any()):
            return None
        cuts = (gaps > _GAP + 1).nonzero()[:, 0]
        firsts = ids[torch.cat((cuts.new_zeros(1), cuts + 1))]
        lasts = ids[torch.cat((cuts, cuts.new_tensor([len(ids) - 1])))] + 1
        lengths = lasts - firsts
        # A page's place among those of all runs: what is skipped in front of its run comes off.
        skipped = firsts - (lengths.cumsum(0) - lengths)
        place = ids - skipped[torch.searchsorted(firsts, ids, right=True) - 1]
        owner = torch.zeros(int(lengths.sum()), dtype=torch.int64)
        owner[place] = row
        first_entry = torch.zeros_like(owner)
        first_entry[place] = of_row * PAGE
        seen = self._seen(owner, first_entry)  # [n, N, PAGE]
        unseen = ~seen.any(-1)  # [n, N]
        table = place.new_zeros(len(padding), len(ordinal))
        table[row, of_row] = place
        blind = (unseen[table] | padding[:, :, None]).all(1)  # [B, N]
        if bool(blind.flatten()[self.padded_index].any()):
            return None
        bias = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
        alone = len(table) == 1 and len(owner) == len(ids)
        return _Pages(
            runs=tuple(zip(firsts.tolist(), lasts.tolist(), strict=True)),
            owner=owner,
            bias=bias.repeat(1, shared, 1)[:, None],
            unseen=unseen.repeat(1, shared)[:, None] if bool(unseen.any()) else None,
            table=None if alone else table,
            padding=None if alone else padding[:, :, None, None],
        )

    def _seen(self, owner: Tensor, first_entry: Tensor) -> Tensor:
        """[n, N, PAGE]: which entries of a page the owner's queries see."""
        entry = first_entry[:, None] + torch.arange(PAGE)  # [n, PAGE]
        offset = (entry - self.metadata.seq_lens[owner][:, None])[:, None]  # [n, 1, PAGE]
        if self.metadata.mask is None:
            seen = offset <= torch.arange(self.max_query_len)[:, None]
        else:
            bit = self._mask[owner][:, :, None] >> offset.clamp(0, WINDOW - 1) & 1
            seen = (offset < 0) | ((offset < WINDOW) & bit.bool())
        first_seen = self.metadata.first_seen
        if first_seen is None:
            return seen
        return seen & (entry[:, None] >= self._by_row(first_seen)[owner][:, :, None])

    @cached_property
    def _mask(self) -> Tensor:
        """[B, N]"""
        mask = self.metadata.mask
        assert mask is not None
        return self._by_row(mask)

    def _by_row(self, by_token: Tensor) -> Tensor:
        """[T] → [B, N]; after a row's last token anything."""
        if self.tokens is None:
            return by_token.view(-1, self.max_query_len)
        return by_token[self.tokens]

    def _reach(self) -> Tensor:
        """[B] entries after each prefix up to the last one that a query sees, or one more."""
        highest = torch.frexp(self._mask.amax(1).double()).exponent
        return torch.where(self._mask.amin(1) < 0, WINDOW, highest)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in fewer passes."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    scale = torch.addcmul(_scalar(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (x * scale).mul_(weight).to(x.dtype)


@cache
def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)


def _attend_pages(
    query: Tensor, keys: Tensor, values: Tensor, forward: _Forward, pages: _Pages
) -> Tensor:
    """query [T, Q, d] → [T, Q, d], each page where it is."""
    heads, size = query.shape[1:]
    rows, max_query_len, groups = forward.metadata.rows, forward.max_query_len, keys.shape[1]
    shared = heads // groups
    by_row = query if forward.tokens is None else query[forward.tokens]
    if max_query_len == 1:
        folded = by_row.view(rows, groups, shared, size)
    else:
        folded = by_row.view(rows, max_query_len, groups, shared, size).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(rows, groups, shared * max_query_len, size)
    read = folded.expand(len(pages.owner), -1, -1, -1) if rows == 1 else folded[pages.owner]
    parts, place = [], 0
    for first, last in pages.runs:
        here = slice(place, place := place + last - first)
        bias = pages.bias[here]
        parts.append(_flash(read[here], keys[first:last], values[first:last], attn_mask=bias))
    mixed, sums = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    # [n, G, R, d] and the logs of the sums [n, G, R], zero for a query that sees nothing there.
    if pages.unseen is not None:
        sums = sums.masked_fill(pages.unseen, float("-inf"))
    if pages.table is None and len(mixed) == 1:
        merged = mixed
    elif pages.table is None:
        weights = sums.softmax(0)[..., None]
        merged = (mixed * weights).sum(0, keepdim=True)
    else:
        assert pages.padding is not None
        weights = sums[pages.table].masked_fill_(pages.padding, float("-inf")).softmax(1)
        merged = (mixed[pages.table] * weights[..., None]).sum(1)
    # [B, G, R, d] → [T, Q, d]
    if max_query_len > 1:
        merged = merged.reshape(rows, groups, shared, max_query_len, size).permute(0, 3, 1, 2, 4)
    merged = merged.reshape(rows * max_query_len, heads, size).to(query.dtype)
    return merged if forward.tokens is None else merged[forward.padded_index]


def _attend_prompts(query: Tensor, keys: Tensor, values: Tensor, forward: _Forward) -> Tensor:
    """Chains of many tokens: each row's keys and values are copied together, once a prompt."""
    metadata, mixed = forward.metadata, torch.empty_like(query)
    starts, seq_lens = metadata.cu_seqlens_q.tolist(), metadata.seq_lens.tolist()
    first_seen = metadata.first_seen
    for row, (first, last) in enumerate(pairwise(starts)):
        prefix, count = seq_lens[row], last - first
        if count == 0:
            continue
        begin = 0 if first_seen is None else int(first_seen[first:last].min())
        pages = metadata.block_table[row, : -(-(prefix + count) // PAGE)]
        key, value = (
            plane[pages].transpose(0, 1).flatten(1, 2)[None, :, begin : prefix + count]
            for plane in (keys, values)
        )  # [1, G, S, d]
        seen, before = None, prefix - begin
        if before:
            seen = torch.ones(count, before + count, dtype=torch.bool).tril_(before)
        if first_seen is not None:
            entry = torch.arange(begin, prefix + count)
            within = entry >= first_seen[first:last, None]  # [n, S]
            seen = within.tril_(before) if seen is None else seen & within
        piece = F.scaled_dot_product_attention(
            query[first:last].transpose(0, 1)[None],
            key,
            value,
            attn_mask=seen,
            is_causal=seen is None,
            enable_gqa=True,
        )
        mixed[first:last] = piece[0].transpose(0, 1)
    return mixed
