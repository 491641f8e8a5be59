"""What proposes draft trees: a name, and a section for each drafter that has something to set."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pipeline.config.section import Section

DrafterName = Literal["none", "eagle3"]


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
}


class DrafterSection(Section):
    """What proposes draft trees. A drafter changes the speed, never the text."""

    name: DrafterName = "eagle3"
    """One of those that `eagle3 drafters` lists."""

    @property
    def needs_head(self) -> bool:
        """Whether it drafts with a head of this pipeline."""
        return DRAFTERS[self.name].trained
