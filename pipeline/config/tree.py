"""The draft tree's shape."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from pipeline.config.section import Section


class TreeSection(Section):
    """Shape of the dynamic draft tree (EAGLE-2 §4, EAGLE-3). `tree: auto` has it picked by measurement."""

    auto: bool = Field(
        False,
        description="Time this machine, try the head on a few prompts, and take the fastest shape for each batch size.",
    )

    top_k: int = Field(
        4, gt=0, description="Candidates per node and beams per step; 1 drafts a chain."
    )
    steps: int = Field(5, gt=0, description="Draft depth.")
    nodes: int = Field(
        16,
        gt=1,
        le=64,
        description="Nodes verified in one forward, root (the last token) included; at most 64.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_auto(cls, value: Any) -> Any:
        return {"auto": True} if value == "auto" else value

    @model_validator(mode="after")
    def _fits_the_mask(self) -> TreeSection:
        if (self.steps - 1) * self.top_k > 64:
            raise ValueError(
                f"(steps - 1) x top_k is {(self.steps - 1) * self.top_k}, at most 64 drafted entries fit; lower steps or top_k"
            )
        return self
