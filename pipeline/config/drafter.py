"""What proposes draft trees: a name, and a section for each drafter that has something to set."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from pipeline.config.section import Section

DrafterName = Literal["none", "eagle3", "dflash"]


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
    "dflash": DrafterInfo(
        "a block drafter: one forward for all depths, a tree of their marginals",
        "a head trained with train.algorithm=dflash",
        True,
    ),
}


class Eagle3DrafterSection(Section):
    """Drafting with an EAGLE-3 head."""

    draft_window: int | None = Field(None, gt=0)
    """Recent positions that the head attends to, in whole pages of 64 beside the first page: beyond
    its training length a head keeps its acceptance so. None: as it was trained."""


class DrafterSection(Section):
    """What proposes draft trees. A drafter changes the speed, never the text."""

    name: DrafterName = "eagle3"
    """One of those that `eagle3 drafters` lists."""

    eagle3: Eagle3DrafterSection = Eagle3DrafterSection()
    """Drafting with an EAGLE-3 head."""

    @property
    def needs_head(self) -> bool:
        """Whether it drafts with a head of this pipeline."""
        return DRAFTERS[self.name].trained
