"""What proposes draft trees: a name, and a section for each drafter that has something to set."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from pipeline.config.section import Section


class DrafterInfo(NamedTuple):
    """What `eagle3 drafters` says of a drafter."""

    about: str
    needs: str
    trained: bool = False  # drafts with a head of this pipeline


DRAFTERS: dict[str, DrafterInfo] = {
    "none": DrafterInfo("plain decoding, one token a round", "nothing"),
    "eagle3": DrafterInfo(
        "an EAGLE-3 head of 2-5 % of the target's size, or chained heads; a dynamic tree",
        "a trained head",
        True,
    ),
    "dflash": DrafterInfo(
        "a block drafter: one forward for all depths, a tree of their marginals",
        "a head trained with train.algorithm=dflash",
        True,
    ),
    "standalone": DrafterInfo(
        "a smaller model with the target's tokenizer, chain or tree", "such a model"
    ),
    "self_spec": DrafterInfo(
        "the target itself over a compressed cache, for long contexts (MagicDec)", "nothing"
    ),
    "ngram": DrafterInfo("what followed the last tokens before: prompt lookup", "nothing"),
}


class Eagle3DrafterSection(Section):
    """Drafting with an EAGLE-3 head."""

    draft_window: int | None = Field(None, gt=0)
    """Recent positions that the head attends to, in whole pages of 64 beside the first page: beyond
    its training length a head keeps its acceptance so. None: as it was trained."""


class BlockDrafterSection(Section):
    """Drafting with a block drafter."""

    block_size: int | None = Field(None, gt=1)
    """Tokens of a block that a forward drafts, the last accepted one included; at most those that
    the head was trained on. None: as many; under tree: auto what is fastest of them, a half, a
    quarter."""


class StandaloneSection(Section):
    """Drafting with a smaller model."""

    source: str | None = None
    """The draft model, as target.source. Its tokens have to be the target's."""
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
            raise ValueError(f"recent is {self.recent}, it has to be below budget {self.budget}")
        if self.window > self.recent:
            raise ValueError(f"window is {self.window}, at most recent ({self.recent}) is possible")
        if self.pool % 2 == 0:
            raise ValueError(f"pool is {self.pool}, it has to be odd")
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


class DrafterSection(Section):
    """What proposes draft trees. A drafter changes the speed, never the text."""

    name: str = "eagle3"
    """One of those that `eagle3 drafters` lists, or one that an installed package registers."""

    eagle3: Eagle3DrafterSection = Eagle3DrafterSection()
    """Drafting with an EAGLE-3 head."""

    dflash: BlockDrafterSection = BlockDrafterSection()
    """Drafting with a block drafter."""

    standalone: StandaloneSection = StandaloneSection()
    """Drafting with a smaller model."""
    self_spec: SelfSpecSection = SelfSpecSection()
    """Drafting with the target itself."""

    @model_validator(mode="after")
    def _names_its_model(self) -> DrafterSection:
        if self.name == "standalone" and self.standalone.source is None:
            raise ValueError("drafter standalone needs standalone.source, the draft model")
        return self

    ngram: NgramSection = NgramSection()
    """Drafting by matching the last tokens with earlier ones."""

    @property
    def is_open(self) -> bool:
        """Whether something is left to choose that only `tree: auto` chooses."""
        return self.name == "self_spec" and self.self_spec.budget == "auto"

    @property
    def needs_head(self) -> bool:
        """Whether it drafts with a head of this pipeline."""
        return self.name not in DRAFTERS or DRAFTERS[self.name].trained
