"""What the trainer teaches is what the decoder drafts: TTT against draft logits of one prefix.

The trainer unrolls over a whole sequence at once, the decoder drafts from caches; a shift of one in
the tokens, the positions or the layers would train a head for inputs that it never meets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import TreeSection
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.eager import EagerOps
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from tests.decoder.conftest import CAPTURE, load_model, random_tokens
from tests.decoder.parity import PREFIX, STEPS, Drafting, aux_of, trained_on, worst_difference


@pytest.mark.parametrize("extended", [0, 1, 4])
@torch.no_grad()
def test_draft_logits_equal_training_logits(
    model: DecoderModel, head: Eagle3Head, extended: int
) -> None:
    assert worst_difference(model, head, extended=extended) <= 1e-4


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
    assert worst_difference(model, changed, extended=4) <= 1e-4


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
        assert worst_difference(model, windowed, extended=extended, prefix=prefix) <= 1e-4
        wrong = worst_difference(model, windowed, extended=extended, prefix=prefix, trained=other)
        assert (wrong > 1e-3) == (prefix >= 198), "70 of 198 are the first that hide a page"


#: Fields of heads of other trainers.
FOREIGN: dict[str, dict[str, Any]] = {
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "two layers": {"num_hidden_layers": 2},
    "q/k norms": {"qk_norm": True},
    "biases": {"attention_bias": True},
    "own embedding": {"own_embedding": True},
    "narrow": {"hidden_size": 24, "target_hidden_size": 48, "own_embedding": True},
    "speculators": {
        **{"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
        **{"num_hidden_layers": 3, "qk_norm": True},
    },
}


def foreign(head: Eagle3Head, **fields: Any) -> Eagle3Head:
    """A head with such fields and random weights in which each counts."""
    changed = Eagle3Head(head.shape.model_copy(update=fields))
    generator = torch.Generator().manual_seed(6)
    for name, tensor in changed.state_dict().items():
        if name in ("d2t", "t2d"):
            continue
        random = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(random * 0.2 + 1 if tensor.dim() == 1 and "bias" not in name else random * 0.3)
    changed.set_vocabulary(head.target_ids())
    return changed


@pytest.mark.parametrize("ops", [None, TorchOps, EagerOps], ids=["picked", "torch", "eager"])
@pytest.mark.parametrize("fields", FOREIGN.values(), ids=FOREIGN)
@torch.no_grad()
def test_heads_of_other_trainers_draft_as_they_are_trained(
    make_target: Callable[[str], Path], head: Eagle3Head, fields: dict[str, Any], ops: Any
) -> None:
    model = load_model(make_target("llama"), ops=ops and ops())
    changed = foreign(head, **fields)
    assert worst_difference(model, changed, extended=4) <= 1e-4
    without = {**dict.fromkeys(fields, False), "num_hidden_layers": 1}
    plain = fields.get("hidden_size") or fields.get("own_embedding")
    if not plain:  # the fields change the logits
        other = Eagle3Head(head.shape.model_copy(update=without))
        other.load_state_dict(changed.state_dict(), strict=False)
        other.set_vocabulary(head.target_ids())
        assert worst_difference(model, changed, extended=4, trained=other) > 1e-3


@pytest.mark.parametrize("count", [1, 2, 5])
@torch.no_grad()
def test_heads_read_any_number_of_aux_states(
    make_target: Callable[[str], Path], head: Eagle3Head, count: int
) -> None:
    model = load_model(make_target("llama"))
    model.stack = replace(model.stack, captured=tuple(range(count)))
    for fields in ({}, {"fc_norm": True}, {"norm_before_fc": True}):
        changed = foreign(head, aux_layers=count, **fields)
        assert worst_difference(model, changed, extended=4) <= 1e-4


@pytest.mark.parametrize("ops", [None, TorchOps, EagerOps], ids=["picked", "torch", "eager"])
@pytest.mark.parametrize("layers", [1, 2])
@torch.no_grad()
def test_a_head_with_a_sliding_window_drafts_as_it_was_trained(
    make_target: Callable[[str], Path], head: Eagle3Head, layers: int, ops: Any
) -> None:
    """To the entry: a window that is one longer is noticed as soon as the first entry is hidden."""
    model = load_model(make_target("llama"), ops=ops and ops())
    fields = {"num_hidden_layers": layers, "qk_norm": True}
    sliding, longer = (foreign(head, sliding_window=size, **fields) for size in (64, 65))
    for prefix, extended in ((60, 4), (63, 0), (64, 1), (66, 4), (140, 4)):
        settings: Any = {"prefix": prefix, "extended": extended}
        assert worst_difference(model, sliding, **settings) <= 1e-4
        wrong = worst_difference(model, sliding, **settings, trained=longer)
        assert (wrong > 1e-4) == (prefix + STEPS > 65), "positions prefix … prefix + 3 are drafted"


@torch.no_grad()
def test_every_beam_of_a_tree_equals_training_on_its_own_chain(
    model: DecoderModel, head: Eagle3Head
) -> None:
    tokens = random_tokens(PREFIX + 1, seed=5)
    aux = aux_of(model, tokens[:-1])
    shape = TreeSection(top_k=3, steps=3, nodes=16)
    drafting = Drafting(head, model, shape, 2)
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
            trained = trained_on(head, model, whole, aux)[step][PREFIX - 1]
            torch.testing.assert_close(drafted[step][0, beam], trained, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_planted_shift_of_the_tokens_is_seen(model: DecoderModel, head: Eagle3Head) -> None:
    assert worst_difference(model, head, extended=0, shift=lambda tokens: tokens.roll(1)) > 1e-2


@torch.no_grad()
def test_a_planted_off_by_one_in_the_rotary_position_is_seen(
    model: DecoderModel, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Eagle3Drafter._load

    def late(drafter: Eagle3Drafter, head: Eagle3Head, model: DecoderModel, pack: Any) -> None:
        original(drafter, head, model, pack)
        # Positions behind the prompt, those of later draft steps, are rotated by one too many.
        rotary = [
            torch.cat((table[:PREFIX], table[PREFIX + 1 :])) for table in drafter._head.rotary
        ]
        drafter._head = replace(drafter._head, rotary=(rotary[0], rotary[1]))

    monkeypatch.setattr(Eagle3Drafter, "_load", late)
    assert worst_difference(model, head, extended=0) > 1e-3


@torch.no_grad()
def test_a_planted_neighbouring_capture_layer_is_seen(model: DecoderModel) -> None:
    right = aux_of(model, torch.arange(PREFIX))
    captured = tuple(layer + 1 for layer in model.stack.captured)
    model.stack = replace(model.stack, captured=captured)
    assert (right - aux_of(model, torch.arange(PREFIX))).abs().max() > 0.1
