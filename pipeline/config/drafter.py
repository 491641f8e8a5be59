"""What proposes draft trees: a name, and a section for each drafter that has something to set."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from pipeline.config.section import Section

DrafterName = Literal["none", "eagle3", "ngram"]


class DrafterInfo(NamedTuple):
    """What `eagle3 drafters` says of a drafter."""

    about: str
    needs: str
    trained: bool = False  # drafts with a head of this pipeline


DRAFTERS: dict[DrafterName, DrafterInfo] = {
    "none": DrafterInfo("plain decoding, one token a round", "nothing"),
    "eagle3": DrafterInfo(
        "an EAGLE-3 head of 2-5 % of the target's size, a dynamic tree", "a trained head", True
    ),
    "ngram": DrafterInfo("what followed the last tokens before: prompt lookup", "nothing"),
}


class Eagle3DrafterSection(Section):
    """Drafting with an EAGLE-3 head."""

    draft_window: int | None = Field(None, gt=0)
    """Recent positions that the head attends to, in whole pages of 64 beside the first page: beyond
    its training length a head keeps its acceptance so. None: as it was trained."""


class NgramSection(Section):
    """Drafting by matching the last tokens with earlier ones."""

    min_match: int = Field(2, gt=0)
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

    name: DrafterName = "eagle3"
    """One of those that `eagle3 drafters` lists."""

    eagle3: Eagle3DrafterSection = Eagle3DrafterSection()
    """Drafting with an EAGLE-3 head."""

    ngram: NgramSection = NgramSection()
    """Drafting by matching the last tokens with earlier ones."""

    @property
    def needs_head(self) -> bool:
        """Whether it drafts with a head of this pipeline."""
        return DRAFTERS[self.name].trained
