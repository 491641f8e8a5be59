"""What the trainer teaches is what the decoder drafts: TTT against draft logits of one prefix.

The trainer unrolls over a whole sequence at once, the decoder drafts from caches; a shift of one in
the tokens, the positions or the layers would train a head for inputs that it never meets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.config import TreeSection
from pipeline.decoder.batch import TokenRows
from pipeline.decoder.drafter import ReadTokens
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.layer import PAGE
from pipeline.decoder.ops.tree import Tree
from pipeline.decoder.round import draft_tree
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.eagle3.ttt import unroll
from pipeline.learning.batches import TrainBatch
from pipeline.target.rotary import RotaryTable
from tests.decoder.conftest import CAPTURE, open_rows, poisoned_planes, random_tokens, states_of

STEPS = 5
PREFIX = 17


@torch.no_grad()
def _states(model: DecoderModel, tokens: Tensor) -> Tensor:
    """Aux states [T, 3H] of a sequence."""
    return states_of(model, tokens).aux


class _Drafting:
    """A drafter over its own pages, and a batch of empty rows."""

    def __init__(
        self, head: Eagle3Head, model: DecoderModel, tree: TreeSection, rows: int, pages: int = 2
    ) -> None:
        self.drafter = Eagle3Drafter(head, model, tree)
        self.planes = poisoned_planes(model, pages * rows + 1, self.drafter)
        self.batch = open_rows(model, rows, pages=pages, drafter=self.drafter)

    def read(self, row: int, tokens: Tensor, aux: Tensor, count: int) -> None:
        """Give a row tokens [E] and states [E, 3H], `count` of them valid, and commit them."""
        batch, each = self.batch.rows(row, row + 1), TokenRows.even(1, len(tokens), tokens.device)
        read = ReadTokens(each, tokens.roll(1), tokens, aux, torch.tensor([count]))
        self.drafter.extend(batch, self.planes, read)
        batch.seq_lens.add_(count)

    def draft(self, root: int, shape: TreeSection) -> tuple[Tree, list[Tensor]]:
        """Trees below a root, and every step's logits [B, beams, Vd]."""
        self.batch.roots.fill_(root)
        self.drafter.trace = []
        tree, _ = draft_tree(self.drafter.ops, self.drafter, self.batch, self.planes, shape)
        return tree, self.drafter.trace


def _trained_on(head: Eagle3Head, model: DecoderModel, tokens: Tensor, aux: Tensor) -> list[Tensor]:
    """The trainer's logits [T, Vd] of every step over a sequence whose end has no aux states.

    The last k+1 positions have no input at step k; their rows mean nothing.
    """
    none = torch.zeros(0, dtype=torch.int64)
    padded = torch.cat((aux, torch.full((len(tokens) - len(aux), aux.shape[1]), 1e3)))
    batch = TrainBatch(("x",), (len(tokens),), tokens, padded, none, none, aux[:0])
    config, length = head.shape.rope_config(), len(tokens) + STEPS
    rotary = RotaryTable(config, length, device=torch.device("cpu"), dtype=torch.float32)
    rows = torch.arange(len(tokens))
    unrolled = unroll(head, model.embedding, batch, rotary, rows=rows, steps=STEPS)
    return [head.logits(output) for output in unrolled.outputs]


def _worst(
    model: DecoderModel,
    head: Eagle3Head,
    *,
    extended: int,
    shift: Callable[[Tensor], Tensor] = lambda tokens: tokens,
    prefix: int = PREFIX,
    trained: Eagle3Head | None = None,
) -> float:
    """Largest difference over steps 0…4 between draft and training logits.

    The drafter reads PREFIX - extended tokens as a prompt and the rest as a round's emission, then
    drafts a chain; the trainer, with `head` or another one, sees the prefix followed by that chain.
    """
    tokens = random_tokens(prefix + 1, seed=5)  # the last one is the root
    aux = _states(model, tokens[:-1])
    shape = TreeSection(top_k=1, steps=STEPS, nodes=STEPS + 1)
    pages = -(-(prefix + STEPS) // PAGE) + 1
    drafting, read = _Drafting(head, model, shape, 1, pages), prefix - extended
    drafting.read(0, shift(tokens[: read + 1])[1:], aux[:read], read)
    if extended:
        padding = torch.zeros(2, dtype=torch.int64)
        wide = torch.cat((aux[read:], torch.full((2, aux.shape[1]), 9.0)))
        drafting.read(0, torch.cat((tokens[read + 1 :], padding)), wide, extended)
    tree, drafted = drafting.draft(int(tokens[-1]), shape)
    chain = tree.tokens[0, 1:]
    expected = _trained_on(trained or head, model, torch.cat((tokens, chain)), aux)
    assert len(drafted) == STEPS
    return max(
        float((ours[0, 0] - theirs[prefix - 1]).abs().max())
        for ours, theirs in zip(drafted, expected, strict=True)
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


@pytest.mark.parametrize("extended", [0, 1, 4])
@torch.no_grad()
def test_a_head_with_a_window_drafts_as_it_was_trained(
    make_target: Callable[[str], Path], head: Eagle3Head, extended: int
) -> None:
    """On both sides of the lengths at which a page leaves the window; another window is noticed."""
    model = DecoderModel.load(
        make_target("llama"),
        CAPTURE,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_length=250,
    )
    windowed, other = (
        Eagle3Head(head.shape.model_copy(update={"draft_window": window})) for window in (70, 150)
    )
    for each in (windowed, other):
        each.load_state_dict(head.state_dict())
    for prefix in (100, 197, 198, 199, 240):
        assert _worst(model, windowed, extended=extended, prefix=prefix) <= 1e-4
        wrong = _worst(model, windowed, extended=extended, prefix=prefix, trained=other)
        assert (wrong > 1e-3) == (prefix >= 198), "70 of 198 are the first that hide a page"


@torch.no_grad()
def test_every_beam_of_a_tree_equals_training_on_its_own_chain(
    model: DecoderModel, head: Eagle3Head
) -> None:
    tokens = random_tokens(PREFIX + 1, seed=5)
    aux = _states(model, tokens[:-1])
    shape = TreeSection(top_k=3, steps=3, nodes=16)
    drafting = _Drafting(head, model, shape, 2)
    drafting.read(1, tokens[1:9], aux[:8], 8)  # a neighbour, which must not matter
    drafting.read(0, tokens[1:], aux, PREFIX)
    _, drafted = drafting.draft(int(tokens[-1]), shape)
    ids = head.target_ids()
    scores, first = drafted[0][0, 0].log_softmax(-1).topk(3)
    second_scores, second = drafted[1][0].log_softmax(-1).topk(3)  # [3, 3]
    best = (scores[:, None] + second_scores).flatten().topk(3).indices
    for beam in range(3):
        parent = int(best[beam]) // 3
        first_chain = ids[first[beam]][None]
        second_chain = torch.stack((ids[first[parent]], ids[second.flatten()[best[beam]]]))
        for step, chain in ((1, first_chain), (2, second_chain)):
            whole = torch.cat((tokens, chain, tokens[: STEPS - 1 - step]))
            trained = _trained_on(head, model, whole, aux)[step][PREFIX - 1]
            torch.testing.assert_close(drafted[step][0, beam], trained, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_planted_shift_of_the_tokens_is_seen(model: DecoderModel, head: Eagle3Head) -> None:
    assert _worst(model, head, extended=0, shift=lambda tokens: tokens.roll(1)) > 1e-2


@torch.no_grad()
def test_a_planted_off_by_one_in_the_rotary_position_is_seen(
    model: DecoderModel, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Eagle3Drafter._load

    def late(drafter: Eagle3Drafter, head: Eagle3Head, model: DecoderModel) -> None:
        original(drafter, head, model)
        # Positions behind the prompt, those of later draft steps, are rotated by one too many.
        rotary = [
            torch.cat((table[:PREFIX], table[PREFIX + 1 :])) for table in drafter._head.rotary
        ]
        drafter._head = replace(drafter._head, rotary=(rotary[0], rotary[1]))

    monkeypatch.setattr(Eagle3Drafter, "_load", late)
    assert _worst(model, head, extended=0) > 1e-3


@torch.no_grad()
def test_a_planted_neighbouring_capture_layer_is_seen(model: DecoderModel) -> None:
    right = _states(model, torch.arange(PREFIX))
    captured = tuple(layer + 1 for layer in model.stack.captured)
    model.stack = replace(model.stack, captured=captured)
    assert (right - _states(model, torch.arange(PREFIX))).abs().max() > 0.1
