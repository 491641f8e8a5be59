"""What proposes draft trees: a drafter's name, and beside it the settings of that drafter.

    drafter: {name: ngram, max_match: 4}

Settings are checked by the drafter's own section. An installed package adds a drafter by an entry
point of the group `eagle3.drafters`, and its settings by the attribute `drafter_settings` of what
the entry point names, a subclass of Section (docs/heads.md).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, field_validator, model_validator

from pipeline.config.section import Section

#: Entry points that name a drafter without a head, and an algorithm whose heads draft.
DRAFTER_GROUP, HEAD_GROUP = "eagle3.drafters", "eagle3.heads"
SettingsT = TypeVar("SettingsT", bound=Section)


class Eagle3DrafterSection(Section):
    """Drafting with an EAGLE-3 head."""

    draft_window: int | None = Field(None, gt=0)
    """Recent positions that the head attends to, in whole pages of 64 beside the first page: beyond
    its training length a head keeps its acceptance so. None: as it was trained."""

    weights: Literal["stored", "fp8"] = "stored"
    """fp8: the head's matrices are rounded to float8 (e4m3, a scale for each row), half of what a
    draft reads on a GPU. Drafts change slightly, replies never. A CPU computes with the same
    rounded numbers and gains nothing. Heads with one layer of their own or several, not chained."""


class BlockDrafterSection(Section):
    """Drafting with a block drafter."""

    block_size: int | None = Field(None, gt=1)
    """Tokens of a block that a forward drafts, the last accepted one included; at most those that
    the head was trained on. None: as many; under tree: auto what is fastest of them, a half, a
    quarter."""


class DsparkDrafterSection(BlockDrafterSection):
    """Drafting with a DSpark block drafter."""

    confidence_weight: float = Field(1.0, ge=0)
    """Power of a position's confidence by which the scores of its proposals are multiplied, where
    the head has a confidence output: a tree spends its nodes elsewhere. 0: none."""
    confidence_threshold: float = Field(0.0, ge=0, lt=1)
    """Least confidence of a position at which anything is proposed: below it, a branch ends. On a
    CPU fewer nodes are verified then; a CUDA graph verifies as many as ever."""


class StandaloneSection(Section):
    """Drafting with a smaller model."""

    source: str
    """The draft model, as target.source. It must have the target's tokens."""
    revision: str | None = None
    """Hub revision; ignored for local sources."""


class SelfSpecSection(Section):
    """Drafting with the target itself, over a part of its cache."""

    kv: Literal["streaming", "snapkv"] = "snapkv"
    """streaming: the first and the recent pages. snapkv: recent entries, and of the prompt those
    that its end attends to, by layer and head; takes memory for them."""
    budget: Annotated[int, Field(ge=128)] | Literal["auto"] = 512
    """Entries that a draft attends to; streaming rounds to whole pages of 64. auto: of 128, 256,
    512 … the fastest, picked with the tree; needs tree: auto."""
    recent: int = Field(64, gt=0)
    """Of them the latest, under snapkv."""
    window: int = Field(32, gt=0)
    """Tokens at the end of a prompt that choose (snapkv)."""
    pool: int = Field(7, gt=0)
    """Neighbours over which their attention is pooled, an odd number, so that entries are kept in
    clusters (snapkv)."""

    @model_validator(mode="after")
    def _fits_into_the_budget(self) -> SelfSpecSection:
        if self.budget != "auto" and self.recent >= self.budget:
            raise ValueError(f"recent is not below budget; set it below {self.budget}")
        if self.window > self.recent:
            raise ValueError(f"window is above recent; set it to at most {self.recent}")
        if self.pool % 2 == 0:
            raise ValueError(f"pool is even; set it to {self.pool - 1} or {self.pool + 1}")
        return self


class NgramSection(Section):
    """Drafting by matching the last tokens with earlier ones."""

    min_match: int = Field(1, gt=0)
    """Tokens in which an earlier place must agree with the end of the text to be proposed from."""

    max_match: int = Field(8, gt=0, le=64)
    """Tokens that are compared at most: places that agree in more count as equals."""

    matches: int = Field(8, gt=0, le=64)
    """Places that are proposed from: those that agree longest, of equals the latest."""

    corpus: str | None = None
    """Path or URI of a JSONL file whose texts are looked up as well, for example earlier replies:
    `text`, `turns` (a list of texts) or `token_ids` in each line. None: the request's own tokens
    only."""

    corpus_tokens: int = Field(1_000_000, gt=0)
    """Tokens of the corpus that are kept, the first ones; each takes about 50 bytes of the device's
    memory."""

    @model_validator(mode="after")
    def _ordered(self) -> NgramSection:
        if self.max_match < self.min_match:
            problem = f"max_match is {self.max_match}, below min_match {self.min_match}"
            raise ValueError(f"{problem}; raise max_match")
        return self


class DrafterInfo(NamedTuple):
    """What `eagle3 drafters` prints, and what `DrafterSection` checks settings with."""

    about: str
    needs: str
    settings: type[Section] = Section
    trained: bool = False  # drafts with a head of this pipeline


DRAFTERS: dict[str, DrafterInfo] = {
    "none": DrafterInfo("plain decoding, one token a round", "nothing"),
    "eagle3": DrafterInfo(
        "an EAGLE-3 head of 2-5 % of the target's size, or chained heads; a dynamic tree",
        "a trained head",
        Eagle3DrafterSection,
        trained=True,
    ),
    "dflash": DrafterInfo(
        "a block drafter: one forward for all depths, a tree of their marginals",
        "a head trained with train.algorithm=dflash",
        BlockDrafterSection,
        trained=True,
    ),
    "dspark": DrafterInfo(
        "a block drafter whose tokens depend on each other: one forward, a beam over its positions",
        "a head trained with train.algorithm=dspark",
        DsparkDrafterSection,
        trained=True,
    ),
    "standalone": DrafterInfo(
        "a smaller model with the target's tokenizer, chain or tree",
        "such a model",
        StandaloneSection,
    ),
    "self_spec": DrafterInfo(
        "the target itself over a compressed cache, for long contexts (MagicDec)",
        "nothing",
        SelfSpecSection,
    ),
    "ngram": DrafterInfo(
        "what followed the last tokens before: prompt lookup", "nothing", NgramSection
    ),
}


class DrafterSection(Section):
    """What proposes draft trees, and its settings. A drafter changes the speed, never the text."""

    model_config = ConfigDict(extra="allow")

    name: str = "eagle3"
    """One of those that `eagle3 drafters` lists, or one that an installed package registers. Its
    settings stand beside the name."""

    lookup: NgramSection | None = None
    """Looks up beside the drafter what followed the last tokens before, in the request or a corpus;
    the nodes of both compete for the tree. {}: with the settings of ngram as they are. null: the
    drafter alone."""

    @model_validator(mode="before")
    @classmethod
    def _check_settings(cls, value: Any) -> Any:
        """The settings checked and completed with their defaults."""
        if not isinstance(value, Mapping):
            return value
        ours = {key: each for key, each in value.items() if key in cls.model_fields}
        settings = {key: each for key, each in value.items() if key not in ours}
        name = value.get("name", "eagle3")
        section = _settings_of(name, settings)
        if section is None:
            return value  # the name is refused next
        for key in settings.keys() - section.model_fields.keys():
            known = [*section.model_fields, "lookup"]
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            fix = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
            raise ValueError(f"drafter {name} has no setting {key!r}; {fix}")
        return {**ours, "name": name, **section.model_validate(settings).model_dump()}

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in DRAFTERS and _entry_point(name) is None:
            raise ValueError("no drafter has this name; `eagle3 drafters` lists them")
        return name

    @model_validator(mode="after")
    def _looks_up_beside_something(self) -> DrafterSection:
        if self.lookup is not None and self.name in ("none", "ngram"):
            raise ValueError(
                f"drafter {self.name} has no lookup beside it; leave lookup out"
                + (", its own settings stand beside the name" if self.name == "ngram" else "")
            )
        return self

    def settings(self, kind: type[SettingsT]) -> SettingsT:
        """The drafter's settings, as its own section."""
        return kind.model_validate(self.model_extra)

    @property
    def is_open(self) -> bool:
        """Whether something is left to choose that only `tree: auto` chooses."""
        return self.name == "self_spec" and self.settings(SelfSpecSection).budget == "auto"

    @property
    def needs_head(self) -> bool:
        """Whether it drafts with a head of this pipeline."""
        if self.name in DRAFTERS:
            return DRAFTERS[self.name].trained
        return not entry_points(group=DRAFTER_GROUP, name=self.name)

    def check_head(self, head: str | None) -> None:
        """Raise ValueError where it lacks a head, or would not draft with the one it is given."""
        if self.needs_head and head is None:
            raise ValueError(f"drafter {self.name} needs a head; set head")
        if head is not None and not self.needs_head:
            raise ValueError(f"drafter {self.name} has no head; leave head out")


#: Every setting of our drafters, for messages; no name has two meanings.
ALL_SETTINGS = {
    key: field for info in DRAFTERS.values() for key, field in info.settings.model_fields.items()
}


def _settings_of(name: Any, settings: Mapping[str, Any]) -> type[Section] | None:
    """The section that checks a drafter's settings; None for an unknown name.

    Another package is imported only to check settings.
    """
    if not isinstance(name, str):
        return None
    if name in DRAFTERS:
        return DRAFTERS[name].settings
    point = _entry_point(name)
    if point is None:
        return None
    if not settings:
        return Section
    section: type[Section] = getattr(point.load(), "drafter_settings", Section)
    return section


def _entry_point(name: str) -> EntryPoint | None:
    groups = (DRAFTER_GROUP, HEAD_GROUP)
    return next((each for group in groups for each in entry_points(group=group, name=name)), None)
