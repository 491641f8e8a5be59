"""Static buffers of a batch: what a round reads and writes, at addresses that never change.

Row r belongs to the r-th running request; active rows are always the first ones. A row that nobody
holds is *inert*: its block table names page 0 only, its length is 0 and never grows, and whatever
else a former request left in it has no effect on anyone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.draft import DraftNoise
from pipeline.decoder.ops.draws import DRAFT_NOISE
from pipeline.decoder.ops.layer import AttentionMetadata
from pipeline.decoder.ops.tree import SamplingTensors, VerifyOutput


@dataclass(frozen=True)
class RowState:
    """What a drafter keeps of each row from round to round: `size` values."""

    size: int
    dtype: torch.dtype


class RowMemory(Protocol):
    """What a drafter keeps of each row, besides keys and values."""

    state: RowState | None  # in batch.drafter_state
    history: int  # tokens, in batch.history; 0: it looks none up
    drafter_pages: int  # pages of its own pool


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Which rows T tokens belong to: row b has tokens cu_seqlens_q[b] … cu_seqlens_q[b + 1] - 1."""

    cu_seqlens_q: Tensor  # [B + 1]
    row: Tensor  # [T]
    within: Tensor  # [T] 0, 1, … in each row
    max_query_len: int  # most tokens of a row, or more

    @classmethod
    @cache
    def even(cls, rows: int, count: int, device: torch.device) -> TokenRows:
        """`count` tokens in each of `rows` rows; the same tensors for the same numbers, for good:
        captured graphs keep their addresses."""
        index = torch.arange(rows * count, device=device)
        cu_seqlens_q = torch.arange(0, rows * count + 1, count, device=device)
        return cls(cu_seqlens_q, index // count, index % count, count)

    @classmethod
    def ragged(cls, cu_seqlens_q: Tensor, tokens: int, max_query_len: int) -> TokenRows:
        """Rows that begin at `cu_seqlens_q` [B + 1], T = `tokens` in all; nothing is read back."""
        index = torch.arange(tokens, device=cu_seqlens_q.device)
        row = torch.bucketize(index, cu_seqlens_q[1:], right=True)
        return cls(cu_seqlens_q, row, index - cu_seqlens_q[row], max_query_len)


@dataclass(frozen=True)
class DecodeBatch:
    """S rows. Views of the first rows, or of one row, are batches too."""

    roots: Tensor  # [S] last token: certain, not yet in the target's cache
    seq_lens: Tensor  # [S] committed cache entries, which is also the root's position
    active: Tensor  # [S] 1 where a request holds the row, else 0
    block_table: Tensor  # [S, P] page ids
    drafter_block_table: Tensor  # [S, O] page ids of the drafter's own pool
    temperature: Tensor  # [S] float32; 0 is greedy
    top_p: Tensor  # [S] float32
    top_k: Tensor  # [S]
    seeds: Tensor  # [S]
    drafter_state: Tensor  # [S, M] what the drafter keeps of each row from round to round
    history: Tensor  # [S, E] tokens up to the root, for drafters that look them up
    emitted: Tensor  # [S, E] tokens of the last round
    counts: Tensor  # [S] how many of them
    proposed: Tensor  # [S, 2] nodes that the round drafted, and the depth of the deepest
    sampled: bool = False  # some row may have a temperature; a round says so to its drafter

    @classmethod
    def empty(
        cls,
        rows: int,
        *,
        pages: int,
        emitted: int,
        device: torch.device,
        drafter: RowMemory | None = None,
    ) -> DecodeBatch:
        """Inert rows of `pages` pages, with what the drafter keeps, `emitted` tokens a round."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        state = (drafter and drafter.state) or RowState(0, torch.float32)
        return cls(
            roots=zeros(),
            seq_lens=zeros(),
            active=zeros(),
            block_table=zeros(pages),
            drafter_block_table=zeros(drafter.drafter_pages if drafter else 0),
            temperature=zeros(dtype=torch.float32),
            top_p=zeros(dtype=torch.float32),
            top_k=zeros(),
            seeds=zeros(),
            drafter_state=zeros(state.size, dtype=state.dtype),
            history=zeros(drafter.history if drafter else 0),
            emitted=zeros(emitted),
            counts=zeros(),
            proposed=zeros(2),
        )

    def __len__(self) -> int:
        return len(self.roots)

    @property
    def sampling(self) -> SamplingTensors:
        return SamplingTensors(self.temperature, self.top_p, self.top_k, self.seeds)

    def noise(self, share: float = DRAFT_NOISE) -> DraftNoise | None:
        """What drafts after the roots draw with, a share of what the target's draws have; None
        where all rows are greedy."""
        if not self.sampled:
            return None
        return DraftNoise(share * self.temperature, self.seeds, self.seq_lens + 1)

    @property
    def _tensors(self) -> dict[str, Any]:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if isinstance(value, Tensor)}

    def rows(self, first: int, last: int) -> DecodeBatch:
        """Rows first … last-1 as a batch that shares this one's memory."""
        if (first, last) == (0, len(self)):
            return self
        return replace(self, **{name: each[first:last] for name, each in self._tensors.items()})

    def copy_rows(self, first: int, other: DecodeBatch) -> None:
        """Overwrite rows from `first` on with all rows of `other`, which are not among them."""
        for name, each in self._tensors.items():
            each[first : first + len(other)] = getattr(other, name)

    def open(
        self,
        block_table: Tensor,
        top_k: Tensor,
        seeds: Tensor,
        temperature: Tensor,
        top_p: Tensor,
        drafter_block_table: Tensor | None = None,
    ) -> None:
        """Give all rows to requests that have nothing cached yet: block_table [S, P],
        drafter_block_table [S, O], others [S].

        The tensors are on the batch's device, and nothing is read back.
        """
        self.roots.zero_()
        self.seq_lens.zero_()
        self.active.fill_(1)
        self.block_table.copy_(block_table)
        if drafter_block_table is not None:
            self.drafter_block_table.copy_(drafter_block_table)
        self.top_k.copy_(top_k)
        self.seeds.copy_(seeds)
        self.temperature.copy_(temperature)
        self.top_p.copy_(top_p)

    def clear_row(self, row: int) -> None:
        """Make a row inert; nothing is waited for."""
        self.block_table[row], self.drafter_block_table[row] = 0, 0
        self.seq_lens[row], self.active[row] = 0, 0

    def metadata(
        self,
        ops: TorchOps,
        rotary: tuple[Tensor, Tensor],
        rows: TokenRows,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> AttentionMetadata:
        """Of tokens that become the entries after the committed ones, row by row.

        They are chains at their entries' positions, unless `positions` [T] and the bits of `mask`
        [T] say otherwise.
        """
        entries, slot_mapping = ops.compute_slot_mapping(
            self.block_table, self.seq_lens, rows.row, rows.within
        )
        return AttentionMetadata(
            rotary=rotary,
            positions=entries if positions is None else positions,
            slot_mapping=slot_mapping,
            block_table=self.block_table,
            seq_lens=self.seq_lens,
            cu_seqlens_q=rows.cu_seqlens_q,
            max_query_len=rows.max_query_len,
            mask=mask,
        )

    def commit(self, accepted: VerifyOutput, proposed: Tensor | None) -> None:
        """Commit what a round emitted, having `proposed` [B, 2]; inert rows stay where they are."""
        last = accepted.tokens.gather(1, accepted.counts[:, None] - 1)[:, 0]
        self.roots.copy_(last.clamp(min=0))  # -1 marks NaN logits; the engine ends such a request
        self.seq_lens.add_(accepted.counts * self.active)
        self.counts.copy_(accepted.counts)
        self.emitted[:, : accepted.tokens.shape[1]].copy_(accepted.tokens)
        if proposed is None:
            self.proposed.zero_()
        else:
            self.proposed.copy_(proposed)
