"""What every section of the configuration is, and the one section that several others hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, each key documented below its declaration."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        hide_input_in_errors=True,  # it may be a key
    )


class TreeSection(Section):
    """Shape of the dynamic draft tree (EAGLE-2 §4, EAGLE-3); `auto` measures to pick it."""

    auto: bool = False
    """Time this machine, try the head on a few prompts, and take the fastest shape for each batch
    size."""

    top_k: int = Field(4, gt=0)
    """Candidates per node and beams per step; 1 drafts a chain."""
    steps: int = Field(5, gt=0)
    """Draft depth."""
    nodes: int = Field(16, gt=1, le=64)
    """Nodes verified in one forward, root (the last token) included; at most 64."""

    @property
    def label(self) -> str:
        """In SGLang's order: steps/topk/num_draft_tokens."""
        return f"{self.steps}/{self.top_k}/{self.nodes}"

    @model_validator(mode="before")
    @classmethod
    def _read_auto(cls, value: Any) -> Any:
        return {"auto": True} if value == "auto" else value

    @model_validator(mode="after")
    def _fits_the_mask(self) -> TreeSection:
        drafted = (self.steps - 1) * self.top_k
        if drafted > 64:
            raise ValueError(
                f"(steps - 1) x top_k is {drafted}, at most 64 drafted entries fit; "
                "lower steps or top_k"
            )
        return self


#: The shape from each batch size upward; batches whose shape is None are decoded plainly.
BatchTrees = Mapping[int, TreeSection | None]


def tree_labels(trees: BatchTrees) -> dict[str, str]:
    """Their labels by batch size, as reports and servers tell them."""
    return {str(rows): tree.label if tree else "plain" for rows, tree in sorted(trees.items())}
