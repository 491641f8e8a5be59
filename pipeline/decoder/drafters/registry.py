"""Drafters by name: `load_drafter` reads what one needs, once, and makes it for any trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.config import DrafterName, DrafterSection
from pipeline.decoder.drafters.base import Drafter, Trees
from pipeline.decoder.model import DecoderModel
from pipeline.eagle3.dflash.head import DflashHead
from pipeline.eagle3.head import DraftingHead, Eagle3Head
from pipeline.errors import ConfigError
from pipeline.target.open import Target


@dataclass(frozen=True)
class DrafterFactory:
    """Makes a drafter for any trees; all that it makes share their weights."""

    make: Callable[[Trees], Drafter]
    max_steps: int = 64  # deepest draft

    def __call__(self, trees: Trees) -> Drafter:
        return self.make(trees)


def load_drafter(
    section: DrafterSection, model: DecoderModel, target: Target, head: DraftingHead | None
) -> DrafterFactory | None:
    """How to make the drafter of a name; None for plain decoding.

    `head` is the head to draft with, where there is one. Raises ConfigError where something is
    missing, HeadError or TargetError where it does not fit the target.
    """
    del target
    if section.name == "none":
        return None
    given = _head(section, head)
    window = section.eagle3.draft_window
    return DrafterFactory(lambda trees: draft_with(given, model, trees, window), _deepest(given))


def draft_with(
    head: DraftingHead, model: DecoderModel, trees: Trees, window: int | None = None
) -> Drafter:
    """The drafter of a head's kind; `window` is an EAGLE-3 head's.

    Raises HeadError where it does not fit the target, ConfigError for trees that it cannot draft.
    """
    if isinstance(head, DflashHead):
        from pipeline.decoder.drafters.dflash import DflashDrafter

        return DflashDrafter(head, model, trees)
    from pipeline.decoder.drafters.eagle3 import Eagle3Drafter

    assert isinstance(head, Eagle3Head)
    return Eagle3Drafter(head, model, trees, draft_window=window)


def _deepest(head: DraftingHead) -> int:
    """Steps that a head can draft."""
    if isinstance(head, DflashHead):
        return head.shape.block_size - 1
    return DrafterFactory.max_steps


def name_of(head: DraftingHead | None) -> DrafterName:
    """The drafter that drafts with such a head; none without one."""
    if head is None:
        return "none"
    return "dflash" if isinstance(head, DflashHead) else "eagle3"


def _head(section: DrafterSection, head: DraftingHead | None) -> DraftingHead:
    if head is None:
        raise ConfigError(
            f"drafter {section.name} needs a trained head",
            where="drafter.name",
            fix="name one, or choose a drafter without (`eagle3 drafters`)",
        )
    if (kind := name_of(head)) != section.name:
        raise ConfigError(
            f"drafter {section.name} cannot draft with this head, which is one for {kind}",
            where="drafter.name",
            fix=f"set drafter.name={kind}, or name another head",
        )
    return head
