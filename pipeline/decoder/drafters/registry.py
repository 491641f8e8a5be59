"""Drafters by name: `load_drafter` reads what one needs, once, and makes it for any trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.config import DrafterSection
from pipeline.decoder.drafters.base import Drafter, Trees
from pipeline.decoder.model import DecoderModel
from pipeline.eagle3.head import Eagle3Head
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
    section: DrafterSection, model: DecoderModel, target: Target, head: Eagle3Head | None
) -> DrafterFactory | None:
    """How to make the drafter of a name; None for plain decoding.

    `head` is the head to draft with, where there is one. Raises ConfigError where something is
    missing, HeadError or TargetError where it does not fit the target.
    """
    if section.name == "none":
        return None
    if section.name == "ngram":
        from pipeline.decoder.drafters.corpus import load_corpus
        from pipeline.decoder.drafters.ngram import NgramDrafter

        corpus = load_corpus(section.ngram, model, target)
        return DrafterFactory(lambda trees: NgramDrafter(model, trees, section.ngram, corpus))
    from pipeline.decoder.drafters.eagle3 import Eagle3Drafter

    given = _head(section, head)
    window = section.eagle3.draft_window
    return DrafterFactory(lambda trees: Eagle3Drafter(given, model, trees, draft_window=window))


def _head(section: DrafterSection, head: Eagle3Head | None) -> Eagle3Head:
    if head is None:
        raise ConfigError(
            f"drafter {section.name} needs a trained head",
            where="drafter.name",
            fix="name one, or choose a drafter without (`eagle3 drafters`)",
        )
    return head
