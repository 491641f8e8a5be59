"""What every drafter has to keep: the text, the pools, and its hands off values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.drafter import Drafter
from pipeline.decoder.engine import Engine
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Completion, Request
from pipeline.decoder.round import decode_round, prefill_prompt
from tests.decoder.conftest import random_tokens

#: Mixed lengths, on both sides of page borders; some end by a stop token, some by their limit.
LENGTHS = (1, 5, 63, 64, 65, 90, 130, 17, 128, 40, 7)


def requests_of(
    lengths: tuple[int, ...] = LENGTHS, *, temperature: float = 0.0, new_tokens: int = 24
) -> list[Request]:
    """A request a length."""
    return [
        Request(
            str(index),
            tuple(random_tokens(length, seed=index).tolist()),
            new_tokens + index % 5,
            (3,) if index % 2 else (),
            temperature=temperature,
            top_p=0.95 if temperature else 1.0,
            seed=index,
        )
        for index, length in enumerate(lengths)
    ]


def decode(
    model: DecoderModel, drafter: Drafter | None, requests: list[Request], slots: int
) -> dict[str, Completion]:
    """Completions by id; all pages of both pools come back."""
    engine = Engine(model, drafter=drafter, slots=slots, prefill_tokens=48)
    done = {each.request_id: each for each in engine.generate(requests)}
    for pool in (engine.pools.shared, engine.pools.drafter_pages):
        assert pool.free_pages == pool.capacity
    assert all(each.error is None for each in done.values())
    return done


def tokens_of(done: dict[str, Completion]) -> dict[str, tuple[int, ...]]:
    return {name: each.token_ids for name, each in done.items()}


Opened = tuple[DecodeBatch, Planes]


def read_both_ways(
    model: DecoderModel, drafter: Drafter, without: Drafter, opened: Callable[[], Opened]
) -> tuple[Opened, Opened]:
    """A row after rounds with a tree and without, and one that read the same tokens as a prompt."""
    prompt = random_tokens(20, seed=4)
    batch, planes = opened()
    prefill_prompt(model, planes, drafter, batch, prompt)
    tokens = batch.emitted[0, :1].tolist()
    for plain in (True, True, False, True, False, False):
        decode_round(model, planes, without if plain else drafter, batch, sampling=False)
        tokens += batch.emitted[0, : int(batch.counts)].tolist()
    whole, others = opened()
    prefill_prompt(model, others, drafter, whole, torch.cat((prompt, torch.tensor(tokens[:-1]))))
    assert torch.equal(batch.roots, whole.roots) and torch.equal(batch.seq_lens, whole.seq_lens)
    return (batch, planes), (whole, others)


#: Operations that hand values to the host; `item` is what inference mode calls it.
_LOOKING = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"),
    *("nonzero", "unique", "_unique2", "unique_consecutive", "unique_dim", "masked_select"),
}


class _NoValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what a CUDA graph cannot hold: reading a value, shapes that depend on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        assert name.split(".")[0] not in _LOOKING, name
        if name.startswith(("index.", "index_put")):
            masks = [each for each in args[1] if each is not None and each.dtype == torch.bool]
            assert not masks, f"{name}: as many values as a mask holds"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_values() -> Iterator[None]:
    """Inside, nothing may look at what a tensor holds."""
    with _NoValues(), torch.inference_mode():  # type: ignore[no-untyped-call]
        yield
