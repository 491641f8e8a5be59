"""Static buffers of a batch: what a round reads and writes, at addresses that never change.

Row r belongs to the r-th running request; active rows are always the first ones. A row that nobody
holds is *inert*: its block table names page 0 only, its length is 0 and never grows, and whatever
else a former request left in it has no effect on anyone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pipeline.decoder.tree import SamplingTensors, VerifyOutput


@dataclass(frozen=True)
class DecodeBatch:
    """S rows. Views of the first rows, or of one row, are batches too."""

    roots: Tensor  # [S] last token: certain, not yet in the target's cache
    seq_lens: Tensor  # [S] committed cache entries, which is also the root's position
    active: Tensor  # [S] 1 where a request holds the row, else 0
    block_table: Tensor  # [S, P] page ids
    temperature: Tensor  # [S] float32; 0 is greedy
    top_p: Tensor  # [S] float32
    top_k: Tensor  # [S]
    seeds: Tensor  # [S]
    drafter_state: Tensor  # [S, M] what the drafter keeps of each row from round to round
    emitted: Tensor  # [S, E] tokens of the last round
    counts: Tensor  # [S] how many of them

    @classmethod
    def empty(
        cls,
        rows: int,
        *,
        pages: int,
        state_size: int,
        emitted: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> DecodeBatch:
        """Inert rows of `pages` pages, `state_size` drafter values, `emitted` tokens a round."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        return cls(
            roots=zeros(),
            seq_lens=zeros(),
            active=zeros(),
            block_table=zeros(pages),
            temperature=zeros(dtype=torch.float32),
            top_p=zeros(dtype=torch.float32),
            top_k=zeros(),
            seeds=zeros(),
            drafter_state=zeros(state_size, dtype=dtype),
            emitted=zeros(emitted),
            counts=zeros(),
        )

    def __len__(self) -> int:
        return len(self.roots)

    @property
    def sampling(self) -> SamplingTensors:
        return SamplingTensors(self.temperature, self.top_p, self.top_k, self.seeds)

    def rows(self, first: int, last: int) -> DecodeBatch:
        """Rows first … last-1 as a batch that shares this one's memory."""
        if (first, last) == (0, len(self)):
            return self
        return DecodeBatch(*(getattr(self, field.name)[first:last] for field in fields(self)))

    def copy_row(self, row: int, other: DecodeBatch, source: int) -> None:
        """Overwrite one row with a row of `other`, which may be this batch."""
        for field in fields(self):
            getattr(self, field.name)[row] = getattr(other, field.name)[source]

    def open_row(
        self,
        row: int,
        pages: list[int],
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
    ) -> None:
        """Give a row to a request that has nothing cached yet; greedy by default."""
        self.clear_row(row)
        self.active[row] = 1
        self.block_table[row, : len(pages)] = torch.tensor(pages, device=self.block_table.device)
        self.temperature[row], self.top_p[row] = temperature, top_p
        self.top_k[row], self.seeds[row] = top_k, seed

    def clear_row(self, row: int) -> None:
        """Make a row inert."""
        self.block_table[row], self.seq_lens[row], self.active[row] = 0, 0, 0

    def advance(self, accepted: VerifyOutput) -> None:
        """Commit what a round emitted; inert rows stay where they are."""
        last = accepted.tokens.gather(1, accepted.counts[:, None] - 1)[:, 0]
        self.roots.copy_(last.clamp(min=0))  # -1 marks NaN logits; the engine ends such a request
        self.seq_lens.add_(accepted.counts * self.active)
        self.counts.copy_(accepted.counts)
        self.emitted[:, : accepted.tokens.shape[1]].copy_(accepted.tokens)
