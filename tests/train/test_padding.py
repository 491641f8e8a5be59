"""Rows that fill products up to a multiple of 32 change nothing, and no product has other sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.heads.dflash.shape import DflashHead
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.eagle3.ttt import TttModel
from pipeline.heads.trained import TrainedModel
from pipeline.heads.unrolled import Objective
from pipeline.learning.batches import ROW_MULTIPLE, fill_up
from tests.train import test_chained, test_dflash, test_dspark
from tests.train.memory_corpus import pack_samples
from tests.train.test_unroll import constants, documents, with_alternatives

__all__ = ["blocks", "dspark"]  # fixtures
blocks, dspark = test_dflash.head, test_dspark.head


@pytest.fixture(params=["eagle3", "chain", "blocks", "dspark"])
def model(
    request: pytest.FixtureRequest, small_head: Eagle3Head, blocks: DflashHead, dspark: DflashHead
) -> TrainedModel[Any]:
    """One of each kind, in float64."""
    objective = Objective(4, 0.7)
    settings: dict[str, Any] = {"max_length": 12, "dtype": torch.float64}
    made: dict[str, TrainedModel[Any]] = {
        "eagle3": TttModel(small_head, *constants(), objective, alternative_weight=0.5, **settings),
        "chain": test_chained.model_of(test_chained.chain_of()),
        "blocks": test_dflash.model_of(blocks),
        "dspark": test_dspark.model_of(dspark),
    }
    return made[request.param]


def test_a_document_behind_the_others_changes_nothing(model: TrainedModel[Any]) -> None:
    batch = pack_samples(with_alternatives())
    padded = batch.padded()
    assert (batch.tokens, padded.tokens, padded.trained_tokens) == (26, 32, 26)
    assert torch.equal(padded.trained(padded.aux_states), batch.aux_states)
    plain, filled = model(batch), model(padded)
    parameters = list(model.head.parameters())
    for ours, theirs in zip(plain[1:], filled[1:], strict=True):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(filled.loss, plain.loss, rtol=1e-12, atol=1e-12)
    gradients = (
        torch.autograd.grad(each.loss, parameters, allow_unused=True) for each in (filled, plain)
    )
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-11)


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sizes of all products of two matrices; attention, document by document, has others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.mm.default, aten.mm.out):
            self.sizes |= {*args[0].shape, *args[1].shape}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("padded", [True, False])
def test_products_have_few_sizes(model: TrainedModel[Any], padded: bool) -> None:
    """Whatever is packed: those of the weights, and multiples of 32."""
    samples = with_alternatives()
    fixed = {size for each in model.head.parameters() for size in each.shape}
    seen = set[int]()
    for batch in (pack_samples(samples[:count]) for count in (1, 2, 3)):
        with Products() as products:
            result = model(batch.padded() if padded else batch)
            result.loss.backward()
        seen |= products.sizes
    odd = {size for size in seen - fixed if size % ROW_MULTIPLE}
    assert bool(odd) == (not padded), odd


def test_what_is_filled_up_says_what_is_not_its_own() -> None:
    filled, real = fill_up(torch.arange(33))
    assert (
        filled.tolist() == [*range(33), *[32] * 31] and real.tolist() == [True] * 33 + [False] * 31
    )
    assert [len(part) for part in fill_up(torch.arange(0))] == [0, 0]
    assert torch.equal(fill_up(torch.arange(64))[0], torch.arange(64))


def test_pasts_stay_what_they_are() -> None:
    batch = pack_samples(documents())
    assert replace(batch, pasts=(1, 0, 2)).padded().pasts == (1, 0, 2, 6)
    full = batch.padded()
    assert full.padded() is full
