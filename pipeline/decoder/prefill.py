"""The prefill batch: requests whose prompts are being read, several prompts to a forward.

    budget of 8 tokens      a0 a1 a2 | b0 | c0 c1 c2 c3        a and b have been read whole: their
    next pass               c4 c5 | d0 d1 d2 d3 d4 d5          first tokens are drawn; c goes on

Which prompts share a forward changes nothing for any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pipeline.decoder.batch import DecodeBatch, TokenRows
from pipeline.decoder.drafter import Drafter
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import RunningRequest
from pipeline.decoder.round import prefill

#: Tokens of a prompt that take every path of a long one.
_LONG = 256


class Prefill:
    """Requests in the rows of a batch of their own, in order of arrival."""

    def __init__(
        self, model: DecoderModel, planes: Planes, drafter: Drafter | None, batch: DecodeBatch
    ) -> None:
        self._model, self._planes, self._drafter, self.batch = model, planes, drafter, batch
        self.requests: list[RunningRequest] = []  # request r holds row r
        self._opened = 0  # rows whose parameters are on the device
        self._ints = Staging(torch.int64, model.device)
        self._floats = Staging(torch.float32, model.device)

    def warm(self) -> None:
        """Launch, on a row that nobody holds, all that reading prompts launches later.

        Kernels compile now and not in the middle of serving: those of prompts of one token, of
        more than any kernel takes at once, and of chunks that are not the last of their prompt.
        """
        row = self.batch.rows(0, 1)
        for length, last in ((1, 1), (min(_LONG, self._model.max_length), 0)):
            ids = torch.zeros(length, dtype=torch.int64, device=self._model.device)
            rows = TokenRows.even(1, length, ids.device)
            prefill(self._model, self._planes, self._drafter, row, rows, ids, ids, last=last)
            self.batch.clear_row(0)

    @property
    def unread(self) -> int:
        """Tokens of the requests' prompts that have not been read."""
        return sum(len(each.request.prompt_ids) - each.prefilled for each in self.requests)

    def add(self, arriving: RunningRequest) -> None:
        """Take in a request that has its pages."""
        self.requests.append(arriving)

    def read(self, budget: int) -> list[RunningRequest]:
        """Read at most `budget` prompt tokens, the first requests' first.

        Returns those whose prompts have been read whole: they hold the first rows of `batch`, where
        their first tokens are.
        """
        tokens: list[int] = []
        next_tokens: list[int] = []  # of each token; anything after the last of a prompt
        counts: list[int] = []
        ended = 0
        for each in self.requests:
            if len(tokens) == budget:
                break
            prompt, first = each.request.prompt_ids, each.prefilled
            last = min(first + budget - len(tokens), len(prompt))
            tokens += prompt[first:last]
            next_tokens += prompt[first + 1 : last + 1]
            next_tokens += [0] * (len(tokens) - len(next_tokens))
            counts.append(last - first)
            each.prefilled = last
            ended += last == len(prompt)
        if tokens:
            self._launch(tokens, next_tokens, counts, ended)
        return self.requests[:ended]

    def drop(self, count: int) -> None:
        """Forget the first `count` requests; the others move up."""
        del self.requests[:count]
        self._opened = max(self._opened - count, 0)
        if count:
            for row in range(self._opened):
                self.batch.copy_rows(row, self.batch.rows(row + count, row + count + 1))

    def remove(self, index: int) -> None:
        """Forget one request; those after it move up."""
        # Whoever else a read has opened was read whole and dropped: no other row has to move.
        assert self._opened <= 1, "between two reads only the first request may hold a row"
        del self.requests[index]
        self._opened -= index < self._opened

    def _launch(
        self, tokens: list[int], next_tokens: list[int], counts: list[int], ended: int
    ) -> None:
        """Everything that the forward needs goes to the device in two copies."""
        first, last = self._opened, len(counts)
        pages, drafter_width = (
            self.batch.block_table.shape[1],
            self.batch.drafter_block_table.shape[1],
        )
        opened = self.requests[first:last]
        cu_seqlens = [0, *accumulate(counts)]
        tables = [[*each.pages, *[0] * (pages - len(each.pages))] for each in opened]
        tables += [each.drafter_pages for each in opened]
        requests = [each.request for each in opened]
        drawing = [value for each in requests for value in (each.top_k, each.seed)]
        parts = [tokens, next_tokens, cu_seqlens, drawing, *tables]
        ints = self._ints.send([value for part in parts for value in part])
        floats = self._floats.send(
            [value for each in requests for value in (each.temperature, each.top_p)]
        )
        by_request = [size * len(opened) for size in (2, pages, drafter_width)]
        sizes = [len(tokens), len(tokens), len(cu_seqlens), *by_request]
        ids, next_ids, cu_seqlens_q, integers, table, drafter_block_table = torch.split(ints, sizes)
        if opened:
            top_k, seeds = integers.view(-1, 2).unbind(1)
            temperature, top_p = floats.view(-1, 2).unbind(1)
            by_row = table.view(-1, pages), top_k, seeds, temperature, top_p
            self.batch.rows(first, last).open(
                *by_row, drafter_block_table.view(len(opened), drafter_width)
            )
            self._opened = last
        prefill(
            self._model,
            self._planes,
            self._drafter,
            self.batch.rows(0, last),
            TokenRows.ragged(cu_seqlens_q, len(tokens), max(counts)),
            ids,
            next_ids,
            last=ended,
        )


class Staging:
    """Host memory from which values reach a device while the host goes on.

    A GPU copies by itself from pinned memory only. Until it has, the memory is not written again.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._device, self._pinned = device, device.type == "cuda"
        self._host = torch.empty(0, dtype=dtype)
        self._copied: torch.cuda.Event | None = None

    def send(self, values: Sequence[float]) -> Tensor:
        """The values on the device [n]; a copy that is under way is waited for."""
        if self._copied is not None:
            self._copied.synchronize()
        count = len(values)
        if count > len(self._host):
            self._host = torch.empty(2 * count, dtype=self._host.dtype, pin_memory=self._pinned)
        self._host[:count] = torch.tensor(values, dtype=self._host.dtype)
        sent = torch.empty(count, dtype=self._host.dtype, device=self._device)
        sent.copy_(self._host[:count], non_blocking=True)
        if self._pinned:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return sent
