"""Drafters by name: `load_drafter` reads what one needs, once, and makes it for any trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.config import (
    DrafterName,
    DrafterSection,
    SelfSpecSection,
    StandaloneSection,
    TargetSection,
)
from pipeline.decoder.drafters.base import Drafter, Trees
from pipeline.decoder.model import DecoderModel
from pipeline.eagle3.chained.head import ChainedHead
from pipeline.eagle3.dflash.head import DflashHead
from pipeline.eagle3.head import DraftingHead, Eagle3Head
from pipeline.errors import ConfigError
from pipeline.target.open import Target

#: Of drafters whose every step is a forward of the target.
_COSTLY = (1, 2, 3, 4)


@dataclass(frozen=True)
class DrafterFactory:
    """Makes a drafter for any trees; all that it makes share their weights."""

    make: Callable[[Trees], Drafter]
    #: Depths of the trees that are worth a try, ascending: what a drafter can do, and where it may
    #: still pay.
    depths: tuple[int, ...] = (1, 2, 3, 4, 5, 6)

    def __call__(self, trees: Trees) -> Drafter:
        return self.make(trees)


def load_drafter(
    section: DrafterSection, model: DecoderModel, target: Target, head: DraftingHead | None
) -> DrafterFactory | None:
    """How to make the drafter of a name; None for plain decoding.

    `head` is the head to draft with, where there is one. Raises ConfigError where something is
    missing, HeadError or TargetError where it does not fit the target.
    """
    if section.name == "none":
        return None
    if section.name == "standalone":
        return _standalone(section.standalone, model, target)
    if section.name == "self_spec":
        return _self_spec(section.self_spec, model)
    if section.name == "ngram":
        from pipeline.decoder.drafters.corpus import load_corpus
        from pipeline.decoder.drafters.ngram import NgramDrafter

        corpus = load_corpus(section.ngram, model, target)
        return DrafterFactory(
            lambda trees: NgramDrafter(model, trees, section.ngram, corpus),
            depths=(1, 2, 3, 4, 6, 8, 12),  # a quotation goes on, and costs nothing to draft
        )
    given = _head(section, head)
    window = section.eagle3.draft_window
    return DrafterFactory(lambda trees: draft_with(given, model, trees, window), _depths(given))


def _standalone(section: StandaloneSection, model: DecoderModel, target: Target) -> DrafterFactory:
    from pipeline.decoder.drafters.standalone import StandaloneDrafter, check_tokens
    from pipeline.target.resolve import resolve

    if section.source is None:
        raise ConfigError(
            "drafter standalone needs a draft model",
            where="drafter.standalone.source",
            fix="name a smaller model with the target's tokenizer",
        )
    source = TargetSection(source=section.source, revision=section.revision)
    directory = resolve(source, decoded=True).directory
    check_tokens(directory, target.directory, section.source)
    draft = DecoderModel.load(
        directory,
        (),
        device=model.device,
        dtype=model.dtype,
        max_length=model.max_length,
        ops=model.ops,
    )
    return DrafterFactory(lambda trees: StandaloneDrafter(draft, model, trees))


def _self_spec(section: SelfSpecSection, model: DecoderModel) -> DrafterFactory:
    if section.kv == "streaming":
        from pipeline.decoder.drafters.self_spec import StreamingDrafter

        budget = section.budget
        return DrafterFactory(
            lambda trees: StreamingDrafter(model, trees, budget=budget), depths=_COSTLY
        )
    from pipeline.decoder.drafters.snapkv import SnapKvDrafter

    kept = section.model_dump(exclude={"kv"})
    return DrafterFactory(lambda trees: SnapKvDrafter(model, trees, **kept), depths=_COSTLY)


def draft_with(
    head: DraftingHead, model: DecoderModel, trees: Trees, window: int | None = None
) -> Drafter:
    """The drafter of a head's kind; `window` is an EAGLE-3 head's.

    Raises HeadError where it does not fit the target, ConfigError for trees that it cannot draft.
    """
    if isinstance(head, DflashHead):
        from pipeline.decoder.drafters.dflash import DflashDrafter

        return DflashDrafter(head, model, trees)
    if isinstance(head, ChainedHead):
        from pipeline.decoder.drafters.chained import ChainedDrafter

        if window is not None:
            problem = "chained heads see the whole text"
            fix = "leave it out, or draft with a head that was trained with one layer"
            raise ConfigError(problem, where="drafter.eagle3.draft_window", fix=fix)
        return ChainedDrafter(head, model, trees)
    from pipeline.decoder.drafters.eagle3 import Eagle3Drafter

    assert isinstance(head, Eagle3Head)
    return Eagle3Drafter(head, model, trees, draft_window=window)


def _depths(head: DraftingHead) -> tuple[int, ...]:
    if isinstance(head, DflashHead):
        return tuple(range(1, head.shape.block_size))
    return DrafterFactory.depths


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
