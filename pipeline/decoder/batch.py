"""Static buffers of a batch: what a round reads and writes, at addresses that never change.

Row r belongs to the r-th active request; active rows are always the first ones. A row that nobody
holds is *inert*: its page table names page 0 only, it starts at 0 and never advances, and whatever
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
    starts: Tensor  # [S] committed entries, which is also the root's position
    active: Tensor  # [S] 1 where a request lives, else 0
    table: Tensor  # [S, P] page ids
    temperature: Tensor  # [S] float32; 0 is greedy
    top_p: Tensor  # [S] float32
    top_k: Tensor  # [S]
    seeds: Tensor  # [S]
    memory: Tensor  # [S, M] what the drafter keeps of each row from round to round
    emitted: Tensor  # [S, E] tokens of the last round
    counts: Tensor  # [S] how many of them

    @classmethod
    def empty(
        cls,
        rows: int,
        *,
        pages: int,
        memory: int,
        emitted: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> DecodeBatch:
        """Inert rows with room for `pages` pages, `memory` drafter values and `emitted` tokens a round."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        return cls(
            roots=zeros(),
            starts=zeros(),
            active=zeros(),
            table=zeros(pages),
            temperature=zeros(dtype=torch.float32),
            top_p=zeros(dtype=torch.float32),
            top_k=zeros(),
            seeds=zeros(),
            memory=zeros(memory, dtype=dtype),
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
        self, row: int, pages: list[int], *, temperature: float, top_p: float, top_k: int, seed: int
    ) -> None:
        """Give a row to a request that has nothing cached yet."""
        self.table[row] = torch.tensor(
            pages + [0] * (self.table.shape[1] - len(pages)), device=self.table.device
        )
        self.starts[row], self.active[row] = 0, 1
        self.temperature[row], self.top_p[row], self.top_k[row], self.seeds[row] = (
            temperature,
            top_p,
            top_k,
            seed,
        )

    def clear_row(self, row: int) -> None:
        """Make a row inert."""
        self.table[row], self.starts[row], self.active[row] = 0, 0, 0

    def advance(self, accepted: VerifyOutput) -> None:
        """Commit what a round emitted; inert rows stay where they are."""
        last = accepted.tokens.gather(1, accepted.counts[:, None] - 1)[:, 0]
        self.roots.copy_(last.clamp(min=0))  # -1 marks NaN logits; the engine ends such a request
        self.starts.add_(accepted.counts * self.active)
        self.counts.copy_(accepted.counts)
        self.emitted[:, : accepted.tokens.shape[1]].copy_(accepted.tokens)
