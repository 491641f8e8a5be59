"""Drafters by name: `load_drafter` reads what one needs, once, and makes it for any trees.

Ours are listed here; a distribution adds its own by an entry point of the group `eagle3.drafters`,
a function (section, model, target) → DrafterFactory. Heads draft by their algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from pipeline.config import (
    DRAFTER_GROUP,
    DrafterSection,
    NgramSection,
    SelfSpecSection,
    StandaloneSection,
    TargetSection,
)
from pipeline.decoder.drafter import Drafter, DrafterFactory, Trees
from pipeline.decoder.model import DecoderModel
from pipeline.errors import ConfigError
from pipeline.heads.base import DraftingHead
from pipeline.heads.registry import algorithm_of
from pipeline.target.open import Target

#: What an entry point of the group names.
MakeFactory = Callable[[DrafterSection, DecoderModel, Target], DrafterFactory]
#: Depths of drafters whose every step is a forward of the target.
_COSTLY = (1, 2, 3, 4)
#: The smallest budget of self_spec that is tried; the others are its doubles.
_LEAST_BUDGET = 128


def load_drafter(
    section: DrafterSection, model: DecoderModel, target: Target, head: DraftingHead | None
) -> DrafterFactory | None:
    """How to make the drafter of a name; None for plain decoding.

    `head` is the head to draft with, where there is one. Raises ConfigError where something is
    missing, HeadError or TargetError where it does not fit the target.
    """
    if section.name == "none":
        return None
    factory = _load_alone(section, model, target, head)
    if section.lookup is None:
        return factory
    from pipeline.drafters.lookup import with_lookup
    from pipeline.drafters.ngram import load_corpus

    return with_lookup(factory, model, section.lookup, load_corpus(section.lookup, model, target))


def _load_alone(
    section: DrafterSection, model: DecoderModel, target: Target, head: DraftingHead | None
) -> DrafterFactory:
    """Without the lookup beside it."""
    if (make := _untrained().get(section.name)) is not None:
        return make(section, model, target)
    head = _check_head(section, head)
    return algorithm_of(head).drafting.drafter_factory(section, head, model)


def _untrained() -> dict[str, MakeFactory]:
    """Drafters without a head, those of other packages too."""
    others = {point.name: point.load() for point in entry_points(group=DRAFTER_GROUP)}
    return others | {"standalone": _standalone, "self_spec": _self_spec, "ngram": _ngram}


def drafter_name(head: DraftingHead | None) -> str:
    """The drafter that drafts with such a head; none without one."""
    return "none" if head is None else algorithm_of(head).drafter_name


def _check_head(section: DrafterSection, head: DraftingHead | None) -> DraftingHead:
    if head is None:
        raise ConfigError(
            f"drafter {section.name} needs a trained head",
            where="drafter.name",
            fix="name one, or choose a drafter without (`eagle3 drafters`)",
        )
    if (name := drafter_name(head)) != section.name:
        raise ConfigError(
            f"drafter {section.name} cannot draft with this head, which is one for {name}",
            where="drafter.name",
            fix=f"set drafter.name={name}, or name another head",
        )
    return head


def _ngram(section: DrafterSection, model: DecoderModel, target: Target) -> DrafterFactory:
    from pipeline.drafters.ngram import NgramDrafter, load_corpus

    settings = section.settings(NgramSection)
    corpus = load_corpus(settings, model, target)
    return DrafterFactory(
        lambda trees: NgramDrafter(model, trees, settings, corpus),
        depths=(1, 2, 3, 4, 6, 8, 12),  # a quotation goes on, and costs nothing to draft
    )


def _standalone(section: DrafterSection, model: DecoderModel, target: Target) -> DrafterFactory:
    from pipeline.drafters.standalone import StandaloneDrafter, check_tokens
    from pipeline.target.open import resolve

    standalone = section.settings(StandaloneSection)
    source = TargetSection(source=standalone.source, revision=standalone.revision)
    directory = resolve(source, decoded=True).directory
    check_tokens(directory, target.directory, standalone.source)
    draft = DecoderModel.load(
        directory,
        (),
        device=model.device,
        dtype=model.dtype,
        max_length=model.max_length,
        ops=model.ops,
    )
    return DrafterFactory(lambda trees: StandaloneDrafter(draft, model, trees), costly=True)


def _self_spec(section: DrafterSection, model: DecoderModel, target: Target) -> DrafterFactory:
    del target
    settings = section.settings(SelfSpecSection)
    if settings.budget != "auto":
        return _with_budget(settings, model, settings.budget)
    budgets = _budgets(settings.recent, model.max_length)
    choices = tuple(_with_budget(settings, model, budget) for budget in budgets)
    return DrafterFactory(_refuse_undecided, depths=_COSTLY, costly=True, choices=choices)


def _with_budget(section: SelfSpecSection, model: DecoderModel, budget: int) -> DrafterFactory:
    from pipeline.drafters.self_spec import SnapKvDrafter, StreamingDrafter

    settings_of_kv = section.model_dump(exclude={"kv", "budget"})

    def make(trees: Trees) -> Drafter:
        if section.kv == "streaming":
            return StreamingDrafter(model, trees, budget=budget)
        return SnapKvDrafter(model, trees, budget=budget, **settings_of_kv)

    settings = {"budget": budget}
    return DrafterFactory(make, _COSTLY, costly=True, settings=settings, from_context=budget)


def _budgets(recent: int, max_context: int) -> list[int]:
    """Doubles, the first above `recent`, below the `max_context` but for the first."""
    budgets = [_LEAST_BUDGET]
    while budgets[0] <= recent:
        budgets[0] *= 2
    while 2 * budgets[-1] < max_context:
        budgets.append(2 * budgets[-1])
    return budgets


def _refuse_undecided(trees: Trees) -> Drafter:
    raise ConfigError(
        "budget auto is picked together with the tree, and this tree is given",
        where="drafter.budget",
        fix="set tree: auto where that is possible (eval.tree), or budget to a number of entries",
    )
