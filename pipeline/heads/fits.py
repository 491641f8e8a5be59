"""Drafting with an EAGLE-3 head (arXiv:2503.01840): extend on real states, then unroll on its own.

A row with L committed tokens x0…x(L-1) and root xL has L entries in the head's cache. Entry i was
made from (embedding of x(i+1), fc(aux i)) at position i:

    entry        0      1     …    L-1                 its output predicts x(L+1): depth 1
    token        x1     x2    …    xL (root)           and is kept in drafter_state
    state        g0     g1    …    g(L-1)

The head is loaded into the same form as a layer of the target, and drafts with `ops.unroll`.
"""

from __future__ import annotations

from pipeline.decoder.model import DecoderModel
from pipeline.errors import HeadError
from pipeline.heads.base import DraftingHead


def check_fits(head: DraftingHead, model: DecoderModel) -> None:
    """Raise HeadError where the head's shape contradicts the target's."""
    hidden, projection = model.config.hidden_size, head.aux_projection
    for field, value, wanted in (
        ("hidden_size", head.shape.hidden_size, hidden),
        ("vocab_size", head.shape.vocab_size, model.vocabulary),
        ("aux states", projection.in_features if projection else 3 * hidden, 3 * hidden),
    ):
        if value != wanted:
            raise HeadError(
                f"{field} is {value}, the target's is {wanted}",
                where="head",
                fix="use the head that was trained for this target",
            )
    proposed = head.target_ids()
    if bool(((proposed < 0) | (proposed >= model.vocabulary)).any()):
        problem = f"d2t leads outside the target's vocabulary of {model.vocabulary} tokens"
        raise HeadError(problem, where="head", fix="use the head that was trained for this target")
