"""A round over static buffers: padding is inert, whatever former requests left in it."""

from __future__ import annotations

import pytest
import torch

from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.drafters.eagle3 import Eagle3Drafter
from pipeline.decoder.engine import Engine
from pipeline.decoder.graphs import default_buckets
from pipeline.decoder.kv import PageAllocator
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Request
from pipeline.decoder.round import decode_round, prefill_chunk
from pipeline.eagle3.head import Eagle3Head
from tests.decoder.conftest import VOCABULARY, open_rows, random_tokens

TREE = TreeSection(top_k=3, steps=4, nodes=10)


def _spoil(batch: DecodeBatch, plane: torch.Tensor, rows: slice) -> None:
    """Leave in inert rows what a former request might have left, and worse."""
    batch.roots[rows] = torch.randint(0, VOCABULARY, batch.roots[rows].shape)
    batch.drafter_state[rows] = float("nan")
    batch.temperature[rows], batch.top_p[rows] = 0.7, 0.3
    batch.top_k[rows], batch.seeds[rows] = 2, 12345
    batch.emitted[rows], batch.counts[rows] = 77, 3
    plane[:, :, 0] = float("nan")  # the page that inert rows write to


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("sampling", [False, True])
@torch.inference_mode()
def test_stale_garbage_in_padded_rows_has_no_effect(
    model: DecoderModel, head: Eagle3Head, drafting: bool, sampling: bool
) -> None:
    drafter = Eagle3Drafter(head, model, TREE) if drafting else None

    def emitted(padding: int) -> list[list[list[int]]]:
        allocator = PageAllocator(7, device=model.device)
        plane = model.plane(allocator)
        if drafter:
            drafter.make_plane(allocator)
        batch = DecodeBatch.empty(
            3 + padding,
            pages=2,
            state_size=drafter.state_size if drafter else 0,
            emitted=TREE.steps + 1,
            dtype=model.dtype,
            device=model.device,
        )
        pages = open_rows(model, 3, pages=2).block_table.tolist()
        for row in range(3):
            temperature = 0.9 * (sampling and row != 1)
            batch.open_row(row, pages[row], temperature=temperature, top_p=0.8, seed=row)
            prompt = random_tokens(20 + 30 * row, seed=row)[None]
            prefill_chunk(model, plane, drafter, batch.rows(row, row + 1), prompt, None)
        seen = []
        for _ in range(6):
            if padding:
                _spoil(batch, plane, slice(3, None))
            decode_round(model, plane, drafter, batch, sampling=sampling)
            seen.append([batch.emitted[row, : batch.counts[row]].tolist() for row in range(3)])
            assert (batch.seq_lens[3:] == 0).all(), "padding must not advance"
        return seen

    assert emitted(padding=5) == emitted(padding=0)


@pytest.mark.parametrize("overlap", [False, True])
def test_buckets_and_overlap_change_no_token(
    model: DecoderModel, head: Eagle3Head, overlap: bool
) -> None:
    prompts = [tuple(random_tokens(3 + 13 * index, seed=index).tolist()) for index in range(9)]
    free = [Request(str(index), prompt, 20, ()) for index, prompt in enumerate(prompts)]
    (stop,) = (done.token_ids[6] for done in Engine(model).generate(free[4:5]))
    requests = [
        Request(str(index), prompt, 1 + 4 * (index % 5), (stop,))
        for index, prompt in enumerate(prompts)
    ]
    plain = {done.request_id: done.token_ids for done in Engine(model).generate(requests)}
    engine = Engine(
        model,
        drafter=Eagle3Drafter(head, model, TREE),
        slots=5,
        buckets=(1, 2, 4, 5),
        overlap=overlap,
    )
    for _ in range(2):
        done = {each.request_id: each for each in engine.generate(requests)}
        assert {name: each.token_ids for name, each in done.items()} == plain
        assert engine.allocator.free_pages == engine.allocator.capacity
    for each in done.values():
        assert each.statistics.round_tokens == len(each.token_ids) - 1


def test_buckets_never_waste_more_than_seven_rows() -> None:
    assert default_buckets(1) == (1,)
    assert default_buckets(8) == (1, 2, 4, 8)
    assert default_buckets(20) == (1, 2, 4, 8, 16, 20)
