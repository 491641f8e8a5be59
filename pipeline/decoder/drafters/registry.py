"""Drafters by name: `load_drafter` reads what one needs, once, and makes it for any trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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
#: The smallest budget of self_spec that is tried; the others are its doubles.
_LEAST_BUDGET = 128
#: The smallest block that is tried, root included.
_LEAST_BLOCK = 3


@dataclass(frozen=True)
class DrafterFactory:
    """Makes a drafter for any trees; all that it makes share their weights."""

    make: Callable[[Trees], Drafter]
    #: Depths of the trees that are worth a try, ascending: what a drafter can do, and where it may
    #: still pay.
    depths: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    #: Its every step is a forward of a whole model.
    costly: bool = False
    #: What was chosen where the configuration leaves it open, such as {"budget": 512}.
    settings: Mapping[str, int] = field(default_factory=dict)
    #: Behind so many tokens or fewer it does what a smaller choice does.
    from_context: int = 0
    #: The same drafter with other settings, the smallest first, to pick one from; none: itself.
    choices: tuple[DrafterFactory, ...] = ()

    def __call__(self, trees: Trees) -> Drafter:
        return self.make(trees)

    def variants(self, context: int) -> list[DrafterFactory]:
        """Those that are worth a try behind `context` tokens."""
        choices = self.choices or (self,)
        return [each for each in choices if each.from_context < context] or [choices[0]]

    def variant(self, settings: Mapping[str, int]) -> DrafterFactory:
        """The one with such settings; itself where it has no choices."""
        return next((each for each in self.choices if each.settings == settings), self)


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
    if isinstance(given, DflashHead):
        return _dflash(given, model, section.dflash.block_size)
    window = section.eagle3.draft_window
    return DrafterFactory(lambda trees: draft_with(given, model, trees, window))


def _standalone(section: StandaloneSection, model: DecoderModel, target: Target) -> DrafterFactory:
    from pipeline.decoder.drafters.standalone import StandaloneDrafter, check_tokens
    from pipeline.target.open import resolve

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
    return DrafterFactory(lambda trees: StandaloneDrafter(draft, model, trees), costly=True)


def _self_spec(section: SelfSpecSection, model: DecoderModel) -> DrafterFactory:
    if section.budget != "auto":
        return _with_budget(section, model, section.budget)
    budgets = _budgets(section.recent, model.max_length)
    choices = tuple(_with_budget(section, model, budget) for budget in budgets)
    return DrafterFactory(_refuse_undecided, depths=_COSTLY, costly=True, choices=choices)


def _with_budget(section: SelfSpecSection, model: DecoderModel, budget: int) -> DrafterFactory:
    from pipeline.decoder.drafters.self_spec import StreamingDrafter
    from pipeline.decoder.drafters.snapkv import SnapKvDrafter

    kept = section.model_dump(exclude={"kv", "budget"})

    def make(trees: Trees) -> Drafter:
        if section.kv == "streaming":
            return StreamingDrafter(model, trees, budget=budget)
        return SnapKvDrafter(model, trees, budget=budget, **kept)

    settings = {"budget": budget}
    return DrafterFactory(make, _COSTLY, costly=True, settings=settings, from_context=budget)


def _budgets(recent: int, longest: int) -> list[int]:
    """Doubles, the first above `recent`, below the `longest` context but for the first."""
    budgets = [_LEAST_BUDGET]
    while budgets[0] <= recent:
        budgets[0] *= 2
    while 2 * budgets[-1] < longest:
        budgets.append(2 * budgets[-1])
    return budgets


def _refuse_undecided(trees: Trees) -> Drafter:
    raise ConfigError(
        "budget auto is picked together with the tree, and this tree is given",
        where="drafter.self_spec.budget",
        fix="set tree: auto where that is possible (eval.tree), or budget to a number of entries",
    )


def _dflash(head: DflashHead, model: DecoderModel, block_size: int | None) -> DrafterFactory:
    """Of one block size, or of all that are worth a try; as such it drafts the trained block."""
    from pipeline.decoder.drafters.dflash import DflashDrafter, check_block

    trained = head.shape.block_size

    def of(size: int, choices: tuple[DrafterFactory, ...] = ()) -> DrafterFactory:
        def make(trees: Trees) -> Drafter:
            return DflashDrafter(head, model, trees, block_size=size)

        depths, settings = tuple(range(1, size)), {"block_size": size}
        return DrafterFactory(make, depths, settings=settings, choices=choices)

    if block_size is not None:
        check_block(block_size, trained)
        return of(block_size)
    return of(trained, tuple(of(size) for size in _blocks(trained)))


def _blocks(trained: int) -> list[int]:
    """The trained block and its halves, the smallest first."""
    sizes = [trained]
    while sizes[0] // 2 >= _LEAST_BLOCK:
        sizes.insert(0, sizes[0] // 2)
    return sizes


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
