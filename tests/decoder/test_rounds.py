"""A round over static buffers: padding is inert, whatever former requests left in it."""

from __future__ import annotations

import pytest
import torch

from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.engine import Engine
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Request
from pipeline.decoder.round import decode_round, prefill_prompt
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from tests.decoder.conftest import VOCABULARY, open_rows, poisoned_planes, random_tokens

TREE = TreeSection(top_k=3, steps=4, nodes=10)


def _spoil(batch: DecodeBatch, planes: Planes, rows: slice) -> None:
    """Leave in inert rows what a former request might have left, and worse."""
    batch.roots[rows] = torch.randint(0, VOCABULARY, batch.roots[rows].shape)
    batch.drafter_state[rows] = float("nan")
    batch.temperature[rows], batch.top_p[rows] = 0.7, 0.3
    batch.top_k[rows], batch.seeds[rows] = 2, 12345
    batch.emitted[rows], batch.counts[rows] = 77, 3
    for plane in (planes.target, *planes.drafter):
        plane[:, :, 0] = float("nan")  # the page that inert rows write to


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("sampling", [False, True])
@torch.inference_mode()
def test_stale_garbage_in_padded_rows_has_no_effect(
    model: DecoderModel, head: Eagle3Head, drafting: bool, sampling: bool
) -> None:
    drafter = Eagle3Drafter(head, model, TREE) if drafting else None

    def emitted(padding: int) -> list[list[list[int]]]:
        planes = poisoned_planes(model, 7, drafter)
        batch = open_rows(model, 3, pages=2, drafter=drafter, emitted=TREE.steps + 1, spare=padding)
        for row in range(3):
            batch.temperature[row] = 0.9 * (sampling and row != 1)
            batch.top_p[row], batch.seeds[row] = 0.8, row
            prompt = random_tokens(20 + 30 * row, seed=row)
            prefill_prompt(model, planes, drafter, batch.rows(row, row + 1), prompt)
        seen = []
        for _ in range(6):
            if padding:
                _spoil(batch, planes, slice(3, None))
            decode_round(model, planes, drafter, batch, sampling=sampling)
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
        assert engine.pools.shared.free_pages == engine.pools.shared.capacity
    for each in done.values():
        assert each.statistics.round_tokens == len(each.token_ids) - 1
