"""What every section of the configuration is, and the one section that several others hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from pipeline.documents import local_path
from pipeline.errors import ConfigError


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, each key documented below its declaration."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,  # pydantic reads them out of texts, which YAML's check lets pass
        hide_input_in_errors=True,  # it may be a key
    )


class TreeSection(Section):
    """Shape of the dynamic draft tree (EAGLE-2 §4, EAGLE-3)."""

    top_k: int = Field(4, gt=0)
    """Candidates per node and beams per step; 1 drafts a chain."""
    steps: int = Field(5, gt=0)
    """Draft depth."""
    nodes: int = Field(16, gt=1, le=64)
    """Nodes verified in one forward, root (the last token) included; at most 64."""

    @classmethod
    def chain(cls, steps: int) -> TreeSection:
        """So many drafted tokens one after the other, as vLLM drafts."""
        return cls(top_k=1, steps=steps, nodes=steps + 1)

    @property
    def label(self) -> str:
        """In SGLang's order: steps/topk/num_draft_tokens."""
        return f"{self.steps}/{self.top_k}/{self.nodes}"

    @model_validator(mode="before")
    @classmethod
    def _is_a_shape(cls, value: Any) -> Any:
        if value == "auto":
            raise ValueError("auto is only supported by eval.tree; give top_k, steps and nodes")
        return value

    @model_validator(mode="after")
    def _fits_the_mask(self) -> TreeSection:
        drafted = (self.steps - 1) * self.top_k
        if drafted > 64:
            raise ValueError(
                f"(steps - 1) x top_k is {drafted}, at most 64 drafted entries fit; "
                "lower steps or top_k"
            )
        return self


def _is_a_place(value: str) -> str:
    try:
        path = local_path(value)
    except ConfigError as error:
        raise ValueError(f"{error.problem}; {error.fix}") from None
    # Jobs elsewhere have another home.
    return path if path is not None and value.startswith("~") else value


#: A directory: local, its `~` expanded, or a URI.
Place = Annotated[str, AfterValidator(_is_a_place)]


def _tree_or_auto(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    del handler  # whose errors name the alternatives
    return value if value == "auto" else TreeSection.model_validate(value)


#: A shape, or `auto`.
TreeOrAuto = Annotated[TreeSection | Literal["auto"], WrapValidator(_tree_or_auto)]
#: The shape from each batch size upward; batches whose shape is None are decoded plainly.
BatchTrees = Mapping[int, TreeSection | None]


def tree_labels(trees: BatchTrees) -> dict[str, str]:
    """Their labels by batch size, as reports and servers tell them."""
    return {str(rows): tree.label if tree else "plain" for rows, tree in sorted(trees.items())}
