"""What the trainer teaches is what the decoder drafts: TTT against draft logits of one prefix.

The trainer unrolls over a whole sequence at once, the decoder drafts from caches; a shift of one in
the tokens, the positions or the layers would train a head for inputs that it never meets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.drafters.eagle3 import Eagle3Drafter
from pipeline.decoder.kv import PageAllocator
from pipeline.decoder.model import DecoderModel
from pipeline.eagle3.head import Eagle3Head
from pipeline.eagle3.layers import RotaryTable
from pipeline.train.data.batches import TrainBatch
from pipeline.train.ttt.unroll import step_logits
from tests.decoder.conftest import open_rows, poisoned_plane, random_tokens

STEPS = 5
PREFIX = 17


@torch.no_grad()
def _states(model: DecoderModel, tokens: Tensor) -> Tensor:
    """Aux states [T, 3H] of a sequence."""
    positions, batch = torch.arange(len(tokens))[None], open_rows(model, 1, pages=2)
    table, lengths, plane = batch.block_table, batch.seq_lens, poisoned_plane(model, 3)
    return model.forward(tokens[None], positions, table, lengths, None, plane).aux[0]


def _drafter(
    head: Eagle3Head, model: DecoderModel, tree: TreeSection, rows: int
) -> tuple[Eagle3Drafter, DecodeBatch]:
    """A drafter over its own pages, and a batch of empty rows."""
    drafter = Eagle3Drafter(head, model, tree)
    drafter.make_plane(PageAllocator(2 * rows + 1, device=model.device))
    return drafter, open_rows(model, rows, pages=2, state_size=drafter.state_size)


def _read(
    drafter: Eagle3Drafter, batch: DecodeBatch, tokens: Tensor, aux: Tensor, count: int
) -> None:
    """Give the drafter tokens [E] and states [E, 3H], `count` of them valid, and commit them."""
    drafter.extend(batch, tokens[None], aux[None], torch.tensor([count]))
    batch.seq_lens.add_(count)


def _trained_on(head: Eagle3Head, model: DecoderModel, tokens: Tensor, aux: Tensor) -> list[Tensor]:
    """The trainer's logits [T, Vd] of every step over a sequence whose end has no aux states."""
    none = torch.zeros(0, dtype=torch.int64)
    padded = torch.cat((aux, torch.full((len(tokens) - len(aux), aux.shape[1]), 1e3)))
    batch = TrainBatch(("x",), (len(tokens),), tokens, padded, none, none, aux[:0])
    config, length = head.shape.rope_config(), len(tokens) + STEPS
    rotary = RotaryTable(config, length, device=torch.device("cpu"), dtype=torch.float32)
    return step_logits(head, model.embedding, batch, rotary, steps=STEPS)


def _worst(
    model: DecoderModel,
    head: Eagle3Head,
    *,
    extended: int,
    shift: Callable[[Tensor], Tensor] = lambda tokens: tokens,
) -> float:
    """Largest difference over steps 0…4 between draft and training logits.

    The drafter reads PREFIX - extended tokens as a prompt and the rest as a round's emission, then
    drafts a chain; the trainer sees the prefix followed by that chain.
    """
    tokens = random_tokens(PREFIX + 1, seed=5)  # the last one is the root
    aux = _states(model, tokens[:-1])
    shape = TreeSection(top_k=1, steps=STEPS, nodes=STEPS + 1)
    drafter, batch = _drafter(head, model, shape, 1)
    drafter.trace = []
    read = PREFIX - extended
    _read(drafter, batch, shift(tokens[: read + 1])[1:], aux[:read], read)
    if extended:
        padding = torch.zeros(2, dtype=torch.int64)
        wide = torch.cat((aux[read:], torch.full((2, aux.shape[1]), 9.0)))
        _read(drafter, batch, torch.cat((tokens[read + 1 :], padding)), wide, extended)
    batch.roots.copy_(tokens[-1:])
    chain = drafter.draft(batch, shape).tokens[0, 1:]
    expected = _trained_on(head, model, torch.cat((tokens, chain)), aux)
    assert len(drafter.trace) == STEPS
    return max(
        float((ours[0, 0] - theirs[PREFIX - 1]).abs().max())
        for ours, theirs in zip(drafter.trace, expected, strict=True)
    )


@pytest.mark.parametrize("extended", [0, 1, 4])
@torch.no_grad()
def test_draft_logits_equal_training_logits(
    model: DecoderModel, head: Eagle3Head, extended: int
) -> None:
    assert _worst(model, head, extended=extended) <= 1e-4


@pytest.mark.parametrize(
    "flags",
    [{"fc_norm": True}, {"norm_output": True}, {"fc_norm": True, "norm_output": True}],
    ids=str,
)
@torch.no_grad()
def test_a_head_with_the_norms_of_eagle_31_drafts_as_it_was_trained(
    model: DecoderModel, head: Eagle3Head, flags: dict[str, bool]
) -> None:
    changed = Eagle3Head(head.shape.model_copy(update=flags))
    generator = torch.Generator().manual_seed(6)
    for name, parameter in changed.named_parameters():
        if "norm" in name:
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
        else:
            parameter.copy_(head.get_parameter(name))
    changed.set_vocabulary(head.target_ids())
    assert _worst(model, changed, extended=4) <= 1e-4


@torch.no_grad()
def test_every_beam_of_a_tree_equals_training_on_its_own_chain(
    model: DecoderModel, head: Eagle3Head
) -> None:
    tokens = random_tokens(PREFIX + 1, seed=5)
    aux = _states(model, tokens[:-1])
    shape = TreeSection(top_k=3, steps=3, nodes=16)
    drafter, batch = _drafter(head, model, shape, 2)
    _read(drafter, batch.rows(1, 2), tokens[1:9], aux[:8], 8)  # a neighbour, which must not matter
    _read(drafter, batch.rows(0, 1), tokens[1:], aux, PREFIX)
    batch.roots.fill_(int(tokens[-1]))
    drafter.trace = []
    drafter.draft(batch, shape)
    ids = head.target_ids()
    scores, first = drafter.trace[0][0, 0].log_softmax(-1).topk(3)
    second_scores, second = drafter.trace[1][0].log_softmax(-1).topk(3)  # [3, 3]
    best = (scores[:, None] + second_scores).flatten().topk(3).indices
    for beam in range(3):
        parent = int(best[beam]) // 3
        first_chain = ids[first[beam]][None]
        second_chain = torch.stack((ids[first[parent]], ids[second.flatten()[best[beam]]]))
        for step, chain in ((1, first_chain), (2, second_chain)):
            whole = torch.cat((tokens, chain, tokens[: STEPS - 1 - step]))
            trained = _trained_on(head, model, whole, aux)[step][PREFIX - 1]
            torch.testing.assert_close(drafter.trace[step][0, beam], trained, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_planted_shift_of_the_tokens_is_seen(model: DecoderModel, head: Eagle3Head) -> None:
    assert _worst(model, head, extended=0, shift=lambda tokens: tokens.roll(1)) > 1e-2


@torch.no_grad()
def test_a_planted_off_by_one_in_the_rotary_position_is_seen(
    model: DecoderModel, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Eagle3Drafter._step

    def late(
        drafter: Eagle3Drafter,
        batch: DecodeBatch,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        *rest: Any,
    ) -> Tensor:
        drafting = rest[-1] is not None  # later draft steps, not the prompt
        return original(drafter, batch, tokens, hidden, positions + drafting, *rest)

    monkeypatch.setattr(Eagle3Drafter, "_step", late)
    assert _worst(model, head, extended=0) > 1e-3


@torch.no_grad()
def test_a_planted_neighbouring_capture_layer_is_seen(model: DecoderModel) -> None:
    right = _states(model, torch.arange(PREFIX))
    model.capture_layers = tuple(layer + 1 for layer in model.capture_layers)
    assert (right - _states(model, torch.arange(PREFIX))).abs().max() > 0.1
